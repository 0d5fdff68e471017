//! Addresses of a store, and how they are shown.

use redis::{ConnectionInfo, IntoConnectionInfo};

use crate::error::StoreError;

/// What stands for a secret.
const HIDDEN: &str = "***";

/// Reads an address.
pub(super) fn parse(address: &str) -> Result<ConnectionInfo, StoreError> {
    let refuse = |reason: String| StoreError::Address { address: without_secrets(address), reason };
    let scheme = address.split("://").next().unwrap_or_default();
    if matches!(scheme, "rediss" | "valkeys") && !cfg!(feature = "tls") {
        return Err(refuse("TLS needs tidegate's feature `tls`: compile it in".to_owned()));
    }
    #[cfg(feature = "tls")]
    if matches!(scheme, "rediss" | "valkeys") {
        choose_crypto();
    }
    let info = address.into_connection_info().map_err(|error| refuse(error.to_string()))?;
    // Batches are small and waited for: Nagle's algorithm would only hold them back.
    let tcp = info.tcp_settings().clone().set_nodelay(true);
    Ok(info.set_tcp_settings(tcp))
}

/// rustls cannot choose where a program was built with several cryptographic libraries, and then panics. A choice
/// that the program made stays.
#[cfg(feature = "tls")]
fn choose_crypto() {
    use rustls::crypto::{CryptoProvider, ring};
    if CryptoProvider::get_default().is_none() {
        // It fails only where another thread was sooner, which is as good.
        let _ = ring::default_provider().install_default();
    }
}

/// The address without user and password, whether or not it can be parsed.
pub(super) fn without_secrets(address: &str) -> String {
    let (scheme, rest) = match address.split_once("://") {
        Some((scheme, rest)) => (format!("{scheme}://"), rest),
        None => (String::new(), address),
    };
    // From the last '@' on: a password that was not escaped may hold one.
    let place = rest
        .rsplit_once('@')
        .map_or_else(|| rest.to_owned(), |(_, place)| format!("{HIDDEN}@{place}"));
    format!("{scheme}{}", without_query_password(&place))
}

/// Unix sockets carry their password in the query.
fn without_query_password(place: &str) -> String {
    let Some((before, query)) = place.split_once('?') else { return place.to_owned() };
    let shown: Vec<_> = query
        .split('&')
        .map(|pair| if pair.starts_with("pass=") { format!("pass={HIDDEN}") } else { pair.into() })
        .collect();
    format!("{before}?{}", shown.join("&"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn password_is_never_shown() {
        let cases = [
            ("redis://h:1/2", "redis://h:1/2"),
            ("redis://me:hunter2@h:1/2", "redis://***@h:1/2"),
            ("redis://:hunter2@h", "redis://***@h"),
            ("redis://:hunt@er2@h", "redis://***@h"),
            ("redis://:hunt/er2@h", "redis://***@h"),
            ("me:hunter2@h", "***@h"),
            ("unix:///s?db=1&pass=hunter2", "unix:///s?db=1&pass=***"),
        ];
        for (address, shown) in cases {
            assert_eq!(without_secrets(address), shown);
        }
    }

    #[test]
    fn address_that_names_no_store_says_why_and_hides_the_password() {
        for address in ["", "h:1", "http://me:hunter2@h", "redis://me:hunter2@h/x", "redis://"] {
            let Err(StoreError::Address { address: shown, reason }) = parse(address) else {
                panic!("{address}: accepted");
            };
            assert!(!reason.is_empty());
            assert!(!shown.contains("hunter2") && !reason.contains("hunter2"), "{shown}: {reason}");
        }
    }

    #[test]
    fn addresses_over_tcp_and_sockets_are_accepted() {
        for address in ["redis://h", "redis://u:p@h:1/2?protocol=resp3", "unix:///tmp/s?db=1"] {
            assert!(parse(address).is_ok(), "{address}");
        }
    }

    #[cfg(not(feature = "tls"))]
    #[test]
    fn tls_without_its_feature_names_the_feature() {
        let Err(StoreError::Address { reason, .. }) = parse("rediss://h") else {
            panic!("accepted");
        };
        assert!(reason.contains("`tls`"), "{reason}");
    }
}
