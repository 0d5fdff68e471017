//! The `tidegate` command: see and measure the limiter at work.
//!
//! Each error is one line on standard error that begins with `error: `. The exit status is 2 if the
//! command line is at fault and 1 if the command failed. A reader that closes the pipe early ends
//! the program with status 0.

#![warn(clippy::print_stdout, clippy::print_stderr)]

use std::process::ExitCode;

use clap::{Command as ClapCommand, CommandFactory, FromArgMatches, Parser, Subcommand};

mod advice;
mod check_config;
mod compare;
#[cfg(feature = "server")]
mod convert;
mod demo;
mod exporter;
mod failure;
mod flags;
mod output;
mod progress;
#[cfg(feature = "server")]
mod serve;
mod simulate;
mod store;
mod summary;
mod sweep;
mod threads;
mod trace;
mod tune;
mod values;
mod warnings;

use failure::Failure;
use output::OutputError;

/// A hybrid local and global rate limiter.
#[derive(Parser)]
#[command(version, about, max_term_width = 100, after_help = EXIT_STATUS)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

const EXIT_STATUS: &str = "\
Exit status: 0 done, 1 failed, 2 the command line is wrong. A reader that closes the pipe early, as
head does, is no failure.";

#[derive(Subcommand)]
enum Command {
    /// Run several nodes under load and compare what they admit with one ideal bucket
    Demo(Box<demo::options::Options>),
    /// Play nodes, network, store and their faults in virtual time; a seed gives the same run
    Simulate(Box<simulate::Options>),
    /// Simulate every cell of the sweep and name those that miss a target
    Sweep(sweep::Options),
    /// Simulate intervals and policies, and recommend one of them
    Tune(Box<tune::Options>),
    /// Compare algorithms, modes and the usual ways on the same requests, or decide about those of a file
    Compare(compare::Options),
    /// Name every mistake of a configuration file
    CheckConfig(check_config::Options),
    /// Decide for programs in any language, over HTTP, and for Envoy
    #[cfg(feature = "server")]
    Serve(serve::Options),
    /// Write a configuration of envoyproxy/ratelimit as one of tidegate
    #[cfg(feature = "server")]
    Convert(convert::Options),
    /// Print a completion script for a shell
    #[command(after_help = COMPLETIONS)]
    Completions {
        /// The shell
        #[arg(value_parser = flags::one_of::<Shell>(["bash", "zsh", "fish"]))]
        shell: Shell,
    },
    /// One node of a demo, as an operating-system process; reads its orders from standard input
    #[command(hide = true)]
    DemoNode,
    /// A redis-server that ends with its demo; reads its orders from standard input
    #[command(hide = true)]
    DemoRedis,
}

type Shell = clap_complete::Shell;

const COMPLETIONS: &str = "\
Examples:
  tidegate completions bash > ~/.local/share/bash-completion/completions/tidegate
  tidegate completions zsh > \"${fpath[1]}/_tidegate\"
  tidegate completions fish > ~/.config/fish/completions/tidegate.fish";

fn main() -> ExitCode {
    let ended = match parse() {
        Ok(command) => run(&command),
        Err(answer) => show(&answer),
    };
    warnings::finish();
    match ended {
        Ok(()) | Err(Failure::Closed) => ExitCode::SUCCESS,
        Err(Failure::Told) => ExitCode::from(2),
        Err(Failure::Usage(text)) => {
            output::note(&format!("error: {text}"));
            ExitCode::from(2)
        }
        Err(Failure::Failed(text)) => {
            output::note(&format!("error: {text}"));
            ExitCode::FAILURE
        }
    }
}

/// A negative number is a bad value of the flag before it, not a flag that is not known.
fn definition() -> ClapCommand {
    Cli::command().mut_subcommands(|command| {
        command.mut_args(|flag| {
            let takes_values = flag.get_action().takes_values();
            flag.allow_negative_numbers(takes_values)
        })
    })
}

fn parse() -> Result<Command, clap::Error> {
    Cli::from_arg_matches(&definition().try_get_matches()?).map(|cli| cli.command)
}

/// Shows the help that was asked for, or what is wrong with the command line.
fn show(answer: &clap::Error) -> Result<(), Failure> {
    let shown = answer.print().map_err(OutputError::from);
    if answer.use_stderr() { Err(Failure::Told) } else { Ok(shown?) }
}

fn run(command: &Command) -> Result<(), Failure> {
    match command {
        Command::DemoNode => warnings::keep(),
        #[cfg(feature = "server")]
        Command::Serve(_) => warnings::log(),
        _ => warnings::show(),
    }
    match command {
        Command::Demo(options) => demo::run(options)?,
        Command::Simulate(options) => simulate::run(options)?,
        Command::Sweep(options) => sweep::run(options)?,
        Command::Tune(options) => tune::run(options)?,
        Command::Compare(options) => compare::run(options)?,
        Command::CheckConfig(options) => check_config::run(options)?,
        #[cfg(feature = "server")]
        Command::Serve(options) => serve::run(options)?,
        #[cfg(feature = "server")]
        Command::Convert(options) => convert::run(options)?,
        Command::Completions { shell } => output::write(&completions(*shell))?,
        Command::DemoNode => demo::process::run_node()?,
        Command::DemoRedis => demo::outage::run_redis()?,
    }
    Ok(())
}

fn completions(shell: Shell) -> String {
    let mut script = Vec::new();
    clap_complete::generate(shell, &mut definition(), "tidegate", &mut script);
    String::from_utf8_lossy(&script).into_owned()
}
