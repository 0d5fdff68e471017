//! Which requests a limit is asked about, by which key, and at what cost.

use std::fmt;
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::time::Duration;

use http::request::Parts;
use http::{Extensions, HeaderMap, HeaderName, Method, Request, StatusCode, Uri};

use super::client_ip::ClientIp;
use crate::key::KEY_BYTES_MAX;
use crate::limiter::ActiveLimit;

/// Whom the request's connection is from: put it into a request's extensions where the framework does
/// not (axum's own is found with the feature `axum`, tonic's of a connection without TLS with `tonic`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Peer(pub SocketAddr);

/// A request without its body.
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub struct Head<'a> {
    /// The method.
    pub method: &'a Method,
    /// The target.
    pub uri: &'a Uri,
    /// The header fields.
    pub headers: &'a HeaderMap,
    /// What other layers left.
    pub extensions: &'a Extensions,
}

impl<'a> Head<'a> {
    /// The head of a request.
    pub fn of<B>(request: &'a Request<B>) -> Self {
        Self {
            method: request.method(),
            uri: request.uri(),
            headers: request.headers(),
            extensions: request.extensions(),
        }
    }

    /// The address that the connection is from, if it is known.
    pub fn peer(&self) -> Option<IpAddr> {
        let peer = self.extensions.get::<Peer>().map(|peer| peer.0.ip());
        #[cfg(feature = "axum")]
        let peer = peer.or_else(|| {
            self.extensions.get::<axum::extract::ConnectInfo<SocketAddr>>().map(|info| info.0.ip())
        });
        #[cfg(feature = "tonic")]
        let peer = peer.or_else(|| {
            let connection = self.extensions.get::<tonic::transport::server::TcpConnectInfo>()?;
            connection.remote_addr().map(|address| address.ip())
        });
        peer
    }
}

impl<'a> From<&'a Parts> for Head<'a> {
    fn from(parts: &'a Parts) -> Self {
        Self {
            method: &parts.method,
            uri: &parts.uri,
            headers: &parts.headers,
            extensions: &parts.extensions,
        }
    }
}

/// A key that is being written, in place.
#[derive(Clone)]
pub struct KeyText {
    bytes: [u8; KEY_BYTES_MAX],
    length: usize,
    spoilt: bool,
}

impl KeyText {
    pub(super) fn new() -> Self {
        Self { bytes: [0; KEY_BYTES_MAX], length: 0, spoilt: false }
    }

    /// Adds to the key. One that becomes longer than [`KEY_BYTES_MAX`] counts as missing.
    pub fn push(&mut self, more: impl AsRef<[u8]>) {
        let more = more.as_ref();
        match self.bytes.get_mut(self.length..self.length + more.len()) {
            Some(room) => {
                room.copy_from_slice(more);
                self.length += more.len();
            }
            None => self.spoilt = true,
        }
    }

    /// There is no key, whatever was and will be written.
    fn spoil(&mut self) {
        self.spoilt = true;
    }

    /// Takes back what was written after the first so many bytes.
    fn cut(&mut self, length: usize) {
        self.length = length;
    }

    /// A part after a length that nobody else writes, which keeps `a` and `bc` apart from `ab` and `c`.
    /// Says whether something was written.
    fn push_part(&mut self, part: &KeyOf, head: &Head<'_>) -> bool {
        let start = self.length;
        self.push([0; LENGTH_BYTES]);
        let part_start = self.length;
        (part.0)(head, self);
        let length = ((self.length - part_start) as u16).to_be_bytes();
        if let Some(room) = self.bytes[start..part_start].first_chunk_mut() {
            *room = length;
        }
        self.length > part_start
    }

    /// Whether something was written that is no key.
    pub(super) fn is_spoilt(&self) -> bool {
        self.spoilt
    }

    /// The key, if one was written.
    pub(super) fn get(&self) -> Option<&[u8]> {
        (self.length > 0 && !self.spoilt).then(|| &self.bytes[..self.length])
    }
}

impl fmt::Write for KeyText {
    fn write_str(&mut self, more: &str) -> fmt::Result {
        self.push(more);
        Ok(())
    }
}

impl fmt::Debug for KeyText {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?}", self.get().map(<[u8]>::escape_ascii).map(|text| text.to_string()))
    }
}

/// So long is what says how long a part of a key is.
const LENGTH_BYTES: usize = 2;

type WriteKey = dyn Fn(&Head<'_>, &mut KeyText) + Send + Sync;
type Cost = dyn Fn(&Head<'_>) -> u32 + Send + Sync;

/// What a request is told from others by.
#[derive(Clone)]
pub struct KeyOf(Arc<WriteKey>);

impl KeyOf {
    /// The client's address. The peer's must be known: [`Peer`].
    pub fn client(client: ClientIp) -> Self {
        Self::function(move |head, key| {
            if let Some(peer) = head.peer() {
                key.push(client.key(peer, head.headers));
            }
        })
    }

    /// The value of a header field, such as an API key. Who sends several is taken for one without a key:
    /// which of them others believe is not known. Let only values count that were authenticated, or each
    /// that somebody makes up is a client.
    pub fn header(name: HeaderName) -> Self {
        Self::function(move |head, key| {
            let mut values = head.headers.get_all(&name).iter();
            match (values.next(), values.next()) {
                (Some(value), None) => key.push(value),
                (_, Some(_)) => key.spoil(),
                (None, None) => (),
            }
        })
    }

    /// The route that the request was matched with, such as `/users/{id}`.
    #[cfg(feature = "axum")]
    pub fn route() -> Self {
        Self::function(|head, key| {
            if let Some(path) = head.extensions.get::<axum::extract::MatchedPath>() {
                key.push(path.as_str());
            }
        })
    }

    /// What a function writes. A key of which nothing is written is missing. Functions must not panic: it
    /// is the request's task that would.
    ///
    /// ```
    /// use std::fmt::Write;
    /// use tidegate::http::KeyOf;
    ///
    /// struct Tenant(u32);
    ///
    /// let by_tenant = KeyOf::function(|head, key| {
    ///     if let Some(Tenant(number)) = head.extensions.get() {
    ///         // Nothing fails to be written; what is too long counts as missing.
    ///         let _ = write!(key, "tenant {number}");
    ///     }
    /// });
    /// # let _ = by_tenant;
    /// ```
    pub fn function(write: impl Fn(&Head<'_>, &mut KeyText) + Send + Sync + 'static) -> Self {
        Self(Arc::new(write))
    }

    /// This key and that one together. Where either is missing, both are.
    #[must_use]
    pub fn and(self, other: Self) -> Self {
        Self::function(move |head, key| {
            let start = key.length;
            let written = [&self, &other].map(|part| key.push_part(part, head));
            if written.contains(&false) {
                key.cut(start);
            }
        })
    }

    /// Writes the key anew.
    pub(super) fn read(&self, head: &Head<'_>, key: &mut KeyText) {
        (key.length, key.spoilt) = (0, false);
        (self.0)(head, key);
    }
}

impl fmt::Debug for KeyOf {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("KeyOf")
    }
}

/// What becomes of a request that has no key.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum OnMissingKey {
    /// All of them share one key.
    #[default]
    Shared,
    /// It is answered with this status, which should be one of an error.
    Refused(StatusCode),
    /// This limit is not asked about it, unless it has a key that is none: then it shares one.
    Unlimited,
}

/// The key of requests that have none. A header field has no such byte in it.
pub(super) const NO_KEY: &[u8] = b"\0";

/// One limit of a service.
#[derive(Clone)]
pub struct KeyedLimit {
    pub(super) limit: ActiveLimit,
    key: KeyOf,
    missing: OnMissingKey,
    cost: Option<Arc<Cost>>,
}

/// What a limit is asked about a request.
pub(super) enum Question {
    /// Nothing.
    None,
    /// Whether there are so many tokens.
    Asked(u32),
    /// Nothing: it is answered with this status.
    Refused(StatusCode),
}

impl KeyedLimit {
    /// Each request costs a token of its key's bucket. Requests without a key share one.
    pub fn new(limit: ActiveLimit, key: KeyOf) -> Self {
        Self { limit, key, missing: OnMissingKey::default(), cost: None }
    }

    /// What becomes of requests that have no key, or one that is too long.
    #[must_use]
    pub fn on_missing_key(mut self, missing: OnMissingKey) -> Self {
        self.missing = missing;
        self
    }

    /// What a request costs, in tokens. One that costs 0 is not limited; one that costs more than the burst
    /// or [`COST_MAX`](crate::COST_MAX) is refused with status 400.
    #[must_use]
    pub fn cost(mut self, cost: impl Fn(&Head<'_>) -> u32 + Send + Sync + 'static) -> Self {
        self.cost = Some(Arc::new(cost));
        self
    }

    /// What becomes of a request; `key` is its key.
    pub(super) fn question(&self, head: &Head<'_>, key: &mut KeyText) -> Question {
        self.key.read(head, key);
        match self.missing {
            _ if key.get().is_some() => (),
            OnMissingKey::Refused(status) => return Question::Refused(status),
            // Who writes what is no key does not choose to be unlimited.
            OnMissingKey::Unlimited if !key.is_spoilt() => return Question::None,
            OnMissingKey::Unlimited | OnMissingKey::Shared => (),
        }
        match self.cost.as_ref().map_or(1, |cost| cost(head)) {
            0 => Question::None,
            cost => Question::Asked(cost),
        }
    }

    /// How long until this limit, which is not charged, has what the request costs, if it ever has.
    pub(super) fn wait(&self, head: &Head<'_>) -> Option<Duration> {
        let mut key = KeyText::new();
        let Question::Asked(cost) = self.question(head, &mut key) else { return None };
        let decision = self.limit.check_n(key.get().unwrap_or(NO_KEY), 0).ok()?;
        (u64::from(cost) <= decision.burst()).then(|| decision.left_after(cost))
    }
}

impl fmt::Debug for KeyedLimit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut rule = f.debug_struct("KeyedLimit");
        rule.field("limit", &self.limit.name()).field("missing", &self.missing);
        rule.finish_non_exhaustive()
    }
}
