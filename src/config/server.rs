//! The table `[server]`: where the service that decides for other programs listens, and how it ends.

use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::time::Duration;

use super::fields::{Fields, SERVER};
use super::reading::Reading;

/// Where the service listens if nobody says where: on this machine alone.
pub const DEFAULT_HTTP: SocketAddr = SocketAddr::new(IpAddr::V4(Ipv4Addr::LOCALHOST), 8080);
/// For how long a service that is told to end waits for requests that are under way.
pub const DEFAULT_DRAIN: Duration = Duration::from_secs(10);
/// The longest that it can wait.
pub const DRAIN_MAX: Duration = Duration::from_secs(300);

const EXAMPLE: &str = "[server] with http = \"127.0.0.1:8080\"";

/// Where the service listens, and how it ends.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct ServerConfig {
    /// Where it listens for HTTP.
    pub http: SocketAddr,
    /// For how long it waits for requests that are under way when it is told to end.
    pub drain: Duration,
}

impl Default for ServerConfig {
    fn default() -> Self {
        Self { http: DEFAULT_HTTP, drain: DEFAULT_DRAIN }
    }
}

/// Reads the table `[server]` of the whole.
pub(super) fn read(root: &Fields<'_>, reading: &mut Reading) -> ServerConfig {
    let mut server = ServerConfig::default();
    let Some(fields) = root.table("server", EXAMPLE, reading) else { return server };
    fields.refuse_unknown(SERVER, reading);
    if let Some(http) = fields.text("http", reading) {
        match http.value.parse() {
            Ok(address) => server.http = address,
            Err(_) => reading.mistake(
                &http.place,
                "must be an address and a port, such as \"127.0.0.1:8080\" or \"[::]:8080\"",
            ),
        }
    }
    if let Some(drain) = fields.duration("drain", reading) {
        if drain.value > DRAIN_MAX {
            reading.mistake(&drain.place, "must be at most 5min");
        }
        server.drain = drain.value;
    }
    server
}
