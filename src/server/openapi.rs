//! `GET /v1/openapi.json`: what these pages take and answer, generated from their code.

use axum::Json;
use serde_json::{Value, json};
use utoipa::openapi::link::Link;
use utoipa::openapi::path::{Operation, PathItem};
use utoipa::openapi::security::{HttpAuthScheme, HttpBuilder, SecurityScheme};
use utoipa::openapi::{Content, OpenApi as Description, Ref, RefOr, ResponseBuilder};
use utoipa::{Modify, OpenApi};

use super::problem::{PROBLEM_JSON, ProblemBody};
use super::{check, keys, limits, overrides, permits, reservations};

#[derive(OpenApi)]
#[openapi(
    info(title = "tidegate", description = "Rate limits for programs in any language."),
    paths(
        check::check,
        check::check_all,
        reservations::reserve,
        reservations::commit,
        reservations::refund,
        permits::acquire,
        permits::release,
        permits::list,
        limits::list,
        keys::show,
        keys::reset,
        overrides::set,
        overrides::remove,
        overrides::switch,
        overrides::switch_back,
    ),
    components(schemas(ProblemBody<'static>)),
    modifiers(&Token, &Problems, &Links),
)]
struct Pages;

/// The token of the service.
struct Token;

impl Modify for Token {
    fn modify(&self, description: &mut Description) {
        let bearer = HttpBuilder::new().scheme(HttpAuthScheme::Bearer).build();
        let components = description.components.get_or_insert_default();
        components.add_security_scheme("token", SecurityScheme::Http(bearer));
    }
}

/// What all pages answer that have a body, or need the token.
struct Problems;

const EVERYWHERE: &[(u16, &str)] = &[(429, "The client's address has used up its quota.")];
const WITH_TOKEN: &[(u16, &str)] = &[
    (400, "The path or the query is malformed."),
    (401, "The token is missing or wrong."),
    (403, "No token is configured."),
    (404, "There is no such limit."),
];
const WITH_BODY: &[(u16, &str)] = &[
    (400, "The body is no JSON, or the query is malformed."),
    (408, "The body did not come in time."),
    (413, "The body is too large, or the list too long."),
    (422, "A field is wrong, or its value can never be taken."),
    (503, "The service ends."),
];

impl Modify for Problems {
    fn modify(&self, description: &mut Description) {
        for PathItem { get, put, post, delete, .. } in description.paths.paths.values_mut() {
            for operation in [get, put, post, delete].into_iter().flatten() {
                add(operation, EVERYWHERE);
                if operation.request_body.is_some() {
                    add(operation, WITH_BODY);
                }
                if operation.security.is_some() {
                    add(operation, WITH_TOKEN);
                }
            }
        }
    }
}

/// What reservations and permits are for.
struct Links;

impl Modify for Links {
    fn modify(&self, description: &mut Description) {
        let reservation = "$response.body#/reservation";
        link(
            description,
            ("/v1/reserve", "commit"),
            json!({"reservation": reservation, "cost": 1}),
        );
        link(description, ("/v1/reserve", "refund"), json!({"reservation": reservation}));
        let [limit, key] = ["limit", "key"].map(|field| format!("$request.body#/{field}"));
        let permit = "$response.body#/permit";
        let released = json!({"limit": limit, "key": key, "permit": permit});
        link(description, ("/v1/acquire", "release"), released);
    }
}

/// Says that what the page at a path answers is for an operation, which is asked so.
fn link(description: &mut Description, (path, operation): (&str, &str), body: Value) {
    let page = description.paths.paths.get_mut(path);
    let answered = page
        .and_then(|page| page.post.as_mut())
        .and_then(|page| page.responses.responses.get_mut("200"));
    let Some(RefOr::T(answered)) = answered else { return };
    let link = Link::builder().operation_id(operation).request_body(Some(body)).build();
    answered.links.insert(operation.to_owned(), link.into());
}

/// Adds the problems that the page does not have by itself.
fn add(operation: &mut Operation, problems: &[(u16, &str)]) {
    for (status, text) in problems {
        let problem = Content::new(Some(Ref::from_schema_name("Problem")));
        let response = ResponseBuilder::new().description(*text).content(PROBLEM_JSON, problem);
        let responses = &mut operation.responses.responses;
        responses.entry(status.to_string()).or_insert_with(|| response.build().into());
    }
}

pub(super) async fn show() -> Json<Description> {
    Json(Pages::openapi())
}
