//! The tables `[concurrency.<name>]`.

#[cfg(feature = "server")]
use super::domains::REQUEST_LIMITS;
use super::fields::{CONCURRENCY, Fields};
use super::reading::Reading;
use crate::error::ConfigError;
use crate::limit::{Concurrency, DEFAULT_MAX_WAIT, Limit, OutagePolicy};

const EXAMPLE: &str = "[concurrency.jobs] with max = 10";

/// Reads all of them. None has the name of a limit.
pub(super) fn read(root: &Fields<'_>, limits: &[Limit], reading: &mut Reading) -> Vec<Concurrency> {
    let Some(table) = root.table("concurrency", EXAMPLE, reading) else { return Vec::new() };
    let tables = table.tables(EXAMPLE, reading);
    if table.is_empty() {
        let remedy = format!("has no limit: add one, such as {EXAMPLE}");
        reading.mistake(&root.place("concurrency"), remedy);
    }
    let mut all = Vec::new();
    for (name, fields) in tables {
        // A reload can add domains, which have a limit of this name.
        #[cfg(feature = "server")]
        let is_of_requests = name == REQUEST_LIMITS;
        #[cfg(not(feature = "server"))]
        let is_of_requests = false;
        if is_of_requests || limits.iter().any(|limit| limit.name() == name) {
            let remedy = "is the name of a limit too: choose another";
            reading.mistake(&fields.place_of_name(name), remedy);
        }
        all.push(limit(name, &fields, reading));
    }
    all
}

fn limit(name: &str, fields: &Fields<'_>, reading: &mut Reading) -> Concurrency {
    fields.refuse_unknown(CONCURRENCY, reading);
    let max = fields.whole("max", reading);
    if max.is_none() && !fields.has("max") {
        reading.missing(fields.at, format!("{}.max", fields.path), "is missing: set max = 10");
    }
    let mut limit = Concurrency::new(name, max.map_or(1, |max| max.value));
    if fields.flag("local", reading).is_some_and(|local| local.value) {
        limit = limit.local();
    }
    if let Some(outage) = fields.word("outage", reading) {
        limit = limit.outage(outage.value);
    }
    if let Some(wait) = fields.duration("max_wait", reading) {
        limit = limit.max_wait(wait.value);
    }
    if let Some(callers) = fields.whole("max_waiting", reading) {
        limit = limit.max_waiting(callers.value);
    }
    check(limit.clone(), fields, reading);
    limit
}

/// `validate` stops at the first mistake: it is named, the field set to a sound value, and all validated again.
fn check(mut limit: Concurrency, fields: &Fields<'_>, reading: &mut Reading) {
    loop {
        let Err(ConfigError::Limit { field, reason, .. }) = limit.validate(false, 1, 1) else {
            return;
        };
        let place = match field {
            "name" => fields.place_of_name(&limit.name),
            field => fields.place(field),
        };
        reading.mistake(&place, super::check::remedy(reason));
        match field {
            "name" => "any".clone_into(&mut limit.name),
            "max" => limit.max = 1,
            "outage" => limit.outage = OutagePolicy::default(),
            "max_wait" => limit.max_wait = DEFAULT_MAX_WAIT,
            _ => return,
        }
    }
}
