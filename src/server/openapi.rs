//! `GET /v1/openapi.json`: what these pages take and answer, generated from their code.

use axum::Json;
use utoipa::openapi::security::{HttpAuthScheme, HttpBuilder, SecurityScheme};
use utoipa::{Modify, OpenApi};

use super::{check, keys, limits, overrides};

#[derive(OpenApi)]
#[openapi(
    info(
        title = "tidegate",
        description = "Rate limits for programs in any language.",
    ),
    paths(
        check::check,
        limits::list,
        keys::show,
        overrides::set,
        overrides::remove,
        overrides::switch,
        overrides::switch_back,
    ),
    modifiers(&Token),
)]
struct Description;

/// The token of the service.
struct Token;

impl Modify for Token {
    fn modify(&self, description: &mut utoipa::openapi::OpenApi) {
        let bearer = HttpBuilder::new().scheme(HttpAuthScheme::Bearer).build();
        let components = description.components.get_or_insert_default();
        components.add_security_scheme("token", SecurityScheme::Http(bearer));
    }
}

pub(super) async fn show() -> Json<utoipa::openapi::OpenApi> {
    Json(Description::openapi())
}
