//! The `tidegate` command: see and measure the limiter at work.

use clap::{CommandFactory, FromArgMatches, Parser, Subcommand};

mod bounds;
mod demo;
mod flags;
mod output;
mod progress;
mod simulate;
mod summary;
mod sweep;
mod threads;
mod trace;
mod tune;

/// A hybrid local and global rate limiter.
#[derive(Parser)]
#[command(version, about, max_term_width = 100)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Runs several nodes under load and compares what they admitted with one ideal bucket.
    Demo(Box<demo::options::Options>),
    /// Plays nodes, network, store and their faults in virtual time; a seed gives the same run.
    Simulate(Box<simulate::Options>),
    /// Simulates every cell of the sweep and names those that miss a target.
    Sweep(sweep::Options),
    /// Simulates intervals and policies, and recommends one of them.
    Tune(Box<tune::Options>),
    /// One node of a demo, as an operating-system process of its own; reads its orders from
    /// standard input.
    #[command(hide = true)]
    DemoNode,
}

fn main() -> std::process::ExitCode {
    tracing_subscriber::fmt()
        .with_writer(std::io::stderr)
        .with_env_filter(
            tracing_subscriber::EnvFilter::try_from_default_env().unwrap_or_else(|_| "warn".into()),
        )
        .init();
    match run(&parse().command) {
        Ok(()) => std::process::ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("tidegate: {error}");
            std::process::ExitCode::FAILURE
        }
    }
}

/// A negative number is a bad value of the flag before it, not a flag that is not known.
fn parse() -> Cli {
    let command = Cli::command().mut_subcommands(|command| {
        command.mut_args(|flag| {
            let takes_values = flag.get_action().takes_values();
            flag.allow_negative_numbers(takes_values)
        })
    });
    let cli = Cli::from_arg_matches(&command.get_matches());
    cli.unwrap_or_else(|error| error.exit())
}

fn run(command: &Command) -> Result<(), Box<dyn std::error::Error>> {
    match command {
        Command::Demo(options) => demo::run(options)?,
        Command::Simulate(options) => simulate::run(options)?,
        Command::Sweep(options) => sweep::run(options)?,
        Command::Tune(options) => tune::run(options)?,
        Command::DemoNode => demo::process::run_node()?,
    }
    Ok(())
}
