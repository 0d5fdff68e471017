//! `tidegate serve`: decides for programs in any language, over HTTP, and for Envoy.

use std::path::{Path, PathBuf};
use std::time::Duration;

use axum::Router;
use axum::routing::get;
use axum_server::Control;
use axum_server::tls_rustls::RustlsConfig;
use clap::Args;
use metrics_exporter_prometheus::{BuildError, Matcher, PrometheusHandle};
use tidegate::config::{Config, ConfigFileError, FILE_BYTES_MAX, ListenAddress, TlsFiles};
use tidegate::server::Service;
use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio::sync::watch;
use tokio::time::{Instant, timeout_at};

use crate::check_config::{self, CheckConfigError};
use crate::exporter::exporter;
use crate::output::{self, OutputError};

mod listener;

pub(crate) use listener::check_certificates;
use listener::{ListenError, Listener, Rules};

/// What is served without a file.
const WITHOUT_FILE: &str = "[limits.default]\nquota = \"100/s\"\n";
/// How users of envoyproxy/ratelimit know how often the file was taken, or not.
const RELOADS: &str = "tidegate_config_reloads_total";
const CERTIFICATE_RELOADS: &str = "tidegate_certificate_reloads_total";
const CONFIG_LOAD_SUCCESS: &str = "ratelimit_service_config_load_success";
const CONFIG_LOAD_ERROR: &str = "ratelimit_service_config_load_error";
/// How they know how long it takes to answer, and bounds of its buckets, in seconds.
const RESPONSE_TIMES: &str = "ratelimit_service_response_time_seconds";
const RESPONSE_TIME_BOUNDS: [f64; 12] =
    [0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.5, 1.0];
/// The pause between two looks at the file.
const LOOK_INTERVAL: Duration = Duration::from_secs(1);
/// How often metrics that nobody reads are tidied.
const METRICS_UPKEEP: Duration = Duration::from_secs(5);
/// For how long a service that ends waits for the store to take what it spent.
const REPORT_WITHIN: Duration = Duration::from_secs(5);

/// Why the service did not start, or did not end in good order.
#[derive(Debug, thiserror::Error)]
pub(crate) enum ServeError {
    #[error(transparent)]
    File(#[from] CheckConfigError),
    #[error(transparent)]
    Config(#[from] tidegate::ConfigError),
    #[error(transparent)]
    Listen(#[from] ListenError),
    #[error(transparent)]
    Io(#[from] std::io::Error),
    #[error(transparent)]
    Metrics(#[from] BuildError),
    #[error(transparent)]
    Shutdown(#[from] tidegate::ShutdownError),
    #[error(transparent)]
    Output(#[from] OutputError),
}

const EXAMPLES: &str = "\
Examples:
  tidegate serve
  curl -s http://127.0.0.1:8080/v1/check -d '{\"limit\": \"default\", \"key\": \"user:42\"}'
  tidegate serve examples/tidegate.toml --http 127.0.0.1:9000 --grpc 127.0.0.1:9001

Without a file it has one limit of 100 requests a second for each key, which it keeps alone. A change of
the file comes into force within two seconds, and at SIGHUP at once; a broken file does not, and its mistakes
are named. SIGTERM and SIGINT end the service once requests under way are answered. docs/SERVICE.md has the
requests and their answers, docs/ENVOY.md those of Envoy, which come over gRPC.";

/// Decides for programs in any language, over HTTP, and for Envoy.
#[derive(Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct Options {
    /// The configuration, in TOML: docs/CONFIGURATION.md
    #[arg(value_name = "FILE")]
    file: Option<PathBuf>,
    /// Where to listen, instead of the file's [server] http or 127.0.0.1:8080; port 0 takes a free one, and unix:PATH a socket
    #[arg(long, value_name = "ADDRESS:PORT")]
    http: Option<ListenAddress>,
    /// Where to listen for Envoy, instead of the file's [server] grpc or 127.0.0.1:8081
    #[arg(long, value_name = "ADDRESS:PORT")]
    grpc: Option<ListenAddress>,
}

pub(crate) fn run(options: &Options) -> Result<(), ServeError> {
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build()?;
    runtime.block_on(serve(options))
}

#[allow(clippy::disallowed_methods, reason = "the file is followed beside the service")]
async fn serve(options: &Options) -> Result<(), ServeError> {
    // Signals are heard from here on.
    let (signals, hangup) = (EndSignals::new()?, signal(SignalKind::hangup())?);
    let source = options.file.as_deref().map(Source::new);
    let config = match &options.file {
        Some(file) => check_config::load(file)?,
        None => Config::from_toml(WITHOUT_FILE)
            .map_err(|error| CheckConfigError::Unreadable(error.to_string()))?,
    };
    let response_times = Matcher::Full(RESPONSE_TIMES.to_owned());
    let exporter = exporter()?.set_buckets_for_metric(response_times, &RESPONSE_TIME_BOUNDS)?;
    let metrics = exporter.install_recorder()?;
    let (server, drain) = (config.server(), config.server().drain);
    let http = Listener::bind("http", options.http.as_ref().unwrap_or(&server.http)).await?;
    let grpc = Listener::bind("grpc", options.grpc.as_ref().unwrap_or(&server.grpc)).await?;
    let rules = Rules::new(server)?;
    listener::raise_open_files(server);
    let certificates = rules.certificates().zip(server.tls.clone());
    let limiter = config.builder().build()?;
    let began = beginning(&config, (&http, &grpc), options.file.is_none())?;
    let service = Service::new(config, limiter.clone())?;
    if let Some(source) = source {
        tokio::spawn(source.follow(service.clone(), hangup, certificates));
    }
    output::write(&began)?;
    let control = Control::new();
    let router = service.router_with(metrics_page(metrics));
    let http_served = http.serve(router, &rules, &control);
    let grpc_served = grpc.serve(service.grpc(), &rules, &control);
    let served = async { tokio::try_join!(http_served, grpc_served) };
    let drained = async {
        signals.told(1).await;
        service.announce_end();
        signals.drain(&control, drain).await;
    };
    tokio::select! {
        served = served => drop(served?),
        () = drained => tracing::warn!("requests were still under way: those whose bodies come now are refused"),
    }
    service.refuse_checks();
    let deadline = Instant::now() + REPORT_WITHIN;
    // Half of it is for what is spent.
    if timeout_at(deadline - REPORT_WITHIN / 2, service.settled()).await.is_err() {
        tracing::warn!(
            "reservations and permits are still being settled: they may stay spent or held"
        );
    }
    limiter.shutdown(deadline.saturating_duration_since(Instant::now())).await?;
    tracing::info!("ended: what was spent is reported");
    Ok(())
}

/// What is said when the service answers.
fn beginning(
    config: &Config,
    (http, grpc): (&Listener, &Listener),
    is_without_file: bool,
) -> std::io::Result<String> {
    let (address, grpc) = (http.address()?, grpc.address()?);
    let limits: Vec<&str> = config.limits().iter().map(tidegate::Limit::name).collect();
    let store = config.store_name().unwrap_or_else(|| "none: this process counts alone".to_owned());
    let addresses = format!("listening on {address}\nfor Envoy on {grpc}\n");
    let permits: Vec<&str> =
        config.concurrency_limits().iter().map(tidegate::Concurrency::name).collect();
    let kinds = [("limits", &limits), ("concurrency limits", &permits)];
    let named = kinds.into_iter().filter(|(_, names)| !names.is_empty());
    let named = named.map(|(kind, names)| format!("{kind}: {}\n", names.join(", ")));
    let began = addresses + &named.collect::<Vec<_>>().concat() + &format!("store: {store}\n");
    if !is_without_file {
        return Ok(began);
    }
    let limit = limits.concat();
    let asked = match address {
        ListenAddress::Tcp(address) => format!("http://{address}"),
        ListenAddress::Unix(path) => format!("--unix-socket {} http://localhost", path.display()),
    };
    Ok(format!(
        "{began}\nTry:\n  curl -s {asked}/v1/check -d '{{\"limit\": \"{limit}\", \"key\": \"user:42\"}}'\n\
         \nThen write limits of your own to a file, and serve that: docs/CONFIGURATION.md\n"
    ))
}

/// How often the service was told to end.
struct EndSignals(watch::Receiver<u32>);

impl EndSignals {
    #[allow(clippy::disallowed_methods, reason = "signals are heard beside the service")]
    fn new() -> Result<Self, ServeError> {
        let mut signals = [signal(SignalKind::terminate())?, signal(SignalKind::interrupt())?];
        let (ended, heard) = watch::channel(0);
        tokio::spawn(async move {
            let [terminate, interrupt] = &mut signals;
            loop {
                tokio::select! {
                    _ = terminate.recv() => {}
                    _ = interrupt.recv() => {}
                }
                ended.send_modify(|times| *times += 1);
            }
        });
        Ok(Self(heard))
    }

    /// Waits until the service was told so often.
    async fn told(&self, often: u32) {
        let mut heard = self.0.clone();
        // The sender lives as long as the runtime.
        let _ = heard.wait_for(|times| *times >= often).await;
    }

    /// Tells the listeners to end, and returns when `drain` is over or the service was told again.
    #[allow(clippy::disallowed_methods, reason = "requests under way live by the real clock")]
    async fn drain(&self, control: &Control, drain: Duration) {
        tracing::info!("told to end: waits for requests that are under way");
        control.graceful_shutdown(None);
        tokio::select! {
            () = tokio::time::sleep(drain) => {}
            () = self.told(2) => {}
        }
    }
}

/// The file that the configuration comes from.
struct Source {
    file: PathBuf,
    /// Its bytes when the configuration was read from it last.
    text: Option<Vec<u8>>,
}

impl Source {
    fn new(file: &Path) -> Self {
        Self { file: file.to_owned(), text: text_of(file) }
    }

    /// Brings each change of the file into force.
    #[allow(clippy::disallowed_methods, reason = "files change by the real clock")]
    async fn follow(
        mut self,
        service: Service,
        mut hangup: Signal,
        certificates: Option<(RustlsConfig, TlsFiles)>,
    ) {
        for result in ["taken", "refused"] {
            metrics::counter!(RELOADS, "result" => result).increment(0);
            if certificates.is_some() {
                metrics::counter!(CERTIFICATE_RELOADS, "result" => result).increment(0);
            }
        }
        let mut before = self.text.clone();
        loop {
            // The pause begins after the last look, however late that was, so that a file that is still written has time to change.
            let is_told = tokio::select! {
                () = tokio::time::sleep(LOOK_INTERVAL) => false,
                told = hangup.recv() => told.is_some(),
            };
            if let Some((certificates, files)) = certificates.as_ref().filter(|_| is_told) {
                renew(certificates, files);
            }
            let text = text_of(&self.file);
            // A file that is being written differs from look to look.
            let has_settled = text != self.text && text == before;
            if is_told || has_settled {
                self.text.clone_from(&text);
                let (file, service) = (self.file.clone(), service.clone());
                // With many limits it takes a while, and requests are answered meanwhile.
                let reloading = tokio::task::spawn_blocking(move || reload(&file, &service));
                if let Err(error) = reloading.await {
                    tracing::error!("the file was not read anew: {error}");
                }
            }
            before = text;
        }
    }
}

/// Takes the certificates that the files have now.
fn renew(certificates: &RustlsConfig, files: &TlsFiles) {
    let renewed = listener::renew(certificates, files);
    let result = if renewed.is_ok() { "taken" } else { "refused" };
    metrics::counter!(CERTIFICATE_RELOADS, "result" => result).increment(1);
    match renewed {
        Ok(()) => tracing::info!("certificates were read anew"),
        Err(error) => tracing::error!("the certificates before stay in force: {error}"),
    }
}

/// Brings what the file has now into force, or says what is wrong with it.
fn reload(file: &Path, service: &Service) {
    let refused = match Config::load(file) {
        Ok(config) => {
            for warning in config.warnings() {
                tracing::warn!("{warning}");
            }
            service.reload(config).err().map(|error| vec![error.to_string()])
        }
        Err(error @ ConfigFileError::Mistakes { .. }) => {
            Some(error.mistakes().iter().map(ToString::to_string).collect())
        }
        Err(error) => Some(vec![error.to_string()]),
    };
    let result = if refused.is_some() { "refused" } else { "taken" };
    metrics::counter!(RELOADS, "result" => result).increment(1);
    if service.has_ratelimit_metrics() {
        let name = if refused.is_some() { CONFIG_LOAD_ERROR } else { CONFIG_LOAD_SUCCESS };
        metrics::counter!(name).increment(1);
    }
    let file = file.display();
    match refused {
        None => tracing::info!("{file}: its limits are in force"),
        Some(reasons) => {
            for reason in reasons {
                tracing::error!(
                    "{file}: all stays as it was, the limits before in force: {reason}"
                );
            }
        }
    }
}

/// The file's bytes; `None` if it cannot be read, or is too large to be a configuration.
fn text_of(file: &Path) -> Option<Vec<u8>> {
    let is_file = |file: std::fs::Metadata| file.is_file() && file.len() <= FILE_BYTES_MAX;
    let is_read = std::fs::metadata(file).is_ok_and(is_file);
    is_read.then(|| std::fs::read(file).ok()).flatten()
}

/// `GET /metrics`.
#[allow(clippy::disallowed_methods, reason = "metrics are tidied by the real clock")]
fn metrics_page(metrics: PrometheusHandle) -> Router {
    let tidied = metrics.clone();
    tokio::spawn(async move {
        let mut looks = tokio::time::interval(METRICS_UPKEEP);
        loop {
            looks.tick().await;
            tidied.run_upkeep();
        }
    });
    Router::new().route("/metrics", get(async move || metrics.render()))
}
