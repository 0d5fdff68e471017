//! A TCP proxy in front of one Redis server that changes the text of the scripts it carries.
//!
//! Clients behind it send the shipped script and the server runs what the proxy makes of it: an
//! earlier edition, or the same script with another clock. Everything else passes unchanged.

#![allow(dead_code, reason = "each test file uses some of the functions only")]
#![allow(
    clippy::disallowed_methods,
    reason = "the proxy is a part of the outside world: it owns its threads"
)]

use std::collections::HashMap;
use std::io::{self, BufRead, BufReader, Write};
use std::net::{Ipv4Addr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

/// The longest word of a request that the proxy carries.
const WORD_BYTES_MAX: usize = 64 << 20;
/// No script has this hash: the server answers NOSCRIPT, and the client sends the text.
const NO_SCRIPT: &[u8] = b"0000000000000000000000000000000000000000";

/// Accepts connections until the process ends: a test's own process is short.
pub(crate) struct ScriptProxy {
    port: u16,
    state: Arc<State>,
}

struct State {
    upstream_port: u16,
    change: Box<dyn Fn(&str) -> String + Send + Sync>,
    /// By the hash that clients call a script by: the one by which the server knows the changed script.
    hashes: Mutex<HashMap<Vec<u8>, Vec<u8>>>,
    changed: AtomicU64,
}

impl ScriptProxy {
    /// Listens on a free port of 127.0.0.1; `change` turns the text of a script into another.
    pub(crate) fn start(
        upstream_port: u16,
        change: impl Fn(&str) -> String + Send + Sync + 'static,
    ) -> io::Result<Self> {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?;
        let port = listener.local_addr()?.port();
        let state = Arc::new(State {
            upstream_port,
            change: Box::new(change),
            hashes: Mutex::default(),
            changed: AtomicU64::new(0),
        });
        let shared = state.clone();
        std::thread::spawn(move || {
            for client in listener.incoming().flatten() {
                let state = shared.clone();
                // A connection that fails ends, as on any wire.
                std::thread::spawn(move || serve(&client, &state));
            }
        });
        Ok(Self { port, state })
    }

    /// Where clients connect.
    pub(crate) fn url(&self) -> String {
        format!("redis://127.0.0.1:{}", self.port)
    }

    /// Calls that ran the changed script.
    pub(crate) fn changed(&self) -> u64 {
        self.state.changed.load(Ordering::Relaxed)
    }
}

fn serve(client: &TcpStream, state: &State) -> io::Result<()> {
    let server = TcpStream::connect((Ipv4Addr::LOCALHOST, state.upstream_port))?;
    client.set_nodelay(true)?;
    server.set_nodelay(true)?;
    let (mut replies, mut answered) = (server.try_clone()?, client.try_clone()?);
    std::thread::spawn(move || {
        let _ = io::copy(&mut replies, &mut answered);
        let _ = answered.shutdown(std::net::Shutdown::Both);
    });
    let mut requests = BufReader::new(client.try_clone()?);
    let result = carry(&mut requests, &mut &server, state);
    let _ = server.shutdown(std::net::Shutdown::Both);
    result
}

/// Carries requests until the client leaves.
fn carry(client: &mut impl BufRead, server: &mut impl Write, state: &State) -> io::Result<()> {
    while let Some(mut words) = read_request(client)? {
        if let [name, script, ..] = words.as_mut_slice() {
            if name.eq_ignore_ascii_case(b"EVAL") {
                *script = state.change(script)?;
            } else if name.eq_ignore_ascii_case(b"EVALSHA") {
                *script = state.known(script).unwrap_or_else(|| NO_SCRIPT.to_vec());
            }
        }
        server.write_all(&encode(&words))?;
    }
    Ok(())
}

impl State {
    fn known(&self, hash: &[u8]) -> Option<Vec<u8>> {
        let hashes = self.hashes.lock().unwrap_or_else(PoisonError::into_inner);
        let changed = hashes.get(&hash.to_ascii_lowercase()).cloned();
        self.changed.fetch_add(u64::from(changed.is_some()), Ordering::Relaxed);
        changed
    }

    /// The changed script; asks the server for both hashes, and calls it by its own from then on.
    fn change(&self, script: &[u8]) -> io::Result<Vec<u8>> {
        let changed = (self.change)(&String::from_utf8_lossy(script)).into_bytes();
        let (hash, hash_of_changed) = (self.load(script)?, self.load(&changed)?);
        let mut hashes = self.hashes.lock().unwrap_or_else(PoisonError::into_inner);
        hashes.insert(hash, hash_of_changed);
        Ok(changed)
    }

    fn load(&self, script: &[u8]) -> io::Result<Vec<u8>> {
        let mut server = TcpStream::connect((Ipv4Addr::LOCALHOST, self.upstream_port))?;
        let load = [b"SCRIPT".to_vec(), b"LOAD".to_vec(), script.to_vec()];
        server.write_all(&encode(&load))?;
        let mut reader = BufReader::new(server);
        let (mut head, mut hash) = (String::new(), String::new());
        reader.read_line(&mut head)?;
        if !head.starts_with('$') {
            return Err(io::Error::other(format!("a script does not load: {head}")));
        }
        reader.read_line(&mut hash)?;
        Ok(hash.trim_end().as_bytes().to_vec())
    }
}

fn encode(words: &[Vec<u8>]) -> Vec<u8> {
    let mut bytes = format!("*{}\r\n", words.len()).into_bytes();
    for word in words {
        bytes.extend_from_slice(format!("${}\r\n", word.len()).as_bytes());
        bytes.extend_from_slice(word);
        bytes.extend_from_slice(b"\r\n");
    }
    bytes
}

/// One request as clients send it, an array of strings; `None` at a clean end.
fn read_request(reader: &mut impl BufRead) -> io::Result<Option<Vec<Vec<u8>>>> {
    let mut line = String::new();
    if reader.read_line(&mut line)? == 0 {
        return Ok(None);
    }
    let count = number(&line, '*')?;
    let mut words = Vec::new();
    for _ in 0..count {
        line.clear();
        reader.read_line(&mut line)?;
        let mut word = vec![0; number(&line, '$')? + b"\r\n".len()];
        reader.read_exact(&mut word)?;
        word.truncate(word.len() - b"\r\n".len());
        words.push(word);
    }
    Ok(Some(words))
}

fn number(line: &str, kind: char) -> io::Result<usize> {
    let number = line.strip_prefix(kind).and_then(|digits| digits.trim_end().parse().ok());
    let number = number.filter(|&number| number <= WORD_BYTES_MAX);
    number.ok_or_else(|| {
        io::Error::new(io::ErrorKind::InvalidData, format!("not a request: {line:?}"))
    })
}
