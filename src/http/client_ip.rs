//! Who asks: the address of a client, as text that a limit takes for a key.

use std::fmt::{self, Write};
use std::net::IpAddr;

use http::HeaderMap;

use super::cidr::{Network, masked};
use super::forwarded::Forwarding;

/// A client that has an IPv6 address mostly has so many bits of it for himself alone.
pub const DEFAULT_PREFIX_V6: u8 = 64;

/// The longest text of an address: of IPv6 with a prefix length.
const TEXT_MAX: usize = 43;

/// Reads the client's address off a request: that of the peer, or what trusted proxies say.
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
    prefix_v6: u8,
}

#[derive(Clone, Debug, PartialEq, Eq)]
enum Trusted {
    Nobody,
    Networks(Vec<Network>),
    Hops(usize),
}

impl Trusted {
    /// Whether what this one says is believed, who is so many hops away.
    fn believes(&self, hop: usize, address: IpAddr) -> bool {
        match self {
            Self::Nobody => false,
            Self::Networks(networks) => networks.iter().any(|network| network.contains(address)),
            Self::Hops(hops) => hop < *hops,
        }
    }
}

impl ClientIp {
    /// Whoever holds the connection. Header fields are not read.
    pub fn peer() -> Self {
        Self {
            trusted: Trusted::Nobody,
            forwarding: Forwarding::default(),
            prefix_v6: DEFAULT_PREFIX_V6,
        }
    }

    /// Whoever asked the proxies of these networks, and of those that were named before. What others say
    /// is not read. Each proxy must add to the field or write it anew: what it only passes on is taken for
    /// its own word. Replaces [`behind_hops`](Self::behind_hops).
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

    /// Whoever asked the outermost of so many proxies, whatever their addresses are. Every request must
    /// come through all of them: who reaches the service by fewer is believed what he says. Replaces
    /// [`behind_networks`](Self::behind_networks).
    #[must_use]
    pub fn behind_hops(mut self, hops: usize) -> Self {
        self.trusted = Trusted::Hops(hops);
        self
    }

    /// The field in which they say so, [`Forwarding::XForwardedFor`] otherwise. Only this one is read:
    /// a proxy passes on what it does not write itself.
    #[must_use]
    pub fn forwarding(mut self, field: Forwarding) -> Self {
        self.forwarding = field;
        self
    }

    /// How many bits of an IPv6 address tell clients apart, [`DEFAULT_PREFIX_V6`] otherwise; more than
    /// 128 are 128.
    #[must_use]
    pub fn prefix_v6(mut self, bits: u8) -> Self {
        self.prefix_v6 = bits.min(128);
        self
    }

    /// The address of the client: the first one, from `peer` outwards, that is not of a trusted proxy.
    /// Where something is told that is no address, it is who told it. IPv4 addresses that are mapped to
    /// IPv6 ones are IPv4 addresses.
    #[inline]
    pub fn address(&self, peer: IpAddr, headers: &HeaderMap) -> IpAddr {
        let peer = peer.to_canonical();
        if self.trusted == Trusted::Nobody { peer } else { self.outermost(peer, headers) }
    }

    /// The first one outwards that is not of a proxy that is believed.
    fn outermost(&self, mut client: IpAddr, headers: &HeaderMap) -> IpAddr {
        let mut told = self.forwarding.addresses(headers);
        let mut hop = 0;
        while self.trusted.believes(hop, client)
            && let Some(Some(address)) = told.next()
        {
            client = address.to_canonical();
            hop += 1;
        }
        client
    }

    /// The [`address`](Self::address) as a key: an IPv4 address, or the network of an IPv6 one. Allocates
    /// nothing.
    #[inline]
    pub fn key(&self, peer: IpAddr, headers: &HeaderMap) -> AddressText {
        let mut text = AddressText { bytes: [0; TEXT_MAX], length: 0 };
        match self.address(peer, headers) {
            IpAddr::V4(address) => text.push_octets(address.octets()),
            address @ IpAddr::V6(_) => text.push_network(address, self.prefix_v6),
        }
        text
    }
}

/// The text of an address, in place.
#[derive(Clone, Copy)]
pub struct AddressText {
    bytes: [u8; TEXT_MAX],
    length: usize,
}

impl AddressText {
    /// As `Display` writes it, in a fraction of the time.
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
        let written = if prefix < 128 {
            write!(self, "{}/{prefix}", masked(address, prefix))
        } else {
            write!(self, "{address}")
        };
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
