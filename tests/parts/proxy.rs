//! A wire that breaks on request: a TCP proxy that knows where a RESP request and its reply end.
//!
//! Each script call (EVAL or EVALSHA) gets a number and a [`Fault`]; every other request passes.
//! Requests and replies run in two tasks, so that what a client sent before it left still
//! reaches the server, as on a real wire. A reply belongs to the oldest request without one:
//! commands that break this (SUBSCRIBE, CLIENT REPLY OFF) cannot be proxied.

#![allow(
    clippy::disallowed_methods,
    reason = "the proxy is a part of the outside world: it owns tasks and real delays"
)]

use std::io;
use std::net::{Ipv4Addr, SocketAddr};
use std::pin::pin;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use tokio::io::{AsyncBufRead, AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufReader};
use tokio::net::tcp::{OwnedReadHalf, OwnedWriteHalf};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{mpsc, watch};
use tokio::task::{JoinHandle, JoinSet};

/// The longest request or reply that the proxy carries; a longer one ends the connection.
const FRAME_BYTES_MAX: usize = 64 << 20;
/// Unanswered requests on one connection before the proxy stops reading new ones.
const UNANSWERED_MAX: usize = 10_000;

/// What happens to one script call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Fault {
    /// Nothing.
    Pass,
    /// The server executes it; then the client's connection closes without the reply.
    CutReply,
    /// The server executes it; the connection stays open and mute from then on. (To lose one
    /// reply and pass the next would hand the client another request's answer.)
    DropReply,
    /// The server executes it twice; the client gets the first reply.
    Duplicate,
    /// The server executes it at once; the reply is held back for so long.
    Delay(Duration),
    /// The request is held back for so long, and reaches the server even if the client has
    /// left by then.
    LateRequest(Duration),
}

/// Script calls by what became of them, counted when it has happened.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Counts {
    /// Answered as if there were no proxy.
    pub(crate) passed: u64,
    /// Executed, and the connection cut.
    pub(crate) cut: u64,
    /// Executed, and the reply dropped; the calls after it on a mute connection included.
    pub(crate) dropped: u64,
    /// Executed twice, and answered once.
    pub(crate) duplicated: u64,
    /// Answered, with the request or the reply held back.
    pub(crate) delayed: u64,
}

type Policy = Arc<dyn Fn(u64) -> Fault + Send + Sync>;

/// A proxy in front of one server; it ends with the value.
pub(crate) struct Proxy {
    port: u16,
    state: Arc<State>,
    refusing: watch::Sender<bool>,
    listening: JoinHandle<()>,
}

/// What the proxy and its connections share.
struct State {
    upstream_port: u16,
    policy: Mutex<Policy>,
    calls: AtomicU64,
    counts: Mutex<Counts>,
}

/// How one request is to be answered.
#[derive(Clone, Copy)]
enum Expected {
    /// Not a script call: passed and not counted.
    Other,
    Call(Fault),
}

impl Proxy {
    /// Listens on a free port of 127.0.0.1 and passes everything.
    pub(crate) async fn start(upstream_port: u16) -> Self {
        Self::start_with(upstream_port, |_| Fault::Pass).await
    }

    /// Listens, and asks `policy` what to do with the script call of each index, from 0.
    pub(crate) async fn start_with(
        upstream_port: u16,
        policy: impl Fn(u64) -> Fault + Send + Sync + 'static,
    ) -> Self {
        let listener =
            TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await.expect("the system has a free port");
        let port = listener.local_addr().expect("a bound socket has an address").port();
        let state = Arc::new(State {
            upstream_port,
            policy: Mutex::new(Arc::new(policy)),
            calls: AtomicU64::new(0),
            counts: Mutex::default(),
        });
        let (refusing, refused) = watch::channel(false);
        let listening = tokio::spawn(accept(listener, Arc::clone(&state), refused));
        Self { port, state, refusing, listening }
    }

    /// Where clients connect.
    pub(crate) fn url(&self) -> String {
        format!("redis://127.0.0.1:{}", self.port)
    }

    /// The proxy's own port.
    pub(crate) fn port(&self) -> u16 {
        self.port
    }

    /// Replaces the policy; the numbering of the calls goes on.
    pub(crate) fn set_policy(&self, policy: impl Fn(u64) -> Fault + Send + Sync + 'static) {
        *self.state.policy.lock().unwrap_or_else(PoisonError::into_inner) = Arc::new(policy);
    }

    /// While true, open connections are cut and new ones are closed before a byte.
    pub(crate) fn set_refusing(&self, refusing: bool) {
        self.refusing.send_replace(refusing);
    }

    /// Script calls that reached the proxy.
    pub(crate) fn calls(&self) -> u64 {
        self.state.calls.load(Ordering::Relaxed)
    }

    /// What became of the script calls so far.
    pub(crate) fn counts(&self) -> Counts {
        *self.state.counts.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Proxy {
    fn drop(&mut self) {
        // The task owns the connections' tasks: all end with it.
        self.listening.abort();
    }
}

impl State {
    fn expect(&self, request: &[u8]) -> Expected {
        if !is_script_call(request) {
            return Expected::Other;
        }
        let index = self.calls.fetch_add(1, Ordering::Relaxed);
        let policy = Arc::clone(&self.policy.lock().unwrap_or_else(PoisonError::into_inner));
        Expected::Call(policy(index))
    }

    fn count(&self, fault: Fault) {
        let mut counts = self.counts.lock().unwrap_or_else(PoisonError::into_inner);
        let count = match fault {
            Fault::Pass => &mut counts.passed,
            Fault::CutReply => &mut counts.cut,
            Fault::DropReply => &mut counts.dropped,
            Fault::Duplicate => &mut counts.duplicated,
            Fault::Delay(_) | Fault::LateRequest(_) => &mut counts.delayed,
        };
        *count += 1;
    }
}

async fn accept(listener: TcpListener, state: Arc<State>, refused: watch::Receiver<bool>) {
    let mut connections = JoinSet::new();
    loop {
        tokio::select! {
            accepted = listener.accept() => if let Ok((client, _)) = accepted {
                connections.spawn(connect(client, Arc::clone(&state), refused.clone()));
            },
            Some(_) = connections.join_next() => {}
        }
    }
}

/// Carries one connection until one side ends it or the proxy refuses.
async fn connect(client: TcpStream, state: Arc<State>, mut refused: watch::Receiver<bool>) {
    tokio::select! {
        biased;
        _ = refused.wait_for(|&refused| refused) => {}
        // Whatever breaks, the client sees a closed connection: that is the report.
        _ = carry(client, state) => {}
    }
}

async fn carry(client: TcpStream, state: Arc<State>) -> io::Result<()> {
    let upstream = SocketAddr::from((Ipv4Addr::LOCALHOST, state.upstream_port));
    let server = TcpStream::connect(upstream).await?;
    client.set_nodelay(true)?;
    server.set_nodelay(true)?;
    let (client_reads, client_writes) = client.into_split();
    let (server_reads, server_writes) = server.into_split();
    let (expect, expected) = mpsc::channel(UNANSWERED_MAX);
    let requests = pump_requests(client_reads, server_writes, expect, Arc::clone(&state));
    let mut replies = pin!(pump_replies(server_reads, client_writes, expected, &state));
    tokio::select! {
        biased;
        done = &mut replies => done,
        // The client has sent its last: what it sent is still executed and answered.
        done = requests => done.and(replies.await),
    }
}

async fn pump_requests(
    client: OwnedReadHalf,
    mut server: OwnedWriteHalf,
    expect: mpsc::Sender<Expected>,
    state: Arc<State>,
) -> io::Result<()> {
    let mut client = BufReader::new(client);
    while let Some(request) = read_frame(&mut client).await? {
        let expected = state.expect(&request);
        if let Expected::Call(Fault::LateRequest(delay)) = expected {
            tokio::time::sleep(delay).await;
        }
        if expect.send(expected).await.is_err() {
            break;
        }
        server.write_all(&request).await?;
        if let Expected::Call(Fault::Duplicate) = expected {
            server.write_all(&request).await?;
        }
    }
    Ok(())
}

async fn pump_replies(
    server: OwnedReadHalf,
    mut client: OwnedWriteHalf,
    mut expected: mpsc::Receiver<Expected>,
    state: &State,
) -> io::Result<()> {
    let mut server = BufReader::new(server);
    let mut mute = false;
    while let Some(expected) = expected.recv().await {
        let reply = read_reply(&mut server, &mut client).await?;
        match expected {
            Expected::Other if mute => {}
            Expected::Other => client.write_all(&reply).await?,
            Expected::Call(Fault::CutReply) if !mute => {
                drop(client);
                state.count(Fault::CutReply);
                return Ok(());
            }
            Expected::Call(fault) => {
                if fault == Fault::Duplicate {
                    read_reply(&mut server, &mut client).await?;
                }
                mute |= fault == Fault::DropReply;
                answer(&mut client, &reply, if mute { Fault::DropReply } else { fault }).await?;
                state.count(if mute { Fault::DropReply } else { fault });
            }
        }
    }
    Ok(())
}

async fn answer(client: &mut OwnedWriteHalf, reply: &[u8], fault: Fault) -> io::Result<()> {
    match fault {
        Fault::DropReply | Fault::CutReply => return Ok(()),
        Fault::Delay(delay) => tokio::time::sleep(delay).await,
        Fault::Pass | Fault::Duplicate | Fault::LateRequest(_) => {}
    }
    client.write_all(reply).await
}

/// The next reply; RESP3's push messages, which answer nobody, go through on the way.
async fn read_reply(
    server: &mut BufReader<OwnedReadHalf>,
    client: &mut OwnedWriteHalf,
) -> io::Result<Vec<u8>> {
    loop {
        let frame = read_frame(server).await?.ok_or(io::ErrorKind::UnexpectedEof)?;
        if frame.first() != Some(&b'>') {
            return Ok(frame);
        }
        client.write_all(&frame).await?;
    }
}

/// The bytes of one whole request or reply, of RESP2 or RESP3; `None` at a clean end.
async fn read_frame(reader: &mut (impl AsyncBufRead + Unpin)) -> io::Result<Option<Vec<u8>>> {
    let mut frame = Vec::new();
    let mut values_left = 1;
    while values_left > 0 {
        let start = frame.len();
        if reader.read_until(b'\n', &mut frame).await? == 0 {
            return if start == 0 { Ok(None) } else { Err(io::ErrorKind::UnexpectedEof.into()) };
        }
        let head = Head::parse(&frame[start..])?;
        values_left = values_left - 1 + head.values;
        let end = frame.len() + head.bytes;
        if end.max(values_left) > FRAME_BYTES_MAX {
            return Err(io::Error::new(io::ErrorKind::InvalidData, "a frame without end"));
        }
        let body = frame.len();
        frame.resize(end, 0);
        reader.read_exact(&mut frame[body..]).await?;
    }
    Ok(Some(frame))
}

/// What follows the first line of a value.
#[derive(Default)]
struct Head {
    /// Bytes of its body, with the line end.
    bytes: usize,
    /// Values inside it.
    values: usize,
}

impl Head {
    /// Lines of an unknown kind stand alone: simple values, and commands typed inline.
    fn parse(line: &[u8]) -> io::Result<Self> {
        let Some((kind, rest)) = line.split_first() else { return Ok(Self::default()) };
        Ok(match kind {
            b'$' | b'=' | b'!' => {
                let body = length(rest)?.map_or(0, |bytes| bytes + b"\r\n".len());
                Self { bytes: body, values: 0 }
            }
            b'*' | b'~' | b'>' => Self { bytes: 0, values: length(rest)?.unwrap_or(0) },
            b'%' => Self { bytes: 0, values: 2 * length(rest)?.unwrap_or(0) },
            // An attribute is pairs and then the value that they describe.
            b'|' => Self { bytes: 0, values: 2 * length(rest)?.unwrap_or(0) + 1 },
            _ => Self::default(),
        })
    }
}

/// `None` is the -1 that stands for no value.
fn length(digits: &[u8]) -> io::Result<Option<usize>> {
    let text = std::str::from_utf8(digits).map_or("", str::trim_end);
    if text == "-1" {
        return Ok(None);
    }
    match text.parse() {
        Ok(length) if length <= FRAME_BYTES_MAX => Ok(Some(length)),
        _ => Err(io::Error::new(io::ErrorKind::InvalidData, format!("length {text:?}"))),
    }
}

/// Whether the request's first word is EVAL or EVALSHA.
fn is_script_call(request: &[u8]) -> bool {
    let word = request.split(|&byte| byte == b'\n').nth(2).unwrap_or_default();
    let word = word.trim_ascii_end();
    word.eq_ignore_ascii_case(b"EVAL") || word.eq_ignore_ascii_case(b"EVALSHA")
}
