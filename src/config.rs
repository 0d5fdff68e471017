//! Configuration as a value, from TOML: limits with their plans, the store, and secrets.
//!
//! ```
//! use tidegate::config::Config;
//!
//! let config = Config::from_toml(
//!     r#"
//!     [limits.api]
//!     quota = "600/min"
//!     burst = 200
//!     "#,
//! )?;
//! let limiter = config.builder().build()?;
//! assert!(limiter.limit("api")?.check("user:42").is_allowed());
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! Every mistake is named at once, with its line, its column, the field, its value, and a remedy:
//!
//! ```
//! use tidegate::config::Config;
//!
//! let error = Config::from_toml("[limits.api]\nqouta = \"600/min\"\nmode = \"exakt\"").unwrap_err();
//! let mistakes: Vec<String> = error.mistakes().iter().map(ToString::to_string).collect();
//! assert_eq!(mistakes[1], "text:2:1: limits.api.qouta = \"600/min\": is no field: did you mean \"quota\"?");
//! assert_eq!(mistakes.len(), 3, "there is no quota either");
//! ```
//!
//! docs/CONFIGURATION.md has all fields. What is valid is defined by [`Limit`] and [`Builder`], whose checks are used.

use std::fmt;
use std::path::Path;

use serde::{Deserialize, Deserializer};

use crate::builder::Builder;
use crate::limit::{Concurrency, Limit};

mod check;
mod concurrency;
mod descriptor;
mod document;
mod domains;
mod fields;
mod limits;
mod mistake;
mod node;
mod plan_checks;
mod plans;
mod reading;
mod rule;
mod secret;
mod server;
mod store;
mod warnings;

#[cfg(feature = "server")]
pub(crate) use descriptor::MetricKey;
#[cfg(feature = "server")]
pub(crate) use descriptor::{ChargeRule, Descriptor, DescriptorRule, PathValues};
use document::Document;
pub(crate) use domains::Domain;
#[cfg(feature = "server")]
pub(crate) use domains::REQUEST_LIMITS;
use fields::Fields;
pub use mistake::{ConfigFileError, Mistake};
use node::Node;
use reading::{Reading, Setting};
pub use secret::SECRET_BYTES_MAX;
#[cfg(feature = "server")]
pub(crate) use server::client_limit;
pub use server::{
    BODY_TIMEOUTS, DEFAULT_BODY_TIMEOUT, DEFAULT_DRAIN, DEFAULT_GRPC, DEFAULT_HEAD_TIMEOUT,
    DEFAULT_HTTP, DEFAULT_MAX_CONNECTIONS, DEFAULT_NEAR_LIMIT_RATIO, DRAIN_MAX, HEAD_TIMEOUTS,
    ListenAddress, ListenAddressError, MAX_CONNECTIONS, Ratio, ServerConfig, TlsFiles, Token,
    UnknownDomain,
};
use store::ConfiguredStore;

/// The largest file that is read, in bytes.
pub const FILE_BYTES_MAX: u64 = 1024 * 1024;

/// What a mistake says in place of a file's name where there is none.
const TEXT: &str = "text";

/// What a limiter is made of, as a value: read from TOML, or by `serde` from any format as a part of a program's own
/// configuration.
///
/// It shows no secret.
#[derive(Clone)]
pub struct Config {
    name: Option<String>,
    limits: Vec<Limit>,
    concurrency: Vec<Concurrency>,
    domains: Vec<Domain>,
    store: Option<ConfiguredStore>,
    max_keys: Option<usize>,
    lanes: Option<u32>,
    max_nodes: Option<u32>,
    key_secret: Option<Vec<u8>>,
    server: ServerConfig,
    warnings: Vec<Mistake>,
}

impl fmt::Debug for Config {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let key_secret = self.key_secret.as_ref().map(|_| reading::HIDDEN);
        f.debug_struct("Config")
            .field("name", &self.name)
            .field("limits", &self.limits)
            .field("concurrency", &self.concurrency)
            .field("domains", &self.domains)
            .field("store", &self.store)
            .field("max_keys", &self.max_keys)
            .field("lanes", &self.lanes)
            .field("max_nodes", &self.max_nodes)
            .field("key_secret", &key_secret)
            .field("server", &self.server)
            .field("warnings", &self.warnings)
            .finish()
    }
}

impl Config {
    /// Reads a TOML file of at most [`FILE_BYTES_MAX`]. Variables are those of the process's environment; paths in the
    /// file begin at its folder. Warnings are in [`warnings`](Self::warnings).
    ///
    /// # Errors
    ///
    /// [`ConfigFileError`] has all mistakes, or says why the file cannot be read.
    pub fn load(path: impl AsRef<Path>) -> Result<Self, ConfigFileError> {
        Self::load_with(path, environment)
    }

    /// As [`load`](Self::load), with the value of each variable from `variables`.
    ///
    /// # Errors
    ///
    /// As [`load`](Self::load).
    pub fn load_with(
        path: impl AsRef<Path>,
        variables: impl Fn(&str) -> Option<String>,
    ) -> Result<Self, ConfigFileError> {
        let path = path.as_ref();
        let file = path.display().to_string();
        let text = secret::read_at_most(path, FILE_BYTES_MAX).and_then(|bytes| {
            String::from_utf8(bytes)
                .map_err(|_| "the file is no text: write it as UTF-8".to_owned())
        });
        match text {
            Ok(text) => {
                let folder = path.parent().unwrap_or(Path::new(""));
                Self::of_text(&text, &file, Reading::new(&variables, folder))
            }
            Err(reason) => Err(ConfigFileError::Unreadable { file, reason }),
        }
    }

    /// Reads TOML. Variables are those of the process's environment; paths begin at its working folder.
    ///
    /// # Errors
    ///
    /// [`ConfigFileError::Mistakes`] has all mistakes.
    pub fn from_toml(text: &str) -> Result<Self, ConfigFileError> {
        Self::from_toml_with(text, environment)
    }

    /// As [`from_toml`](Self::from_toml), with the value of each variable from `variables`.
    ///
    /// # Errors
    ///
    /// As [`from_toml`](Self::from_toml).
    pub fn from_toml_with(
        text: &str,
        variables: impl Fn(&str) -> Option<String>,
    ) -> Result<Self, ConfigFileError> {
        Self::of_text(text, TEXT, Reading::new(&variables, Path::new("")))
    }

    /// A builder with all that is configured: listeners and limits of other sources can be added.
    ///
    /// All builders of a configuration, and of its clones, share its store.
    pub fn builder(&self) -> Builder {
        let mut builder = check::empty();
        for limit in self.all_limits() {
            builder = builder.limit(limit);
        }
        for limit in &self.concurrency {
            builder = builder.concurrency(limit.clone());
        }
        if let Some(name) = &self.name {
            builder = builder.name(name);
        }
        if let Some(store) = &self.store {
            builder = builder.store(store.clone());
        }
        if let Some(keys) = self.max_keys {
            builder = builder.max_keys(keys);
        }
        if let Some(lanes) = self.lanes {
            builder = builder.lanes(lanes);
        }
        if let Some(nodes) = self.max_nodes {
            builder = builder.max_nodes(nodes);
        }
        match &self.key_secret {
            Some(secret) => builder.key_secret(secret.clone()),
            None => builder,
        }
    }

    /// The limits in the order of the file, and after them those of domains.
    pub fn limits(&self) -> &[Limit] {
        &self.limits
    }

    /// The concurrency limits in the order of the file.
    pub fn concurrency_limits(&self) -> &[Concurrency] {
        &self.concurrency
    }

    /// The configured limits, and that of the quotas that requests bring, if there are domains.
    pub(crate) fn all_limits(&self) -> impl Iterator<Item = Limit> {
        let limits = self.limits.iter().cloned();
        #[cfg(feature = "server")]
        let limits = limits.chain((!self.domains.is_empty()).then(domains::request_limits));
        limits
    }

    /// The domain of this name.
    #[cfg(feature = "server")]
    pub(crate) fn domain(&self, name: &str) -> Option<&Domain> {
        self.domains.iter().find(|domain| domain.name == name)
    }

    /// What is allowed, and mostly a mistake, in the order of the file.
    pub fn warnings(&self) -> &[Mistake] {
        &self.warnings
    }

    /// The store for people, without secrets; `None` if each node is alone.
    pub fn store_name(&self) -> Option<String> {
        self.store.as_ref().map(ConfiguredStore::name)
    }

    /// Where `tidegate serve` listens, and how it ends.
    pub fn server(&self) -> &ServerConfig {
        &self.server
    }

    /// The first field outside `limits` and `domains` by which two configurations differ, and that a service which runs cannot
    /// change. Of `server` it can change `token`, `body_timeout`, `unknown_domain`, `shadow_domains` and `limit_headers`.
    pub fn fixed_field_that_differs(&self, other: &Self) -> Option<&'static str> {
        let has_same_store = match (&self.store, &other.store) {
            (Some(own), Some(other)) => own.is_same(other),
            (own, other) => own.is_none() && other.is_none(),
        };
        [
            ("name", self.name == other.name),
            ("store", has_same_store),
            ("max_keys", self.max_keys == other.max_keys),
            ("lanes", self.lanes == other.lanes),
            ("max_nodes", self.max_nodes == other.max_nodes),
            ("key_secret", self.key_secret == other.key_secret),
            ("concurrency", self.concurrency == other.concurrency),
        ]
        .into_iter()
        .find(|(_, is_same)| !is_same)
        .map(|(field, _)| field)
        .or_else(|| self.server.fixed_field_that_differs(&other.server))
    }

    fn of_text(text: &str, file: &str, mut reading: Reading) -> Result<Self, ConfigFileError> {
        // A mark of the byte order is a blank to its left.
        let text = text.strip_prefix('\u{feff}').unwrap_or(text);
        let Document { root, mistakes, sections } = Document::read(text);
        reading.mistakes = mistakes;
        reading.sections = sections;
        Self::of_root(&root, reading, Some(text), file)
    }

    fn of_root(
        root: &Node,
        mut reading: Reading,
        text: Option<&str>,
        file: &str,
    ) -> Result<Self, ConfigFileError> {
        let config = Self::read(&Fields::of_root(root), &mut reading);
        let mistakes = mistake::placed(reading.mistakes, text, file);
        let warnings = mistake::placed(reading.warnings, text, file);
        if mistakes.is_empty() {
            return Ok(Self { warnings, ..config });
        }
        Err(ConfigFileError::Mistakes { mistakes, warnings })
    }

    /// Reads and checks all; what is wrong has its default.
    fn read(root: &Fields<'_>, reading: &mut Reading) -> Self {
        root.refuse_unknown(fields::ROOT, reading);
        let store = store::read(root, reading);
        let mut config = Self {
            name: root.text("name", reading).map(value),
            limits: Vec::new(),
            concurrency: Vec::new(),
            domains: Vec::new(),
            max_keys: root.whole("max_keys", reading).map(value),
            lanes: root.whole("lanes", reading).map(value),
            max_nodes: root.whole("max_nodes", reading).map(value),
            key_secret: root.secret("key_secret", reading).map(value),
            store: store.store,
            server: server::read(root, reading),
            warnings: Vec::new(),
        };
        let table = root.table("limits", limits::EXAMPLE, reading);
        // What is no table is a mistake of its own.
        let has_limits = root.has("limits") && !table.as_ref().is_some_and(Fields::is_empty)
            || root.has("concurrency")
            || root.has("domains");
        let tables = table.map(|limits| limits.tables(limits::EXAMPLE, reading));
        let mut on_node = check::limiter(config.builder(), has_limits, root, reading);
        let node = warnings::Node {
            is_shared: store.is_shared,
            has_store: root.has("store"),
            max_nodes: config.max_nodes.filter(|nodes| *nodes > 0),
        };
        if root.has("store") && config.store.is_none() {
            on_node = on_node.store(crate::store::MemoryStore::new());
        }
        for (name, fields) in tables.unwrap_or_default() {
            let before = reading.mistakes.len();
            let read = limits::read(name, fields, reading);
            check::limit(&read, &on_node, reading);
            if reading.mistakes.len() == before {
                warnings::limit(&read, &node, reading);
            }
            config.limits.push(read.limit);
        }
        let (domains, limits) = domains::read(root, &config.limits, &on_node, reading);
        config.domains = domains;
        config.limits.extend(limits);
        let limits: Vec<Limit> = config.all_limits().collect();
        config.concurrency = concurrency::read(root, &limits, reading);
        let has_none = config.limits.is_empty() && config.concurrency.is_empty();
        if has_none && root.has("domains") && reading.mistakes.is_empty() {
            let remedy = "has no descriptor with a quota: add one, or a limit";
            reading.mistake(&root.place("domains"), remedy);
        }
        config
    }
}

fn value<T>(setting: Setting<T>) -> T {
    setting.value
}

/// A variable of the process, if it is text.
fn environment(name: &str) -> Option<String> {
    std::env::var(name).ok()
}

/// From any format that has tables, texts, numbers and truth values. Warnings go to the log.
///
/// The error's text has all mistakes.
impl<'de> Deserialize<'de> for Config {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let root = Node::deserialize(deserializer)?;
        let reading = Reading::new(&environment, Path::new(""));
        let config = Self::of_root(&root, reading, None, TEXT).map_err(|error| {
            let mistakes: Vec<String> = error.mistakes().iter().map(Mistake::to_string).collect();
            serde::de::Error::custom(mistakes.join("; "))
        })?;
        for warning in &config.warnings {
            tracing::warn!("{warning}");
        }
        Ok(config)
    }
}
