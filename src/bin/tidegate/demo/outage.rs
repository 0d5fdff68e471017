//! A redis-server of the demo's own, to be stopped and continued.
//!
//! The server belongs to a keeper, a process of this program in a process group of its own. The
//! keeper's standard input is a pipe from the demo. The pipe closes when the demo ends, by whatever
//! signal; the keeper then kills the server, stopped or not, and ends too.
//!
//! The server has a process group of its own as well. In the keeper's group, a stopped server would
//! end the keeper: a group that is orphaned with a stopped member is sent SIGHUP.
#![allow(clippy::disallowed_methods, reason = "waits for a server to start, and for an outage")]

use std::io::{BufRead, BufReader, Write};
use std::net::{TcpListener, TcpStream};
use std::os::unix::process::CommandExt;
use std::process::{Child, ChildStdin, Command, Stdio};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};

use super::DemoError;
use super::options::Outage;
use crate::output;

const START_WITHIN: Duration = Duration::from_secs(5);

/// Servers tried before giving up: a port can be taken between the look and the start.
const STARTS_MAX: u32 = 3;

/// Orders to the keeper, a line each.
const STOP: &str = "stop";
const CONTINUE: &str = "continue";

/// A server that ends with this value, and with this process.
#[derive(Debug)]
pub(crate) struct OwnRedis {
    keeper: Child,
    orders: Option<ChildStdin>,
    port: u16,
}

impl OwnRedis {
    /// Starts `redis-server` from the PATH on a free port, keeping nothing on disk.
    pub(crate) fn start() -> Result<Self, DemoError> {
        let mut keeper = Command::new(std::env::current_exe()?)
            .arg("demo-redis")
            .process_group(0)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()?;
        let (orders, answers) = (keeper.stdin.take(), keeper.stdout.take());
        let mut own = Self { keeper, orders, port: 0 };
        let mut line = String::new();
        if let Some(answers) = answers {
            BufReader::new(answers).read_line(&mut line)?;
        }
        let port: Result<u16, String> =
            serde_json::from_str(&line).unwrap_or_else(|_| Err("its keeper ended".to_owned()));
        own.port = port.map_err(DemoError::OwnRedis)?;
        Ok(own)
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
        self.order(STOP)?;
        wait(outage.until);
        self.order(CONTINUE)
    }

    fn order(&self, order: &str) -> Result<(), DemoError> {
        let mut orders = self.orders.as_ref().ok_or(DemoError::OwnRedisGone)?;
        orders.write_all(format!("{order}\n").as_bytes()).map_err(|_| DemoError::OwnRedisGone)
    }
}

impl Drop for OwnRedis {
    fn drop(&mut self) {
        self.orders = None;
        // A keeper that cannot be waited for has ended.
        let _ = self.keeper.wait();
    }
}

/// The keeper: starts a server, says on which port, follows orders, and ends with its input.
pub(crate) fn run_redis() -> Result<(), DemoError> {
    let (mut server, port) = match start_server() {
        Ok(started) => started,
        Err(error) => return Ok(output::json(&Err::<u16, String>(error))?),
    };
    let followed = output::json(&Ok::<u16, String>(port))
        .map_err(DemoError::from)
        .and_then(|()| follow_orders(&server));
    server.kill()?;
    server.wait()?;
    followed
}

fn follow_orders(server: &Child) -> Result<(), DemoError> {
    for order in std::io::stdin().lines() {
        let signal = match order?.as_str() {
            STOP => Signal::STOP,
            CONTINUE => Signal::CONT,
            _ => continue,
        };
        kill_process(Pid::from_child(server), signal).map_err(std::io::Error::from)?;
    }
    Ok(())
}

fn start_server() -> Result<(Child, u16), String> {
    let mut failure = String::new();
    for _ in 0..STARTS_MAX {
        match try_server() {
            Ok(Ok(started)) => return Ok(started),
            Ok(Err(reason)) => failure = reason,
            Err(error) => return Err(error.to_string()),
        }
    }
    Err(failure)
}

/// A server on a port that is free now. The inner error is worth another try.
fn try_server() -> std::io::Result<Result<(Child, u16), String>> {
    let port = TcpListener::bind("127.0.0.1:0")?.local_addr()?.port();
    let mut server = Command::new("redis-server")
        .args(["--port", &port.to_string(), "--bind", "127.0.0.1"])
        .args(["--save", "", "--appendonly", "no"])
        .process_group(0)
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()?;
    let deadline = Instant::now() + START_WITHIN;
    while TcpStream::connect(("127.0.0.1", port)).is_err() {
        if let Some(status) = server.try_wait()? {
            return Ok(Err(format!("it ended at once: {status}")));
        }
        if Instant::now() > deadline {
            server.kill()?;
            server.wait()?;
            return Ok(Err(format!("no answer within {START_WITHIN:?}")));
        }
        std::thread::sleep(Duration::from_millis(10));
    }
    Ok(Ok((server, port)))
}
