//! Decisions by a local bucket while its key comes under another plan.

use super::*;
use crate::algorithm::{KeyRule, StateRule, TurnRule};
use crate::bucket::local_bucket::LocalBucket;
use crate::bucket::new_key::NewKey;
use crate::bucket::spend_result::LocalAsk;
use crate::bucket::table::TableBucket;
use crate::limit::{Limit, LimitInfo};
use crate::quota::Quota;
use crate::time::Timestamp;

const NOW: Timestamp = Timestamp::from_micros(1_000_000_000);

/// A plan of so many tokens, of which none flows in.
fn plan(tokens: u64) -> &'static LimitInfo {
    let quota = Quota::new(1, std::time::Duration::from_secs(24 * 3600)).burst(tokens);
    let limit = Limit::new("model", quota).local().plan("other", quota);
    let terms = limit.validate_on_node(true, None, 1).expect("it can be kept");
    LimitInfo::intern("model", (None, false), &terms, quota.into(), 0)
}

fn take(bucket: &LocalBucket, cost: u32, plan: &'static LimitInfo) -> (bool, u64) {
    let rule = plan.here.as_ref().and_then(|rule: &KeyRule| TurnRule::of(rule));
    let ask = LocalAsk { cost, rule: rule.expect("it is one"), within_us: 0, plan: plan.number };
    loop {
        if let Some(answer) = bucket.try_decide(bucket.load(), ask, NOW) {
            return (answer.is_allowed, answer.standing.remaining());
        }
    }
}

/// A key with one token left by `begins` is asked by two threads, one of which brings it under another plan.
fn last_token_is_spent_once(begins: u64, other: u64) {
    let (begins, other) = (plan(begins), plan(other));
    let bucket = Arc::new(LocalBucket::default());
    bucket.start(NewKey { first_credit: 0, plan: begins.number }, false);
    let all = begins.rule.quota().burst_tokens() as u32;
    assert!(take(&bucket, all - 1, begins).0);
    let changed = run(&bucket, move |bucket| take(bucket, 1, other).0);
    let (allowed, _) = take(&bucket, 1, begins);
    assert_ne!(allowed, changed.join().unwrap(), "one of the two");
    assert_eq!(take(&bucket, 0, other).1, 0);
}

#[test]
fn last_token_of_a_key_is_spent_once_while_its_plan_is_raised() {
    check("last token while a plan is raised", || last_token_is_spent_once(2, 4));
}

#[test]
fn last_token_of_a_key_is_spent_once_while_its_plan_is_lowered() {
    check("last token while a plan is lowered", || last_token_is_spent_once(4, 2));
}
