//! What proxies say about whom they speak for, read from its end: that is what the nearest one wrote.

use std::net::{IpAddr, SocketAddr};

use http::{HeaderMap, HeaderName, HeaderValue, header};

/// The field in which trusted proxies say who asked them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Forwarding {
    /// `X-Forwarded-For`: addresses, each proxy's after those that it was told.
    #[default]
    XForwardedFor,
    /// `Forwarded` (RFC 7239), by its `for` parameters.
    Forwarded,
}

impl Forwarding {
    fn field(self) -> HeaderName {
        match self {
            Self::XForwardedFor => HeaderName::from_static("x-forwarded-for"),
            Self::Forwarded => header::FORWARDED,
        }
    }

    /// The addresses in these header fields, the last one first; `None` stands for what is none.
    ///
    /// Elements are parted at each comma, whether quoted or not: who comes first cannot open a quote
    /// that swallows what is said after him, and no address has a comma in it.
    pub(super) fn addresses(self, headers: &HeaderMap) -> impl Iterator<Item = Option<IpAddr>> {
        let mut lines = headers.get_all(self.field()).into_iter();
        let lines = std::iter::from_fn(move || lines.next_back());
        let elements =
            lines.flat_map(|line: &HeaderValue| line.as_bytes().rsplit(|&byte| byte == b','));
        elements.map(move |element| {
            let element = str::from_utf8(element).ok()?.trim_matches([' ', '\t']);
            match self {
                Self::XForwardedFor => address(element),
                Self::Forwarded => of_parameters(element),
            }
        })
    }
}

/// The `for` parameter of an element, which may stand there once.
fn of_parameters(element: &str) -> Option<IpAddr> {
    let mut values = element.split(';').filter_map(|pair| {
        let (name, value) = pair.split_once('=')?;
        name.trim_matches([' ', '\t']).eq_ignore_ascii_case("for").then_some(value)
    });
    let (value, None) = (values.next()?, values.next()) else { return None };
    let value = value.trim_matches([' ', '\t']);
    let unquoted = value.strip_prefix('"').and_then(|value| value.strip_suffix('"'));
    address(unquoted.unwrap_or(value))
}

/// An address, with a port or without; an IPv6 one in brackets or not.
fn address(text: &str) -> Option<IpAddr> {
    if let Ok(address) = text.parse::<IpAddr>() {
        return Some(address);
    }
    if let Ok(address) = text.parse::<SocketAddr>() {
        return Some(address.ip());
    }
    text.strip_prefix('[')?.strip_suffix(']')?.parse().ok().map(IpAddr::V6)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn addresses(forwarding: Forwarding, lines: &[&str]) -> Vec<String> {
        let mut headers = HeaderMap::new();
        for line in lines {
            headers.append(forwarding.field(), line.parse().unwrap());
        }
        let text = |address: Option<IpAddr>| address.map_or("?".to_owned(), |one| one.to_string());
        forwarding.addresses(&headers).map(text).collect()
    }

    #[test]
    fn addresses_come_from_the_last_line_and_the_end_of_each() {
        let x = |lines: &[&str]| addresses(Forwarding::XForwardedFor, lines);
        assert_eq!(x(&[]), [""; 0]);
        assert_eq!(x(&["1.1.1.1, 2.2.2.2", "3.3.3.3"]), ["3.3.3.3", "2.2.2.2", "1.1.1.1"]);
        let spelled = "2001:db8::1,[2001:db8::2],[2001:db8::3]:80 ,\t4.4.4.4:80";
        assert_eq!(x(&[spelled]), ["4.4.4.4", "2001:db8::3", "2001:db8::2", "2001:db8::1"]);
        assert_eq!(x(&["1.1.1.1,,unknown, 010.0.0.1,1.1.1"]), ["?", "?", "?", "?", "1.1.1.1"]);
    }

    #[test]
    fn the_standard_field_tells_by_its_for_parameter() {
        let standard = |line| addresses(Forwarding::Forwarded, &[line]);
        assert_eq!(standard("for=192.0.2.60;proto=http;by=203.0.113.43"), ["192.0.2.60"]);
        assert_eq!(
            standard("by=9.9.9.9; FOR = \"[2001:db8:cafe::17]:4711\""),
            ["2001:db8:cafe::17"]
        );
        for none in
            ["for=unknown", "for=_hidden", "by=1.1.1.1", "for=1.1.1.1;for=2.2.2.2", "for", "\""]
        {
            assert_eq!(standard(none), ["?"], "{none}");
        }
        let open_quote = "for=\"1.1.1.1, for=2.2.2.2";
        assert_eq!(standard(open_quote), ["2.2.2.2", "?"], "what the last proxy wrote is read");
    }
}
