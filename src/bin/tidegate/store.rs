//! The store that a command uses.

use std::str::FromStr;

use tidegate::RedisStore;

use crate::values::Address;

/// Where the nodes meet.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Store {
    Memory,
    Redis(String),
}

impl Store {
    /// What it goes by in the report.
    pub(crate) const fn name(&self) -> &'static str {
        match self {
            Self::Memory => "memory",
            Self::Redis(_) => "redis",
        }
    }
}

impl FromStr for Store {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let address = match text {
            "memory" => return Ok(Self::Memory),
            url if url.contains("://") => url.to_owned(),
            other => match other.parse::<Address>() {
                Ok(address) => format!("redis://{address}"),
                Err(_) => return Err("expected memory, redis://HOST:PORT or HOST:PORT".to_owned()),
            },
        };
        match RedisStore::open(&address) {
            Ok(_) => Ok(Self::Redis(address)),
            Err(error) => Err(error.to_string()),
        }
    }
}

/// A namespace of this run's own: what an earlier run left in the store does not matter to it.
#[allow(clippy::disallowed_methods, reason = "a name that no earlier run had")]
pub(crate) fn namespace() -> String {
    let now =
        std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap_or_default();
    format!("run-{}-{}", std::process::id(), now.as_micros())
}
