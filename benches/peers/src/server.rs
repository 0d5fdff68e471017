//! A redis-server of the benchmark's own.

use std::io;
use std::net::{TcpListener, TcpStream};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// A server that is not ready by then never will be.
const START_WITHIN: Duration = Duration::from_secs(5);

/// A redis-server that ends with this value.
pub struct Server {
    child: Child,
    port: u16,
    names: AtomicU64,
}

impl Server {
    /// Starts `redis-server` from the PATH on a free port, keeping nothing on disk.
    pub fn start() -> io::Result<Self> {
        let port = TcpListener::bind("127.0.0.1:0")?.local_addr()?.port();
        let child = Command::new("redis-server")
            .args(["--port", &port.to_string(), "--bind", "127.0.0.1"])
            .args(["--save", "", "--appendonly", "no"])
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()?;
        let server = Self { child, port, names: AtomicU64::new(0) };
        let deadline = Instant::now() + START_WITHIN;
        while TcpStream::connect(("127.0.0.1", port)).is_err() {
            if Instant::now() > deadline {
                return Err(io::ErrorKind::TimedOut.into());
            }
            std::thread::sleep(Duration::from_millis(10));
        }
        Ok(server)
    }

    pub fn address(&self) -> String {
        format!("redis://127.0.0.1:{}", self.port)
    }

    pub fn client(&self) -> redis::Client {
        redis::Client::open(self.address()).expect("a good address")
    }

    /// A prefix for keys that nobody else has: no case finds another's state.
    pub fn fresh_name(&self) -> String {
        format!("peers{}", self.names.fetch_add(1, Ordering::Relaxed))
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        // A server that has ended by itself needs no killing.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
