//! The client's address, and the key that it makes.

use std::fmt::{self, Write};
use std::net::IpAddr;

use http::HeaderMap;
use ipnet::IpNet;

use super::forwarded::Forwarding;
use crate::key::{Key, KeyWriter};
use crate::network::Network;

/// A client with an IPv4 address has the whole address, in bits.
pub const DEFAULT_PREFIX_V4: u8 = 32;
/// A client with an IPv6 address mostly has a network of this many bits.
pub const DEFAULT_PREFIX_V6: u8 = 64;

/// The longest text of an address: an IPv6 network.
const TEXT_MAX: usize = 43;

/// Reads the client's address from a request: the peer's, or the one that trusted proxies report.
///
/// ```
/// use tidegate::http::ClientIp;
///
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let client = ClientIp::peer().behind_networks(["10.0.0.0/8".parse()?]);
/// let mut headers = http::HeaderMap::new();
/// headers.append("x-forwarded-for", "198.51.100.7, 203.0.113.9".parse()?);
/// let proxy = "10.1.2.3".parse()?;
/// assert_eq!(&*client.key(proxy, &headers), "203.0.113.9");
/// let stranger = "192.0.2.1".parse()?;
/// assert_eq!(&*client.key(stranger, &headers), "192.0.2.1");
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ClientIp {
    trusted: Trusted,
    forwarding: Forwarding,
    prefix_v4: u8,
    prefix_v6: u8,
}

#[derive(Clone, Debug, PartialEq, Eq)]
enum Trusted {
    Nobody,
    Networks(Vec<Network>),
    Hops(usize),
}

impl Trusted {
    /// Whether this address, `hop` hops away, is a proxy whose reports are true.
    fn believes(&self, hop: usize, address: IpAddr) -> bool {
        match self {
            Self::Nobody => false,
            Self::Networks(networks) => networks.iter().any(|network| network.contains(address)),
            Self::Hops(hops) => hop < *hops,
        }
    }
}

impl ClientIp {
    /// The peer of the connection. Header fields are not read.
    pub fn peer() -> Self {
        Self {
            trusted: Trusted::Nobody,
            forwarding: Forwarding::default(),
            prefix_v4: DEFAULT_PREFIX_V4,
            prefix_v6: DEFAULT_PREFIX_V6,
        }
    }

    /// Trusts the proxies of these networks, and of the networks that were named before. Reports of other peers are
    /// not read. Each proxy must append to the field or replace it: an address that it only passes on counts as its
    /// own report. Replaces [`behind_hops`](Self::behind_hops).
    #[must_use]
    pub fn behind_networks(mut self, networks: impl IntoIterator<Item = Network>) -> Self {
        let mut all = match self.trusted {
            Trusted::Networks(networks) => networks,
            Trusted::Nobody | Trusted::Hops(_) => Vec::new(),
        };
        all.extend(networks);
        self.trusted = Trusted::Networks(all);
        self
    }

    /// Trusts the nearest `hops` proxies, whatever their addresses are. Every request must pass all of them: a
    /// client that bypasses a proxy can forge its address. Replaces [`behind_networks`](Self::behind_networks).
    #[must_use]
    pub fn behind_hops(mut self, hops: usize) -> Self {
        self.trusted = Trusted::Hops(hops);
        self
    }

    /// The header field in which trusted proxies report the client; [`Forwarding::XForwardedFor`] is the default.
    /// Other fields are not read, because a proxy passes on fields that it does not write.
    #[must_use]
    pub fn forwarding(mut self, field: Forwarding) -> Self {
        self.forwarding = field;
        self
    }

    /// How many bits of an IPv4 address tell clients apart; [`DEFAULT_PREFIX_V4`] is the default. More than 32 are
    /// 32.
    #[must_use]
    pub fn prefix_v4(mut self, bits: u8) -> Self {
        self.prefix_v4 = bits.min(32);
        self
    }

    /// How many bits of an IPv6 address tell clients apart; [`DEFAULT_PREFIX_V6`] is the default. More than 128 are
    /// 128.
    #[must_use]
    pub fn prefix_v6(mut self, bits: u8) -> Self {
        self.prefix_v6 = bits.min(128);
        self
    }

    /// The address of the client: the first one, from `peer` outwards, that is not a trusted proxy's. Where a proxy
    /// reports something that is no address, it is the proxy's own. IPv4 addresses that are mapped to IPv6 ones are
    /// IPv4 addresses.
    #[inline]
    pub fn address(&self, peer: IpAddr, headers: &HeaderMap) -> IpAddr {
        self.find(peer, headers).0
    }

    /// The address of the client, and whether that is trusted as a proxy's, so that no client beyond it is known.
    #[inline]
    pub(super) fn find(&self, peer: IpAddr, headers: &HeaderMap) -> (IpAddr, bool) {
        let peer = peer.to_canonical();
        if self.trusted == Trusted::Nobody { (peer, false) } else { self.outermost(peer, headers) }
    }

    /// The first address outwards that is not a trusted proxy's, or else the last one, and whether it is.
    fn outermost(&self, mut client: IpAddr, headers: &HeaderMap) -> (IpAddr, bool) {
        let mut reported = self.forwarding.addresses(headers);
        let mut hop = 0;
        while self.trusted.believes(hop, client) {
            let Some(Some(address)) = reported.next() else { return (client, true) };
            client = address.to_canonical();
            hop += 1;
            if self.has_one_report() {
                break;
            }
        }
        (client, false)
    }

    /// Whether all of the trusted hops pass on one address, which the outermost of them reports.
    fn has_one_report(&self) -> bool {
        matches!((&self.trusted, &self.forwarding), (Trusted::Hops(_), Forwarding::Header(_)))
    }

    /// The [`address`](Self::address) as a key: `203.0.113.9`, or the network `2001:db8:1:2::/64` where the prefix
    /// is shorter than the address.
    ///
    /// Cost: no allocation.
    #[inline]
    pub fn key(&self, peer: IpAddr, headers: &HeaderMap) -> AddressText {
        self.text(self.address(peer, headers))
    }

    /// An address as a key.
    #[inline]
    pub(super) fn text(&self, address: IpAddr) -> AddressText {
        let mut text = AddressText { bytes: [0; TEXT_MAX], length: 0 };
        match address {
            IpAddr::V4(address) if self.prefix_v4 == 32 => text.push_octets(address.octets()),
            address @ IpAddr::V4(_) => text.push_network(address, self.prefix_v4),
            address @ IpAddr::V6(_) if self.prefix_v6 == 128 => text.push_display(&address),
            address @ IpAddr::V6(_) => text.push_network(address, self.prefix_v6),
        }
        text
    }
}

/// The text of an address or a network, without an allocation. It is a [`Key`].
#[derive(Clone, Copy)]
pub struct AddressText {
    bytes: [u8; TEXT_MAX],
    length: usize,
}

impl AddressText {
    /// The text that `Display` writes, in a fraction of the time.
    #[inline]
    fn push_octets(&mut self, octets: [u8; 4]) {
        for (at, octet) in octets.into_iter().enumerate() {
            if at > 0 {
                self.push(b'.');
            }
            if octet >= 100 {
                self.push(b'0' + octet / 100);
            }
            if octet >= 10 {
                self.push(b'0' + octet / 10 % 10);
            }
            self.push(b'0' + octet % 10);
        }
    }

    fn push_network(&mut self, address: IpAddr, prefix: u8) {
        // `prefix_v4` and `prefix_v6` take no longer prefix than an address has bits.
        let network = IpNet::new(address, prefix).unwrap_or_else(|_| IpNet::from(address));
        self.push_display(&network.trunc());
    }

    fn push_display(&mut self, text: &dyn fmt::Display) {
        let written = write!(self, "{text}");
        debug_assert!(written.is_ok(), "no address is longer");
    }

    /// Adds an ASCII character, as long as there is room.
    fn push(&mut self, character: u8) {
        if let Some(room) = self.bytes.get_mut(self.length) {
            *room = character;
            self.length += 1;
        }
    }
}

impl std::ops::Deref for AddressText {
    type Target = str;

    fn deref(&self) -> &str {
        str::from_utf8(&self.bytes[..self.length]).unwrap_or_default()
    }
}

impl Key for AddressText {
    fn write(&self, writer: &mut KeyWriter<'_>) {
        writer.push(self.as_ref());
    }

    fn held_bytes(&self) -> Option<&[u8]> {
        Some(self.as_ref())
    }
}

impl AsRef<[u8]> for AddressText {
    fn as_ref(&self) -> &[u8] {
        &self.bytes[..self.length]
    }
}

impl PartialEq for AddressText {
    fn eq(&self, other: &Self) -> bool {
        **self == **other
    }
}

impl Eq for AddressText {}

impl fmt::Display for AddressText {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self)
    }
}

impl fmt::Debug for AddressText {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(&**self, f)
    }
}

impl Write for AddressText {
    fn write_str(&mut self, more: &str) -> fmt::Result {
        let end = self.length + more.len();
        let room = self.bytes.get_mut(self.length..end).ok_or(fmt::Error)?;
        room.copy_from_slice(more.as_bytes());
        self.length = end;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use http::{HeaderName, HeaderValue};

    use super::*;

    /// Once, the end of the field was taken for a proxy that reports no client, and each denial of a client warned of it.
    #[test]
    fn client_that_a_field_of_one_address_names_is_reported_through_any_number_of_hops() {
        let field = HeaderName::from_static("cf-connecting-ip");
        let peer = IpAddr::from([10, 0, 0, 1]);
        let reported = IpAddr::from([203, 0, 113, 9]);
        for hops in 1..=3 {
            let forwarding = Forwarding::Header(field.clone());
            let client = ClientIp::peer().behind_hops(hops).forwarding(forwarding);
            let mut headers = HeaderMap::new();
            assert_eq!(client.find(peer, &headers), (peer, true), "{hops} hops, and no field");
            headers.insert(field.clone(), HeaderValue::from_static("203.0.113.9"));
            assert_eq!(client.find(peer, &headers), (reported, false), "{hops} hops");
            headers.insert(field.clone(), HeaderValue::from_static("unknown"));
            assert_eq!(client.find(peer, &headers), (peer, true), "{hops} hops, and no address");
        }
    }
}
