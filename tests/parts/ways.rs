//! Ways to ask about a request.

use std::time::Duration;

use tidegate::Decision;

use crate::virtual_nodes::VirtualNodes;

/// How long a request waits for its turn at most.
const PATIENCE: Duration = Duration::from_secs(1);

pub(crate) type Way<'a> = Box<dyn Fn() -> Decision + 'a>;

/// Ways to ask the limit `api` of the first node about one request of `key`, and their names.
pub(crate) fn ways<'a>(
    cluster: &'a VirtualNodes,
    key: &'static str,
) -> Vec<(&'static str, Way<'a>)> {
    let node = &cluster.nodes[0];
    let api = node.limit("api").unwrap();
    let group = node.group(["api"]).unwrap();
    let handle = api.handle(key);
    let (of_check, of_sure, of_schedule) = (api.clone(), api.clone(), api.clone());
    let (of_ready, of_all, of_reserve, held) = (api.clone(), api.clone(), api, handle.clone());
    let reserved = move || {
        let reservation = cluster.wait(of_reserve.reserve(key, 1)).unwrap();
        let decision = reservation.decision();
        reservation.commit(1);
        decision
    };
    vec![
        ("check", Box::new(move || of_check.check(key))),
        ("check_sure", Box::new(move || cluster.wait(of_sure.check_sure(key)))),
        ("handle", Box::new(move || handle.check())),
        ("handle, sure", Box::new(move || cluster.wait(held.check_sure()))),
        ("schedule", Box::new(move || of_schedule.schedule(key))),
        ("until_ready", Box::new(move || cluster.wait(of_ready.until_ready(key, PATIENCE)))),
        ("group", Box::new(move || group.check(key))),
        (
            "group, sure",
            Box::new(move || {
                let group = node.group(["api"]).unwrap();
                cluster.wait(async move { group.check_sure(key).await })
            }),
        ),
        ("check_all", Box::new(move || cluster.wait(node.check_all([of_all.on(key)])).unwrap())),
        ("reserve", Box::new(reserved)),
    ]
}
