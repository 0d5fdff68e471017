//! The table `[server]`: where the service that decides for other programs listens, what it answers, and how it ends.

use std::fmt;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::ops::RangeInclusive;
use std::time::Duration;

use serde::Deserialize;

use super::fields::{Fields, SERVER};
use super::reading::{HIDDEN, Reading};

/// Where the service listens if nobody says where: on this machine alone.
pub const DEFAULT_HTTP: SocketAddr = SocketAddr::new(IpAddr::V4(Ipv4Addr::LOCALHOST), 8080);
/// Where it listens for gRPC if nobody says where.
pub const DEFAULT_GRPC: SocketAddr = SocketAddr::new(IpAddr::V4(Ipv4Addr::LOCALHOST), 8081);
/// How long the body of a request over HTTP may take to come.
pub const DEFAULT_BODY_TIMEOUT: Duration = Duration::from_secs(30);
/// The shortest and the longest body timeout.
pub const BODY_TIMEOUTS: RangeInclusive<Duration> =
    Duration::from_millis(10)..=Duration::from_secs(300);
/// For how long a service that is told to end waits for requests that are under way.
pub const DEFAULT_DRAIN: Duration = Duration::from_secs(10);
/// The longest that it can wait.
pub const DRAIN_MAX: Duration = Duration::from_secs(300);

/// How many characters a token has.
const TOKEN_CHARS: RangeInclusive<usize> = 16..=512;

const EXAMPLE: &str = "[server] with http = \"127.0.0.1:8080\"";

/// Where the service listens, and how it ends.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct ServerConfig {
    /// Where it listens for HTTP.
    pub http: SocketAddr,
    /// Where it listens for gRPC: Envoy's rate limit service.
    pub grpc: SocketAddr,
    /// The bearer token of requests that change overrides or ask about single keys. Without one they get 403.
    pub token: Option<Token>,
    /// How long the body of a request over HTTP may take to come.
    pub body_timeout: Duration,
    /// Whether each request over HTTP is logged.
    pub access_log: bool,
    /// For how long it waits for requests that are under way when it is told to end.
    pub drain: Duration,
    /// What is answered about a domain that is not configured.
    pub unknown_domain: UnknownDomain,
    /// Whether the limits of domains deny nothing: they decide and count, and statuses say what they decided.
    pub shadow_domains: bool,
    /// Whether answers about domains have header fields for the response.
    pub limit_headers: bool,
}

/// A bearer token. `Debug` hides it.
#[derive(Clone, PartialEq, Eq)]
pub struct Token(String);

impl fmt::Debug for Token {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Token").field(&HIDDEN).finish()
    }
}

impl Token {
    /// Whether the two are equal, in constant time for tokens of one length.
    #[cfg(feature = "server")]
    pub(crate) fn is(&self, other: &str) -> bool {
        subtle::ConstantTimeEq::ct_eq(self.0.as_bytes(), other.as_bytes()).into()
    }
}

/// What is answered about a domain that is not configured.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum UnknownDomain {
    /// Its requests go on.
    #[default]
    Allow,
    /// Its requests are denied.
    Deny,
}

impl Default for ServerConfig {
    fn default() -> Self {
        Self {
            http: DEFAULT_HTTP,
            grpc: DEFAULT_GRPC,
            token: None,
            body_timeout: DEFAULT_BODY_TIMEOUT,
            access_log: false,
            drain: DEFAULT_DRAIN,
            unknown_domain: UnknownDomain::default(),
            shadow_domains: false,
            limit_headers: false,
        }
    }
}

/// Reads the table `[server]` of the whole.
pub(super) fn read(root: &Fields<'_>, reading: &mut Reading) -> ServerConfig {
    let mut server = ServerConfig::default();
    let Some(fields) = root.table("server", EXAMPLE, reading) else { return server };
    fields.refuse_unknown(SERVER, reading);
    address("http", &mut server.http, &fields, reading);
    address("grpc", &mut server.grpc, &fields, reading);
    if let Some(token) = fields.secret_text("token", reading) {
        let has_valid_length = TOKEN_CHARS.contains(&token.value.len());
        if !has_valid_length || !token.value.bytes().all(|byte| byte.is_ascii_graphic()) {
            reading.mistake(
                &token.place,
                "must be 16 to 512 printable ASCII characters without spaces",
            );
        }
        server.token = Some(Token(token.value));
    }
    if let Some(timeout) = fields.duration("body_timeout", reading) {
        if !BODY_TIMEOUTS.contains(&timeout.value) {
            reading.mistake(&timeout.place, "must be 10ms to 5min");
        }
        server.body_timeout = timeout.value;
    }
    if let Some(log) = fields.flag("access_log", reading) {
        server.access_log = log.value;
    }
    if let Some(unknown) = fields.word("unknown_domain", reading) {
        server.unknown_domain = unknown.value;
    }
    if let Some(shadow) = fields.flag("shadow_domains", reading) {
        server.shadow_domains = shadow.value;
    }
    if let Some(headers) = fields.flag("limit_headers", reading) {
        server.limit_headers = headers.value;
    }
    if let Some(drain) = fields.duration("drain", reading) {
        if drain.value > DRAIN_MAX {
            reading.mistake(&drain.place, "must be at most 5min");
        }
        server.drain = drain.value;
    }
    server
}

/// An address, which is the default before.
fn address(name: &str, address: &mut SocketAddr, fields: &Fields<'_>, reading: &mut Reading) {
    let Some(text) = fields.text(name, reading) else { return };
    if let Ok(parsed) = text.value.parse() {
        *address = parsed;
        return;
    }
    let port = address.port();
    let remedy =
        format!("must be an address and a port, such as \"127.0.0.1:{port}\" or \"[::]:{port}\"");
    reading.mistake(&text.place, remedy);
}
