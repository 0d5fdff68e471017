//! What limits see of a request and of its response.

use std::net::{IpAddr, SocketAddr};

use http::request::Parts;
use http::{Extensions, HeaderMap, Method, Request, Response, StatusCode, Uri};

/// The address that a request's connection comes from. Insert it into the request's extensions where the
/// framework does not: axum's `ConnectInfo<SocketAddr>` is read with the feature `axum`, and the address of a
/// tonic connection, with TLS or without, with the feature `tonic`.
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
    /// What other layers and the server attached to the request.
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

    /// The address that the connection comes from, if it is known. [`Peer`] comes first, then what the framework
    /// knows.
    ///
    /// Cost: a TLS connection of tonic costs a copy of the request's extensions.
    pub fn peer(&self) -> Option<IpAddr> {
        let peer = self.extensions.get::<Peer>().map(|peer| peer.0.ip());
        #[cfg(feature = "axum")]
        let peer = peer.or_else(|| {
            self.extensions.get::<axum::extract::ConnectInfo<SocketAddr>>().map(|info| info.0.ip())
        });
        #[cfg(feature = "tonic")]
        let peer = peer.or_else(|| self.tonic_peer());
        peer
    }

    #[cfg(feature = "tonic")]
    fn tonic_peer(&self) -> Option<IpAddr> {
        use tonic::metadata::MetadataMap;
        use tonic::transport::server::TcpConnectInfo;

        if let Some(connection) = self.extensions.get::<TcpConnectInfo>() {
            return connection.remote_addr().map(|address| address.ip());
        }
        // The type of a TLS connection's address exists only with tonic's TLS features, which are the user's to
        // choose. tonic itself knows whether it does.
        let extensions = self.extensions.clone();
        let request = tonic::Request::from_parts(MetadataMap::new(), extensions, ());
        request.remote_addr().map(|address| address.ip())
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

/// A response without its body.
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub struct ResponseHead<'a> {
    /// The status.
    pub status: StatusCode,
    /// The header fields. Those of the limits are not there yet.
    pub headers: &'a HeaderMap,
    /// What the service attached to the response.
    pub extensions: &'a Extensions,
}

impl<'a> ResponseHead<'a> {
    /// The head of a response.
    pub fn of<B>(response: &'a Response<B>) -> Self {
        Self {
            status: response.status(),
            headers: response.headers(),
            extensions: response.extensions(),
        }
    }
}
