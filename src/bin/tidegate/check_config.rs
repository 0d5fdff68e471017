//! `tidegate check-config`: what is wrong with a configuration file.

use std::path::{Path, PathBuf};

use clap::Args;
use serde::Serialize;
use tidegate::config::{Config, ConfigFileError, Mistake};
use tidegate::{Concurrency, Limit, Rule};

use crate::output::{self, OutputError};

/// Of the JSON.
const SCHEMA_VERSION: u32 = 1;

/// What can stop a check.
#[derive(Debug, thiserror::Error)]
pub(crate) enum CheckConfigError {
    #[error(transparent)]
    Output(#[from] OutputError),
    #[error("{0}")]
    Unreadable(String),
    /// A file of TLS that the service could not use.
    #[error("{}: {reason}", config.display())]
    #[cfg_attr(
        not(feature = "server"),
        expect(dead_code, reason = "without the service nothing reads them")
    )]
    Certificates { config: PathBuf, reason: String },
    #[error("{}: {mistakes} {}", file.display(), if *mistakes == 1 { "mistake" } else { "mistakes" })]
    Mistakes { file: PathBuf, mistakes: usize },
}

const EXAMPLES: &str = "\
Examples:
  tidegate check-config examples/tidegate.toml
  tidegate check-config examples/tidegate.toml --json

Every mistake and every warning is a line of FILE:LINE:COLUMN on standard error. Variables have to be set
as for the service, and the files of secrets and of TLS have to be there. Nothing is connected to, and no secret is
printed. The exit status is 2 if there is a mistake; warnings do not change it.";

/// Names every mistake of a configuration file by its line and column.
#[derive(Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct Options {
    /// The file, in TOML
    #[arg(value_name = "FILE")]
    file: PathBuf,
    /// Write the report as a line of JSON, also if there are mistakes
    #[arg(long)]
    json: bool,
}

/// The report.
#[derive(Serialize)]
struct Report<'a> {
    schema_version: u32,
    file: String,
    limits: Vec<LimitLine<'a>>,
    concurrency: Vec<ConcurrencyLine<'a>>,
    store: Option<String>,
    mistakes: Vec<MistakeLine<'a>>,
    warnings: Vec<MistakeLine<'a>>,
}

#[derive(Serialize)]
struct LimitLine<'a> {
    name: &'a str,
    algorithm: &'static str,
    quota: String,
    plans: Vec<PlanLine<'a>>,
}

#[derive(Serialize)]
struct ConcurrencyLine<'a> {
    name: &'a str,
    max: u32,
}

#[derive(Serialize)]
struct PlanLine<'a> {
    name: &'a str,
    quota: String,
}

#[derive(Serialize)]
struct MistakeLine<'a> {
    line: usize,
    column: usize,
    field: &'a str,
    value: &'a str,
    remedy: &'a str,
}

/// Reads a file for another command. What is wrong with it is named on standard error, as by a check, and so is what is odd.
pub(crate) fn load(file: &Path) -> Result<Config, CheckConfigError> {
    let config = Config::load(file).map_err(|error| {
        note("mistake", error.mistakes());
        note("warning", error.warnings());
        match error {
            ConfigFileError::Mistakes { mistakes, .. } => {
                CheckConfigError::Mistakes { file: file.to_owned(), mistakes: mistakes.len() }
            }
            unreadable => CheckConfigError::Unreadable(unreadable.to_string()),
        }
    })?;
    note("warning", config.warnings());
    Ok(config)
}

pub(crate) fn run(options: &Options) -> Result<(), CheckConfigError> {
    let config = match Config::load(&options.file) {
        Ok(config) => config,
        Err(error @ ConfigFileError::Mistakes { .. }) => return tell(options, &error),
        Err(error) => return Err(CheckConfigError::Unreadable(error.to_string())),
    };
    note("warning", config.warnings());
    #[cfg(feature = "server")]
    crate::serve::check_certificates(config.server()).map_err(|error| {
        CheckConfigError::Certificates { config: options.file.clone(), reason: error.to_string() }
    })?;
    let report = Report {
        schema_version: SCHEMA_VERSION,
        file: options.file.display().to_string(),
        limits: config.limits().iter().map(limit_line).collect(),
        concurrency: config.concurrency_limits().iter().map(concurrency_line).collect(),
        store: config.store_name(),
        mistakes: Vec::new(),
        warnings: mistake_lines(config.warnings()),
    };
    if options.json {
        output::json(&report)?;
    } else {
        output::write(&summary(&report))?;
    }
    Ok(())
}

fn tell(options: &Options, error: &ConfigFileError) -> Result<(), CheckConfigError> {
    note("mistake", error.mistakes());
    note("warning", error.warnings());
    let file = options.file.clone();
    if options.json {
        output::json(&Report {
            schema_version: SCHEMA_VERSION,
            file: file.display().to_string(),
            limits: Vec::new(),
            concurrency: Vec::new(),
            store: None,
            mistakes: mistake_lines(error.mistakes()),
            warnings: mistake_lines(error.warnings()),
        })?;
    }
    Err(CheckConfigError::Mistakes { file, mistakes: error.mistakes().len() })
}

/// As compilers write it, so that editors find the line.
fn note(kind: &str, mistakes: &[Mistake]) {
    for mistake in mistakes {
        let (file, line, column) = (mistake.file(), mistake.line(), mistake.column());
        let (field, value, remedy) = (mistake.field(), mistake.value(), mistake.remedy());
        output::note(&format!("{file}:{line}:{column}: {kind}: {field} = {value}: {remedy}"));
    }
}

fn mistake_lines(mistakes: &[Mistake]) -> Vec<MistakeLine<'_>> {
    let lines = mistakes.iter().map(|mistake| MistakeLine {
        line: mistake.line(),
        column: mistake.column(),
        field: mistake.field(),
        value: mistake.value(),
        remedy: mistake.remedy(),
    });
    lines.collect()
}

fn concurrency_line(limit: &Concurrency) -> ConcurrencyLine<'_> {
    ConcurrencyLine { name: limit.name(), max: limit.max() }
}

fn limit_line(limit: &Limit) -> LimitLine<'_> {
    let plans = limit.plans().map(|(name, rule)| PlanLine { name, quota: quota(rule) });
    LimitLine {
        name: limit.name(),
        algorithm: limit.rule().algorithm(),
        quota: quota(limit.rule()),
        plans: plans.collect(),
    }
}

/// Only a token bucket has a burst of its own.
fn quota(rule: Rule) -> String {
    match rule {
        Rule::TokenBucket(quota) => quota.to_string(),
        _ => rule.quota_text(),
    }
}

fn summary(report: &Report<'_>) -> String {
    let limits: Vec<String> = report.limits.iter().map(limit_summary).collect();
    let store = report.store.as_deref().unwrap_or("none: each node is alone");
    let permits: Vec<String> =
        report.concurrency.iter().map(|it| format!("{} ({})", it.name, it.max)).collect();
    let kinds = [("limits", limits), ("concurrency limits", permits)];
    let named = kinds.iter().filter(|(_, names)| !names.is_empty());
    let named = named.map(|(kind, names)| format!("{kind} {}", names.join(", ")));
    let parts: Vec<String> = named.chain([format!("store {store}")]).collect();
    format!("{}: {}\n", report.file, parts.join("; "))
}

fn limit_summary(limit: &LimitLine<'_>) -> String {
    let LimitLine { name, algorithm, quota, plans } = limit;
    let plans: Vec<String> =
        plans.iter().map(|PlanLine { name, quota }| format!("{name} {quota}")).collect();
    if plans.is_empty() {
        return format!("{name} ({algorithm} {quota})");
    }
    format!("{name} ({algorithm} {quota}; plans {})", plans.join(", "))
}
