//! A real redis-server of the test's own: private port, no files kept, ended with the value.
//!
//! Uses std only, so that unit tests inside `src` can include this file by its path.

#![allow(dead_code, reason = "each test file uses some of the functions only")]
#![allow(
    clippy::disallowed_methods,
    reason = "a test that waits for a real process polls real time, with a deadline"
)]

use std::fs::{self, File};
use std::io::{self, BufRead, BufReader, Write};
use std::net::{Ipv4Addr, SocketAddr, TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::atomic::{AtomicU16, Ordering};
use std::time::{Duration, Instant};

/// Names another server to test against (Valkey, an older Redis); default is [`SERVER_DEFAULT`].
const SERVER_VARIABLE: &str = "TIDEGATE_TEST_SERVER";
/// Looked up on the PATH.
const SERVER_DEFAULT: &str = "redis-server";
/// In an extra argument, stands for the server's port.
const PORT_PLACEHOLDER: &str = "{port}";
/// The first port tried. The range lies below the one that systems hand out by themselves, so
/// that a killed server finds its port still free when it restarts.
const PORT_FIRST: u16 = 20_000;
/// How many ports there are to choose from.
const PORTS_MAX: u16 = 12_000;
/// Servers tried before giving up: a port can be taken between the look and the start.
const STARTS_MAX: u32 = 10;
/// A server that is not ready by then never will be.
const READY_DEADLINE: Duration = Duration::from_secs(20);
/// The pause between two looks at whether the server is ready.
const POLL_GAP: Duration = Duration::from_millis(5);
/// The longest wait for a connection or for one answer.
const ANSWER_DEADLINE: Duration = Duration::from_secs(10);
/// What redis-server and valkey-server write to their log once they listen.
const READY_LINE: &str = "Ready to accept connections";

/// Spreads the ports over the servers of this process.
static PORTS_TRIED: AtomicU16 = AtomicU16::new(0);

/// A server process, killed and forgotten on drop.
#[derive(Debug)]
pub(crate) struct RedisServer {
    child: Child,
    exit: Option<ExitStatus>,
    port: u16,
    directory: PathBuf,
    extra: Vec<String>,
}

impl RedisServer {
    /// Starts a server on a free port of 127.0.0.1 and returns when it answers.
    pub(crate) fn start() -> Self {
        Self::start_with(&[])
    }

    /// As [`start`](Self::start), with arguments added. `{port}` in one of them stands for the
    /// port; `--tls-port {port}` turns plain connections off.
    pub(crate) fn start_with(extra: &[&str]) -> Self {
        let extra: Vec<String> = extra.iter().map(|&argument| argument.to_owned()).collect();
        let mut failure = String::new();
        for _ in 0..STARTS_MAX {
            match Self::launch(free_port(), extra.clone()) {
                Ok(server) => return server,
                Err(reason) => failure = reason,
            }
        }
        panic!("no server started in {STARTS_MAX} attempts, the last said: {failure}");
    }

    /// Where clients connect.
    pub(crate) fn url(&self) -> String {
        let scheme = if self.speaks_tls() { "rediss" } else { "redis" };
        format!("{scheme}://127.0.0.1:{}", self.port)
    }

    /// The port; it stays the same over restarts.
    pub(crate) fn port(&self) -> u16 {
        self.port
    }

    /// The process id, of the newest process.
    pub(crate) fn pid(&self) -> u32 {
        self.child.id()
    }

    /// A folder of this server's own (its working directory), removed on drop.
    pub(crate) fn directory(&self) -> &Path {
        &self.directory
    }

    /// Sends one command over a new plain connection and returns the reply as text: an error
    /// starts with `-`, an array has an element a line, no value is `(nil)`.
    pub(crate) fn command(&self, arguments: &[&str]) -> String {
        request(self.port, arguments)
            .unwrap_or_else(|error| panic!("{arguments:?} on port {}: {error}", self.port))
    }

    /// Freezes the process (SIGSTOP): connections stay open and nothing answers.
    pub(crate) fn stop(&self) {
        self.signal("STOP");
    }

    /// Lets a frozen process go on (SIGCONT).
    pub(crate) fn cont(&self) {
        self.signal("CONT");
    }

    /// Kills the process (SIGKILL) and waits for its end; its memory is lost.
    pub(crate) fn kill(&mut self) {
        if self.exit.is_none() {
            self.child.kill().expect("a child that was not waited for can be killed");
            self.exit = Some(self.child.wait().expect("a killed child can be waited for"));
        }
    }

    /// Kills the process if it runs, and starts an empty one on the same port.
    pub(crate) fn restart(&mut self) {
        self.kill();
        let deadline = Instant::now() + READY_DEADLINE;
        loop {
            self.child = spawn(self.port, &self.directory, &self.extra);
            self.exit = None;
            match self.wait_until_ready() {
                Ok(()) => return,
                Err(reason) if Instant::now() > deadline => panic!("no restart: {reason}"),
                Err(_) => self.kill(),
            }
        }
    }

    fn launch(port: u16, extra: Vec<String>) -> Result<Self, String> {
        let directory =
            std::env::temp_dir().join(format!("tidegate-{}-{port}", std::process::id()));
        fs::create_dir_all(&directory).expect("the temporary folder is writable");
        let child = spawn(port, &directory, &extra);
        let mut server = Self { child, exit: None, port, directory, extra };
        server.wait_until_ready()?;
        Ok(server)
    }

    /// The log line comes first: an answer on the port alone could be another process's.
    fn wait_until_ready(&mut self) -> Result<(), String> {
        let deadline = Instant::now() + READY_DEADLINE;
        while !(self.log().contains(READY_LINE) && self.answers()) {
            self.exit = self.child.try_wait().expect("a child can be asked for its end");
            if let Some(exit) = self.exit {
                return Err(format!("{exit}: {}", self.log()));
            }
            if Instant::now() > deadline {
                return Err(format!("not ready after {READY_DEADLINE:?}: {}", self.log()));
            }
            std::thread::sleep(POLL_GAP);
        }
        Ok(())
    }

    fn log(&self) -> String {
        fs::read_to_string(log_file(&self.directory)).unwrap_or_default()
    }

    /// Whether PING is answered; a refusal for want of a password is an answer too. TLS needs a
    /// client that this file does not have: there the log has the last word.
    fn answers(&self) -> bool {
        self.speaks_tls()
            || request(self.port, &["PING"])
                .is_ok_and(|reply| reply == "PONG" || reply.starts_with("-NO"))
    }

    fn speaks_tls(&self) -> bool {
        speaks_tls(&self.extra)
    }

    /// The shell's `kill`, because the program of that name is missing from small images.
    fn signal(&self, name: &str) {
        let status = Command::new("sh")
            .args(["-c", r#"kill -s "$0" "$1""#, name, &self.pid().to_string()])
            .status()
            .expect("a shell starts");
        assert!(status.success(), "SIG{name} to {} failed: {status}", self.pid());
    }
}

impl Drop for RedisServer {
    fn drop(&mut self) {
        // A panic here, while a failed test unwinds, would hide the test's own message.
        if self.exit.is_none() {
            let _ = self.child.kill();
            let _ = self.child.wait();
        }
        let _ = fs::remove_dir_all(&self.directory);
    }
}

fn spawn(port: u16, directory: &Path, extra: &[String]) -> Child {
    let program = std::env::var_os(SERVER_VARIABLE).unwrap_or_else(|| SERVER_DEFAULT.into());
    let log = File::create(log_file(directory)).expect("the server's folder is writable");
    let plain_port = if speaks_tls(extra) { 0 } else { port };
    Command::new(&program)
        .args(["--port", &plain_port.to_string(), "--bind", "127.0.0.1"])
        .args(["--save", "", "--appendonly", "no", "--daemonize", "no", "--dir"])
        .arg(directory)
        .args(extra.iter().map(|argument| argument.replace(PORT_PLACEHOLDER, &port.to_string())))
        .stdin(Stdio::null())
        .stderr(log.try_clone().expect("an open file can be shared"))
        .stdout(log)
        .spawn()
        .unwrap_or_else(|error| panic!("{}: {error}: is it installed?", program.display()))
}

fn speaks_tls(extra: &[String]) -> bool {
    extra.iter().any(|argument| argument == "--tls-port")
}

fn log_file(directory: &Path) -> PathBuf {
    directory.join("server.log")
}

/// A port that nobody listens on now, and that no other server of this process is given soon.
fn free_port() -> u16 {
    // Test programs that run side by side have numbers side by side, and start far apart: a server that is started again may
    // find its port taken otherwise.
    let first = (u64::from(std::process::id()) * 7919 % u64::from(PORTS_MAX)) as u16;
    for _ in 0..PORTS_MAX {
        let tried = PORTS_TRIED.fetch_add(1, Ordering::Relaxed);
        let offset = (u32::from(first) + u32::from(tried)) % u32::from(PORTS_MAX);
        let port = PORT_FIRST + offset as u16;
        if TcpListener::bind((Ipv4Addr::LOCALHOST, port)).is_ok() {
            return port;
        }
    }
    panic!("no free port from {PORT_FIRST} to {}", PORT_FIRST + PORTS_MAX - 1);
}

fn request(port: u16, arguments: &[&str]) -> io::Result<String> {
    let address = SocketAddr::from((Ipv4Addr::LOCALHOST, port));
    let mut stream = TcpStream::connect_timeout(&address, ANSWER_DEADLINE)?;
    stream.set_read_timeout(Some(ANSWER_DEADLINE))?;
    stream.set_write_timeout(Some(ANSWER_DEADLINE))?;
    stream.write_all(&encode(arguments))?;
    read_reply(&mut BufReader::new(stream))
}

fn encode(arguments: &[&str]) -> Vec<u8> {
    let mut bytes = format!("*{}\r\n", arguments.len()).into_bytes();
    for argument in arguments {
        bytes.extend_from_slice(format!("${}\r\n{argument}\r\n", argument.len()).as_bytes());
    }
    bytes
}

/// Reads one RESP2 reply: RESP3 must be asked for, and nobody asks here.
fn read_reply(reader: &mut impl BufRead) -> io::Result<String> {
    let line = read_line(reader)?;
    let (kind, rest) = line.split_at_checked(1).ok_or_else(|| unreadable(&line))?;
    match kind {
        "+" | ":" => Ok(rest.to_owned()),
        "-" => Ok(line),
        "$" => read_bulk(reader, length(rest)?),
        "*" => read_array(reader, length(rest)?),
        _ => Err(unreadable(&line)),
    }
}

fn read_line(reader: &mut impl BufRead) -> io::Result<String> {
    let mut line = String::new();
    if reader.read_line(&mut line)? == 0 {
        return Err(io::ErrorKind::UnexpectedEof.into());
    }
    Ok(line.trim_end_matches(['\r', '\n']).to_owned())
}

fn read_bulk(reader: &mut impl BufRead, length: Option<usize>) -> io::Result<String> {
    let Some(length) = length else { return Ok("(nil)".to_owned()) };
    let mut bytes = vec![0; length + "\r\n".len()];
    reader.read_exact(&mut bytes)?;
    Ok(String::from_utf8_lossy(&bytes[..length]).into_owned())
}

fn read_array(reader: &mut impl BufRead, length: Option<usize>) -> io::Result<String> {
    let Some(length) = length else { return Ok("(nil)".to_owned()) };
    let elements: io::Result<Vec<String>> = (0..length).map(|_| read_reply(reader)).collect();
    Ok(elements?.join("\n"))
}

/// `None` is the -1 that stands for no value.
fn length(digits: &str) -> io::Result<Option<usize>> {
    if digits == "-1" {
        return Ok(None);
    }
    digits.parse().map(Some).map_err(|_| unreadable(digits))
}

fn unreadable(what: &str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, format!("not a RESP2 reply: {what:?}"))
}
