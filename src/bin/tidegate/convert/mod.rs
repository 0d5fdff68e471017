//! `tidegate convert`: a configuration of envoyproxy/ratelimit as one of tidegate.

use std::fmt::Write as _;
use std::path::{Path, PathBuf};

use clap::Args;

use crate::output::{self, OutputError};

mod descriptors;
mod yaml;

use descriptors::{Descriptor, Domain, Quota, Reading};

/// What can stop a conversion.
#[derive(Debug, thiserror::Error)]
pub(crate) enum ConvertError {
    #[error("{}: {error}", file.display())]
    Unreadable { file: PathBuf, error: std::io::Error },
    #[error("{mistakes} {}: nothing was written", if *mistakes == 1 { "mistake" } else { "mistakes" })]
    Mistakes { mistakes: usize },
    #[error(transparent)]
    Output(#[from] OutputError),
}

const EXAMPLES: &str = "\
Examples:
  tidegate convert ratelimit.yaml > tidegate.toml
  tidegate convert config/*.yaml --merge-domains --mode exact > tidegate.toml
  tidegate serve tidegate.toml

The file has the limits. For processes that share them add a table [store]: docs/CONFIGURATION.md.
What has no counterpart is named on standard error as FILE:LINE, and so is each mistake: then nothing
is written. docs/ENVOY.md has a table of all fields and settings.";

/// Write a configuration of envoyproxy/ratelimit as one of tidegate.
#[derive(Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct Options {
    /// Files in YAML, one domain in each
    #[arg(value_name = "FILE", required = true)]
    files: Vec<PathBuf>,
    /// Join the files that have one domain, as `MERGE_DOMAIN_CONFIG=true` does
    #[arg(long)]
    merge_domains: bool,
    /// The algorithm of all limits
    #[arg(long, value_name = "NAME", default_value = "fixed-window",
        value_parser = ["token-bucket", "leaky-bucket", "fixed-window", "sliding-window", "sliding-log"])]
    algorithm: String,
    /// Where all limits are decided: here and in the store (hybrid), in the store (exact), or here alone (local)
    #[arg(long, value_name = "NAME", default_value = "hybrid", value_parser = ["hybrid", "exact", "local"])]
    mode: String,
}

pub(crate) fn run(options: &Options) -> Result<(), ConvertError> {
    let (mut domains, mut mistakes) = (Vec::<Domain>::new(), 0);
    for file in &options.files {
        let unreadable = |error| ConvertError::Unreadable { file: file.clone(), error };
        let text = std::fs::read_to_string(file).map_err(unreadable)?;
        let mut reading = Reading::default();
        if let Some(domain) = Domain::read(&text, &mut reading) {
            join(&mut domains, domain, options.merge_domains, &mut reading);
        }
        note(file, "note", &reading.notes);
        note(file, "mistake", &reading.mistakes);
        mistakes += reading.mistakes.len();
    }
    if mistakes > 0 {
        return Err(ConvertError::Mistakes { mistakes });
    }
    if !domains.iter().any(|domain| domain.descriptors.iter().any(Descriptor::has_quota)) {
        output::note(
            "note: no descriptor has a quota: add a limit, such as [limits.api], before it is served",
        );
    }
    Ok(output::write(&written(&domains, options))?)
}

/// Adds what a file has to what others have.
fn join(domains: &mut Vec<Domain>, added: Domain, merges: bool, reading: &mut Reading) {
    let Some(domain) = domains.iter_mut().find(|domain| domain.name == added.name) else {
        domains.push(added);
        return;
    };
    if !merges {
        let mistake =
            format!("domain {:?} is in another file too: give --merge-domains", added.name);
        reading.mistake(added.line, mistake);
        return;
    }
    for descriptor in added.descriptors {
        if domain.descriptors.iter().any(|known| known.is_same(&descriptor)) {
            let mistake = format!("{} is in another file too", descriptor.shown());
            reading.mistake(descriptor.line, mistake);
        }
        domain.descriptors.push(descriptor);
    }
}

fn note(file: &Path, kind: &str, lines: &[(usize, String)]) {
    for (line, text) in lines {
        output::note(&format!("{}:{line}: {kind}: {text}", file.display()));
    }
}

/// The configuration.
fn written(domains: &[Domain], options: &Options) -> String {
    let mut text = "# Written by tidegate convert.\n".to_owned();
    for domain in domains {
        let path = format!("domains.{}", quoted_name(&domain.name));
        let _ = writeln!(text, "\n[{path}]");
        descriptors_in(&path, &domain.descriptors, options, &mut text);
    }
    text
}

fn descriptors_in(path: &str, descriptors: &[Descriptor], options: &Options, text: &mut String) {
    for descriptor in descriptors {
        let path = format!("{path}.{}", quoted_name(&descriptor.table_name()));
        let _ = writeln!(text, "\n[{path}]");
        fields(descriptor, options, text);
        descriptors_in(&path, &descriptor.descriptors, options, text);
    }
}

fn fields(descriptor: &Descriptor, options: &Options, text: &mut String) {
    let mut field = |name: &str, value: String| {
        let _ = writeln!(text, "{name} = {value}");
    };
    for name in &descriptor.flags {
        field(name, "true".to_owned());
    }
    let Some(limit) = &descriptor.limit else { return };
    match &limit.quota {
        Quota::None if !descriptor.is_shadow => field("deny", "true".to_owned()),
        Quota::Unlimited | Quota::None => field("unlimited", "true".to_owned()),
        Quota::Some(quota) => {
            field("quota", quoted(quota));
            field("algorithm", quoted(&options.algorithm));
            if options.mode != "hybrid" {
                field("mode", quoted(&options.mode));
            }
            if descriptor.is_shadow {
                field("switch", quoted("shadow"));
            }
        }
    }
    if let Some(name) = &limit.name {
        field("name", quoted_text(name));
    }
    if !limit.replaces.is_empty() {
        let names: Vec<String> = limit.replaces.iter().map(|name| quoted_text(name)).collect();
        field("replaces", format!("[{}]", names.join(", ")));
    }
}

/// A text in which a dollar is a dollar, and no variable.
fn quoted_text(text: &str) -> String {
    quoted(&text.replace('$', "$$"))
}

/// A name in TOML.
fn quoted_name(name: &str) -> String {
    let is_bare = |byte: u8| byte.is_ascii_alphanumeric() || b"_-".contains(&byte);
    if !name.is_empty() && name.bytes().all(is_bare) { name.to_owned() } else { quoted(name) }
}

/// A text in TOML.
fn quoted(text: &str) -> String {
    let mut quoted = String::from("\"");
    for char in text.chars() {
        match char {
            '"' | '\\' => quoted.extend(['\\', char]),
            char if char.is_control() => {
                let _ = write!(quoted, "\\u{:04X}", u32::from(char));
            }
            char => quoted.push(char),
        }
    }
    quoted.push('"');
    quoted
}
