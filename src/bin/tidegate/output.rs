//! Standard output, which may be a pipe that nobody reads to its end.

use std::io::{ErrorKind, Result, Write};

/// Writes all of `text`. A reader that has gone, as `head` does, has seen enough.
pub(crate) fn write(text: &str) -> Result<()> {
    pass_on(text, &mut std::io::stdout().lock())
}

fn pass_on(text: &str, to: &mut impl Write) -> Result<()> {
    match to.write_all(text.as_bytes()).and_then(|()| to.flush()) {
        Err(error) if error.kind() == ErrorKind::BrokenPipe => Ok(()),
        written => written,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Fails in this way.
    struct Pipe(ErrorKind);

    impl Write for Pipe {
        fn write(&mut self, _: &[u8]) -> Result<usize> {
            Err(self.0.into())
        }

        fn flush(&mut self) -> Result<()> {
            Ok(())
        }
    }

    #[test]
    fn a_reader_that_has_gone_is_no_error_and_a_full_disk_is_one() {
        let mut all = Vec::new();
        assert!(pass_on("a line\n", &mut all).is_ok());
        assert_eq!(all, b"a line\n");
        assert!(pass_on("a line\n", &mut Pipe(ErrorKind::BrokenPipe)).is_ok());
        assert!(pass_on("a line\n", &mut Pipe(ErrorKind::StorageFull)).is_err());
    }
}
