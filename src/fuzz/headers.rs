//! Header fields that strangers write.

use std::net::{IpAddr, Ipv4Addr};
use std::time::{Duration, SystemTime};

use http::{HeaderMap, HeaderName, HeaderValue};

use crate::http::{ClientIp, Forwarding, Network};
use crate::quota::Quota;
use crate::retry::RateLimitHints;

/// Fields that the parsers read, by the first byte of a line.
const FIELDS: [&str; 12] = [
    "x-forwarded-for",
    "forwarded",
    "cf-connecting-ip",
    "retry-after",
    "date",
    "ratelimit",
    "ratelimit-policy",
    "ratelimit-limit",
    "ratelimit-remaining",
    "ratelimit-reset",
    "x-ratelimit-limit",
    "x-ratelimit-reset",
];

/// Reads `bytes` as lines of header fields, each behind a byte that names its field, and as a network and a quota.
///
/// Whatever a client writes, the address that the trusted proxy appends is the client's. What is read of a network or a
/// quota reads the same when it is written. A key that is an address is in each network around it.
pub fn headers(bytes: &[u8]) {
    let mut headers = HeaderMap::new();
    for line in bytes.split(|&byte| byte == b'\n') {
        let Some((field, value)) = line.split_first() else { continue };
        let field = HeaderName::from_static(FIELDS[usize::from(*field) % FIELDS.len()]);
        if let Ok(value) = HeaderValue::from_bytes(value) {
            headers.append(field, value);
        }
        for (forwarding, report) in [
            (Forwarding::XForwardedFor, "203.0.113.9"),
            (Forwarding::Forwarded, "for=203.0.113.9;host=\"a,b;c\""),
        ] {
            appended_report_counts(forwarding, value, report);
        }
    }
    let peer = IpAddr::V4(Ipv4Addr::new(10, 0, 0, 1));
    let named = Forwarding::Header(HeaderName::from_static("cf-connecting-ip"));
    for forwarding in [Forwarding::XForwardedFor, Forwarding::Forwarded, named] {
        let client = ClientIp::peer().behind_hops(3).forwarding(forwarding);
        let _ = client.key(peer, &headers);
    }
    let now = SystemTime::UNIX_EPOCH + Duration::from_secs(1_700_000_000);
    let _ = RateLimitHints::read(&headers, now);
    let Ok(text) = str::from_utf8(bytes) else { return };
    match text.parse::<Network>() {
        Ok(network) => assert_eq!(network.to_string().parse(), Ok(network)),
        Err(error) => assert!(error.to_string().contains("network = "), "{error}"),
    }
    addresses_are_in_the_networks_around_them(bytes, text);
    match text.parse::<Quota>() {
        Ok(quota) => assert_eq!(quota.to_string().parse(), Ok(quota), "{text:?}"),
        Err(error) => assert!(!error.to_string().is_empty()),
    }
}

/// A key that is an address is found by each network that has it.
fn addresses_are_in_the_networks_around_them(key: &[u8], text: &str) {
    let (Some(network), Ok(address)) = (Network::of_key(key), text.parse::<IpAddr>()) else {
        return;
    };
    let bits = network.prefix_len();
    assert_eq!(Network::new(address.to_canonical(), bits), Ok(network));
    for prefix in 0..=bits {
        let around = network.within(prefix).expect("it is wider");
        assert!(around.contains(address), "{around} {address}");
    }
    assert_eq!(network.within(bits + 1), None);
}

/// The client is whom the trusted proxy reports at the end of the line, whatever stands before.
fn appended_report_counts(forwarding: Forwarding, forged: &[u8], report: &str) {
    let line = [forged, b", ", report.as_bytes()].concat();
    let Ok(line) = HeaderValue::from_bytes(&line) else { return };
    let field = match forwarding {
        Forwarding::XForwardedFor => HeaderName::from_static("x-forwarded-for"),
        _ => http::header::FORWARDED,
    };
    let headers = HeaderMap::from_iter([(field, line)]);
    let proxy = IpAddr::V4(Ipv4Addr::new(10, 0, 0, 1));
    let network = "10.0.0.0/8".parse::<Network>().expect("a network");
    let client = ClientIp::peer().behind_networks([network]).forwarding(forwarding);
    assert_eq!(&*client.key(proxy, &headers), "203.0.113.9", "{headers:?}");
}
