//! `tidegate serve` as a process, and requests of it.

#![allow(clippy::unwrap_used, reason = "a test's helpers may fail the test")]
#![allow(clippy::disallowed_methods, reason = "a process lives by the real clock")]

use std::fs;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::path::PathBuf;
use std::process::{Child, ChildStderr, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use serde_json::Value;

use super::service::TOKEN;

/// For what happens soon.
pub(crate) const SOON: Duration = Duration::from_secs(20);

/// A process of the service. It is killed when this is dropped.
pub(crate) struct Server {
    pub(crate) process: Child,
    pub(crate) address: String,
    /// What it said when it began.
    pub(crate) began: String,
    pub(crate) log: Option<ChildStderr>,
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

impl Server {
    /// With the text of a configuration, or without a file.
    pub(crate) fn start(file: Option<&PathBuf>) -> Self {
        Self::start_with(file, false)
    }

    pub(crate) fn start_with(file: Option<&PathBuf>, is_store_away: bool) -> Self {
        let server = Self::start_at("127.0.0.1:0", file);
        if !is_store_away {
            server.wait_until("ready", |it| it.ask("GET", "/health/ready", "").status == 200);
        }
        server
    }

    /// One that answers over HTTP there. It may not be ready yet.
    pub(crate) fn start_at(http: &str, file: Option<&PathBuf>) -> Self {
        Self::start_at_both(http, "127.0.0.1:0", file)
    }

    /// The same with an address for gRPC.
    pub(crate) fn start_at_both(http: &str, grpc: &str, file: Option<&PathBuf>) -> Self {
        let mut process = Command::new(env!("CARGO_BIN_EXE_tidegate"))
            .args(["serve", "--http", http, "--grpc", grpc])
            .args(file)
            .env("NO_COLOR", "1")
            .env_remove("RUST_LOG")
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        let mut said = BufReader::new(process.stdout.take().unwrap());
        let mut began = String::new();
        while !began.contains("store: ") {
            assert!(said.read_line(&mut began).unwrap() > 0, "it ended: {began}");
        }
        if file.is_none() {
            while !began.contains("CONFIGURATION") {
                assert!(said.read_line(&mut began).unwrap() > 0, "it ended: {began}");
            }
        }
        let address = began.lines().next().unwrap().strip_prefix("listening on ").unwrap();
        Self { address: address.to_owned(), began, log: process.stderr.take(), process }
    }

    pub(crate) fn signal(&self, name: &str) {
        let pid = self.process.id().to_string();
        assert!(Command::new("kill").args(["-s", name, &pid]).status().unwrap().success());
    }

    /// Waits until it has ended, and says what it logged.
    pub(crate) fn ended(&mut self) -> (ExitStatus, String) {
        let deadline = Instant::now() + SOON;
        let status = loop {
            if let Some(status) = self.process.try_wait().unwrap() {
                break status;
            }
            assert!(Instant::now() < deadline, "it does not end");
            std::thread::sleep(Duration::from_millis(10));
        };
        let mut log = String::new();
        self.log.take().unwrap().read_to_string(&mut log).unwrap();
        (status, log)
    }

    pub(crate) fn ask(&self, method: &str, path: &str, body: &str) -> Answer {
        ask(&self.address, method, path, body).unwrap()
    }

    /// The same with the token of tests.
    pub(crate) fn ask_with_token(&self, path: &str, body: &Value) -> Answer {
        post_with_token(&self.address, path, body).unwrap()
    }

    pub(crate) fn check(&self, body: &Value) -> Answer {
        self.ask("POST", "/v1/check", &body.to_string())
    }

    /// Looks until something is so.
    pub(crate) fn wait_until(&self, what: &str, is_so: impl Fn(&Self) -> bool) {
        let deadline = Instant::now() + SOON;
        while !is_so(self) {
            assert!(Instant::now() < deadline, "not within {SOON:?}: {what}");
            std::thread::sleep(Duration::from_millis(20));
        }
    }
}

#[derive(Debug)]
pub(crate) struct Answer {
    pub(crate) status: u16,
    pub(crate) head: String,
    pub(crate) body: String,
}

impl Answer {
    pub(crate) fn json(&self) -> Value {
        serde_json::from_str(&self.body).unwrap_or_else(|error| panic!("{error}: {self:?}"))
    }
}

/// One request over a connection of its own. An error if the service is gone, or its answer is not whole.
pub(crate) fn ask(address: &str, method: &str, path: &str, body: &str) -> std::io::Result<Answer> {
    ask_with(address, method, path, "", body)
}

/// The same with the token of tests.
pub(crate) fn post_with_token(address: &str, path: &str, body: &Value) -> std::io::Result<Answer> {
    let token = format!("authorization: Bearer {TOKEN}\r\n");
    ask_with(address, "POST", path, &token, &body.to_string())
}

/// The same with more fields of the head.
fn ask_with(
    address: &str,
    method: &str,
    path: &str,
    fields: &str,
    body: &str,
) -> std::io::Result<Answer> {
    let mut stream = TcpStream::connect(address)?;
    stream.set_read_timeout(Some(SOON))?;
    let length = body.len();
    write!(
        stream,
        "{method} {path} HTTP/1.1\r\nhost: {address}\r\nconnection: close\r\n{fields}content-length: {length}\r\n\r\n{body}"
    )?;
    let mut text = String::new();
    stream.read_to_string(&mut text)?;
    let broken = || std::io::Error::other(format!("not whole: {text:?}"));
    let (head, body) = text.split_once("\r\n\r\n").ok_or_else(broken)?;
    let status =
        head.split(' ').nth(1).and_then(|status| status.parse().ok()).ok_or_else(broken)?;
    Ok(Answer { status, head: head.to_lowercase(), body: body.to_owned() })
}

/// A configuration file of a test's own.
pub(crate) fn file(test: &str, text: &str) -> PathBuf {
    let path = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join(format!("serve-{test}.toml"));
    fs::write(&path, text).unwrap();
    path
}
