//! What a user of the library compiles: the feature `cli` is for the binary alone.
//!
//! Built with `cli` only: then every package that is asked about was fetched, and none is now.
//! cargo-deny could ban packages too, but it is one more tool to install, looks at one set of
//! features a run, and counts nothing.

#![cfg(feature = "cli")]

use std::collections::BTreeSet;
use std::process::Command;

/// What only the binary may pull in: argument parsers, terminals, plotters, reports.
const CLI_ONLY: [&str; 14] = [
    "anstream",
    "anstyle",
    "clap",
    "clap_builder",
    "clap_complete",
    "crossterm",
    "hdrhistogram",
    "indicatif",
    "is-terminal",
    "metrics-exporter-prometheus",
    "plotters",
    "ratatui",
    "termcolor",
    "tracing-subscriber",
];

/// What the library cannot do without: shows that the list of packages was read at all.
const NEEDED: [&str; 2] = ["redis", "tokio"];

#[test]
fn without_the_cli_feature_no_argument_parser_plotter_or_terminal_crate_is_pulled_in() {
    let packages = packages("redis,metrics");
    for needed in NEEDED {
        assert!(packages.iter().any(|name| name == needed), "no {needed} in {packages:?}");
    }
    let strangers: Vec<&String> =
        packages.iter().filter(|name| CLI_ONLY.contains(&name.as_str())).collect();
    assert!(strangers.is_empty(), "the library pulls in {strangers:?}");
}

#[test]
fn default_features_need_85_packages_at_most() {
    let packages: BTreeSet<String> = packages("default").into_iter().collect();
    assert!((20..=85).contains(&packages.len()), "{}: {packages:?}", packages.len());
}

#[test]
fn with_the_cli_feature_the_argument_parser_is_seen() {
    // Else a change of cargo's output could blind the test above.
    assert!(packages("cli").iter().any(|name| name == "clap"));
}

/// The names of the packages that the library needs with these features alone.
fn packages(features: &str) -> Vec<String> {
    let output = Command::new(env!("CARGO"))
        .current_dir(env!("CARGO_MANIFEST_DIR"))
        .args(["tree", "--locked", "--offline", "--edges", "normal", "--prefix", "none"])
        .args(["--no-default-features", "--features", features])
        .output()
        .expect("cargo runs, as it runs this test");
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "cargo tree: {}: {errors}", output.status);
    let text = String::from_utf8_lossy(&output.stdout);
    text.lines().filter_map(|line| line.split_whitespace().next()).map(str::to_owned).collect()
}
