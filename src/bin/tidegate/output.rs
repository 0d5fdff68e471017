//! The one writer of the program: reports on standard output, notes on standard error.
//!
//! A report that cannot be written ends the program: quietly and with status 0 if its reader has
//! gone, as `head` does once it has seen enough, and with an error and status 1 otherwise. A note
//! that cannot be written is lost, and the report still counts.

use std::fs::File;
use std::io::{ErrorKind, Write};
use std::os::fd::AsFd;
use std::os::unix::fs::MetadataExt;

use serde::Serialize;

/// Why a report did not arrive.
#[derive(Debug, thiserror::Error)]
pub(crate) enum OutputError {
    /// Its reader has closed the pipe.
    #[error("the reader of the output has gone")]
    Closed,
    #[error("the output cannot be written: {0}")]
    Failed(std::io::Error),
}

impl From<std::io::Error> for OutputError {
    fn from(error: std::io::Error) -> Self {
        match error.kind() {
            ErrorKind::BrokenPipe => Self::Closed,
            _ => Self::Failed(error),
        }
    }
}

impl From<serde_json::Error> for OutputError {
    fn from(error: serde_json::Error) -> Self {
        Self::from(std::io::Error::from(error))
    }
}

/// Writes all of `text` to standard output.
pub(crate) fn write(text: &str) -> Result<(), OutputError> {
    pass_on(text, &mut std::io::stdout().lock())
}

/// Writes a line of JSON to standard output.
pub(crate) fn json(value: &impl Serialize) -> Result<(), OutputError> {
    write(&(serde_json::to_string(value)? + "\n"))
}

/// Writes a line to standard error. If nobody reads it any more, and the report would go to the
/// same reader, the program ends: there is nobody left to work for.
pub(crate) fn note(line: &str) {
    let written = pass_on(&format!("{line}\n"), &mut std::io::stderr().lock());
    if matches!(written, Err(OutputError::Closed)) && is_one_pipe() {
        std::process::exit(0);
    }
}

fn pass_on(text: &str, to: &mut impl Write) -> Result<(), OutputError> {
    to.write_all(text.as_bytes())?;
    Ok(to.flush()?)
}

/// Whether standard output and standard error are one and the same.
fn is_one_pipe() -> bool {
    let identity = |stream: std::io::Result<std::os::fd::OwnedFd>| {
        let file = File::from(stream.ok()?).metadata().ok()?;
        Some((file.dev(), file.ino()))
    };
    let output = identity(std::io::stdout().as_fd().try_clone_to_owned());
    output.is_some() && output == identity(std::io::stderr().as_fd().try_clone_to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Fails in this way.
    struct Pipe(ErrorKind);

    impl Write for Pipe {
        fn write(&mut self, _: &[u8]) -> std::io::Result<usize> {
            Err(self.0.into())
        }

        fn flush(&mut self) -> std::io::Result<()> {
            Ok(())
        }
    }

    #[test]
    fn closed_pipe_and_full_disk_are_different_errors() {
        let mut all = Vec::new();
        assert!(pass_on("a line\n", &mut all).is_ok());
        assert_eq!(all, b"a line\n");
        let closed = pass_on("a line\n", &mut Pipe(ErrorKind::BrokenPipe));
        assert!(matches!(closed, Err(OutputError::Closed)), "{closed:?}");
        let full = pass_on("a line\n", &mut Pipe(ErrorKind::StorageFull));
        assert!(matches!(full, Err(OutputError::Failed(_))), "{full:?}");
    }
}
