//! The table `[server]`: where the service that decides for other programs listens, what it answers, and how it ends.

use std::fmt;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::ops::RangeInclusive;
use std::path::PathBuf;
use std::str::FromStr;
use std::time::Duration;

use serde::Deserialize;

use super::check;
use super::fields::{Fields, SERVER};
use super::reading::{HIDDEN, Reading, Setting};
use crate::error::ConfigError;
use crate::limit::Limit;
use crate::quota::Quota;

/// Where the service listens if nobody says where: on this machine alone.
pub const DEFAULT_HTTP: ListenAddress = local(8080);
/// Where it listens for gRPC if nobody says where.
pub const DEFAULT_GRPC: ListenAddress = local(8081);
/// How many connections it has at most, for HTTP and for gRPC each.
pub const DEFAULT_MAX_CONNECTIONS: u32 = 10_000;
/// The fewest and the most of them.
pub const MAX_CONNECTIONS: RangeInclusive<u32> = 1..=1_000_000;
/// How long a connection over HTTP waits for the head of a request.
pub const DEFAULT_HEAD_TIMEOUT: Duration = Duration::from_secs(75);
/// The shortest and the longest head timeout.
pub const HEAD_TIMEOUTS: RangeInclusive<Duration> =
    Duration::from_millis(10)..=Duration::from_secs(3600);
/// How long the body of a request over HTTP may take to come.
pub const DEFAULT_BODY_TIMEOUT: Duration = Duration::from_secs(30);
/// The shortest and the longest body timeout.
pub const BODY_TIMEOUTS: RangeInclusive<Duration> =
    Duration::from_millis(10)..=Duration::from_secs(300);
/// For how long a service that is told to end waits for requests that are under way.
pub const DEFAULT_DRAIN: Duration = Duration::from_secs(10);
/// The longest that it can wait.
pub const DRAIN_MAX: Duration = Duration::from_secs(300);

/// The part of a limit beyond which hits are near it, unless it is set.
pub const DEFAULT_NEAR_LIMIT_RATIO: f64 = 0.8;

/// How many characters a token has.
const TOKEN_CHARS: RangeInclusive<usize> = 16..=512;

const EXAMPLE: &str = "[server] with http = \"127.0.0.1:8080\"";

/// Where a service listens: an address and a port, or a socket in the file system, written as `unix:/run/tidegate.sock`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ListenAddress {
    /// An address and a port.
    Tcp(SocketAddr),
    /// A path.
    Unix(PathBuf),
}

const fn local(port: u16) -> ListenAddress {
    ListenAddress::Tcp(SocketAddr::new(IpAddr::V4(Ipv4Addr::LOCALHOST), port))
}

impl fmt::Display for ListenAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Tcp(address) => address.fmt(f),
            Self::Unix(path) => write!(f, "unix:{}", path.display()),
        }
    }
}

/// A text that is no address.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "must be an address and a port, such as \"127.0.0.1:8080\" or \"[::]:8080\", or \"unix:\" and a path"
)]
pub struct ListenAddressError;

impl FromStr for ListenAddress {
    type Err = ListenAddressError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        match text.strip_prefix("unix:") {
            Some("") => Err(ListenAddressError),
            Some(path) => Ok(Self::Unix(path.into())),
            None => text.parse().map(Self::Tcp).map_err(|_| ListenAddressError),
        }
    }
}

/// The files of TLS, in PEM.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TlsFiles {
    /// The certificate, and those between it and an authority.
    pub cert: PathBuf,
    /// Its private key.
    pub key: PathBuf,
    /// Authorities, of which clients must show a certificate.
    pub client_ca: Option<PathBuf>,
}

/// Where the service listens, and how it ends.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct ServerConfig {
    /// Where it listens for HTTP.
    pub http: ListenAddress,
    /// Where it listens for gRPC: Envoy's rate limit service.
    pub grpc: ListenAddress,
    /// TLS at addresses, for HTTP and gRPC; sockets have none.
    pub tls: Option<TlsFiles>,
    /// How many connections it has at most, for HTTP and for gRPC each. More are closed at once.
    pub max_connections: u32,
    /// How long a connection over HTTP/1 waits for the head of a request, the next one too, and how long any takes to send its first
    /// request.
    pub head_timeout: Duration,
    /// The bearer token of requests that change overrides, reserve tokens or ask about single keys. Without one they get 403.
    pub token: Option<Token>,
    /// How many requests over HTTP each client address may make; health and metrics are not counted.
    pub client_quota: Option<Quota>,
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
    /// The part of a limit beyond which hits are near it, if metrics about domains are to have the names of
    /// envoyproxy/ratelimit too.
    pub near_limit_ratio: Option<Ratio>,
}

/// A part of a whole, 0 to 1.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Ratio(f64);

/// It is never NaN.
impl Eq for Ratio {}

impl Ratio {
    /// As a number.
    pub fn get(self) -> f64 {
        self.0
    }
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
            tls: None,
            max_connections: DEFAULT_MAX_CONNECTIONS,
            head_timeout: DEFAULT_HEAD_TIMEOUT,
            token: None,
            client_quota: None,
            body_timeout: DEFAULT_BODY_TIMEOUT,
            access_log: false,
            drain: DEFAULT_DRAIN,
            unknown_domain: UnknownDomain::default(),
            shadow_domains: false,
            limit_headers: false,
            near_limit_ratio: None,
        }
    }
}

impl ServerConfig {
    /// The first field by which the two differ and that a running service cannot change.
    pub(super) fn fixed_field_that_differs(&self, other: &Self) -> Option<&'static str> {
        let Self {
            http,
            grpc,
            tls,
            max_connections,
            head_timeout,
            client_quota,
            access_log,
            drain,
            near_limit_ratio,
            // These it can change.
            token: _,
            body_timeout: _,
            unknown_domain: _,
            shadow_domains: _,
            limit_headers: _,
        } = self;
        let [own, others] = [tls, &other.tls].map(Option::as_ref);
        let [has_names, had_names] = [self, other].map(|it| it.near_limit_ratio.is_some());
        [
            ("server.http", *http == other.http),
            ("server.grpc", *grpc == other.grpc),
            ("server.tls_cert", own.map(|it| &it.cert) == others.map(|it| &it.cert)),
            ("server.tls_key", own.map(|it| &it.key) == others.map(|it| &it.key)),
            // What is left of them.
            ("server.client_ca", *tls == other.tls),
            ("server.max_connections", *max_connections == other.max_connections),
            ("server.head_timeout", *head_timeout == other.head_timeout),
            ("server.client_quota", *client_quota == other.client_quota),
            ("server.access_log", *access_log == other.access_log),
            ("server.drain", *drain == other.drain),
            ("server.ratelimit_metrics", has_names == had_names),
            ("server.near_limit_ratio", *near_limit_ratio == other.near_limit_ratio),
        ]
        .into_iter()
        .find(|(_, is_same)| !is_same)
        .map(|(field, _)| field)
    }
}

/// Reads the table `[server]` of the whole.
pub(super) fn read(root: &Fields<'_>, reading: &mut Reading) -> ServerConfig {
    let mut server = ServerConfig::default();
    let Some(fields) = root.table("server", EXAMPLE, reading) else { return server };
    fields.refuse_unknown(SERVER, reading);
    address("http", &mut server.http, &fields, reading);
    address("grpc", &mut server.grpc, &fields, reading);
    server.tls = tls(&fields, reading);
    let most = fields.whole("max_connections", reading);
    within(most, MAX_CONNECTIONS, "must be 1 to 1000000", &mut server.max_connections, reading);
    let timeout = fields.duration("head_timeout", reading);
    within(timeout, HEAD_TIMEOUTS, "must be 10ms to 1h", &mut server.head_timeout, reading);
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
    server.client_quota = client_quota(&fields, reading);
    let timeout = fields.duration("body_timeout", reading);
    within(timeout, BODY_TIMEOUTS, "must be 10ms to 5min", &mut server.body_timeout, reading);
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
    server.near_limit_ratio = near_limit_ratio(&fields, reading);
    let drain = fields.duration("drain", reading);
    let drains = Duration::ZERO..=DRAIN_MAX;
    within(drain, drains, "must be at most 5min", &mut server.drain, reading);
    server
}

/// The limit of the service's own clients, called so in metrics: each process keeps it alone.
pub(crate) fn client_limit(quota: Quota) -> Limit {
    Limit::new("clients", quota).local()
}

/// A quota that this limit can have.
fn client_quota(fields: &Fields<'_>, reading: &mut Reading) -> Option<Quota> {
    let Setting { value, place } = fields.text("client_quota", reading)?;
    match value.parse::<Quota>() {
        Ok(quota) => {
            for (_, reason) in check::faults(&mut client_limit(quota), &mut true, &check::empty()) {
                reading.mistake(&place, check::remedy(&reason));
            }
            Some(quota)
        }
        Err(ConfigError::Quota { reason, .. }) => {
            reading.mistake(&place, reason);
            None
        }
        Err(error) => {
            reading.mistake(&place, error.to_string());
            None
        }
    }
}

/// That of the metrics by other names, if they are wanted.
fn near_limit_ratio(fields: &Fields<'_>, reading: &mut Reading) -> Option<Ratio> {
    let is_wanted = fields.flag("ratelimit_metrics", reading).is_some_and(|flag| flag.value);
    let ratio = fields.decimal("near_limit_ratio", reading);
    let place = fields.place("near_limit_ratio");
    let ratio = ratio.map_or(DEFAULT_NEAR_LIMIT_RATIO, |ratio| ratio.value);
    if !(0.0..=1.0).contains(&ratio) {
        reading.mistake(&place, "must be 0 to 1");
    } else if !is_wanted && fields.has("near_limit_ratio") {
        reading.mistake(&place, "has no effect without ratelimit_metrics = true: add it");
    }
    is_wanted.then_some(Ratio(ratio))
}

/// A value that is in a range.
fn within<T: PartialOrd>(
    setting: Option<Setting<T>>,
    range: RangeInclusive<T>,
    must: &str,
    value: &mut T,
    reading: &mut Reading,
) {
    let Some(setting) = setting else { return };
    if !range.contains(&setting.value) {
        reading.mistake(&setting.place, must);
    }
    *value = setting.value;
}

/// An address, which is the default before.
fn address(name: &str, address: &mut ListenAddress, fields: &Fields<'_>, reading: &mut Reading) {
    let Some(text) = fields.text(name, reading) else { return };
    match text.value.parse() {
        Ok(ListenAddress::Unix(path)) => {
            *address = ListenAddress::Unix(reading.folder.join(path));
        }
        Ok(parsed) => *address = parsed,
        Err(error) => reading.mistake(&text.place, ListenAddressError::to_string(&error)),
    }
}

/// The files of TLS: the certificate has a key, and that of clients is asked for where there is TLS.
fn tls(fields: &Fields<'_>, reading: &mut Reading) -> Option<TlsFiles> {
    let [cert, key, client_ca] =
        ["tls_cert", "tls_key", "client_ca"].map(|field| file(field, fields, reading));
    match (cert, key) {
        (Some(cert), Some(key)) => return Some(TlsFiles { cert, key, client_ca }),
        (Some(_), None) if !fields.has("tls_key") => {
            reading.mistake(&fields.place("tls_cert"), "needs tls_key too: add it");
        }
        (None, Some(_)) if !fields.has("tls_cert") => {
            reading.mistake(&fields.place("tls_key"), "needs tls_cert too: add it");
        }
        (None, None) if client_ca.is_some() => {
            let remedy = "has no effect without tls_cert and tls_key: add them, or remove it";
            reading.mistake(&fields.place("client_ca"), remedy);
        }
        _ => {}
    }
    None
}

/// A file, whose path begins at the configuration's folder. Whoever serves reads it.
fn file(field: &str, fields: &Fields<'_>, reading: &mut Reading) -> Option<PathBuf> {
    let text = fields.text(field, reading)?;
    Some(reading.folder.join(text.value))
}
