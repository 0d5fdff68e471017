//! A redis-server of the demo's own, to be stopped and continued.
#![allow(clippy::disallowed_methods, reason = "waits for a server to start, and for an outage")]

use std::net::{TcpListener, TcpStream};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use super::DemoError;
use super::options::Outage;

const START_WITHIN: Duration = Duration::from_secs(5);

/// A server that ends with this value.
#[derive(Debug)]
pub(crate) struct OwnRedis {
    child: Child,
    port: u16,
}

impl OwnRedis {
    /// Starts `redis-server` from the PATH on a free port, keeping nothing on disk.
    pub(crate) fn start() -> Result<Self, DemoError> {
        let port = TcpListener::bind("127.0.0.1:0")?.local_addr()?.port();
        let child = Command::new("redis-server")
            .args(["--port", &port.to_string(), "--bind", "127.0.0.1"])
            .args(["--save", "", "--appendonly", "no"])
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .map_err(|error| DemoError::OwnRedis(error.to_string()))?;
        let server = Self { child, port };
        let deadline = Instant::now() + START_WITHIN;
        while TcpStream::connect(("127.0.0.1", port)).is_err() {
            if Instant::now() > deadline {
                return Err(DemoError::OwnRedis(format!("no answer within {START_WITHIN:?}")));
            }
            std::thread::sleep(Duration::from_millis(10));
        }
        Ok(server)
    }

    pub(crate) fn address(&self) -> String {
        format!("redis://127.0.0.1:{}", self.port)
    }

    /// Stops the server for the time of the outage, then lets it go on. Returns when it is over.
    pub(crate) fn suffer(&self, outage: Outage, start: Instant) -> Result<(), DemoError> {
        let wait = |until: Duration| {
            std::thread::sleep((start + until).saturating_duration_since(Instant::now()));
        };
        wait(outage.from);
        self.signal("-STOP")?;
        wait(outage.until);
        self.signal("-CONT")
    }

    fn signal(&self, signal: &str) -> Result<(), DemoError> {
        let status = Command::new("kill").args([signal, &self.child.id().to_string()]).status()?;
        if status.success() {
            Ok(())
        } else {
            Err(DemoError::OwnRedis(format!("kill {signal} failed: {status}")))
        }
    }
}

impl Drop for OwnRedis {
    fn drop(&mut self) {
        // A server that has ended by itself needs no killing.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
