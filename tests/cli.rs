//! The binary as a shell meets it: what it exits with, and what stands on standard error.
#![allow(
    clippy::disallowed_methods,
    reason = "a test that waits for a real process polls real time, with a deadline"
)]

use std::collections::HashMap;
use std::fs::File;
use std::io::Read;
use std::path::Path;
use std::process::{Child, Command, ExitStatus, Output, Stdio};
use std::time::{Duration, Instant};

use parts::RedisServer;

mod parts;

/// No run here takes nearly as long; one that does hangs.
const DEADLINE: Duration = Duration::from_secs(120);
const POLL_GAP: Duration = Duration::from_millis(10);

/// The program with arguments that hold no spaces, in a folder for the files that it writes.
fn tidegate(arguments: &str) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_tidegate"));
    command
        .args(arguments.split_whitespace())
        .current_dir(env!("CARGO_TARGET_TMPDIR"))
        .env_remove("RUST_LOG")
        .env_remove("NO_COLOR")
        .stdin(Stdio::null());
    command
}

fn run(arguments: &str) -> Output {
    tidegate(arguments).output().expect("the program starts")
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

fn poll<T>(what: &str, mut look: impl FnMut() -> Option<T>) -> T {
    let deadline = Instant::now() + DEADLINE;
    loop {
        if let Some(found) = look() {
            return found;
        }
        assert!(Instant::now() < deadline, "{what}: not within {DEADLINE:?}");
        std::thread::sleep(POLL_GAP);
    }
}

fn end_of(child: &mut Child) -> ExitStatus {
    poll("the end of the program", || child.try_wait().expect("a child can be asked for its end"))
}

/// A command line, its exit status, and what stands on standard error.
struct Row {
    arguments: &'static str,
    status: i32,
    says: &'static str,
}

const fn row(arguments: &'static str, status: i32, says: &'static str) -> Row {
    Row { arguments, status, says }
}

fn check(rows: &[Row]) {
    for Row { arguments, status, says } in rows {
        let output = run(arguments);
        let stderr = text(&output.stderr);
        assert_eq!(output.status.code(), Some(*status), "{arguments}: {stderr}");
        assert!(stderr.contains(says), "{arguments}: {stderr}");
        assert!(!stderr.contains("panicked"), "{arguments}: {stderr}");
        if *status != 0 {
            let errors = stderr.lines().filter(|line| line.starts_with("error: ")).count();
            assert_eq!(errors, 1, "{arguments}: one error in one form: {stderr}");
        }
    }
}

#[test]
fn wrong_command_line_exits_with_2() {
    check(&[
        row("demo --outage 5s..8s --seconds 2", 2, "'5s..8s' for '--outage'"),
        row("demo --outage 3s..2s", 2, "must end after it begins"),
        row("demo --outage 1.05s..2s", 2, "whole tenths of a second"),
        row("demo --scenario outage", 2, "invalid value 'outage' for '--scenario"),
        row("demo --processes", 2, "'--processes'"),
        row("demo --store nowhere", 2, "expected memory, redis://HOST:PORT or HOST:PORT"),
        row("demo --store redis://", 2, "--store"),
        row("demo --metrics 9000", 2, "expected a host and a port"),
        row("demo --rate 100/week", 2, "expected a whole number of tokens in a period"),
        row("demo --rate 0", 2, "for '--rate'"),
        row("demo --accuracy 0%", 2, "for '--accuracy'"),
        row("demo --accuracy 5", 2, "expected a part such as 5% or 0.05"),
        row("simulate --loss 1.5", 2, "expected a part such as 5% or 0.05"),
        row("simulate --loss -1%", 2, "expected a part such as 5% or 0.05"),
        row("simulate --rate 100/week", 2, "expected a whole number of tokens in a period"),
        row("simulate --rtt 5", 2, "expected a duration such as"),
        row("simulate --interval soon", 2, "expected a duration such as"),
        row("simulate --faults die@1s/9", 2, "for '--faults'"),
        row("simulate --policy write-behind --form async", 2, "for '--form'"),
        row("sweep --rate 100/week", 2, "expected a whole number of tokens in a period"),
        row("sweep --rate 7 --burst 100", 2, "--rate 7/s: no cell of the sweep"),
        row("sweep --interval 5", 2, "expected a duration such as"),
        row("tune --min-ideal 5", 2, "expected a part such as 5% or 0.05"),
        row("tune --max-excess much", 2, "expected a part of the burst such as 1% or 0.01"),
        row("tune --rate 100/week", 2, "expected a whole number of tokens in a period"),
        row("tune --svg /no/such/folder/a.svg", 2, "for '--svg'"),
    ]);
}

/// An arrivals file with this content, in the folder that the program runs in.
fn arrivals(name: &str, content: &str) {
    let path = Path::new(env!("CARGO_TARGET_TMPDIR")).join(name);
    std::fs::write(path, content).expect("the folder is there");
}

#[test]
fn comparison_that_cannot_be_made_names_both_sides() {
    arrivals("good.csv", "0,a,1\n");
    for (name, content) in [
        ("fields.csv", "0,a\n"),
        ("time.csv", "t_us,key,cost\n0,a,1\nsoon,a,1\n"),
        ("cost.csv", "0,a,1\n1,a,-1\n"),
        ("far.csv", "0,a,1\n400000000000000,a,1\n"),
        ("text.csv", "0,a,1\n0,\"a,1\n"),
    ] {
        arrivals(name, content);
    }
    let of = "--decisions - --arrivals";
    let rows = [
        (format!("--quota 5/week {of} good.csv"), 2, "for '--quota': expected tokens/period"),
        (format!("--quota 5/s --algorithm leeky-bucket {of} good.csv"), 2, "'leaky-bucket'"),
        (
            format!("--quota 5/s --algorithm fixed-window --burst 9 {of} good.csv"),
            2,
            "'9' for '--burst': does not fit --algorithm fixed-window",
        ),
        (format!("--quota 5/s --queue 1s {of} good.csv"), 2, "not fit --algorithm token-bucket"),
        (
            format!("--quota 5/50ms --algorithm sliding-log {of} good.csv"),
            2,
            "'50ms' for '--quota': must be at least 100 ms",
        ),
        (format!("--quota 5/s --store redis://127.0.0.1:1 {of} good.csv"), 2, "for '--store'"),
        (
            format!("--quota 5/s --mode exact --store 127.0.0.1:1 {of} good.csv"),
            1,
            "request 1 was not decided",
        ),
        (format!("--quota 5/s {of} none.csv"), 1, "none.csv: "),
        (format!("--quota 5/s {of} fields.csv"), 1, "fields.csv, line 1: fields = \"2\""),
        (format!("--quota 5/s {of} time.csv"), 1, "time.csv, line 3: t_us = \"soon\""),
        (format!("--quota 5/s {of} cost.csv"), 1, "cost.csv, line 2: cost = \"-1\""),
        (format!("--quota 5/s {of} far.csv"), 1, "far.csv, line 2: t_us = "),
        (format!("--quota 5/s {of} text.csv"), 1, "text.csv, line 2: fields"),
    ];
    compare_fails(rows);
}

/// Runs comparisons that cannot be made, each with the status and what is said.
fn compare_fails(rows: impl IntoIterator<Item = (String, i32, &'static str)>) {
    for (arguments, status, says) in rows {
        let arguments: &'static str = format!("compare {arguments}").leak();
        check(&[row(arguments, status, says)]);
    }
}

#[test]
fn zone_that_does_not_fit_is_named() {
    arrivals("zone.csv", "0,a,1\n");
    let of = "--decisions - --arrivals zone.csv";
    compare_fails([
        (
            format!("--quota 5/day --algorithm fixed-window --zone Europe/Berlim {of}"),
            2,
            "'\"Europe/Berlim\"' for '--zone': is no zone",
        ),
        (format!("--quota 5/month --algorithm fixed-window {of}"), 2, "for '--zone': a month"),
        (
            format!("--quota 5/day --algorithm fixed-window --zone UTC {of}"),
            2,
            "'UTC' for '--zone': the first t_us is before 1990",
        ),
        (
            format!("--quota 5/day --zone UTC {of}"),
            2,
            "'UTC' for '--zone': does not fit --algorithm token-bucket",
        ),
    ]);
}

#[test]
fn compare_writes_decisions_in_the_order_of_the_file() {
    // A time that goes back, a peek, a cost that never fits, quotes, and times as a clock of today has them.
    const BEGIN: u64 = 1_700_000_000_000_000;
    let lines = [
        (900_000, "a", 3),
        (900_000, "\"b, c\"", 4),
        (950_000, "a", 2),
        (940_000, "a", 1),
        (950_000, "a", 0),
        (950_000, "a", 5),
        (950_000, "a", 5_000_000_000_u64),
        (1_899_999, "a", 1),
        (1_900_000, "a", 3),
    ];
    let text = |more: &[&str]| {
        let lines = lines.iter().enumerate().map(|(at, (t_us, key, cost))| {
            let more = more.get(at).map_or(String::new(), |more| format!(",{more}"));
            format!("{},{key},{cost}{more}\n", BEGIN + t_us)
        });
        lines.collect::<String>()
    };
    arrivals("compare.csv", &text(&[]));
    let (server, text_of) = (RedisServer::start(), String::from_utf8_lossy);
    for (rule, expected) in [
        (
            "--algorithm sliding-log --quota 4/s",
            ["1,0", "1,0", "0,0", "1,0", "1,0", "0,0", "0,0", "0,0", "1,0"],
        ),
        // The window ends between the fourth and the eighth line.
        (
            "--algorithm fixed-window --quota 4/s",
            ["1,0", "1,0", "0,0", "1,0", "1,0", "0,0", "0,0", "1,0", "1,0"],
        ),
        ("--quota 4/s", ["1,0", "1,0", "0,0", "1,0", "1,0", "0,0", "0,0", "1,0", "1,0"]),
        // The second request takes the slots until 1.75 s of 1.65 s: the third would wait for 700 ms.
        (
            "--algorithm leaky-bucket --quota 4/s --queue 600ms",
            ["1,0", "1,0", "0,0", "0,0", "1,0", "0,0", "0,0", "1,0", "1,249999"],
        ),
    ] {
        for mode in ["local", "exact", &format!("exact --store {}", server.url())] {
            let files = "--arrivals compare.csv --decisions decided.csv";
            let line = format!("compare {rule} --mode {mode} {files}");
            let output = run(&line);
            assert!(output.status.success(), "{line}: {}", text_of(&output.stderr));
            let path = Path::new(env!("CARGO_TARGET_TMPDIR")).join("decided.csv");
            let decided = std::fs::read_to_string(path).expect("it was written");
            let expected = format!("t_us,key,cost,allowed,delay_us\n{}", text(&expected));
            assert_eq!(decided, expected, "{line}");
        }
    }
}

#[test]
fn table_compares_ways_on_the_same_requests() {
    let line = "compare --quota 20/s --load 3 --time 1s --keys 1 --nodes 2 --chart ways.svg --json";
    let output = run(line);
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(output.status.success(), "{text} {}", String::from_utf8_lossy(&output.stderr));
    let report: serde_json::Value = serde_json::from_str(&text).expect("a line of JSON");
    let rows = report["rows"].as_array().expect("rows");
    assert_eq!(rows.len(), 5 * 3 + 4);
    let figure = |algorithm: &str, way: &str, name: &str| {
        let is_it = |row: &&serde_json::Value| row["algorithm"] == algorithm && row["way"] == way;
        let row = rows.iter().find(is_it).unwrap_or_else(|| panic!("{algorithm}, {way}"));
        row[name].as_f64().unwrap_or_else(|| panic!("{row}"))
    };
    for algorithm in
        ["token-bucket", "leaky-bucket", "fixed-window", "sliding-window", "sliding-log"]
    {
        assert!(figure(algorithm, "exact", "excess_tokens") <= 0.1, "{algorithm}: {text}");
        assert!(figure(algorithm, "exact", "store_calls_per_decision") >= 1.0, "{algorithm}");
        assert!(figure(algorithm, "hybrid", "excess_tokens") <= 20.0, "{algorithm}: {text}");
        // Two nodes have the limit each.
        assert!(figure(algorithm, "local", "admitted_vs_ideal_pct") > 120.0, "{algorithm}: {text}");
        assert!(figure(algorithm, "local", "store_calls_per_decision") < 0.01, "{algorithm}");
    }
    assert!(figure("fixed-window", "a central call", "admitted_vs_ideal_pct") >= 99.0, "{text}");
    let chart = Path::new(env!("CARGO_TARGET_TMPDIR")).join("ways.svg");
    let chart = std::fs::read_to_string(chart).expect("it was drawn");
    assert!(chart.contains("sliding-log, hybrid") && chart.contains("<polyline"), "{chart}");
}

#[test]
fn table_that_cannot_be_made_names_the_flag() {
    check(&[
        row("compare --nodes 0", 2, "'0' for '--nodes': must be 1 to 1000"),
        row("compare --load 0", 2, "for '--load': must be above 0"),
        row("compare --time 1s --quota 5/min", 2, "'1s' for '--time': must be a period at least"),
        row("compare --quota 1000000/s", 2, "for '--quota': more than 200000 requests"),
        row(
            "compare --case edge --quota 100000/s --time 600s",
            2,
            "for '--quota': more than 200000",
        ),
        row("compare --zone UTC", 2, "'UTC' for '--zone': name --algorithm fixed-window"),
        row("compare --case edges", 2, "'edge'"),
        row("compare --decisions -", 2, "--arrivals"),
        row("compare --arrivals good.csv --decisions -", 2, "--quota"),
        row("compare --quota 5/s --arrivals good.csv --decisions - --nodes 3", 2, "--nodes"),
        row("compare --store redis://127.0.0.1:1 --time 1s --mode exact", 1, "error: "),
    ]);
}

/// A node with leases waited for ever where nothing came before its first request.
#[test]
fn node_with_leases_decides_its_first_request() {
    arrivals("first.csv", "0,a,2\n");
    for algorithm in
        ["token-bucket", "leaky-bucket", "fixed-window", "sliding-window", "sliding-log"]
    {
        let rule = format!("--algorithm {algorithm} --quota 5/s");
        let output =
            run(&format!("compare {rule} --mode hybrid --arrivals first.csv --decisions -"));
        let text = String::from_utf8_lossy(&output.stdout).into_owned();
        assert_eq!(text, "t_us,key,cost,allowed,delay_us\n0,a,2,1,0\n", "{algorithm}");
    }
}

#[test]
fn each_algorithm_that_nodes_lease_is_played_and_judged_by_its_own_definition() {
    for algorithm in ["token-bucket", "fixed-window", "sliding-window", "sliding-log"] {
        let load = format!("--algorithm {algorithm} --rate 100/s --burst 200 --nodes 4 --load 3");
        let line = format!("simulate {load} --seconds 20 --policy strict --json");
        let report: serde_json::Value = serde_json::from_slice(&run(&line).stdout).expect("JSON");
        assert_eq!(report["algorithm"], algorithm);
        let [excess, ideal, pct] = ["excess_tokens", "ideal", "admitted_vs_ideal_pct"]
            .map(|name| report[name].as_f64().unwrap_or_else(|| panic!("{report}")));
        // A bucket has its burst beside the rate; ten windows have theirs, and parts of an eleventh.
        let most = if algorithm == "token-bucket" { 2200.0 } else { 2400.0 };
        assert!((1900.0..=most).contains(&ideal), "{algorithm}: {ideal}");
        assert!(excess <= 1e-6 && (90.0..=100.0).contains(&pct), "{algorithm}: {excess}, {pct}");
    }
    check(&[
        row("sweep --algorithm leaky-bucket", 2, "'leaky-bucket' for '--algorithm"),
        row("simulate --algorithm leaky-bucket --burst 0", 2, "'0' for '--burst'"),
        row("simulate --algorithm leaky-bucket --accuracy 5%", 2, "'5%' for '--accuracy'"),
        row("tune --algorithm leaky-bucket --rate 1/h --burst 10000", 2, "'10000' for '--burst'"),
        row(
            "simulate --algorithm sliding-log --policy write-behind",
            2,
            "'sliding-log' for '--algorithm'",
        ),
        row("demo --algorithm fixed-window --burst 5 --rate 100/s", 2, "'50ms' for '--burst'"),
    ]);
}

#[test]
fn leaky_bucket_is_played_by_its_queue() {
    let load = "--algorithm leaky-bucket --rate 50/s --burst 25 --nodes 4 --seconds 10";
    let line = format!("simulate {load} --form async --policy strict --json");
    let report: serde_json::Value = serde_json::from_slice(&run(&line).stdout).expect("JSON");
    assert_eq!(report["algorithm"], "leaky-bucket");
    let [excess, ideal, pct] = ["excess_tokens", "ideal", "admitted_vs_ideal_pct"]
        .map(|name| report[name].as_f64().unwrap_or_else(|| panic!("{report}")));
    // Ten seconds' slots, and what the queue promises beyond them.
    assert!((515.0..=526.0).contains(&ideal), "{ideal}");
    assert!(excess <= 0.12 && (95.0..=100.5).contains(&pct), "{excess}, {pct}");
    // Callers who do not wait for the store keep no queue.
    let line = format!("tune {load} --seeds 1 --json").replace("--seconds 10", "");
    let report: serde_json::Value = serde_json::from_slice(&run(&line).stdout).expect("JSON");
    assert_eq!(report["recommended"]["form"], "async");
}

#[test]
fn names_that_are_nearly_right_are_offered() {
    check(&[
        row("dmeo", 2, "'demo'"),
        row("demo --scenario hred", 2, "'herd'"),
        row("simulate --scenario outtage", 2, "'outage'"),
        row("simulate --policy strct", 2, "'strict'"),
        row("simulate --form asinc", 2, "'async'"),
        row("sweep --scenario hred", 2, "'herd'"),
        row("sweep --policy defualt", 2, "'default'"),
        row("demo --second 3", 2, "'--seconds'"),
    ]);
}

#[test]
fn failure_exits_with_1() {
    check(&[
        row("simulate --trace /no/such/file", 1, "error: trace /no/such/file: cannot be read"),
        row("demo --trace /dev/null", 1, "error: trace /dev/null: "),
        row("demo --metrics 256.0.0.1:9000 --seconds 1", 1, "error: --metrics 256.0.0.1:9000"),
        // At a round trip of a second and one node in two denied, no choice keeps to nothing.
        row(
            "tune --nodes 4 --rate 20 --burst 20 --seeds 1 --rtt 1s --max-excess 0 --min-ideal 100%",
            1,
            "error: nothing to recommend",
        ),
    ]);
}

#[test]
fn trace_that_is_longer_than_a_run_is_refused_and_its_speed_named() {
    arrivals("years.csv", "0,a\n1700000000000,b\n");
    arrivals("second.csv", "0,a\n1000,b\n");
    let years = "'1' for '--speed': the trace spans 1700000000 s, and is replayed within 604800 s: set 2811 or more";
    let second =
        "for '--speed': the trace spans 1 s, and is replayed within 604800 s: set 1 or more";
    check(&[
        row("simulate --trace years.csv", 2, years),
        row("tune --trace years.csv --seeds 1", 2, years),
        row("demo --trace years.csv", 2, years),
        row("simulate --trace second.csv --speed 1e-7", 2, second),
        row("simulate --trace second.csv --speed 1e-300", 2, second),
        row("simulate --trace years.csv --speed 2e9", 0, ""),
    ]);
}

#[test]
fn missed_target_is_a_failure_only_on_request() {
    let missing = "sweep --scenario herd --rate 20 --nodes 20 --interval 50ms --seeds 1 \
                   --policy write-behind";
    let output = run(missing);
    assert!(text(&output.stdout).contains("missed: 20/s burst 20"), "{}", text(&output.stdout));
    assert_eq!(output.status.code(), Some(0));
    let output = run(&format!("{missing} --fail-on-miss"));
    assert_eq!(output.status.code(), Some(1));
    assert_eq!(text(&output.stderr), "error: 1 of 1 cells miss a target\n");
    let keeping = "sweep --scenario over_uniform --rate 1000/s --burst 1000 --nodes 4 --interval 50ms \
                   --seeds 1";
    assert_eq!(run(&format!("{keeping} --fail-on-miss")).status.code(), Some(0));
}

#[test]
fn store_that_is_away_is_told_once_for_all_nodes() {
    let server = RedisServer::start();
    let address = format!("127.0.0.1:{}", server.port());
    // Nobody listens there from here on.
    drop(server);
    for processes in ["--nodes 64", "--nodes 8 --processes"] {
        let output = run(&format!("demo --store {address} --seconds 1 {processes}"));
        let stderr = text(&output.stderr);
        assert_eq!(output.status.code(), Some(1), "{stderr}");
        let last = stderr.lines().last().unwrap_or_default();
        assert!(last.starts_with("error: "), "{processes}: {stderr}");
        // Once as it happens, and once with how often it did. A machine that is held up has other warnings too.
        let warnings = stderr.lines().filter_map(|line| line.strip_prefix("warning: "));
        let mut times = HashMap::new();
        for warning in warnings {
            let text = warning.split_once(" times: ").map_or(warning, |(_, text)| text);
            *times.entry(text).or_insert(0) += 1;
        }
        let away = times.keys().filter(|text| text.starts_with("the store is away")).count();
        assert!(away > 0 && times.values().all(|&times| times <= 2), "{processes}: {stderr}");
    }
}

#[test]
fn reader_that_goes_early_ends_the_program_quietly() {
    let long = "simulate --rate 20 --burst 20 --seconds 2 --seeds 10000";
    for arguments in ["demo --seconds 60", long, &format!("{long} --json")] {
        let (mut reader, writer) = std::io::pipe().expect("a pipe");
        let mut command = tidegate(arguments);
        command.stdout(writer.try_clone().expect("a pipe can be shared")).stderr(writer);
        let mut child = command.spawn().expect("the program starts");
        drop(command);
        let mut some = [0; 10];
        reader.read_exact(&mut some).expect("something is written");
        assert!(!text(&some).contains("panicked"));
        drop(reader);
        assert_eq!(end_of(&mut child).code(), Some(0), "{arguments}");
    }
    for arguments in ["--help", "sweep --scenario herd --rate 20 --nodes 4 --seeds 1"] {
        let (reader, writer) = std::io::pipe().expect("a pipe");
        drop(reader);
        let output = tidegate(arguments).stdout(writer).output().expect("the program starts");
        assert_eq!((output.status.code(), text(&output.stderr)), (Some(0), String::new()));
    }
}

#[test]
#[cfg(target_os = "linux")]
fn full_disk_is_one_error() {
    for arguments in [
        "demo --seconds 0.1",
        "demo --seconds 0.1 --json",
        "simulate --rate 20 --burst 20 --seconds 1",
        "simulate --rate 20 --burst 20 --seconds 1 --seeds 5",
        "simulate --rate 20 --burst 20 --seconds 1 --json",
        "sweep --scenario herd --rate 20 --nodes 4 --seeds 1",
        "completions bash",
        "--help",
        "demo --help",
    ] {
        let full = File::options().write(true).open("/dev/full").expect("/dev/full");
        let output = tidegate(arguments).stdout(full).output().expect("the program starts");
        let stderr = text(&output.stderr);
        let errors: Vec<&str> = stderr.lines().filter(|line| !line.starts_with("note: ")).collect();
        assert_eq!(output.status.code(), Some(1), "{arguments}: {stderr}");
        let expected = "error: the output cannot be written: No space left on device (os error 28)";
        assert_eq!(errors, [expected], "{arguments}");
    }
    // Notes that cannot be written do not matter: the report can.
    let full = File::options().write(true).open("/dev/full").expect("/dev/full");
    let output = tidegate("demo --seconds 1.5").stderr(full).output().expect("it starts");
    assert_eq!(output.status.code(), Some(0));
    assert!(text(&output.stdout).contains("4 nodes admitted "));
}

#[test]
fn output_that_is_no_terminal_has_no_colours() {
    for arguments in
        ["--help", "demo --help", "demo --scenario no", "demo --outage 1s..2s --seconds 3"]
    {
        for log in ["", "debug"] {
            let mut command = tidegate(arguments);
            if !log.is_empty() {
                command.env("RUST_LOG", log);
            }
            let output = command.output().expect("the program starts");
            let both = [output.stdout, output.stderr].concat();
            assert!(!both.contains(&0x1b), "{arguments}: {}", text(&both));
        }
    }
}

/// The processes that `pid` has started and that are there still.
#[cfg(target_os = "linux")]
fn children(pid: u32) -> Vec<u32> {
    let Ok(tasks) = std::fs::read_dir(format!("/proc/{pid}/task")) else { return Vec::new() };
    let of_task = |task: std::fs::DirEntry| {
        std::fs::read_to_string(task.path().join("children")).unwrap_or_default()
    };
    let all: String = tasks.flatten().map(of_task).collect::<Vec<String>>().join(" ");
    all.split_whitespace().filter_map(|pid| pid.parse().ok()).collect()
}

/// The name of a process and its state, such as `T` for stopped; none once it has ended.
#[cfg(target_os = "linux")]
fn name_and_state(pid: u32) -> Option<(String, char)> {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    let (name, rest) = stat.split_once('(')?.1.rsplit_once(')')?;
    let state = rest.trim_start().chars().next()?;
    (state != 'Z').then(|| (name.to_owned(), state))
}

#[test]
#[cfg(target_os = "linux")]
fn signal_during_an_outage_leaves_no_process_behind() {
    for (signal, nodes) in [("TERM", ""), ("KILL", ""), ("TERM", "--processes")] {
        let mut demo = tidegate(&format!("demo --outage 0.1s..100s --seconds 100 {nodes}"))
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .expect("the program starts");
        let stopped = poll("a redis-server that is stopped", || {
            let of_demo = children(demo.id());
            of_demo.into_iter().flat_map(children).find(|&pid| {
                name_and_state(pid)
                    .is_some_and(|(name, state)| name == "redis-server" && state == 'T')
            })
        });
        let mut started = children(demo.id());
        started.push(stopped);
        let killed = Command::new("sh")
            .args(["-c", r#"kill -s "$0" "$1""#, signal, &demo.id().to_string()])
            .status()
            .expect("a shell starts");
        assert!(killed.success());
        assert_eq!(end_of(&mut demo).code(), None, "ended by the signal");
        for pid in started {
            poll("the end of a child", || name_and_state(pid).is_none().then_some(()));
        }
    }
}

/// The names that the help of a command lists for `--scenario`.
fn scenarios_in_help(command: &str) -> Vec<String> {
    let help = text(&run(&format!("{command} --help")).stdout);
    let words = help.split_whitespace().collect::<Vec<&str>>().join(" ");
    let (_, list) = words.split_once(" when: ").unwrap_or_else(|| panic!("{command}: {help}"));
    let end = list.find([' ', '[']).map_or(list, |_| list.split(" [").next().unwrap_or(list));
    end.split(", ").map(|name| name.trim().to_owned()).collect()
}

#[test]
fn help_lists_the_scenarios_that_a_command_takes_and_each_runs() {
    let (demo, all) = (scenarios_in_help("demo"), scenarios_in_help("simulate"));
    assert!(demo.len() > 5 && all.len() > demo.len(), "{demo:?} {all:?}");
    for name in &all {
        let few = "--rate 20 --burst 20 --nodes 4 --seconds 0.2";
        let mut output = run(&format!("simulate {few} --scenario {name}"));
        if text(&output.stderr).contains("the last fault of") {
            let enough = few.replace("0.2", "16");
            output = run(&format!("simulate {enough} --scenario {name}"));
        }
        assert_eq!(output.status.code(), Some(0), "{name}: {}", text(&output.stderr));
        // Nothing runs: a scenario that is taken lets the outage be what is refused.
        let output = run(&format!("demo --outage 5s..8s --seconds 2 --scenario {name}"));
        let refused = if demo.contains(name) { "'--outage'" } else { "'--scenario" };
        assert!(text(&output.stderr).contains(refused), "{name}: {}", text(&output.stderr));
        if demo.contains(name) {
            let output = run(&format!("demo {few} --scenario {name}"));
            assert_eq!(output.status.code(), Some(0), "{name}: {}", text(&output.stderr));
        }
    }
}

#[test]
fn help_has_examples_that_run() {
    let traces = Path::new(env!("CARGO_MANIFEST_DIR")).join("examples/traces/");
    let check_command = |command: &str| {
        let help = text(&run(&format!("{command} --help")).stdout);
        let examples: Vec<&str> =
            help.lines().filter_map(|line| line.strip_prefix("  tidegate ")).collect();
        assert!((2..=4).contains(&examples.len()), "{command}: {help}");
        for example in examples {
            let output = run(&example.replace("examples/traces/", &traces.to_string_lossy()));
            assert_eq!(output.status.code(), Some(0), "{example}: {}", text(&output.stderr));
        }
    };
    // Most of their time goes by the clock.
    std::thread::scope(|scope| {
        for command in ["demo", "simulate", "sweep", "tune", "compare"] {
            scope.spawn(move || check_command(command));
        }
    });
}

#[test]
fn value_means_the_same_in_each_spelling_and_command() {
    let base = "simulate --json --nodes 4 --seconds 2";
    for (one, other) in [
        ("--rate 60 --loss 5%", "--rate 60/s --loss 0.05"),
        ("--rate 60 --accuracy 5%", "--rate 60 --accuracy 0.05"),
        ("--rate 60 --seconds 2", "--rate 60 --seconds 2000ms"),
    ] {
        let base = if one.contains("seconds") { "simulate --json" } else { base };
        let reports = [one, other].map(|flags| text(&run(&format!("{base} {flags}")).stdout));
        assert!(!reports[0].is_empty());
        assert_eq!(reports[0], reports[1], "{one} | {other}");
    }
    check(&[
        row("demo --rate 600/min --burst 20 --seconds 0.1", 0, ""),
        row("simulate --rate 600/min --burst 20 --seconds 1", 0, ""),
        row("sweep --rate 100/h --scenario herd --nodes 4 --interval 50ms --seeds 1", 0, ""),
    ]);
}

#[test]
fn summary_is_short_and_json_names_its_schema() {
    let summary = text(&run("demo --seconds 0.5").stdout);
    let (headline, figures) = summary.split_once("\n\n").expect("a headline, then the figures");
    assert!(headline.starts_with("4 nodes admitted ") && headline.lines().count() == 1);
    assert!(figures.lines().count() <= 12, "{summary}");
    assert!(text(&run("demo --seconds 0.5 --verbose").stdout).contains("\nstore_calls "));
    for command in ["demo --seconds 0.5 --json", "simulate --seconds 0.5 --json"] {
        let report: serde_json::Value =
            serde_json::from_slice(&run(command).stdout).expect("one object and nothing else");
        assert_eq!(report["schema_version"], 2, "{command}");
        assert_eq!(report["slot_ms"], 100, "{command}");
        assert!(report["timeline"].is_array(), "{command}");
    }
}

#[test]
fn odd_configuration_is_noted_and_an_ordinary_one_is_not() {
    let odd = run("simulate --nodes 20 --burst 100 --rate 100 --credit 2 --seconds 2");
    let noted = "note: the credit of 20 nodes is 40 tokens, 40% of the burst";
    assert!(text(&odd.stderr).contains(noted), "{}", text(&odd.stderr));
    assert_eq!(text(&run("simulate --seconds 2").stderr), "");
}

/// A configuration file in the folder that the program runs in, and its check.
fn check_config(name: &str, content: &str, flags: &str) -> Output {
    std::fs::write(Path::new(env!("CARGO_TARGET_TMPDIR")).join(name), content).expect("a file");
    run(&format!("check-config {name} {flags}"))
}

#[test]
fn check_config_names_each_mistake_and_warning_by_its_place_and_exits_with_2() {
    let text = "[limits.api]\nquota = \"600/mim\"\ncredit = 16\n\
                [limits.login]\nquota = \"5/min\"\nmode = \"exact\"\n";
    let output = check_config("broken.toml", text, "");
    let stderr = text_of_lines(&output.stderr);
    assert_eq!(output.status.code(), Some(2), "{stderr:?}");
    assert_eq!(text_of_lines(&output.stdout), [""; 0]);
    for (line, begins) in stderr.iter().zip([
        "broken.toml:2:9: mistake: limits.api.quota = \"600/mim\": expected tokens/period",
        "broken.toml:3:10: mistake: limits.api.credit = 16: must be 0 to 15 tokens",
        "broken.toml:6:8: warning: limits.login.mode = \"exact\": there is no store",
        "error: broken.toml: 2 mistakes",
    ]) {
        assert!(line.starts_with(begins), "{line}");
    }
    assert_eq!(stderr.len(), 4, "{stderr:?}");
    let output = check_config("broken.toml", text, "--json");
    let report: serde_json::Value = serde_json::from_slice(&output.stdout).expect("JSON");
    assert_eq!((output.status.code(), &report["schema_version"]), (Some(2), &1.into()));
    let first = serde_json::json!([2, 9, "limits.api.quota", "\"600/mim\""]);
    let mistake = &report["mistakes"][0];
    let of = [&mistake["line"], &mistake["column"], &mistake["field"], &mistake["value"]];
    assert_eq!(serde_json::json!(of), first);
    assert_eq!(report["warnings"][0]["line"], 6);
}

fn text_of_lines(bytes: &[u8]) -> Vec<String> {
    text(bytes).lines().map(str::to_owned).collect()
}

#[test]
fn check_config_sums_up_the_limits_of_a_sound_file_and_shows_no_password() {
    let text = "[store]\nredis = \"redis://shop:hunter2@cache\"\n[limits.api]\nquota = \"600/min burst 200\"\n\
                [limits.api.plans.pro]\nquota = \"6000/min\"\n[limits.api.plans.team]\nquota = \"50/s\"\nburst = 90\n\
                [limits.mail]\nalgorithm = \"leaky-bucket\"\nquota = \"10/s\"\nqueue = \"50ms\"\n";
    let output = check_config("sound.toml", text, "");
    let expected = "sound.toml: limits api (token-bucket 600/min burst 200; plans pro 6000/min, \
                    team 50/s burst 90), mail (leaky-bucket 10/s); store redis://***@cache";
    assert_eq!(
        (output.status.code(), text_of_lines(&output.stdout)),
        (Some(0), vec![expected.to_owned()])
    );
    let warned = text_of_lines(&output.stderr);
    assert!(
        warned.len() == 1 && warned[0].starts_with("sound.toml:13:9: warning: limits.mail.queue")
    );
    let output = check_config("sound.toml", text, "--json");
    let report: serde_json::Value = serde_json::from_slice(&output.stdout).expect("JSON");
    assert_eq!(report["limits"][1]["algorithm"], "leaky-bucket");
    let team = serde_json::json!({"name": "team", "quota": "50/s burst 90"});
    assert_eq!(report["limits"][0]["plans"][1], team);
    assert_eq!(report["store"], "redis://***@cache");
    check(&[row("check-config no-such.toml", 1, "no-such.toml: the file cannot be read")]);
}

#[test]
fn demo_runs_each_limit_of_a_file_and_names_those_that_it_cannot_show() {
    let file = |name: &str, content: &str| {
        let folder = Path::new(env!("CARGO_TARGET_TMPDIR"));
        std::fs::write(folder.join(name), content).expect("a file");
    };
    let sound = "[store]\nredis = \"redis://nobody.invalid\"\n\
                 [limits.api]\nquota = \"50/s burst 20\"\naccuracy = 0.05\n\
                 [limits.day]\nalgorithm = \"fixed-window\"\nquota = \"40/min\"\n\
                 [limits.login]\nquota = \"5/min\"\nmode = \"exact\"\n\
                 [limits.here]\nquota = \"5/min\"\nmode = \"local\"\n\
                 [limits.mail]\nalgorithm = \"leaky-bucket\"\nquota = \"10/s\"\nqueue = \"600ms\"\n\
                 [limits.post]\nalgorithm = \"leaky-bucket\"\nquota = \"10/s\"\naccuracy = 0.05\n\
                 [limits.bill]\nalgorithm = \"fixed-window\"\nquota = \"9/month\"\nzone = \"Europe/Berlin\"\n";
    file("demo.toml", sound);
    let output = run("demo --config demo.toml --seconds 1 --json");
    let stderr = text(&output.stderr);
    assert_eq!(output.status.code(), Some(0), "{stderr}");
    let reports: Vec<serde_json::Value> = text_of_lines(&output.stdout)
        .iter()
        .map(|line| serde_json::from_str(line).expect("a report a line"))
        .collect();
    let [api, day, mail, post] = &reports[..] else { panic!("four can be shown: {reports:?}") };
    assert_eq!((&api["limit"], &api["burst"]), (&"api".into(), &20.into()));
    assert_eq!((&api["interval_ms"], &api["rate"]), (&serde_json::Value::Null, &50.into()));
    assert_eq!((&day["limit"], &day["algorithm"]), (&"day".into(), &"fixed-window".into()));
    assert_eq!((&day["rate"], &day["period_s"]), (&40.into(), &60.into()));
    // It had no credit, and admitted nothing at once.
    assert_eq!((&post["limit"], &post["burst"]), (&"post".into(), &1.into()));
    assert!(post["admitted"].as_u64().is_some_and(|admitted| admitted > 0), "{post}");
    // Six wait behind the one whose slot is now.
    assert_eq!((&mail["algorithm"], &mail["burst"]), (&"leaky-bucket".into(), &7.into()));
    let admitted = mail["admitted"].as_u64().expect("a number");
    assert!((5..=10 + 7 + 4).contains(&admitted), "{admitted} of 10 a second");
    let admitted = day["admitted"].as_u64().expect("a number");
    assert!(admitted <= 40 + 10, "{admitted} of 40 in a window");
    for (limit, reason) in [
        ("login", "the store decides each request"),
        ("here", "each node is alone"),
        ("bill", "the windows of its zone"),
    ] {
        let told = format!("note: limit {limit:?} is not shown: {reason}");
        assert!(stderr.contains(&told), "{stderr}");
    }

    file("demo-broken.toml", "[limits.api]\nquota = \"600/mim\"\n");
    file("demo-exact.toml", "[limits.login]\nquota = \"5/min\"\nmode = \"exact\"\n");
    check(&[
        row("demo --config demo-broken.toml", 2, "demo-broken.toml:2:9: mistake: limits.api.quota"),
        row("demo --config demo-broken.toml", 2, "error: demo-broken.toml: 1 mistake"),
        row("demo --config demo-exact.toml", 2, "it has no limit that a demo can show"),
        row("demo --config no-such.toml", 1, "no-such.toml: the file cannot be read"),
        row("demo --config demo.toml --rate 5", 2, "cannot be used with"),
    ]);
}

#[test]
fn notes_of_a_demo_are_about_the_credit_of_its_file() {
    let file = "[limits.strict]\nquota = \"5/s\"\nstrict = true\n[limits.loose]\nquota = \"50/s\"\ncredit = 5\n";
    let path = Path::new(env!("CARGO_TARGET_TMPDIR")).join("demo-credit.toml");
    std::fs::write(path, file).expect("a file");
    let output = run("demo --config demo-credit.toml --seconds 1");
    let stderr = text_of_lines(&output.stderr);
    assert_eq!(output.status.code(), Some(0), "{stderr:?}");
    let notes: Vec<&String> = stderr.iter().filter(|line| line.starts_with("note: ")).collect();
    let of_loose = "note: the credit of 4 nodes is 20 tokens, 40% of the burst: so much may be spent before the store is asked";
    assert_eq!(notes, [of_loose]);
}

#[test]
fn demo_shows_limits_of_a_file_switched_on_and_without_blocks() {
    let of = |name: &str, more: &str| format!("[limits.{name}]\nquota = {more}\n");
    let file = of("tried", "\"40/min\"\nswitch = \"shadow\"")
        + &of("old", "\"40/min\"\nswitch = \"off\"")
        + &of("login", "\"50/s burst 20\"\nblock_for = \"1h\"");
    let path = Path::new(env!("CARGO_TARGET_TMPDIR")).join("demo-switched.toml");
    std::fs::write(path, file).expect("a file");
    let output = run("demo --config demo-switched.toml --load 100 --seconds 2 --json");
    assert_eq!(output.status.code(), Some(0), "{}", text(&output.stderr));
    let report = |line: &String| -> serde_json::Value { serde_json::from_str(line).expect("JSON") };
    let reports: Vec<serde_json::Value> =
        text_of_lines(&output.stdout).iter().map(report).collect();
    // The first two are asked 133 times each. Of the last one two seconds' tokens come after the first denials.
    for (report, (limit, range)) in
        reports.iter().zip([("tried", 20..=70), ("old", 20..=70), ("login", 60..=200)])
    {
        assert_eq!(report["limit"], limit);
        let admitted = report["admitted"].as_u64().expect("a number");
        assert!(range.contains(&admitted), "{limit}: {admitted}");
    }
    assert_eq!(reports.len(), 3);
}

#[test]
fn completions_are_scripts_of_their_shells() {
    for shell in ["bash", "zsh", "fish"] {
        let output = run(&format!("completions {shell}"));
        assert_eq!(output.status.code(), Some(0));
        let script = text(&output.stdout);
        assert!(script.contains("over_uniform") && script.contains("fail-on-miss"), "{shell}");
    }
    let script = Path::new(env!("CARGO_TARGET_TMPDIR")).join("tidegate.bash");
    std::fs::write(&script, run("completions bash").stdout).expect("a file");
    assert!(Command::new("bash").arg("-n").arg(&script).status().expect("bash").success());
}
