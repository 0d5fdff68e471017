//! `tidegate convert`: a configuration of envoyproxy/ratelimit as one of tidegate.

use std::path::{Path, PathBuf};

use clap::Args;

use crate::output::{self, OutputError};

mod check;
mod descriptors;
mod written;
mod yaml;

use descriptors::{Descriptor, Domain, Reading};
use written::Written;

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
What has no counterpart is named on standard error as FILE:LINE, and so is each mistake, also what would
be refused of the result: then nothing is written. docs/ENVOY.md has a table of all fields and settings.";

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
    for (number, file) in options.files.iter().enumerate() {
        let unreadable = |error| ConvertError::Unreadable { file: file.clone(), error };
        let text = std::fs::read_to_string(file).map_err(unreadable)?;
        let mut reading = Reading { file: number, ..Reading::default() };
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
    let has_quota =
        domains.iter().any(|domain| domain.descriptors.iter().any(Descriptor::has_quota));
    if !has_quota {
        output::note(
            "note: no descriptor has a quota: add a limit, such as [limits.api], before it is served",
        );
    }
    let written = Written::of(&domains, options);
    let mistakes = check::mistakes(&written, has_quota);
    for (place, text) in &mistakes {
        match place {
            Some(place) => {
                note(&options.files[place.file], "mistake", &[(place.line, text.clone())]);
            }
            None => output::note(&format!("mistake: {text}")),
        }
    }
    if mistakes.is_empty() {
        return Ok(output::write(&written.text)?);
    }
    Err(ConvertError::Mistakes { mistakes: mistakes.len() })
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
        reading.mistake(added.place.line, mistake);
        return;
    }
    for descriptor in added.descriptors {
        if domain.descriptors.iter().any(|known| known.is_same(&descriptor)) {
            let mistake = format!("{} is in another file too", descriptor.shown());
            reading.mistake(descriptor.place.line, mistake);
        }
        domain.descriptors.push(descriptor);
    }
}

fn note(file: &Path, kind: &str, lines: &[(usize, String)]) {
    for (line, text) in lines {
        output::note(&format!("{}:{line}: {kind}: {text}", file.display()));
    }
}
