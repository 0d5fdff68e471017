//! Plans from TOML and other formats: each has the quota that the file says, and odd ones are warned of. Broken ones are in
//! `tests/config/broken.txt`.
#![allow(clippy::unwrap_used, reason = "a test's helpers may fail the test")]

use std::fmt::Write;
use std::time::Duration;

use tidegate::config::{Config, Mistake};
use tidegate::{
    FixedWindow, LeakyBucket, Limit, Limiter, MemoryStore, Mode, Quota, Rule, SlidingLog,
    SlidingWindow,
};

/// A limit and its plans as a file has them, and by calls.
type Both = (&'static str, Limit);

fn with_plans(own: impl Into<Rule>, [free, pro, team]: [impl Into<Rule>; 3]) -> Limit {
    Limit::new("api", own).plan("free", free).plan("pro", pro).plan("team/v2", team)
}

fn buckets() -> [Both; 2] {
    let tokens = "\
        quota = \"20/s\"\n\
        [limits.api.plans.free]\nquota = \"5/s\"\n\
        [limits.api.plans.pro]\nquota = \"600/min\"\nburst = 200\n\
        [limits.api.plans.\"team/v2\"]\nquota = \"40/s burst 90\"\n";
    let slots = "\
        algorithm = \"leaky-bucket\"\nquota = \"20/s\"\nqueue = \"2s\"\n\
        [limits.api.plans.free]\nquota = \"5/s\"\n\
        [limits.api.plans.pro]\nquota = \"40/s\"\nqueue = \"1s\"\n\
        [limits.api.plans.\"team/v2\"]\nquota = \"80/s\"\nqueue = \"0s\"\n";
    let (free, pro) = (Quota::per_second(5), Quota::per_minute(600).burst(200));
    let team = Quota::per_second(40).burst(90);
    let leaky = |tokens, s| LeakyBucket::per_second(tokens).queue(Duration::from_secs(s));
    let of_slots = [leaky(5, 2), leaky(40, 1), leaky(80, 0)];
    [
        (tokens, with_plans(Quota::per_second(20), [free, pro, team])),
        (slots, with_plans(leaky(20, 2), of_slots)),
    ]
}

/// In each form that TOML has of tables.
fn windows() -> [Both; 3] {
    let fixed = "\
        algorithm = \"fixed-window\"\nquota = \"20/h\"\nplans.free.quota = \"5/h\"\n\
        plans.pro.quota = \"200/h\"\nplans.\"team/v2\".quota = \"90/60min\"\n";
    let sliding = "\
        algorithm = \"sliding-window\"\nquota = \"20/h\"\n\
        plans = { free = { quota = \"5/h\" }, pro = { quota = \"200/h\" }, \"team/v2\" = { quota = \"90/h\" } }\n";
    let log = "\
        algorithm = \"sliding-log\"\nquota = \"20/h\"\n[limits.api.plans]\nfree = { quota = \"5/h\" }\n\
        pro = { quota = \"200/h\" }\n\"team/v2\" = { quota = \"90/h\" }\n";
    let plans = [5, 200, 90];
    [
        (fixed, with_plans(FixedWindow::per_hour(20), plans.map(FixedWindow::per_hour))),
        (sliding, with_plans(SlidingWindow::per_hour(20), plans.map(SlidingWindow::per_hour))),
        (log, with_plans(SlidingLog::per_hour(20), plans.map(SlidingLog::per_hour))),
    ]
}

#[tokio::test]
async fn plan_of_a_file_has_the_quota_that_it_says_in_each_algorithm_and_mode() {
    let mut asked = 0;
    for (text, by_calls) in buckets().into_iter().chain(windows()) {
        for mode in [Mode::Local, Mode::Hybrid, Mode::Exact] {
            let word = format!("{mode:?}").to_lowercase();
            let text = format!(
                "lanes = 1\n[store]\nmemory = true\n[limits.api]\nmode = \"{word}\"\n{text}"
            );
            let limit = by_calls.clone().mode(mode);
            if mode == Mode::Hybrid && matches!(limit.rule(), Rule::LeakyBucket(_)) {
                continue;
            }
            let config = Config::from_toml(&text).unwrap();
            assert_eq!(config.limits(), std::slice::from_ref(&limit), "{text}");
            let limiter = config.builder().build().unwrap();
            let api = limiter.async_limit("api").unwrap();
            assert_eq!(api.check_sure("nobody").await.quota(), limit.quota());
            for (name, rule) in limit.plans() {
                let plan = api.plan(name).unwrap();
                let seen = plan.check_sure(name).await;
                assert!(seen.is_allowed(), "{name} of {text}");
                assert_eq!((plan.rule(), seen.quota()), (rule, rule.quota()), "{name} of {text}");
                asked += 1;
            }
            if mode != Mode::Exact {
                let pro = limiter.limit("api").unwrap().plan("pro").unwrap();
                let quota = limit.plans().find(|(name, _)| *name == "pro").unwrap().1.quota();
                assert_eq!(pro.check("caller").quota(), quota);
            }
        }
    }
    assert_eq!(asked, 14 * 3);
}

#[test]
#[cfg(feature = "calendar")]
fn plan_of_a_month_is_in_the_zone_of_its_limit() {
    let text = |zone: &str| {
        format!(
            "[limits.bill]\nalgorithm = \"fixed-window\"\nquota = \"10/month\"\nzone = \"Asia/Tokyo\"\n\
             [limits.bill.plans.large]\nquota = \"900/month\"\n{zone}"
        )
    };
    let in_tokyo = |tokens| FixedWindow::per_month(tokens).zone("Asia/Tokyo");
    for zone in ["", "zone = \"Asia/Tokyo\"\n"] {
        let config = Config::from_toml(&text(zone)).unwrap();
        assert_eq!(
            config.limits(),
            [Limit::new("bill", in_tokyo(10)).plan("large", in_tokyo(900))]
        );
        let limiter = config.builder().build().unwrap();
        let large = limiter.limit("bill").unwrap().plan("large").unwrap();
        assert_eq!(large.check("customer").remaining(), 899);
    }
}

fn rows(mistakes: &[Mistake]) -> Vec<String> {
    let row = |it: &Mistake| {
        let (line, column) = (it.line(), it.column());
        format!("{line}:{column} {} = {}: {}", it.field(), it.value(), it.remedy())
    };
    mistakes.iter().map(row).collect()
}

fn warned(text: &str) -> Vec<String> {
    rows(Config::from_toml(text).expect("no mistake").warnings())
}

#[test]
fn plan_that_is_the_limits_own_quota_is_warned_of() {
    let limit = "[limits.api]\nquota = \"600/min\"\nburst = 20\n[limits.api.plans.pro]\n";
    let warning = "5:9 limits.api.plans.pro.quota = \"600/min burst 20\": is the limit's own quota, so the plan \
                   changes nothing: change it, or remove the plan";
    assert_eq!(warned(&format!("{limit}quota = \"600/min burst 20\"\n")), [warning]);
    for other in ["600/min burst 21", "601/min burst 20", "600/min"] {
        assert_eq!(warned(&format!("{limit}quota = \"{other}\"\n")), [""; 0], "{other}");
    }
}

#[test]
fn queue_of_a_plan_in_which_nobody_or_too_many_can_wait_is_warned_of() {
    let text = |queue: &str| {
        format!(
            "[limits.mail]\nalgorithm = \"leaky-bucket\"\nquota = \"10/s\"\nqueue = \"2s\"\nmax_waiting = 20\n\
             [limits.mail.plans.slow]\nquota = \"1/min\"\n{queue}\n[limits.mail.plans.bulk]\nquota = \"11/s\"\n\
             queue = \"2s\"\n"
        )
    };
    let nobody =
        "is shorter than a slot, so nobody can wait in it: make it 60000ms at least, or remove it";
    let many = "11:9 limits.mail.plans.bulk.queue = \"2s\": is 22 slots long, and max_waiting lets 20 callers wait: \
                shorten it, or raise max_waiting";
    let of_limit =
        format!("7:9 limits.mail.plans.slow.quota = \"1/min\": the limit's queue {nobody}");
    assert_eq!(warned(&text("")), [of_limit, many.to_owned()]);
    let own = format!("8:9 limits.mail.plans.slow.queue = \"59s\": {nobody}");
    assert_eq!(warned(&text("queue = \"59s\"")), [own, many.to_owned()]);
    assert_eq!(warned(&text("queue = \"60s\"")), [many]);
}

#[test]
#[cfg(feature = "redis")]
fn plan_with_a_burst_of_fewer_tokens_than_nodes_is_warned_of() {
    let text = |burst: u32| {
        format!(
            "max_nodes = 5\n[limits.api]\nquota = \"100/s\"\n[limits.api.plans.free]\nquota = \"90/s\"\n\
             burst = {burst}\n[store]\nredis = \"redis://cache\"\n"
        )
    };
    let warning = "6:9 limits.api.plans.free.burst = 4: a burst of 4 is less than a token for each of 5 nodes \
                   (max_nodes), so check may deny first requests: ask with check_sure, set max_nodes to the nodes \
                   there are, or set mode = \"exact\"";
    assert_eq!(warned(&text(4)), [warning]);
    assert_eq!(warned(&text(5)), [""; 0]);
}

#[test]
fn plans_of_a_format_without_lines_are_read_alike() {
    let of = |plans: &str| {
        let limits = format!(r#"{{"limits": {{"api": {{"quota": "10/s", "plans": {plans}}}}}}}"#);
        serde_json::from_str::<Config>(&limits)
    };
    let own = || Limit::new("api", Quota::per_second(10));
    let config = of(r#"{"pro": {"quota": "100/s", "burst": 300}, "team": {"quota": "50/s"}}"#);
    let pro = own().plan("pro", Quota::per_second(100).burst(300));
    assert_eq!(config.unwrap().limits(), [pro.plan("team", Quota::per_second(50))]);
    assert_eq!(of("{}").unwrap().limits(), [own()]);
    let twice = r#"{"pro": {"quota": "9/s"}, "pro": {"quota": 8}, "b c": {"quota": "7/s", "mode": "exact"}}"#;
    let error = of(twice).unwrap_err().to_string();
    for part in [
        "limits.api.plans.pro = \"pro\": is defined twice",
        "limits.api.plans.pro.quota = 8: is a whole number",
        "limits.api.plans.\"b c\" = \"b c\": must be 1 to 64",
        "limits.api.plans.\"b c\".mode = \"exact\": is a field of the limit",
    ] {
        assert!(error.contains(part), "{error}");
    }
    assert_eq!(error.split("; ").filter(|part| part.contains("limits.api")).count(), 4, "{error}");
}

#[test]
fn mistake_of_a_limit_is_not_said_again_of_its_plans() {
    let of = |text: &str| rows(Config::from_toml(text).unwrap_err().mistakes());
    let queue = "[limits.api]\nalgorithm = \"leaky-bucket\"\nquota = \"10/s\"\nmode = \"local\"\nqueue = \"367d\"\n\
                 [limits.api.plans.pro]\nquota = \"20/s\"\n";
    assert_eq!(of(queue), ["5:9 limits.api.queue = \"367d\": must be at most 366 days"]);
    let zone = "[limits.api]\nalgorithm = \"fixed-window\"\nquota = \"10/d\"\nzone = \"Mars/Olympus\"\n\
                [limits.api.plans.pro]\nquota = \"20/d\"\n";
    let said = of(zone);
    assert!(said.len() == 1 && said[0].starts_with("4:8 limits.api.zone"), "{said:?}");
    let algorithm = "[limits.api]\nalgorithm = \"leeky\"\nquota = \"10/d\"\n\
                     [limits.api.plans.pro]\nquota = \"20/d\"\nqueue = \"2s\"\n";
    assert_eq!(of(algorithm).len(), 1, "{:?}", of(algorithm));
    let mode = "[store]\nmemory = true\n[limits.api]\nalgorithm = \"leaky-bucket\"\nquota = \"10/s\"\n\
                mode = \"locla\"\n[limits.api.plans.pro]\nquota = \"20/s\"\n";
    let said = of(mode);
    assert!(said.len() == 1 && said[0].starts_with("6:8 limits.api.mode"), "{said:?}");
    let quota = "[limits.api]\nalgorithm = \"fixed-window\"\nquota = \"10/x\"\n\
                 [limits.api.plans.pro]\nquota = \"20/d\"\n";
    assert_eq!(of(quota).len(), 1, "{:?}", of(quota));
}

#[tokio::test]
async fn plans_that_only_together_have_no_common_unit_are_refused_as_by_calls() {
    let unit = "the plans' tokens have no common unit that leases can be counted in: choose rounder numbers, or numbers \
                that are nearer to each other";
    let text = |algorithm: &str, [own, one, other]: [&str; 3]| {
        format!(
            "[store]\nmemory = true\n[limits.api]\nalgorithm = \"{algorithm}\"\nquota = \"{own}\"\n{}{}",
            if one.is_empty() { String::new() } else { format!("plans.a.quota = \"{one}\"\n") },
            if other.is_empty() { String::new() } else { format!("plans.b.quota = \"{other}\"\n") },
        )
    };
    let cases = [
        // Of a bucket the slow plan is at fault, of windows no one alone.
        (
            "token-bucket",
            ["100/s", "1/d", "1000000000/h"],
            "6:17 limits.api.plans.a.quota = \"1/d\"",
        ),
        ("fixed-window", ["10/d", "7/d", "60000/d"], "6:1 limits.api.plans = plans"),
    ];
    for (algorithm, all @ [own, one, other], place) in cases {
        for alone in [[own, one, ""], [own, "", other]] {
            let config = Config::from_toml(&text(algorithm, alone)).unwrap();
            assert!(config.builder().build().is_ok(), "{alone:?}");
        }
        let mistakes = rows(Config::from_toml(&text(algorithm, all)).unwrap_err().mistakes());
        assert_eq!(mistakes, [format!("{place}: {unit}")]);
        let rule = |quota: &str| -> Rule {
            let quota: Quota = quota.parse().unwrap();
            match algorithm {
                "token-bucket" => quota.into(),
                _ => FixedWindow::new(quota.tokens(), quota.period()).into(),
            }
        };
        let limit = Limit::new("api", rule(own)).plan("a", rule(one)).plan("b", rule(other));
        let built = Limiter::builder().limit(limit).store(MemoryStore::new()).build();
        assert!(built.unwrap_err().to_string().contains(unit));
    }
}

#[test]
fn one_plan_more_than_a_limit_may_have_is_one_mistake() {
    let of = |plans: usize| {
        let mut text = "[limits.api]\nquota = \"10/s\"\n".to_owned();
        for plan in 0..plans {
            writeln!(text, "[limits.api.plans.p{plan}]\nquota = \"20/s\"").unwrap();
        }
        Config::from_toml(&text)
    };
    let config = of(tidegate::PLANS_MAX).unwrap();
    assert_eq!(config.limits()[0].plan_names().count(), 1000);
    let Err(error) = of(tidegate::PLANS_MAX + 1) else { panic!("no mistake") };
    let mistakes = rows(error.mistakes());
    assert_eq!(mistakes, ["3:13 limits.api.plans = plans: at most 1000 plans"]);
}
