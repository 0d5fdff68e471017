//! The addresses that proxies report, read from the end of the field, where the nearest proxy wrote.

use std::net::{IpAddr, SocketAddr};

use http::{HeaderMap, HeaderName, HeaderValue, header};

/// The header field in which trusted proxies report the client's address.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Forwarding {
    /// `X-Forwarded-For`: a list of addresses, to which each proxy appends its own peer's.
    #[default]
    XForwardedFor,
    /// `Forwarded` (RFC 7239), with the addresses in its `for` parameters.
    Forwarded,
    /// One address in a field of this name, such as `CF-Connecting-IP`, `True-Client-IP` or `Fly-Client-IP`. The
    /// outermost trusted proxy must set it, and the proxies behind it must pass it on. A field that is there twice,
    /// or that holds no address, is not read.
    Header(HeaderName),
}

const X_FORWARDED_FOR: HeaderName = HeaderName::from_static("x-forwarded-for");

impl Forwarding {
    fn field(&self) -> HeaderName {
        match self {
            Self::XForwardedFor => X_FORWARDED_FOR,
            Self::Forwarded => header::FORWARDED,
            Self::Header(name) => name.clone(),
        }
    }

    /// The addresses in this header field, the last one first; `None` stands for text that is no address.
    ///
    /// Quotes are paired from the end too: text that comes first cannot open a quote that hides later text, and text
    /// that a proxy quotes (the host that the client asked for) is not read as a report.
    pub(super) fn addresses(&self, headers: &HeaderMap) -> impl Iterator<Item = Option<IpAddr>> {
        let values = headers.get_all(self.field());
        let is_single = values.iter().count() == 1;
        let mut lines = values.into_iter();
        let lines = std::iter::from_fn(move || lines.next_back());
        let elements = lines.flat_map(|line: &HeaderValue| self.elements(line.as_bytes()));
        elements.map(move |element| match self {
            Self::XForwardedFor => address(element),
            Self::Forwarded => of_parameters(element),
            Self::Header(_) => address(element).filter(|_| is_single),
        })
    }

    /// The elements of a line, the last one first; a field with one address is no list.
    fn elements<'a>(&self, line: &'a [u8]) -> impl Iterator<Item = &'a [u8]> + use<'a> {
        let separator = if matches!(self, Self::Header(_)) { None } else { Some(b',') };
        rsplit(line, separator)
    }
}

/// The parts between separators that are not quoted, the last one first; all of it without a separator.
fn rsplit(text: &[u8], separator: Option<u8>) -> impl Iterator<Item = &[u8]> {
    let mut rest = Some(text);
    std::iter::from_fn(move || {
        let text = rest?;
        let mut quoted = false;
        let at = (0..text.len()).rev().find(|&at| {
            let escapes = || text[..at].iter().rev().take_while(|&&byte| byte == b'\\').count();
            quoted ^= text[at] == b'"' && escapes() % 2 == 0;
            separator == Some(text[at]) && !quoted
        });
        rest = at.map(|at| &text[..at]);
        Some(at.map_or(text, |at| &text[at + 1..]))
    })
}

/// The `for` parameter of an element, if it is there once.
fn of_parameters(element: &[u8]) -> Option<IpAddr> {
    let mut values = rsplit(element, Some(b';')).filter_map(|pair| {
        let (name, value) = pair.split_at_checked(pair.iter().position(|&byte| byte == b'=')?)?;
        name.trim_ascii().eq_ignore_ascii_case(b"for").then_some(value[1..].trim_ascii())
    });
    let (value, None) = (values.next()?, values.next()) else { return None };
    let unquoted = value.strip_prefix(b"\"").and_then(|value| value.strip_suffix(b"\""));
    address(unquoted.unwrap_or(value))
}

/// An address, with a port or without, which may be hidden (`_b1`); an IPv6 one in brackets or not.
fn address(text: &[u8]) -> Option<IpAddr> {
    let text = str::from_utf8(text).ok()?.trim_matches([' ', '\t']);
    if let Ok(address) = text.parse::<IpAddr>() {
        return Some(address);
    }
    if let Ok(address) = text.parse::<SocketAddr>() {
        return Some(address.ip());
    }
    let text = text.rsplit_once(":_").map_or(text, |(address, _)| address);
    match text.strip_prefix('[') {
        Some(bracketed) => bracketed.strip_suffix(']')?.parse().ok().map(IpAddr::V6),
        None => text.parse().ok().map(IpAddr::V4),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn addresses(forwarding: &Forwarding, lines: &[&str]) -> Vec<String> {
        let mut headers = HeaderMap::new();
        for line in lines {
            headers.append(forwarding.field(), line.parse().unwrap());
        }
        let text = |address: Option<IpAddr>| address.map_or("?".to_owned(), |one| one.to_string());
        forwarding.addresses(&headers).map(text).collect()
    }

    #[test]
    fn addresses_come_from_the_last_line_and_the_end_of_each() {
        let x = |lines: &[&str]| addresses(&Forwarding::XForwardedFor, lines);
        assert_eq!(x(&[]), [""; 0]);
        assert_eq!(x(&["1.1.1.1, 2.2.2.2", "3.3.3.3"]), ["3.3.3.3", "2.2.2.2", "1.1.1.1"]);
        let spelled = "2001:db8::1,[2001:db8::2],[2001:db8::3]:80 ,\t4.4.4.4:80";
        assert_eq!(x(&[spelled]), ["4.4.4.4", "2001:db8::3", "2001:db8::2", "2001:db8::1"]);
        assert_eq!(x(&["1.1.1.1,,unknown, 010.0.0.1,1.1.1"]), ["?", "?", "?", "?", "1.1.1.1"]);
    }

    #[test]
    fn the_standard_field_tells_by_its_for_parameter() {
        let standard = |line: &str| addresses(&Forwarding::Forwarded, &[line]);
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
        assert_eq!(standard("for=\"192.0.2.43:_p1\""), ["192.0.2.43"]);
        assert_eq!(standard("for=\"[2001:db8::1]:_p1\""), ["2001:db8::1"]);
        // What clients may ask for as a host, in the proxy's quotes.
        for host in ["x,for=8.8.8.8;y=", "x;for=8.8.8.8", "x\\\",for=8.8.8.8;y=\\\"", "x\\\\"] {
            let line = format!("for=1.1.1.1, for=192.0.2.1;host=\"{host}\"");
            assert_eq!(standard(&line), ["192.0.2.1", "1.1.1.1"], "{host}");
        }
        let open_quote = "for=\"1.1.1.1, for=2.2.2.2";
        assert_eq!(standard(open_quote), ["2.2.2.2", "?"], "what the last proxy wrote is read");
    }

    #[test]
    fn named_header_holds_one_address_or_none() {
        let name = HeaderName::from_static("cf-connecting-ip");
        let named = |lines: &[&str]| addresses(&Forwarding::Header(name.clone()), lines);
        assert_eq!(named(&["203.0.113.9"]), ["203.0.113.9"]);
        assert_eq!(named(&["2001:db8::1"]), ["2001:db8::1"]);
        assert_eq!(named(&["8.8.8.8, 203.0.113.9"]), ["?"], "a list is no address");
        assert_eq!(named(&["8.8.8.8", "203.0.113.9"]), ["?", "?"], "nor are two fields");
        assert_eq!(named(&["unknown"]), ["?"]);
        assert_eq!(named(&[]), [""; 0]);
    }
}
