//! The parts of docs/CONTRIBUTING.md that a machine can hold us to.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

/// What may stand in the repository's top folder, beside dot-files.
const TOP_LEVEL: [&str; 11] = [
    "Cargo.lock",
    "Cargo.toml",
    "LICENSE-APACHE",
    "LICENSE-MIT",
    "README.md",
    "benches",
    "docs",
    "examples",
    "lua",
    "src",
    "tests",
];
/// A longer file is two rooms with one door. Unit tests count.
const FILE_LINES_MAX: usize = 700;
/// Code of the data plane and of what users hold, without comments and tests. 1700 lines are aimed at: lower this with
/// each line that goes; raise it only for what must be there.
const DATA_PLANE_LINES_MAX: usize = 2466;
/// Parts that have a row of their own, by the files that only they need, each with at most so many lines.
const PART_LINES_MAX: usize = 300;
const PARTS: [&str; 29] = [
    "builder/resolver",
    "bucket/window_bucket",
    "bucket/log_bucket",
    "bucket/lease_bucket/plan",
    "bucket/lease_bucket/put_back",
    "bucket/local_bucket/plan",
    "bucket/new_key",
    "bucket/local_bucket/settle",
    "limiter/ask_store",
    "limiter/by_request",
    "limiter/group",
    "limiter/handed_over",
    "limiter/reservation",
    "limiter/reset",
    "limiter/settle",
    "limiter/several",
    "limiter/together/part",
    "limiter/together",
    "limiter/above_max",
    "limiter/alone",
    "limiter/waiting",
    "limiter/waiting/line",
    "limiter/async_limit",
    "limiter/slots",
    "limiter/overrides",
    "limiter/plans",
    "limiter/concurrency",
    "limiter/concurrency/timed",
    "limiter/update",
];
/// The floors that do not count, as files or folders of src.
const OTHER_FLOORS: [&str; 25] = [
    "algorithm",
    "bin",
    "bound",
    "config",
    "decision",
    "driver",
    "error",
    "fuzz",
    "http",
    "key",
    "limit",
    "metrics",
    "network",
    "overrides",
    "pages",
    "plan",
    "quota",
    "retry",
    "rls",
    "server",
    "sim",
    "store",
    "sync",
    "testing",
    "time",
];
/// The folders that hold code.
const CODE: [&str; 5] = ["src", "lua", "tests", "benches", "examples"];
/// Marks of unfinished work, put together here so that this file does not carry them.
const UNFINISHED: [&str; 4] = [
    concat!("to", "do!"),
    concat!("un", "implemented!"),
    concat!("TO", "DO"),
    concat!("FIX", "ME"),
];
/// A test that does not run proves nothing.
const IGNORED: &str = concat!("#[", "ignore");

#[test]
fn the_top_folder_holds_the_usual_places_and_nothing_else() {
    let strangers: Vec<String> = top_level()
        .into_iter()
        .filter(|name| !name.starts_with('.') && !TOP_LEVEL.contains(&name.as_str()))
        .collect();
    assert!(strangers.is_empty(), "find a place in src, docs, tests, ... for {strangers:?}");
}

#[test]
fn no_file_of_src_is_longer_than_it_should_be() {
    let long: Vec<String> = files(&["src"])
        .into_iter()
        .map(|file| (lines(&file), file))
        .filter(|&(lines, _)| lines > FILE_LINES_MAX)
        .map(|(lines, file)| format!("{}: {lines} lines", file.display()))
        .collect();
    assert!(long.is_empty(), "more than {FILE_LINES_MAX} lines: split\n{}", long.join("\n"));
}

#[test]
fn data_plane_is_within_its_budget() {
    let source = root().join("src");
    let counted: Vec<(usize, PathBuf)> = files(&["src"])
        .into_iter()
        .filter_map(|file| {
            let inner = file.strip_prefix(&source).ok()?.with_extension("");
            let floor = inner.iter().next()?.to_str()?;
            let counts = !OTHER_FLOORS.contains(&floor) && !is_test(&inner);
            counts.then(|| (code_lines(&fs::read_to_string(&file).unwrap()), inner))
        })
        .collect();
    for (lines, file) in &counted {
        println!("{lines:5} {}", file.display());
    }
    let (parts, core): (Vec<_>, Vec<_>) =
        counted.iter().partition(|(_, file)| PARTS.iter().any(|part| Path::new(part) == file));
    assert_eq!(parts.len(), PARTS.len(), "each part has its file");
    for (lines, file) in parts {
        assert!(*lines <= PART_LINES_MAX, "{lines} lines in {}", file.display());
    }
    let all: usize = core.iter().map(|(lines, _)| lines).sum();
    println!(
        "{all:5} lines of code in the data plane (at most {DATA_PLANE_LINES_MAX}), without {PARTS:?}"
    );
    assert!(counted.len() > 10, "it has more files than {counted:?}");
    assert!(all <= DATA_PLANE_LINES_MAX, "{all} lines: at most {DATA_PLANE_LINES_MAX}");
}

/// Whether a file of src holds tests or models.
fn is_test(file: &Path) -> bool {
    file.iter().any(|part| part == "tests" || part == "models")
}

#[test]
fn comments_blank_lines_and_tests_are_no_code() {
    let text = "//! a\n\nfn a() {}\n    // b\n    #[inline]\n#[cfg(test)]\nmod tests {\n    fn b() {}\n}\n";
    assert_eq!(code_lines(text), 2);
}

/// The tests that a text names as `beginning_...` and that are not in the file named after them.
fn promised_tests_that_are_missing(text: &str) -> Vec<String> {
    let (mut names, mut missing) = (Vec::new(), Vec::new());
    for quoted in text.split('`').skip(1).step_by(2) {
        if let Some(name) = quoted.strip_suffix("...") {
            names.push(format!("fn {name}"));
        } else if Path::new(quoted).extension().is_some_and(|it| it == "rs") {
            let file = std::fs::read_to_string(root().join(quoted)).unwrap_or_default();
            missing.extend(names.drain(..).filter(|name| !file.contains(name)));
        }
    }
    missing.extend(names);
    missing
}

#[test]
fn tests_that_promises_name_are_in_their_files() {
    let promises = text(&root().join("docs/PROMISES.md"));
    let (_, table) = promises.split_once("| promise | test |").expect("there is a table");
    assert_eq!(promised_tests_that_are_missing(table), Vec::<String>::new());
    // Tests of another file: this one has their names as literals.
    let wrong = "`no_such_test_...` and `no_module_names_...` in `tests/layers.rs`; `lost_...`";
    assert_eq!(promised_tests_that_are_missing(wrong), ["fn no_such_test_", "fn lost_"]);
}

#[test]
fn no_code_carries_a_mark_of_unfinished_work() {
    let marked = lines_with(&CODE, &UNFINISHED);
    assert!(marked.is_empty(), "finish these:\n{}", marked.join("\n"));
}

#[test]
fn no_test_is_switched_off() {
    let ignored = lines_with(&["src", "tests"], &[IGNORED]);
    assert!(ignored.is_empty(), "let these run, or remove them:\n{}", ignored.join("\n"));
}

#[test]
fn the_marks_are_found_where_they_are() {
    let text = format!("fine\n    {}(\"later\")\n", UNFINISHED[0]);
    assert_eq!(marks("a.rs", &text, &UNFINISHED), [format!("a.rs:2: {}", UNFINISHED[0])]);
    assert!(marks("a.rs", "fine", &UNFINISHED).is_empty());
}

/// Lines that are neither blank nor comments, up to the unit tests.
fn code_lines(text: &str) -> usize {
    let lines: Vec<&str> = text.lines().collect();
    let begin_tests = |pair: &[&str]| pair[0] == "#[cfg(test)]" && pair[1].contains("mod tests");
    let until = lines.windows(2).position(begin_tests).unwrap_or(lines.len());
    let is_code = |line: &&&str| !line.trim().is_empty() && !line.trim().starts_with("//");
    lines[..until].iter().filter(is_code).count()
}

fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

/// Git's answer where there is git: it knows what is ignored, such as build folders.
fn top_level() -> BTreeSet<String> {
    let names = listed_by_git().unwrap_or_else(listed_by_folder);
    assert!(names.contains("Cargo.toml"), "the top folder was not read: {names:?}");
    names
}

fn listed_by_git() -> Option<BTreeSet<String>> {
    if !root().join(".git").exists() {
        return None;
    }
    let output = Command::new("git")
        .current_dir(root())
        .args(["ls-files", "-z", "--cached", "--others", "--exclude-standard"])
        .output()
        .ok()
        .filter(|output| output.status.success())?;
    let paths = String::from_utf8_lossy(&output.stdout);
    let tops = paths.split('\0').filter_map(|path| path.split('/').next());
    Some(tops.filter(|name| !name.is_empty()).map(str::to_owned).collect())
}

fn listed_by_folder() -> BTreeSet<String> {
    let entries = fs::read_dir(root()).expect("the top folder is readable");
    entries
        .map(|entry| entry.expect("the top folder is readable").file_name())
        .map(|name| name.to_string_lossy().into_owned())
        .filter(|name| name != "target")
        .collect()
}

/// All files of these folders, those that are missing left out.
fn files(folders: &[&str]) -> Vec<PathBuf> {
    folders.iter().flat_map(|folder| files_below(&root().join(folder))).collect()
}

fn files_below(folder: &Path) -> Vec<PathBuf> {
    let Ok(entries) = fs::read_dir(folder) else { return Vec::new() };
    let paths = entries.map(|entry| entry.expect("the folder is readable").path());
    paths.flat_map(|path| if path.is_dir() { files_below(&path) } else { vec![path] }).collect()
}

/// Empty for what is not text.
fn text(file: &Path) -> String {
    fs::read_to_string(file).unwrap_or_default()
}

fn lines(file: &Path) -> usize {
    text(file).lines().count()
}

fn lines_with(folders: &[&str], needles: &[&str]) -> Vec<String> {
    let files = files(folders);
    assert!(!files.is_empty(), "no files in {folders:?}");
    files.iter().flat_map(|file| marks(&file.to_string_lossy(), &text(file), needles)).collect()
}

/// `file:line: needle` for each needle found.
fn marks(file: &str, text: &str, needles: &[&str]) -> Vec<String> {
    let mut found = Vec::new();
    for (index, line) in text.lines().enumerate() {
        for needle in needles.iter().filter(|&&needle| line.contains(needle)) {
            found.push(format!("{file}:{}: {needle}", index + 1));
        }
    }
    found
}
