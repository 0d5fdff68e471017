//! Configuration from TOML: every mistake by line, column, field, value and remedy; the limits that builder calls make;
//! and no secret anywhere.

use std::fmt::Write;

use proptest::prelude::*;
use tidegate::config::{Config, ConfigFileError, FILE_BYTES_MAX, Mistake, SECRET_BYTES_MAX};
use tidegate::{
    FixedWindow, LeakyBucket, Limit, Limiter, Mode, OutagePolicy, Quota, Rule, SlidingLog,
    SlidingWindow, Switch, SyncPolicy,
};

#[cfg(feature = "redis")]
mod parts;

/// Broken configurations, each with what is to be said of it.
#[cfg(all(feature = "calendar", feature = "redis"))]
const BROKEN: &str = include_str!("config/broken.txt");
const EXAMPLE: &str = include_str!("../examples/tidegate.toml");
/// A part of every secret here.
const SECRET: &str = "hunter2";

/// The environment of these tests.
fn variables(name: &str) -> Option<String> {
    let value = match name {
        "SHORT" => "hunter2",
        "REDIS_PASSWORD" => "hunter2@/hunter2",
        "KEY_SECRET" | "TIDEGATE_KEY_SECRET" => "hunter2-hunter2-hunter2",
        "REDIS_URL" => "redis://shop:hunter2@127.0.0.1:1/0",
        "NODES" => "4",
        "QUOTA" => "7/min",
        _ => return None,
    };
    Some(value.to_owned())
}

fn read(text: &str) -> Result<Config, ConfigFileError> {
    Config::from_toml_with(text, variables)
}

fn mistakes(text: &str) -> Vec<Mistake> {
    read(text).err().map_or(Vec::new(), |error| error.mistakes().to_vec())
}

fn row(mistake: &Mistake) -> String {
    let (line, column) = (mistake.line(), mistake.column());
    let (field, value, remedy) = (mistake.field(), mistake.value(), mistake.remedy());
    format!("{line}:{column} | {field} | {value} | {remedy}")
}

/// A name, a text, and the rows expected.
#[cfg(all(feature = "calendar", feature = "redis"))]
fn cases() -> Vec<(&'static str, String, Vec<&'static str>)> {
    let case = |case: &'static str| {
        let (name, rest) = case.split_once('\n').expect("a name on a line of its own");
        let is_row = |line: &&str| line.starts_with("-- ");
        let text = rest.lines().filter(|line| !is_row(line));
        let rows = rest.lines().filter(is_row).map(|line| &line[3..]);
        (name, text.fold(String::new(), |text, line| text + line + "\n"), rows.collect())
    };
    BROKEN.split("== ").skip(1).map(case).collect()
}

#[test]
#[cfg(all(feature = "calendar", feature = "redis"))]
fn all_mistakes_of_over_a_hundred_broken_configurations_are_named_and_nothing_else() {
    let cases = cases();
    let with = |mistakes: usize| cases.iter().filter(|case| case.2.len() == mistakes).count();
    assert_eq!((cases.len(), with(1), with(5)), (143, 113, 25));
    let mut wrong = String::new();
    for (name, text, expected) in &cases {
        let named: Vec<String> = mistakes(text).iter().map(row).collect();
        if &named != expected {
            writeln!(wrong, "{name}:\n  {}", named.join("\n  ")).unwrap();
        }
    }
    assert!(wrong.is_empty(), "said, and not expected:\n{wrong}");
}

#[test]
#[cfg(all(feature = "calendar", feature = "redis"))]
fn no_secret_of_a_broken_configuration_is_shown() {
    let mut with_secrets = 0;
    for (name, text, _) in cases() {
        let Err(error) = read(&text) else { panic!("{name}: no mistake") };
        let shown = format!("{error} {error:?}");
        assert!(!shown.contains(SECRET), "{name}: {shown}");
        with_secrets += usize::from(text.contains(SECRET) || text.contains("${"));
    }
    assert!(with_secrets >= 10, "{with_secrets}");
}

#[test]
fn mistake_is_shown_as_one_line_that_begins_with_its_place() {
    let error = read("[limits.api]\nquota = \"10/s\"\nmode = \"exakt\"\n").unwrap_err();
    let expected = "text:3:8: limits.api.mode = \"exakt\": must be \"local\", \"hybrid\" or \"exact\": did \
                    you mean \"exact\"?";
    assert_eq!(error.to_string(), expected);
    let of_windows = read("\u{feff}[limits.api]\r\nquota = \"10/s\"\r\nmode = \"exakt\"\r\n");
    assert_eq!(of_windows.unwrap_err().to_string(), expected, "with the ends of another system");
}

#[test]
#[cfg(all(feature = "calendar", feature = "redis"))]
fn secrets_of_variables_files_and_texts_are_used_and_not_shown() {
    let folder = std::path::Path::new(env!("CARGO_TARGET_TMPDIR")).join("config_secrets");
    std::fs::create_dir_all(&folder).unwrap();
    std::fs::write(folder.join("key"), "hunter2-hunter2-hunter2\n").unwrap();
    std::fs::write(folder.join("password"), "hunter2\r\n").unwrap();
    let limit = "[limits.api]\nquota = \"10/s\"\n";
    let texts = [
        (
            "key_secret = \"${KEY_SECRET}\"\n",
            "redis = \"redis://cache\"\npassword = \"${SHORT}\"\n",
        ),
        (
            "key_secret_file = \"key\"\n",
            "redis = \"redis://cache\"\npassword_file = \"password\"\n",
        ),
        ("key_secret = \"hunter2-hunter2-hunter2\"\n", "redis = \"redis://:hunter2@cache\"\n"),
        ("", "redis = \"redis://:${SHORT}@cache\"\n"),
        ("", "redis = \"redis://cache\"\nuser = \"shop\"\npassword = \"${REDIS_PASSWORD}\"\n"),
        ("", "redis = \"${REDIS_URL}\"\n"),
    ];
    for (secret, store) in texts {
        let path = folder.join("tidegate.toml");
        std::fs::write(&path, format!("{secret}[store]\n{store}{limit}")).unwrap();
        let config = Config::load_with(&path, variables).unwrap();
        let shown = format!("{config:?} {:?}", config.store_name());
        assert!(!shown.contains(SECRET), "{shown}");
        assert_eq!(
            shown.contains("***"),
            store.contains('@') || store.contains("URL") || !secret.is_empty()
        );
        assert!(config.builder().build().is_ok(), "{store}");
    }
}

#[test]
fn key_secret_of_a_file_is_without_its_last_newline() {
    let folder = std::path::Path::new(env!("CARGO_TARGET_TMPDIR"));
    let secret = |name: &str, content: &str| {
        std::fs::write(folder.join(name), content).unwrap();
        let path = folder.join(format!("{name}.toml"));
        let text = format!("key_secret_file = {name:?}\n[limits.api]\nquota = \"10/s\"\n");
        std::fs::write(&path, text).unwrap();
        Config::load(&path)
    };
    assert!(secret("secret_16", "0123456789abcdef\n").is_ok());
    let error = secret("secret_15", "0123456789abcde\n").unwrap_err();
    assert_eq!(
        row(&error.mistakes()[0]),
        "1:19 | key_secret_file | \"secret_15\" | must be at least 16 random bytes"
    );
    let large = "x".repeat(usize::try_from(SECRET_BYTES_MAX).unwrap() + 1);
    let error = secret("secret_large", &large).unwrap_err();
    assert!(error.to_string().contains("larger than 65536 bytes"), "{error}");
}

#[test]
fn file_that_cannot_be_read_is_no_mistake_of_a_line() {
    let folder = std::path::Path::new(env!("CARGO_TARGET_TMPDIR"));
    std::fs::write(folder.join("latin.toml"), b"name = \"gr\xf6\"").unwrap();
    let large = "#".repeat(usize::try_from(FILE_BYTES_MAX).unwrap() + 1);
    std::fs::write(folder.join("large.toml"), large).unwrap();
    for (name, reason) in [
        ("none.toml", "cannot be read: No such file"),
        ("latin.toml", "is no text"),
        ("large.toml", "is larger than 1048576 bytes"),
    ] {
        let error = Config::load(folder.join(name)).unwrap_err();
        assert!(matches!(error, ConfigFileError::Unreadable { .. }), "{error:?}");
        assert!(error.mistakes().is_empty() && error.warnings().is_empty());
        let shown = error.to_string();
        assert!(shown.contains(name) && shown.contains(reason), "{shown}");
    }
}

#[test]
fn number_and_quota_may_come_from_variables() {
    let config = read("max_nodes = \"${NODES}\"\n[limits.api]\nquota = \"${QUOTA}\"\n").unwrap();
    assert_eq!(config.limits(), [Limit::new("api", Quota::per_minute(7))]);
    assert!(format!("{config:?}").contains("max_nodes: Some(4)"), "{config:?}");
}

#[test]
fn file_of_concurrency_limits_and_domains_without_a_quota_is_sound() {
    let text = "[concurrency.jobs]\nmax = 10\n[domains.web.admin]\ndeny = true\n";
    let config = read(text).unwrap();
    assert_eq!((config.limits().len(), config.concurrency_limits().len()), (0, 1));
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let _entered = runtime.enter();
    assert!(config.builder().build().is_ok());
}

#[test]
fn limits_are_in_the_order_of_the_file() {
    let text =
        "[limits.b]\nquota = \"1/s\"\n[limits.c]\nquota = \"1/s\"\n[limits.a]\nquota = \"1/s\"\n";
    let config = read(text).unwrap();
    let names: Vec<&str> = config.limits().iter().map(Limit::name).collect();
    assert_eq!(names, ["b", "c", "a"]);
}

#[test]
fn odd_limit_is_warned_of_by_its_line() {
    let warned = |text: &str| -> Vec<String> {
        let config = read(text).expect("no mistake");
        config.warnings().iter().map(row).collect()
    };
    let memory = "\n[store]\nmemory = true\n";
    let cases = [
        (
            "[limits.mail]\nalgorithm = \"leaky-bucket\"\nquota = \"10/s\"\nqueue = \"99ms\"",
            "4:9 | limits.mail.queue | \"99ms\" | is shorter than a slot, so nobody can wait in it: make it 100ms at \
             least, or remove it",
        ),
        (
            "[limits.mail]\nalgorithm = \"leaky-bucket\"\nquota = \"10/s\"\nqueue = \"2s\"\nmax_waiting = 19",
            "4:9 | limits.mail.queue | \"2s\" | is 20 slots long, and max_waiting lets 19 callers wait: shorten it, \
             or raise max_waiting",
        ),
        (
            "[limits.api]\nquota = \"10/s\"\nmode = \"exact\"",
            "3:8 | limits.api.mode | \"exact\" | there is no store, so each node decides alone: add a table [store], \
             or set mode = \"local\"",
        ),
        (
            "[limits.api]\nquota = \"10/s\"\nmode = \"local\"\noutage = \"open\"",
            "4:10 | limits.api.outage | \"open\" | has no effect on a limit whose mode is local: remove it",
        ),
    ];
    for (text, warning) in cases {
        assert_eq!(warned(text), [warning], "{text}");
    }
    let exact = "[limits.api]\nquota = \"10/s\"\nmode = \"exact\"\nversion = 2";
    let warning =
        "4:11 | limits.api.version | 2 | has no effect on a limit whose mode is exact: remove it";
    assert_eq!(warned(&format!("{exact}{memory}")), [warning]);
    let queue = "[limits.mail]\nalgorithm = \"leaky-bucket\"\nquota = \"10/s\"\naccuracy = 0.05";
    let warning = "4:12 | limits.mail.accuracy | 0.05 | has no effect on a leaky-bucket: remove it";
    assert_eq!(warned(&format!("{queue}{memory}")), [warning]);
    for text in [
        "[limits.mail]\nalgorithm = \"leaky-bucket\"\nquota = \"10/s\"\nqueue = \"100ms\"",
        "[limits.mail]\nalgorithm = \"leaky-bucket\"\nquota = \"10/s\"\nqueue = \"2s\"\nmax_waiting = 20",
        "[limits.api]\nquota = \"10/s\"\nmode = \"local\"",
        "[limits.api]\nquota = \"1/s\"",
        "[limits.api]\nquota = \"1/s\"\n[store]\nmemory = true",
    ] {
        assert_eq!(warned(text), [""; 0], "{text}");
    }
}

#[test]
fn setting_without_effect_on_a_shared_leaky_bucket_is_warned_of_by_its_line() {
    let fields = "algorithm = \"leaky-bucket\"\nquota = \"10/s\"\ngrace = \"5s\"\nversion = 3\n";
    for table in ["limits.mail", "domains.mail.to"] {
        let text = format!("[{table}]\n{fields}[store]\nmemory = true\n");
        let warned: Vec<String> = read(&text).unwrap().warnings().iter().map(row).collect();
        let remedy = "has no effect on a leaky-bucket: remove it";
        let expected = [
            format!("4:9 | {table}.grace | \"5s\" | {remedy}"),
            format!("5:11 | {table}.version | 3 | {remedy}"),
        ];
        assert_eq!(warned, expected);
    }
}

#[test]
#[cfg(feature = "redis")]
fn burst_of_fewer_tokens_than_nodes_is_warned_of() {
    let text = |nodes: &str, quota: &str| {
        format!("{nodes}\n[limits.api]\n{quota}\n[store]\nredis = \"redis://cache\"\n")
    };
    let warned = |nodes: &str, quota: &str| -> Vec<String> {
        let config = read(&text(nodes, quota)).expect("no mistake");
        config.warnings().iter().map(row).collect()
    };
    let of = |place: &str, value: &str, burst: u32, nodes: &str| {
        format!(
            "{place} | {value} | a burst of {burst} is less than a token for each of {nodes}, so check may deny \
             first requests: ask with check_sure, set max_nodes to the nodes there are, or set mode = \"exact\""
        )
    };
    let by_default =
        of("3:9 | limits.api.quota", "\"15/s\"", 15, "16 nodes (the default of max_nodes)");
    assert_eq!(warned("", "quota = \"15/s\""), [by_default]);
    let by_number = of("4:9 | limits.api.burst", "4", 4, "5 nodes (max_nodes)");
    assert_eq!(warned("max_nodes = 5", "quota = \"100/s\"\nburst = 4"), [by_number]);
    assert_eq!(warned("", "quota = \"16/s\""), [""; 0]);
    assert_eq!(warned("max_nodes = 4", "quota = \"100/s\"\nburst = 4"), [""; 0]);
    assert_eq!(warned("", "algorithm = \"leaky-bucket\"\nquota = \"1/s\""), [""; 0]);
}

#[test]
fn value_of_several_lines_that_ends_is_no_mistake_beside_one() {
    let text = "limits.a = { quota = \"1/x\" }\nlanes = 16 17\nname = \"\"\"a\nb\"\"\"\n";
    let lines: Vec<usize> = mistakes(text).iter().map(Mistake::line).collect();
    assert_eq!(lines, [1, 2]);
    assert!(read("name = \"\"\"a\nb\"\"\"\n[limits.a]\nquota = \"1/s\"\n").is_ok());
}

#[test]
fn thousands_of_mistakes_are_all_named() {
    let mut text = String::new();
    for line in 0..10_000 {
        writeln!(text, "[limits.l{line}]\nquota = {line}/s\ncredit = 99").unwrap();
    }
    let mistakes = mistakes(&text);
    assert_eq!(mistakes.len(), 20_000);
    assert_eq!((mistakes[19_999].line(), mistakes[19_999].column()), (30_000, 10));
}

#[test]
fn warnings_come_with_mistakes_too() {
    let text = "[limits.a]\nquota = \"10/s\"\nmode = \"exact\"\n[limits.b]\nquota = \"10\"\n";
    let error = read(text).unwrap_err();
    assert_eq!((error.mistakes().len(), error.warnings().len()), (1, 1));
    assert_eq!(error.warnings()[0].line(), 3);
}

#[tokio::test]
#[cfg(all(feature = "calendar", feature = "redis"))]
async fn example_file_is_sound_and_its_limits_decide_on_a_real_store() {
    let server = parts::RedisServer::start();
    let url = server.url();
    let path = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("examples/tidegate.toml");
    let of_server =
        |name: &str| if name == "REDIS_URL" { Some(url.clone()) } else { variables(name) };
    let config = Config::load_with(path, of_server).unwrap();
    assert!(config.warnings().is_empty(), "{:?}", config.warnings());
    let limiter = config.builder().build_ready(std::time::Duration::from_secs(20)).await.unwrap();
    let api = limiter.limit("api").unwrap();
    for _ in 0..200 {
        assert!(api.check_sure("user:42").await.is_allowed());
    }
    let pro = api.plan("pro").unwrap().check_sure("customer:7").await;
    assert!(pro.is_allowed() && pro.quota() == Quota::per_minute(6000).burst(2000));
    assert!(limiter.limit("mail").unwrap().check_sure("host").await.is_allowed());
    assert!(limiter.limit("bill").unwrap().check_sure("customer").await.is_allowed());
    let login = limiter.async_limit("login").unwrap();
    let mut admitted = 0;
    for _ in 0..20 {
        admitted += u32::from(login.check_sure("account").await.is_allowed());
    }
    assert_eq!(admitted, 5);
}

/// A limit as a file has it, and by calls.
#[derive(Clone, Debug)]
struct Both {
    text: String,
    limit: Limit,
}

fn rules() -> impl Strategy<Value = (String, Rule)> {
    let tokens = prop_oneof![1..200_000_u64, Just(0), 1..2_000_000_000_u64];
    let period_us =
        prop_oneof![Just(1_000_000_u64), Just(60_000_000), Just(3_600_000_000), 1..99_000_000_u64];
    let queue_ms = prop_oneof![0..5_000_u64, 1..40_000_000_000_u64];
    (0..6_u32, tokens, period_us, 0..1000_u64, queue_ms).prop_map(
        |(algorithm, tokens, period_us, burst, queue_ms)| {
            let period = std::time::Duration::from_micros(period_us);
            let quota = format!("quota = \"{tokens}/{period_us}us\"\n");
            match algorithm {
                0 => (quota, Quota::new(tokens, period).into()),
                1 => (
                    format!("{quota}burst = {burst}\n"),
                    Quota::new(tokens, period).burst(burst).into(),
                ),
                2 => {
                    let queue = std::time::Duration::from_millis(queue_ms);
                    let text =
                        format!("{quota}algorithm = \"leaky-bucket\"\nqueue = \"{queue_ms}ms\"\n");
                    (text, LeakyBucket::new(tokens, period).queue(queue).into())
                }
                3 => (
                    format!("{quota}algorithm = \"fixed-window\"\n"),
                    FixedWindow::new(tokens, period).into(),
                ),
                4 => (
                    format!("{quota}algorithm = \"sliding-window\"\n"),
                    SlidingWindow::new(tokens, period).into(),
                ),
                _ => (
                    format!("{quota}algorithm = \"sliding-log\"\n"),
                    SlidingLog::new(tokens, period).into(),
                ),
            }
        },
    )
}

fn modes() -> impl Strategy<Value = Option<(&'static str, Mode)>> {
    let all = vec![("local", Mode::Local), ("hybrid", Mode::Hybrid), ("exact", Mode::Exact)];
    proptest::option::of(proptest::sample::select(all))
}

fn outages() -> impl Strategy<Value = Option<(&'static str, OutagePolicy)>> {
    let all = vec![
        ("share", OutagePolicy::Share),
        ("last-rate", OutagePolicy::LastRate),
        ("open", OutagePolicy::Open),
        ("closed", OutagePolicy::Closed),
    ];
    proptest::option::of(proptest::sample::select(all))
}

fn syncs() -> impl Strategy<Value = Option<(String, SyncPolicy)>> {
    let interval = (0..7000_u64).prop_map(|ms| {
        let text = format!("sync_interval = \"{ms}ms\"\n");
        (text, SyncPolicy::Interval(std::time::Duration::from_millis(ms)))
    });
    let accuracy = (0.0..1.1, proptest::option::of(0.0..2e6)).prop_map(
        |(excess, key_syncs_per_second_max): (f64, Option<f64>)| {
            let mut text = format!("accuracy = {excess:?}\n");
            if let Some(ceiling) = key_syncs_per_second_max {
                writeln!(text, "key_syncs_per_second_max = {ceiling:?}").unwrap();
            }
            (text, SyncPolicy::Accuracy { excess, key_syncs_per_second_max })
        },
    );
    proptest::option::of(prop_oneof![interval, accuracy])
}

/// Grace, wait, waiting callers, version, credit; in units of the file.
type Numbers = (Option<u32>, Option<u32>, Option<u32>, Option<u32>, Option<u32>);

fn numbers() -> impl Strategy<Value = Numbers> {
    let any = || proptest::option::of(0..20_000_u32);
    (any(), any(), any(), any(), proptest::option::of(0..18_u32))
}

/// A line with a switch, the same switch, and for how many days a denied key is blocked.
fn exceptions() -> impl Strategy<Value = (&'static str, Switch, u32)> {
    let switches = [
        ("", Switch::On),
        ("switch = \"on\"\n", Switch::On),
        ("switch = \"shadow\"\n", Switch::Shadow),
        ("switch = \"off\"\n", Switch::Off),
    ];
    let days = prop_oneof![Just(0_u32), 0..400_u32];
    (proptest::sample::select(switches.to_vec()), days)
        .prop_map(|((line, switch), days)| (line, switch, days))
}

fn with_exceptions(limit: Limit, text: &mut String, of: (&str, Switch, u32)) -> Limit {
    let (line, switch, days) = of;
    text.push_str(line);
    writeln!(text, "block_for = \"{days}d\"").unwrap();
    limit.switch(switch).block_for(std::time::Duration::from_secs(86_400) * days)
}

fn both() -> impl Strategy<Value = Both> {
    (both_without_plans(), proptest::collection::vec(plans(), 0..3))
        .prop_map(|(both, plans)| plans.iter().fold(both, with_plan))
}

/// A plan: its name, its tokens, a period if it has one of its own, a burst and a queue.
type Plan = (String, u64, Option<u64>, Option<u64>, Option<u64>);

fn plans() -> impl Strategy<Value = Plan> {
    let name = prop_oneof![9 => "[a-c]{1,2}", 1 => "[ -~]{0,70}"];
    let tokens = prop_oneof![9 => 1..200_000_u64, 1 => 0..2_000_000_000_u64];
    let period_us = proptest::option::weighted(0.2, 1..99_000_000_u64);
    (name, tokens, period_us, proptest::option::of(0..1000_u64), proptest::option::of(0..5000_u64))
}

/// A plan of the limit's algorithm.
fn with_plan(both: Both, plan: &Plan) -> Both {
    let (name, tokens, period_us, burst, queue_ms) = plan;
    let limit = both.limit;
    let period = period_us.map_or(limit.quota().period(), std::time::Duration::from_micros);
    let key = |name: &str| serde_json::to_string(name).unwrap();
    let (table, us) = (format!("{}.plans.{}", key(limit.name()), key(name)), period.as_micros());
    let mut text = format!("{}[limits.{table}]\nquota = \"{tokens}/{us}us\"\n", both.text);
    let rule: Rule = match limit.rule() {
        Rule::LeakyBucket(own) => {
            // Without a queue of its own, a plan has its limit's.
            let queue = queue_ms.map_or(own.longest_wait(), std::time::Duration::from_millis);
            queue_ms.inspect(|ms| writeln!(text, "queue = \"{ms}ms\"").unwrap());
            LeakyBucket::new(*tokens, period).queue(queue).into()
        }
        Rule::FixedWindow(_) => FixedWindow::new(*tokens, period).into(),
        Rule::SlidingWindow(_) => SlidingWindow::new(*tokens, period).into(),
        Rule::SlidingLog(_) => SlidingLog::new(*tokens, period).into(),
        _ => {
            burst.inspect(|burst| writeln!(text, "burst = {burst}").unwrap());
            let quota = Quota::new(*tokens, period);
            burst.map_or(quota, |burst| quota.burst(burst)).into()
        }
    };
    Both { text, limit: limit.plan(name, rule) }
}

fn both_without_plans() -> impl Strategy<Value = Both> {
    let name = prop_oneof!["[a-zA-Z0-9_./-]{1,64}", "[ -~]{0,70}"];
    (name, rules(), modes(), outages(), syncs(), numbers(), any::<bool>(), exceptions()).prop_map(
        |(name, (rule, by_call), mode, outage, sync, numbers, strict, exceptions)| {
            let key = serde_json::to_string(&name).unwrap();
            let mut text = format!("[limits.{key}]\n{rule}");
            let mut limit = Limit::new(name, by_call);
            let mut line = |name: &str, value: &dyn std::fmt::Display| {
                writeln!(text, "{name} = {value}").unwrap();
            };
            if let Some((word, mode)) = mode {
                line("mode", &format!("{word:?}"));
                limit = limit.mode(mode);
            }
            if let Some((word, outage)) = outage {
                line("outage", &format!("{word:?}"));
                limit = limit.outage(outage);
            }
            let (grace, wait, waiting, version, credit) = numbers;
            let ms = |ms: u32| std::time::Duration::from_millis(ms.into());
            if let Some(grace) = grace {
                line("grace", &format!("\"{grace}ms\""));
                limit = limit.grace(ms(grace));
            }
            if let Some(wait) = wait {
                line("max_wait", &format!("\"{wait}ms\""));
                limit = limit.max_wait(ms(wait));
            }
            if let Some(waiting) = waiting {
                line("max_waiting", &waiting);
                limit = limit.max_waiting(waiting);
            }
            if let Some(version) = version {
                line("version", &version);
                limit = limit.version(version);
            }
            if let Some(credit) = credit {
                line("credit", &credit);
                limit = limit.credit(credit);
            } else {
                line("strict", &strict);
                limit = if strict { limit.strict() } else { limit };
            }
            limit = with_exceptions(limit, &mut text, exceptions);
            if let Some((lines, policy)) = sync {
                text.push_str(&lines);
                limit = limit.sync(policy);
            }
            Both { text, limit }
        },
    )
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 2000, ..ProptestConfig::default() })]

    /// One definition of what is valid: a file is refused if and only if the builder refuses.
    #[test]
    fn limit_of_a_file_is_the_one_of_calls_and_refused_only_if_that_is(
        both in both(), store in any::<bool>(), nodes in proptest::option::of(0..40_u32),
    ) {
        let mut text = both.text.clone();
        if store {
            text.push_str("[store]\nmemory = true\n");
        }
        let whole = nodes.map_or(String::new(), |nodes| format!("max_nodes = {nodes}\n"));
        let config = read(&format!("max_keys = 100\n{whole}{text}"));
        let mut builder = Limiter::builder().max_keys(100).limit(both.limit.clone());
        if store {
            builder = builder.store(tidegate::MemoryStore::new());
        }
        if let Some(nodes) = nodes {
            builder = builder.max_nodes(nodes);
        }
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        let _entered = runtime.enter();
        match (config, builder.build()) {
            (Ok(config), Ok(_)) => {
                prop_assert_eq!(config.limits(), std::slice::from_ref(&both.limit));
                prop_assert!(config.builder().build().is_ok());
            }
            (Err(_), Err(_)) => {}
            (config, built) => {
                prop_assert!(false, "{text}\nby file: {config:?}\nby calls: {:?}", built.err());
            }
        }
    }
}

/// The example with more kinds of values, and each secret by a variable.
fn good() -> String {
    let more = "[limits.\"größe\"]\nquota = '7/h burst 9' # €\ncredit = 0x3\nsync_interval = \"\"\"50ms\"\"\"\n";
    format!("{EXAMPLE}\n{more}")
}

/// The text with one random change.
fn mutated(text: &str, rng: &mut fastrand::Rng) -> String {
    const PIECES: [&str; 22] = [
        "\"", "'", "\"\"\"", "[", "]", "[[", "{", "}", "=", ".", ",", "\n", "#", "$", "${", "\\",
        "0", "-1", "€", "\u{0}", "\r", "true",
    ];
    let mut chars: Vec<char> = text.chars().collect();
    for _ in 0..rng.usize(1..4) {
        let at = rng.usize(0..=chars.len());
        let until = (at + rng.usize(0..30)).min(chars.len());
        let part: Vec<char> = chars[at..until].to_vec();
        match rng.u8(0..4) {
            0 => drop(chars.drain(at..until)),
            1 => drop(chars.splice(at..at, part)),
            2 => chars.truncate(until.max(chars.len() / 2)),
            _ => {
                let piece = PIECES[rng.usize(0..PIECES.len())].chars();
                drop(chars.splice(at..(at + 1).min(chars.len()), piece));
            }
        }
    }
    chars.into_iter().collect()
}

#[test]
fn random_changes_of_a_good_file_never_panic_and_show_no_secret_and_mistakes_are_in_the_file() {
    let (good, mut broken) = (good(), 0);
    let known = |name: &str| if name == "REDIS_URL" { None } else { variables(name) };
    for seed in 0..4000 {
        let text = mutated(&good, &mut fastrand::Rng::with_seed(seed));
        let result = Config::from_toml_with(&text, known);
        let shown = format!("{result:?}");
        assert!(!shown.contains(SECRET), "seed {seed}: {shown}");
        let Err(error) = result else { continue };
        broken += 1;
        let lines: Vec<&str> = text.split('\n').collect();
        for mistake in error.mistakes().iter().chain(error.warnings()) {
            let line = lines.get(mistake.line().wrapping_sub(1));
            let column_max = line.map_or(0, |line| line.chars().count() + 1);
            let is_inside = (1..=column_max).contains(&mistake.column());
            assert!(is_inside, "seed {seed}: {mistake}");
            let is_said = !mistake.remedy().is_empty() && !mistake.field().is_empty();
            assert!(is_said, "seed {seed}: {mistake:?}");
        }
    }
    assert!(broken > 1000, "{broken}");
}

#[test]
fn words_of_a_format_without_lines_are_read_alike() {
    let json = r#"{"max_nodes": 4, "store": {"memory": true}, "limits": {"api": {"quota": "600/min", "burst": 20,
        "accuracy": 0.5, "strict": false}}}"#;
    let config: Config = serde_json::from_str(json).unwrap();
    let limit = Limit::new("api", Quota::per_minute(600).burst(20)).accuracy(0.5);
    assert_eq!(config.limits(), [limit]);
    let wrong =
        r#"{"lanes": 0, "limits": {"api": {"quota": "600/mim", "mode": null, "plans": []}}}"#;
    let error = serde_json::from_str::<Config>(wrong).unwrap_err().to_string();
    for part in [
        "lanes = 0: must be 1",
        "limits.api.quota = \"600/mim\": exp",
        "limits.api.mode = null",
        "plans",
    ] {
        assert!(error.contains(part), "{error}");
    }
}

#[test]
fn quota_mode_and_policy_are_words_in_any_format() {
    let words = (Quota::per_second(5).burst(9), Mode::Exact, OutagePolicy::LastRate);
    let json = serde_json::to_string(&words).unwrap();
    assert_eq!(json, r#"["5/s burst 9","exact","last-rate"]"#);
    assert_eq!(serde_json::from_str::<(Quota, Mode, OutagePolicy)>(&json).unwrap(), words);
    let error = serde_json::from_str::<Quota>("\"5 a second\"").unwrap_err().to_string();
    assert!(error.starts_with("quota \"5 a second\": expected tokens/period"), "{error}");
}
