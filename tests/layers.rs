//! The floors of docs/ARCHITECTURE.md: a module names its own floor and lower ones.
//!
//! Every path of `src` that starts with `crate::` or leaves its module by `super::` is looked up
//! in [`FLOORS`]. `lib.rs` re-exports from everywhere and is exempt; unit tests are not.
//!
//! The files of a floor name each other in one direction only. A file and the folder of its name are one here: they
//! are one type's code in parts. So is a `mod.rs` that only re-exports: what it re-exports is named where it is.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};

/// The modules of the crate, lowest floor first, and those that are planned: `plan`, `rls`, `server`. A
/// module may name what stands on its own line or on an earlier one.
const FLOORS: [&[&str]; 13] = [
    &["time", "error", "quota", "key", "network"],
    &["algorithm"],
    &["limit", "plan", "overrides", "bound", "decision"],
    &["bucket"],
    &["sync"],
    &["store"],
    &["driver"],
    &["metrics"],
    &["limiter", "builder"],
    &["config"],
    &["testing", "http", "retry", "rls", "server", "sim"],
    &["fuzz"],
    &["bin", "pages"],
];

/// Folders whose files stand alone: the floors. In other folders are parts of the file of that name.
const FOLDERS: [&str; 10] =
    ["bin", "bin/tidegate", "bucket", "driver", "http", "retry", "server", "sim", "store", "sync"];

/// Names every module, so it has no floor.
const EXEMPT_FILE: &str = "lib.rs";

#[test]
fn no_module_names_a_floor_above_its_own() {
    let src = Path::new(env!("CARGO_MANIFEST_DIR")).join("src");
    let files = rust_files(&src);
    assert!(files.len() > 1, "no modules found under {}", src.display());
    let faults: Vec<String> = files.iter().flat_map(|file| faults_of_file(&src, file)).collect();
    assert!(faults.is_empty(), "imports run upwards:\n{}", faults.join("\n"));
}

#[test]
fn no_two_files_of_a_floor_name_each_other_even_by_way_of_others() {
    let src = Path::new(env!("CARGO_MANIFEST_DIR")).join("src");
    let sources: Vec<(String, String)> = rust_files(&src)
        .iter()
        .map(|file| {
            let name = file.strip_prefix(&src).expect("the file was found in src");
            let source = fs::read_to_string(file).expect("src is readable");
            (name.to_string_lossy().replace('\\', "/"), source)
        })
        .collect();
    let sources: Vec<(&str, &str)> =
        sources.iter().map(|(file, source)| (file.as_str(), source.as_str())).collect();
    let edges = on_cycles(&sources);
    assert!(edges.is_empty(), "files name each other in a circle:\n{}", edges.join("\n"));
}

#[test]
fn circles_of_files_are_found_and_families_and_re_exports_are_none() {
    let facade = ("sync/mod.rs", "pub(crate) mod a; mod b; pub(crate) use a::A;");
    let by_facade = ("sync/b.rs", "use super::A;");
    assert!(on_cycles(&[facade, ("sync/a.rs", ""), by_facade]).is_empty());
    let circle = [facade, ("sync/a.rs", "use super::b::B;"), by_facade];
    assert_eq!(on_cycles(&circle), ["sync::a -> sync::b", "sync::b -> sync::a"]);
    let longer = [
        ("store/a.rs", "use crate::store::b::B;"),
        ("store/b.rs", "fn b(c: super::c::C) {}"),
        ("store/c.rs", "use super::a::{A, self};"),
        ("store/d.rs", "use super::a::A;"),
    ];
    assert_eq!(
        on_cycles(&longer),
        ["store::a -> store::b", "store::b -> store::c", "store::c -> store::a"]
    );
    let family = [("sync/a.rs", "mod part; use part::P;"), ("sync/a/part.rs", "use super::A;")];
    assert!(on_cycles(&family).is_empty());
    let defined_in_mod = [("sync/mod.rs", "use a::A;"), ("sync/a.rs", "use super::Here;")];
    assert_eq!(on_cycles(&defined_in_mod), ["sync -> sync::a", "sync::a -> sync"]);
    let neighbours =
        [("plan.rs", "use crate::limit::Limit;"), ("limit.rs", "use crate::plan::Plan;")];
    assert_eq!(on_cycles(&neighbours), ["limit -> plan", "plan -> limit"]);
    let unit_test = [
        ("sync/a.rs", "use super::b::B; mod tests { fn a() {} }"),
        ("sync/b.rs", "mod tests { use super::super::a::A; }"),
    ];
    assert!(on_cycles(&unit_test).is_empty());
}

/// The edges, of files that name others of their floor, that are on a circle or on the way from one to another.
fn on_cycles(sources: &[(&str, &str)]) -> Vec<String> {
    let modules: BTreeSet<Vec<String>> =
        sources.iter().map(|(file, _)| module_of_file(file)).collect();
    let mut re_exports = BTreeMap::new();
    let mut named = Vec::new();
    for (file, source) in sources {
        let home = module_of_file(file);
        let is_test = |part: &String| ["tests", "models", "fuzz"].contains(&part.as_str());
        if *file == EXEMPT_FILE || home.iter().any(is_test) {
            continue;
        }
        for reference in References::find(&home, &tokens(source)) {
            let Reference { path, is_re_export, is_in_tests, .. } = reference;
            if is_re_export && let Some(last) = path.last() {
                re_exports.insert([&home[..], std::slice::from_ref(last)].concat(), path);
            } else if !is_in_tests {
                named.push((home.clone(), path));
            }
        }
    }
    let mut edges: BTreeSet<(String, String)> = named
        .into_iter()
        .filter_map(|(home, path)| {
            let other = file_of(&path, &modules, &re_exports)?;
            let (from, to) = (family_of(&home, &modules), family_of(&other, &modules));
            (floor(&home[0]) == floor(&other[0]) && from != to).then_some((from, to))
        })
        .collect();
    // What nobody names, and what names nobody, is on no circle.
    loop {
        let from: BTreeSet<String> = edges.iter().map(|(from, _)| from.clone()).collect();
        let to: BTreeSet<String> = edges.iter().map(|(_, to)| to.clone()).collect();
        let before = edges.len();
        edges.retain(|edge| to.contains(&edge.0) && from.contains(&edge.1));
        if edges.len() == before {
            return edges.iter().map(|(from, to)| format!("{from} -> {to}")).collect();
        }
    }
}

/// The file in which a path ends, behind what is re-exported on the way.
fn file_of(
    path: &[String],
    modules: &BTreeSet<Vec<String>>,
    re_exports: &BTreeMap<Vec<String>, Vec<String>>,
) -> Option<Vec<String>> {
    let length = (1..=path.len()).rev().find(|&length| modules.contains(&path[..length]))?;
    match path.get(..=length).and_then(|name| re_exports.get(name)) {
        Some(source) => file_of(source, modules, re_exports),
        None => Some(path[..length].to_vec()),
    }
}

/// The outermost file of whose folder a module is: `sync/lane.rs` for `sync/lane/flight.rs`.
fn family_of(module: &[String], modules: &BTreeSet<Vec<String>>) -> String {
    let is_folder = |part: &[String]| FOLDERS.contains(&part.join("/").as_str());
    let length = (1..=module.len())
        .find(|&length| modules.contains(&module[..length]) && !is_folder(&module[..length]))
        .unwrap_or(module.len());
    module[..length].join("::")
}

/// File, source, and what the checker says of it: the checker is proved before it is trusted.
const VERDICTS: &[(&str, &str, &[&str])] = &[
    ("sync/lane.rs", "use crate::bucket::Bucket;", &[]),
    ("sync/lane.rs", "use crate::sync::message::Request;", &[]),
    ("sync/lane.rs", "use super::message::Request;", &[]),
    ("quota.rs", "use crate::time::micros;", &[]),
    ("limiter.rs", "use crate::builder::Builder;", &[]),
    ("lib.rs", "pub use crate::limiter::Limiter;", &[]),
    ("sync/lane.rs", "use crate::driver::Driver;", &["src/sync/lane.rs:1 sync -> driver"]),
    ("sync/mod.rs", "\n\nuse crate::store::Store;", &["src/sync/mod.rs:3 sync -> store"]),
    ("time.rs", "use crate::bucket;", &["src/time.rs:1 time -> bucket"]),
    (
        "store/redis.rs",
        "use crate::{\n    error::StoreError,\n    driver::{Driver, wait},\n    sync::{self, Event},\n};",
        &["src/store/redis.rs:3 store -> driver"],
    ),
    (
        "plan.rs",
        "use crate::{limit as bound, sync as control, store::*};",
        &["src/plan.rs:1 plan -> sync", "src/plan.rs:1 plan -> store"],
    ),
    ("key.rs", "use {crate::error::A, crate::sim::B};", &["src/key.rs:1 key -> sim"]),
    ("driver.rs", "let a = crate::limiter::Y::new();", &["src/driver.rs:1 driver -> limiter"]),
    ("driver.rs", "fn a(x: &crate :: server :: S) {}", &["src/driver.rs:1 driver -> server"]),
    (
        "store/redis/wire.rs",
        "use super::super::super::driver::D;",
        &["src/store/redis/wire.rs:1 store -> driver"],
    ),
    ("sync/lane.rs", "use super::super::driver;", &["src/sync/lane.rs:1 sync -> driver"]),
    ("sync/lane.rs", "use super::{rng, super::driver::D};", &["src/sync/lane.rs:1 sync -> driver"]),
    ("time.rs", "use super::limiter::L;", &["src/time.rs:1 time -> limiter"]),
    ("time.rs", "mod tests { use super::*; use super::limiter::in_time; }", &[]),
    ("time.rs", "mod tests { use super::super::limiter; }", &["src/time.rs:1 time -> limiter"]),
    ("time.rs", "mod a { fn b() {} } use super::limiter;", &["src/time.rs:1 time -> limiter"]),
    ("sync/lane.rs", "pub(crate) fn a() {} pub(super) struct B;", &[]),
    ("sync/lane.rs", "/// [`x`](crate::driver)\n//! crate::driver\n// use crate::driver;", &[]),
    ("sync/lane.rs", "/* a /* crate::driver */ crate::driver */", &[]),
    ("sync/lane.rs", r#"let a = "crate::driver \" crate::sim";"#, &[]),
    ("sync/lane.rs", r##"let a = r#"" crate::driver"#; let b = b"crate::sim";"##, &[]),
    (
        "sync/lane.rs",
        r#"let a: &'a str = f('"', '\'', '/'); use crate::driver;"#,
        &["src/sync/lane.rs:1 sync -> driver"],
    ),
    ("bin/tidegate/main.rs", "use crate::report::Table; use tidegate::Limiter;", &[]),
    (
        "sync/lane.rs",
        "use crate::Limiter;",
        &["src/sync/lane.rs:1 sync -> `Limiter`, which is on no floor: name its module"],
    ),
    (
        "time.rs",
        "use super::*;",
        &["src/time.rs:1 time -> `*`, which is on no floor: name its module"],
    ),
    (
        "attic.rs",
        "",
        &["src/attic.rs: `attic` is on no floor: give it one in FLOORS (tests/layers.rs)"],
    ),
];

#[test]
fn the_checker_catches_each_way_to_name_a_module_and_nothing_else() {
    for (file, source, expected) in VERDICTS {
        assert_eq!(faults(file, source), *expected, "in {file}:\n{source}");
    }
}

fn rust_files(folder: &Path) -> Vec<PathBuf> {
    let entries = fs::read_dir(folder).expect("src is readable");
    let mut paths: Vec<PathBuf> =
        entries.map(|entry| entry.expect("src is readable").path()).collect();
    paths.sort();
    let (folders, files): (Vec<_>, Vec<_>) = paths.into_iter().partition(|path| path.is_dir());
    let mut found: Vec<PathBuf> =
        files.into_iter().filter(|file| file.extension().is_some_and(|end| end == "rs")).collect();
    found.extend(folders.iter().flat_map(|folder| rust_files(folder)));
    found
}

fn faults_of_file(src: &Path, file: &Path) -> Vec<String> {
    let source = fs::read_to_string(file).expect("src is readable");
    let name = file.strip_prefix(src).expect("the file was found in src");
    faults(&name.to_string_lossy().replace('\\', "/"), &source)
}

/// What is wrong with a file of `src`; `file` is its path below `src`.
fn faults(file: &str, source: &str) -> Vec<String> {
    if file == EXEMPT_FILE {
        return Vec::new();
    }
    let home = module_of_file(file);
    let Some(own) = floor(&home[0]) else {
        return vec![format!(
            "src/{file}: `{}` is on no floor: give it one in FLOORS (tests/layers.rs)",
            home[0]
        )];
    };
    let named = References::find(&home, &tokens(source));
    let mut found: Vec<String> =
        named.iter().filter_map(|named| fault(file, &home[0], own, named)).collect();
    // A group names its module once for each thing in it.
    found.dedup();
    found
}

fn fault(file: &str, module: &str, own: usize, named: &Reference) -> Option<String> {
    let Reference { line, module: other, .. } = named;
    match floor(other) {
        Some(floor) if floor <= own => None,
        Some(_) => Some(format!("src/{file}:{line} {module} -> {other}")),
        None => Some(format!(
            "src/{file}:{line} {module} -> `{other}`, which is on no floor: name its module"
        )),
    }
}

fn floor(module: &str) -> Option<usize> {
    FLOORS.iter().position(|floor| floor.contains(&module))
}

/// `sync/mod.rs` is `sync`, `sync/lane.rs` is `sync::lane`.
fn module_of_file(file: &str) -> Vec<String> {
    let path = file.strip_suffix(".rs").unwrap_or(file);
    let path = path.strip_suffix("/mod").unwrap_or(path);
    path.split('/').map(str::to_owned).collect()
}

/// What a line names, from the crate's root on.
struct Reference {
    line: usize,
    module: String,
    path: Vec<String>,
    /// `pub use`: others find it here.
    is_re_export: bool,
    /// In an inline module of unit tests.
    is_in_tests: bool,
}

/// A walk over a file's tokens that collects the paths which start at the crate's root.
struct References<'a> {
    tokens: &'a [Token],
    at: usize,
    /// What `crate` means: a binary's modules have a root of their own.
    root: Vec<String>,
    /// The module that the walk is in.
    module: Vec<String>,
    /// At each inline module that the walk is in: the braces open outside it.
    inline: Vec<usize>,
    braces: usize,
    is_re_export: bool,
    found: Vec<Reference>,
}

impl<'a> References<'a> {
    fn find(home: &[String], tokens: &'a [Token]) -> Vec<Reference> {
        let root = if home[0] == "bin" { vec!["bin".to_owned()] } else { Vec::new() };
        let (module, inline) = (home.to_vec(), Vec::new());
        let (at, braces, is_re_export, found) = (0, 0, false, Vec::new());
        let mut walk = Self { tokens, at, root, module, inline, braces, is_re_export, found };
        while walk.at < tokens.len() {
            walk.step();
        }
        walk.found
    }

    fn text(&self, ahead: usize) -> &str {
        self.tokens.get(self.at + ahead).map_or("", |token| &token.text)
    }

    fn before(&self) -> &str {
        self.at.checked_sub(1).map_or("", |before| &self.tokens[before].text)
    }

    fn step(&mut self) {
        match self.text(0) {
            "use" => self.is_re_export = matches!(self.before(), "pub" | ")"),
            ";" => self.is_re_export = false,
            "crate" | "super" if self.text(1) == "::" => return self.path(self.module.clone()),
            // A path to a module beside or below, as imports have it.
            _ if self.before() == "use" => return self.path(self.module.clone()),
            "mod" if self.text(2) == "{" => self.enter(),
            "{" => self.braces += 1,
            "}" => self.leave(),
            _ => {}
        }
        self.at += 1;
    }

    fn enter(&mut self) {
        self.module.push(self.text(1).to_owned());
        self.inline.push(self.braces);
        // The name is passed over here, the brace counts as any other.
        self.at += 1;
    }

    fn leave(&mut self) {
        self.braces = self.braces.saturating_sub(1);
        if self.inline.last() == Some(&self.braces) {
            self.inline.pop();
            self.module.pop();
        }
    }

    /// Reads one path or tree of paths, whose first word is looked up from `from`.
    fn path(&mut self, mut from: Vec<String>) {
        let line = self.tokens[self.at].line;
        loop {
            match self.text(0) {
                "{" => return self.group(&from),
                "crate" => from.clone_from(&self.root),
                "super" => drop(from.pop()),
                "self" => {}
                word => from.push(word.to_owned()),
            }
            self.at += 1;
            if self.text(0) != "::" {
                break;
            }
            self.at += 1;
        }
        // `crate::{self}` names everything, like `crate::*`.
        let module = from.first().map_or("*", String::as_str).to_owned();
        let is_in_tests = self.module.last().is_some_and(|name| name == "tests");
        let is_re_export = self.is_re_export;
        self.found.push(Reference { line, module, path: from, is_re_export, is_in_tests });
    }

    /// Reads `{a, b::c}`, each from `from`.
    fn group(&mut self, from: &[String]) {
        self.at += 1;
        while !matches!(self.text(0), "}" | "") {
            match self.text(0) {
                "," => self.at += 1,
                "as" => self.at += 2,
                _ => self.path(from.to_vec()),
            }
        }
        self.at += 1;
    }
}

/// A word, a `::` or a single other character of a source.
struct Token {
    line: usize,
    text: String,
}

/// The source without comments, strings and white space.
fn tokens(source: &str) -> Vec<Token> {
    let chars: Vec<char> = source.chars().collect();
    let mut found = Vec::new();
    let (mut at, mut line) = (0, 1);
    while at < chars.len() {
        let (length, is_code) = piece(&chars[at..]);
        let text = &chars[at..at + length];
        if is_code {
            found.push(Token { line, text: text.iter().collect() });
        }
        line += text.iter().filter(|&&char| char == '\n').count();
        at += length;
    }
    found
}

/// The length of the piece of source that `rest` starts with, and whether it is code.
fn piece(rest: &[char]) -> (usize, bool) {
    let next = rest.get(1).copied();
    match rest[0] {
        '/' if next == Some('/') => (length_until(rest, |char| char == '\n'), false),
        '/' if next == Some('*') => (block_comment(rest), false),
        '"' => (quoted(rest), false),
        '\'' => (character(rest), false),
        ':' if next == Some(':') => (2, true),
        char if is_word(char) => word(rest),
        char => (1, !char.is_whitespace()),
    }
}

fn is_word(char: char) -> bool {
    char.is_alphanumeric() || char == '_'
}

fn length_until(rest: &[char], end: impl Fn(char) -> bool) -> usize {
    rest.iter().position(|&char| end(char)).unwrap_or(rest.len())
}

/// Comments nest in Rust.
fn block_comment(rest: &[char]) -> usize {
    let (mut depth, mut at) = (0, 0);
    while at < rest.len() {
        match rest[at..] {
            ['/', '*', ..] => (depth, at) = (depth + 1, at + 2),
            ['*', '/', ..] => (depth, at) = (depth - 1, at + 2),
            _ => at += 1,
        }
        if depth == 0 {
            break;
        }
    }
    at
}

/// A literal that ends with the quote that it starts with, in which a backslash escapes.
fn quoted(rest: &[char]) -> usize {
    let mut at = 1;
    while at < rest.len() && rest[at] != rest[0] {
        at += if rest[at] == '\\' { 2 } else { 1 };
    }
    (at + 1).min(rest.len())
}

/// A character, or the tick of a lifetime.
fn character(rest: &[char]) -> usize {
    match rest {
        [_, '\\', ..] | [_, _, '\'', ..] => quoted(rest).max(3).min(rest.len()),
        _ => 1,
    }
}

/// A word, or the raw string whose prefix looks like one.
fn word(rest: &[char]) -> (usize, bool) {
    let length = length_until(rest, |char| !is_word(char));
    let prefix: String = rest[..length].iter().collect();
    let hashes = length_until(&rest[length..], |char| char != '#');
    let is_raw = matches!(prefix.as_str(), "r" | "br" | "cr");
    if !is_raw || rest.get(length + hashes) != Some(&'"') {
        return (length, true);
    }
    let mut end = vec!['#'; hashes + 1];
    end[0] = '"';
    let start = length + hashes + 1;
    let body = rest[start..].windows(end.len()).position(|part| part == end);
    (body.map_or(rest.len(), |body| start + body + end.len()), false)
}
