//! Where the service listens: addresses and sockets, TLS, and what a connection may take.

use std::future::{Ready, ready};
use std::io;
use std::net::{Ipv4Addr, SocketAddr};
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::os::unix::net as unix;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Context, Poll};
use std::time::{Duration, Instant};

use axum::extract::ConnectInfo;
use axum::{Extension, Router};
use axum_server::accept::{Accept, DefaultAcceptor, NoDelayAcceptor};
use axum_server::tls_rustls::{RustlsAcceptor, RustlsConfig};
use axum_server::{Address, Control, Handle, Server};
use rustix::fs::Mode;
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit, umask};
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use rustls::server::{ServerConfig as TlsConfig, WebPkiClientVerifier};
use tidegate::config::{ListenAddress, ServerConfig, TlsFiles};
use tokio::net::{TcpListener, UnixListener, UnixStream};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tower_service::Service;

/// How often a client of HTTP/2 that is silent is asked whether it is still there.
const PING_INTERVAL: Duration = Duration::from_secs(30);
const PING_TIMEOUT: Duration = Duration::from_secs(20);
/// Files that are no connections of clients.
const OTHER_FILES: u64 = 100;
/// How long a socket may take to show that somebody listens at it.
const ASKED_WITHIN: Duration = Duration::from_secs(1);
/// How often the log says that connections could not be accepted.
const WARN_INTERVAL: Duration = Duration::from_secs(60);

/// Why nobody is listened to.
#[derive(Debug, thiserror::Error)]
pub(crate) enum ListenError {
    #[error("{address}: {error}: give another address by --{flag} or [server] {flag}")]
    Bind { address: ListenAddress, error: io::Error, flag: &'static str },
    #[error("[server] {field} = {path:?}: {reason}")]
    File { field: &'static str, path: PathBuf, reason: String },
    #[error("[server] tls_cert and tls_key: {0}")]
    Tls(rustls::Error),
}

/// An address that is listened at.
pub(crate) enum Listener {
    Tcp(TcpListener),
    /// Its file is removed when this is dropped.
    Unix(UnixListener, SocketFile),
}

/// Device, number there, and when it was made: numbers are given again.
type FileIdentity = (u64, u64, i64, i64);

/// The file of a socket.
pub(crate) struct SocketFile {
    path: PathBuf,
    /// By what it is told from another one at its path.
    identity: Option<FileIdentity>,
}

impl SocketFile {
    fn identity(path: &Path) -> Option<FileIdentity> {
        let file = std::fs::symlink_metadata(path).ok()?;
        Some((file.dev(), file.ino(), file.mtime(), file.mtime_nsec()))
    }
}

/// Another service may listen at the path by now, while this one still answers what was under way.
impl Drop for SocketFile {
    fn drop(&mut self) {
        if self.identity.is_some() && Self::identity(&self.path) == self.identity {
            let _ = std::fs::remove_file(&self.path);
        }
    }
}

impl Listener {
    pub(crate) async fn bind(
        flag: &'static str,
        address: &ListenAddress,
    ) -> Result<Self, ListenError> {
        let bound = match address {
            ListenAddress::Tcp(address) => TcpListener::bind(address).await.map(Self::Tcp),
            ListenAddress::Unix(path) => bind_unix(path).await,
        };
        bound.map_err(|error| ListenError::Bind { address: address.clone(), error, flag })
    }

    /// Where it listens.
    pub(crate) fn address(&self) -> io::Result<ListenAddress> {
        Ok(match self {
            Self::Tcp(listener) => ListenAddress::Tcp(listener.local_addr()?),
            Self::Unix(_, file) => ListenAddress::Unix(file.path.clone()),
        })
    }

    /// Answers until `control` is told to end, and then what is under way.
    pub(crate) async fn serve(
        self,
        router: Router,
        rules: &Rules,
        control: &Control,
    ) -> io::Result<()> {
        match (self, &rules.tls) {
            (Self::Tcp(listener), None) => {
                let server = Server::<SocketAddr>::from_listener(listener)
                    .acceptor(rules.counted(NoDelayAcceptor));
                let service = router.into_make_service_with_connect_info::<SocketAddr>();
                rules.applied_to(server, control).serve(service).await
            }
            (Self::Tcp(listener), Some(tls)) => {
                let acceptor =
                    RustlsAcceptor::new(tls.clone()).handshake_timeout(rules.head_timeout);
                let acceptor = acceptor.acceptor(rules.counted(NoDelayAcceptor));
                let server = Server::<SocketAddr>::from_listener(listener).acceptor(acceptor);
                let service = router.into_make_service_with_connect_info::<SocketAddr>();
                rules.applied_to(server, control).serve(service).await
            }
            (Self::Unix(listener, _file), _) => {
                // Who comes by a socket is on this machine.
                let client = ConnectInfo(SocketAddr::from((Ipv4Addr::LOCALHOST, 0)));
                let service = router.layer(Extension(client)).into_make_service();
                let server = Server::<unix::SocketAddr>::from_listener(listener)
                    .acceptor(rules.counted(DefaultAcceptor));
                rules.applied_to(server, control).serve(service).await
            }
        }
    }
}

/// A socket at this path, in place of one that a process left behind which has ended.
async fn bind_unix(path: &Path) -> io::Result<Listener> {
    let listener = match bind_for_all(path) {
        Err(error) if error.kind() == io::ErrorKind::AddrInUse && is_left_behind(path).await => {
            std::fs::remove_file(path)?;
            bind_for_all(path)?
        }
        bound => bound?,
    };
    let file = SocketFile { path: path.to_owned(), identity: SocketFile::identity(path) };
    Ok(Listener::Unix(listener, file))
}

/// Binds a Unix socket of mode 0777: to connect takes permission to write, so that its folder decides who may. The umask sets the mode
/// when the socket is made, since a mode that is set later by path could hit a file that somebody has put there. The umask is that of
/// the whole process, which makes no other file at this time.
fn bind_for_all(path: &Path) -> io::Result<UnixListener> {
    let before = umask(Mode::empty());
    let bound = UnixListener::bind(path);
    umask(before);
    bound
}

/// Whether nobody listens at a socket. One that does not answer in time has a listener that is busy.
#[allow(clippy::disallowed_methods, reason = "another process lives by the real clock")]
async fn is_left_behind(path: &Path) -> bool {
    let is_socket = std::fs::symlink_metadata(path).is_ok_and(|it| it.file_type().is_socket());
    let asked = tokio::time::timeout(ASKED_WITHIN, UnixStream::connect(path));
    let is_refused = |error: &io::Error| error.kind() == io::ErrorKind::ConnectionRefused;
    is_socket && asked.await.is_ok_and(|answer| answer.as_ref().is_err_and(is_refused))
}

/// What holds for all connections.
pub(crate) struct Rules {
    tls: Option<RustlsConfig>,
    head_timeout: Duration,
    /// How many connections each listener has at most.
    max_connections: usize,
}

impl Rules {
    pub(crate) fn new(server: &ServerConfig) -> Result<Self, ListenError> {
        let tls = server.tls.as_ref().map(tls_config).transpose()?;
        Ok(Self {
            tls: tls.map(|tls| RustlsConfig::from_config(Arc::new(tls))),
            head_timeout: server.head_timeout,
            max_connections: server.max_connections as usize,
        })
    }

    /// Whose certificates can be [renewed](renew), if there is TLS.
    pub(crate) fn certificates(&self) -> Option<RustlsConfig> {
        self.tls.clone()
    }

    fn applied_to<A: Address, Acceptor>(
        &self,
        server: Server<A, Acceptor>,
        control: &Control,
    ) -> Server<A, Acceptor> {
        let handle = Handle::with_control(control.clone());
        let warned = Mutex::new(None);
        let mut server = server
            .handle(handle)
            .first_request_timeout(self.head_timeout)
            .accept_error_handler(move |from, error| refused(from.is_some(), error, &warned));
        let builder = server.http_builder();
        builder.http1().header_read_timeout(self.head_timeout);
        builder.http2().keep_alive_interval(PING_INTERVAL).keep_alive_timeout(PING_TIMEOUT);
        server
    }

    fn counted<A>(&self, acceptor: A) -> CountedAcceptor<A> {
        CountedAcceptor { acceptor, places: Arc::new(Semaphore::new(self.max_connections)) }
    }
}

/// Lets the process open as many files as connections take, if the system allows it.
pub(crate) fn raise_open_files(server: &ServerConfig) {
    let wanted = 2 * u64::from(server.max_connections) + OTHER_FILES;
    let limit = getrlimit(Resource::Nofile);
    let is_enough = |files: Option<u64>| files.is_none_or(|files| files >= wanted);
    if is_enough(limit.current) {
        return;
    }
    let current = limit.maximum.map_or(wanted, |most| most.min(wanted));
    let raised = setrlimit(Resource::Nofile, Rlimit { current: Some(current), ..limit });
    let open = if raised.is_ok() { Some(current) } else { limit.current };
    if !is_enough(open) {
        let open = open.unwrap_or_default();
        tracing::warn!("the process may open {open} files, and max_connections needs {wanted}");
    }
}

/// Counts a connection that was not let in. The log has those alone that could not be accepted, and one of them a minute: of
/// others strangers may cause any number.
#[allow(clippy::disallowed_methods, reason = "a log lives by the real clock")]
fn refused(is_accepted: bool, error: &io::Error, warned: &Mutex<Option<Instant>>) {
    tracing::debug!("a connection was not let in: {error}");
    metrics::counter!("tidegate_connections_refused_total").increment(1);
    let mut warned = warned.lock().unwrap_or_else(PoisonError::into_inner);
    if !is_accepted && warned.is_none_or(|last| last.elapsed() >= WARN_INTERVAL) {
        *warned = Some(Instant::now());
        tracing::warn!("a connection could not be accepted: {error}");
    }
}

/// Takes the certificates of the files for connections that come from now on.
pub(crate) fn renew(certificates: &RustlsConfig, files: &TlsFiles) -> Result<(), ListenError> {
    certificates.reload_from_config(Arc::new(tls_config(files)?));
    Ok(())
}

/// Whether the service could use the files of TLS.
pub(crate) fn check_certificates(server: &ServerConfig) -> Result<(), ListenError> {
    server.tls.as_ref().map(tls_config).transpose().map(|_| ())
}

fn tls_config(files: &TlsFiles) -> Result<TlsConfig, ListenError> {
    let of = |field, path: &Path| {
        let path = path.to_owned();
        move |reason: String| ListenError::File { field, path, reason }
    };
    let chain = certificates_of("tls_cert", &files.cert)?;
    let key = PrivateKeyDer::from_pem_file(&files.key);
    let key =
        key.map_err(|error| of("tls_key", &files.key)(format!("has no private key: {error}")))?;
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let builder = TlsConfig::builder_with_provider(provider.clone())
        .with_safe_default_protocol_versions()
        .map_err(ListenError::Tls)?;
    let builder = match &files.client_ca {
        None => builder.with_no_client_auth(),
        Some(path) => {
            let wrong = of("client_ca", path);
            let mut roots = rustls::RootCertStore::empty();
            let authorities = certificates_of("client_ca", path)?;
            let added = authorities.into_iter().try_for_each(|authority| roots.add(authority));
            let verifier = added
                .map_err(|error| error.to_string())
                .and_then(|()| {
                    let verifier =
                        WebPkiClientVerifier::builder_with_provider(Arc::new(roots), provider)
                            .build();
                    verifier.map_err(|error| error.to_string())
                })
                .map_err(wrong)?;
            builder.with_client_cert_verifier(verifier)
        }
    };
    let mut config = builder.with_single_cert(chain, key).map_err(ListenError::Tls)?;
    config.alpn_protocols = vec![b"h2".to_vec(), b"http/1.1".to_vec()];
    Ok(config)
}

fn certificates_of(
    field: &'static str,
    path: &Path,
) -> Result<Vec<CertificateDer<'static>>, ListenError> {
    let wrong = |reason: String| ListenError::File { field, path: path.to_owned(), reason };
    let read = CertificateDer::pem_file_iter(path).and_then(Iterator::collect::<Result<Vec<_>, _>>);
    match read {
        Ok(certificates) if certificates.is_empty() => {
            Err(wrong("has no certificate in PEM: put one there".to_owned()))
        }
        Ok(certificates) => Ok(certificates),
        Err(error) => Err(wrong(error.to_string())),
    }
}

/// Lets connections in as long as there are places.
#[derive(Clone)]
struct CountedAcceptor<A> {
    acceptor: A,
    places: Arc<Semaphore>,
}

impl<I, S, A> Accept<I, S> for CountedAcceptor<A>
where
    A: Accept<I, S, Stream = I, Service = S, Future = Ready<io::Result<(I, S)>>>,
{
    type Stream = I;
    type Service = Placed<S>;
    type Future = Ready<io::Result<(I, Placed<S>)>>;

    fn accept(&self, stream: I, service: S) -> Self::Future {
        let Ok(place) = self.places.clone().try_acquire_owned() else {
            return ready(Err(io::Error::other("there are max_connections already")));
        };
        let accepted = self.acceptor.accept(stream, service).into_inner();
        let placed = |service| Placed { service, _place: Arc::new(place) };
        ready(accepted.map(|(stream, service)| (stream, placed(service))))
    }
}

/// The service of one connection, which has its place.
#[derive(Clone)]
struct Placed<S> {
    service: S,
    _place: Arc<OwnedSemaphorePermit>,
}

impl<R, S: Service<R>> Service<R> for Placed<S> {
    type Response = S::Response;
    type Error = S::Error;
    type Future = S::Future;

    fn poll_ready(&mut self, context: &mut Context<'_>) -> Poll<Result<(), Self::Error>> {
        self.service.poll_ready(context)
    }

    fn call(&mut self, request: R) -> Self::Future {
        self.service.call(request)
    }
}
