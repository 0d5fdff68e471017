//! Limitador in memory: fixed windows; limits and their variables are expressions, evaluated for
//! each request against a context that is built from it.

use std::collections::HashMap;

use limitador::RateLimiter;
use limitador::limit::{Context, Limit, Namespace};

use super::{Contender, by_name};
use crate::case::Case;

pub fn new(case: &Case) -> Box<dyn Contender> {
    let (tokens, seconds) = if case.denied { (100, 3600) } else { (1_000_000_000, 1) };
    // Its cache forgets keys beyond its size: twice as many fit as there are.
    let limiter = RateLimiter::new(2 * case.keys.max(1000) as u64);
    let key = "key".try_into().expect("a good expression");
    limiter.add_limit(Limit::new("bench", tokens, seconds, vec![], vec![key]));
    let namespace = Namespace::from("bench");
    by_name("limitador in memory", case, move |name| {
        let context = Context::from(HashMap::from([("key".to_owned(), name.clone())]));
        let result = limiter.check_rate_limited_and_update(&namespace, &context, 1);
        result.expect("a good context").limited
    })
}
