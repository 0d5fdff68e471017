//! Targets for the fuzzer of tests/fuzz: each takes any bytes, and panics where a promise is broken. One more, for lines
//! of traces, which the binary reads, is in tests/fuzz/src/trace.rs.
//!
//! The unit tests below run each target on its kept inputs, tests/fuzz/corpus, where each bug that was found stands
//! under a name of its own.

#[cfg(all(feature = "http", feature = "retry"))]
mod headers;
mod reply;
#[cfg(feature = "redis")]
mod request;

#[cfg(all(feature = "http", feature = "retry"))]
pub use headers::headers;
pub use reply::reply;
#[cfg(feature = "redis")]
pub use request::{Server, request};

/// A fuzzer's bytes, from which a target draws what it needs; zeros follow the last one.
struct Bytes<'a>(&'a [u8]);

impl Bytes<'_> {
    #[cfg(feature = "redis")]
    fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    fn byte(&mut self) -> u8 {
        let Some((first, rest)) = self.0.split_first() else { return 0 };
        self.0 = rest;
        *first
    }

    #[cfg(feature = "redis")]
    fn one_in(&mut self, times: u8) -> bool {
        self.byte().is_multiple_of(times)
    }

    fn below(&mut self, most: usize) -> usize {
        usize::from(u16::from_le_bytes([self.byte(), self.byte()])) % most.max(1)
    }

    fn take<const N: usize>(&mut self) -> [u8; N] {
        std::array::from_fn(|_| self.byte())
    }

    /// A number as it stands on the wire: an edge mostly, or any eight bytes.
    fn wire_number(&mut self) -> [u8; 8] {
        let edge = match self.byte() % 16 {
            0 => 0.0,
            1 => 1.0,
            2 => -1.0,
            3 => f64::from(self.byte()),
            4 => -f64::from(self.byte()),
            5 => 1e6 * f64::from(self.byte()),
            6 => (1_i64 << 52) as f64,
            7 => (1_i64 << 53) as f64,
            8 => -((1_i64 << 53) as f64),
            9 => 1e15,
            10 => 0.5,
            11 => f64::NAN,
            12 => f64::INFINITY,
            13 => 1e12 * f64::from(self.byte()),
            _ => return self.take(),
        };
        edge.to_le_bytes()
    }
}

/// Writes `new` over the bytes from `at` on, as far as there are any.
fn replace(bytes: &mut [u8], at: usize, new: &[u8]) {
    for (old, new) in bytes.iter_mut().skip(at).zip(new) {
        *old = *new;
    }
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::path::Path;

    /// Runs the target on every kept input, and names the one that fails.
    fn run_kept(target: &str, mut run: impl FnMut(&[u8])) {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fuzz/corpus").join(target);
        let entries = fs::read_dir(&folder).expect("the target has kept inputs");
        let mut files: Vec<_> = entries.map(|entry| entry.expect("readable").path()).collect();
        files.sort();
        assert!(!files.is_empty(), "{target} has no kept inputs");
        for file in files {
            println!("{}", file.display());
            run(&fs::read(&file).expect("readable"));
        }
    }

    #[test]
    fn kept_replies_break_no_promise() {
        run_kept("reply", super::reply);
    }

    #[cfg(feature = "redis")]
    #[test]
    fn kept_requests_break_no_promise_on_a_real_server() {
        use crate::store::redis_server::RedisServer;

        let redis = RedisServer::start();
        let mut server = super::Server::open(&redis.url());
        run_kept("request", |bytes| super::request(&mut server, bytes));
    }

    #[cfg(all(feature = "http", feature = "retry"))]
    #[test]
    fn kept_headers_break_no_promise() {
        run_kept("headers", super::headers);
    }
}
