//! Networks of IP addresses.

use std::fmt;
use std::net::IpAddr;
use std::str::FromStr;

use ipnet::IpNet;

/// A network of IP addresses, such as `10.0.0.0/8`, `2001:db8::/32` or a single `192.0.2.7`.
///
/// IPv4 addresses that are written as IPv6 ones (`::ffff:10.0.0.1`) are IPv4 addresses.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Network(IpNet);

/// An error: the text is no network.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("network = {value:?}: {reason}")]
pub struct NetworkError {
    /// The text that was given.
    pub value: String,
    /// What is wrong, and what to write instead.
    pub reason: &'static str,
}

const TOO_LONG: &str = "the prefix length must be 0 to 32, or to 128 for IPv6";
const NO_NETWORK: &str =
    "must be an IP address, or one and a prefix length of 0 to 32 (128 for IPv6) after a /";

impl Network {
    /// The network of the first `prefix` bits of an address.
    ///
    /// # Errors
    ///
    /// [`NetworkError`] if the prefix is longer than the address, or bits beyond it are not 0.
    pub fn new(address: IpAddr, prefix: u8) -> Result<Self, NetworkError> {
        Self::checked(address, prefix)
            .map_err(|reason| NetworkError { value: format!("{address}/{prefix}"), reason })
    }

    fn checked(address: IpAddr, prefix: u8) -> Result<Self, &'static str> {
        let mut network = IpNet::new(address, prefix).map_err(|_| TOO_LONG)?;
        let canonical = address.to_canonical();
        if canonical != address {
            let prefix = prefix.checked_sub(96);
            let prefix =
                prefix.ok_or("a mapped IPv4 address needs a prefix length of 96 or more")?;
            network = IpNet::new(canonical, prefix).map_err(|_| TOO_LONG)?;
        }
        if network.trunc() != network {
            return Err("bits beyond the prefix length must be 0");
        }
        Ok(Self(network))
    }

    /// The network that a text names as a key: that of an address, or any.
    pub(crate) fn of_key(text: &[u8]) -> Option<Self> {
        let text = str::from_utf8(text).ok()?;
        // Bytes that begin otherwise are no address.
        let first = text.bytes().next()?;
        if first.is_ascii_hexdigit() || first == b':' { text.parse().ok() } else { None }
    }

    /// The bits that addresses of it share.
    pub(crate) fn prefix_len(&self) -> u8 {
        self.0.prefix_len()
    }

    /// The network of the first `prefix` bits of this one's addresses; `None` if it has not so many.
    pub(crate) fn within(&self, prefix: u8) -> Option<Self> {
        let is_wider = prefix <= self.0.prefix_len();
        let network = IpNet::new(self.0.network(), prefix).ok().filter(|_| is_wider)?;
        Some(Self(network.trunc()))
    }

    /// Whether `address` is in the network.
    pub fn contains(&self, address: IpAddr) -> bool {
        self.0.contains(&address.to_canonical())
    }
}

impl FromStr for Network {
    type Err = NetworkError;

    fn from_str(text: &str) -> Result<Self, NetworkError> {
        let refused = |reason| NetworkError { value: text.to_owned(), reason };
        let (address, prefix) = text.split_once('/').map_or((text, None), |(a, p)| (a, Some(p)));
        // The standard library's addresses have no leading zeros, which some read as octal.
        let address: IpAddr = address.parse().map_err(|_| refused(NO_NETWORK))?;
        let prefix = match prefix {
            Some(digits) if digits.bytes().all(|byte| byte.is_ascii_digit()) => {
                digits.parse().map_err(|_| refused(NO_NETWORK))?
            }
            Some(_) => return Err(refused(NO_NETWORK)),
            None => IpNet::from(address).prefix_len(),
        };
        Self::checked(address, prefix).map_err(refused)
    }
}

impl fmt::Display for Network {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn network(text: &str) -> Network {
        text.parse().unwrap()
    }

    #[test]
    fn network_contains_its_addresses_in_either_spelling() {
        for (text, inside, outside) in [
            ("10.0.0.0/8", "10.255.3.4", "11.0.0.0"),
            ("10.0.0.0/8", "::ffff:10.1.2.3", "::10.1.2.3"),
            ("192.0.2.7", "192.0.2.7", "192.0.2.6"),
            ("0.0.0.0/0", "203.0.113.9", "::1"),
            ("2001:db8::/32", "2001:db8:ffff::1", "2001:db9::"),
            ("::/0", "fe80::1", "10.0.0.1"),
            ("::ffff:10.0.0.0/104", "10.200.0.1", "11.0.0.1"),
        ] {
            assert!(network(text).contains(inside.parse().unwrap()), "{inside} in {text}");
            assert!(!network(text).contains(outside.parse().unwrap()), "{outside} in {text}");
        }
        assert_eq!(network("::ffff:10.0.0.0/104").to_string(), "10.0.0.0/8");
    }

    #[test]
    fn error_names_the_field_and_the_text() {
        for text in [
            "",
            "/",
            "10.0.0.0/",
            "10.0.0.0/33",
            "10.0.0.0/+8",
            "10.0.0.0/-1",
            "10.0.0.1/8",
            "2001:db8::/129",
            "2001:db8::1/64",
            "::ffff:10.0.0.0/95",
            "10.0.0/8",
            "010.0.0.0/8",
            "proxy",
            "10.0.0.0/8 ",
        ] {
            let error = text.parse::<Network>().unwrap_err();
            assert!(error.to_string().starts_with(&format!("network = {text:?}: ")), "{error}");
        }
        let address: IpAddr = "10.0.0.0".parse().unwrap();
        assert_eq!(Network::new(address, 8), Ok(network("10.0.0.0/8")));
        for (prefix, value) in [(33, "10.0.0.0/33"), (4, "10.0.0.0/4")] {
            assert_eq!(Network::new(address, prefix).unwrap_err().value, value);
        }
    }
}
