//! Which client a request is charged to, and what the response's header fields say.

#![cfg(all(feature = "http", feature = "testing"))]

use std::net::IpAddr;
use std::time::Duration;

use http::{HeaderMap, HeaderName, HeaderValue};
use proptest::prelude::*;
use sfv::{BareItem, Item, List, ListEntry, Parser};
use tidegate::http::{ClientIp, Forwarding, HeaderStyle, LimitReport, Network, Reset, RetryAfter};
use tidegate::testing::{ManualClock, ScriptedStore};
use tidegate::{Decision, Limit, Limiter, Mode, Quota};

// ---- the client's address --------------------------------------------------------------------------------

fn ip(text: &str) -> IpAddr {
    text.parse().unwrap()
}

fn networks<const COUNT: usize>(networks: [&str; COUNT]) -> [Network; COUNT] {
    networks.map(|network| network.parse().unwrap())
}

fn reports(lines: &[&str]) -> HeaderMap {
    let mut headers = HeaderMap::new();
    for line in lines {
        headers.append("x-forwarded-for", line.parse().unwrap());
        headers.append("forwarded", format!("for={line}").parse().unwrap());
    }
    headers
}

/// What is no list of addresses: a hundred values and more.
fn malformed() -> Vec<HeaderValue> {
    let texts = [
        "",
        ",",
        ",,,",
        " ",
        "unknown",
        "_hidden",
        "for=",
        "null",
        "localhost",
        "1.2.3",
        "1.2.3.4.5",
        "256.1.1.1",
        "1.2.3.4/8",
        "01.2.3.4",
        "1.2.3.4:",
        "1.2.3.4:99999",
        "::1::",
        "[::1",
        "::1]",
        "[1.2.3.4]",
        "fe80::1%eth0",
        "\"1.2.3.4",
        "1.2.3.4\"",
        "1.2.3.4;",
        "%31.2.3.4",
        "0x7f.1",
    ];
    let spelled = |text: &str| {
        [text.to_owned(), format!("{text},"), format!(" {text} ; x"), format!("\t{text}\t{text}")]
    };
    let mut values: Vec<HeaderValue> =
        texts.iter().flat_map(|text| spelled(text)).map(|text| text.parse().unwrap()).collect();
    values
        .extend((0x80..=0xff_u8).step_by(16).map(|byte| HeaderValue::from_bytes(&[byte]).unwrap()));
    values.push(HeaderValue::from_bytes(&vec![b','; 100_000]).unwrap());
    values
}

#[test]
fn forged_fields_of_an_untrusted_peer_are_not_read() {
    let clients = [
        ClientIp::peer(),
        ClientIp::peer().behind_networks(networks(["10.0.0.0/8", "2001:db8::/32"])),
        ClientIp::peer()
            .behind_networks(networks(["10.0.0.0/8"]))
            .forwarding(Forwarding::Forwarded),
        ClientIp::peer().behind_hops(0),
    ];
    for client in &clients {
        for forged in [&["8.8.8.8"][..], &["10.0.0.1, 8.8.8.8", "10.0.0.2"], &["::1", "[::1]:80"]] {
            assert_eq!(&*client.key(ip("192.0.2.1"), &reports(forged)), "192.0.2.1", "{client:?}");
        }
        for value in malformed() {
            let mut headers = HeaderMap::new();
            headers.append("x-forwarded-for", value.clone());
            headers.append("forwarded", value.clone());
            assert_eq!(&*client.key(ip("192.0.2.1"), &headers), "192.0.2.1", "{value:?}");
        }
    }
}

#[test]
fn unreadable_reports_are_charged_to_the_proxy() {
    let proxy = ip("10.0.0.1");
    let behind = [
        ClientIp::peer().behind_networks(networks(["10.0.0.0/8"])),
        ClientIp::peer().behind_hops(1),
        ClientIp::peer().behind_hops(1).forwarding(Forwarding::Forwarded),
    ];
    for client in &behind {
        for value in malformed() {
            let mut headers = HeaderMap::new();
            headers.append("x-forwarded-for", value.clone());
            headers.append("forwarded", value.clone());
            assert_eq!(&*client.key(proxy, &headers), "10.0.0.1", "{value:?}");
        }
        assert_eq!(&*client.key(proxy, &HeaderMap::new()), "10.0.0.1", "nothing was reported");
    }
}

/// A proxy that appends the client's address and then its own public one, as docs/PROXIES.md says of Google Cloud's.
#[test]
fn client_is_found_before_the_public_address_that_a_balancer_appends() {
    let of_balancer = networks(["35.191.0.0/16", "130.211.0.0/22", "34.120.1.1"]);
    let clients = [ClientIp::peer().behind_networks(of_balancer), ClientIp::peer().behind_hops(2)];
    for client in &clients {
        for told in ["203.0.113.9, 34.120.1.1", "8.8.8.8, 203.0.113.9, 34.120.1.1"] {
            let key = client.key(ip("35.191.0.5"), &reports(&[told]));
            assert_eq!(&*key, "203.0.113.9", "{client:?}: {told}");
        }
    }
}

#[test]
fn client_is_the_first_address_that_no_trusted_proxy_has() {
    let chain = reports(&["8.8.8.8, 192.0.2.1", "10.0.0.9"]);
    let by_network = ClientIp::peer().behind_networks(networks(["10.0.0.0/8"]));
    assert_eq!(&*by_network.key(ip("10.0.0.1"), &chain), "192.0.2.1");
    assert_eq!(&*by_network.key(ip("::ffff:10.0.0.1"), &chain), "192.0.2.1");
    for (hops, client) in [(0, "10.0.0.1"), (1, "10.0.0.9"), (2, "192.0.2.1"), (9, "8.8.8.8")] {
        let by_hops = ClientIp::peer().behind_hops(hops);
        assert_eq!(&*by_hops.key(ip("10.0.0.1"), &chain), client, "{hops} hops");
    }
    let only = reports(&["8.8.8.8"]);
    assert_eq!(
        &*by_network.forwarding(Forwarding::Forwarded).key(ip("10.0.0.1"), &only),
        "8.8.8.8"
    );
}

#[test]
fn addresses_count_up_to_their_prefix() {
    let client = ClientIp::peer();
    let key = |client: &ClientIp, peer| client.key(ip(peer), &HeaderMap::new()).to_string();
    assert_eq!(key(&client, "2001:db8:1:2:3:4:5:6"), "2001:db8:1:2::/64");
    assert_eq!(key(&client.clone().prefix_v6(48), "2001:db8:1:2:3:4:5:6"), "2001:db8:1::/48");
    assert_eq!(key(&client.clone().prefix_v6(0), "2001:db8::1"), "::/0");
    let longest = "2001:db8:1111:2222:3333:4444:5555:6666";
    assert_eq!(key(&client.clone().prefix_v6(255), longest), longest);
    assert_eq!(key(&client.clone().prefix_v6(127), longest), format!("{longest}/127"));
    assert_eq!(key(&client, "::ffff:192.0.2.1"), "192.0.2.1", "an IPv4 address is whole");
    let v4 = |bits| key(&client.clone().prefix_v4(bits), "203.0.113.9");
    assert_eq!((v4(24), v4(32)), ("203.0.113.0/24".to_owned(), "203.0.113.9".to_owned()));
    assert_eq!((v4(0), v4(255)), ("0.0.0.0/0".to_owned(), "203.0.113.9".to_owned()));
}

/// Once, only two fields were read, so that the address that a CDN reports had neither prefix nor trust.
#[test]
fn d9_named_header_of_a_trusted_proxy_is_the_clients_address() {
    for name in ["cf-connecting-ip", "true-client-ip", "fly-client-ip"] {
        let name: HeaderName = name.parse().unwrap();
        let client = ClientIp::peer()
            .behind_networks(networks(["10.0.0.0/8"]))
            .forwarding(Forwarding::Header(name.clone()));
        let key = |peer: &str, values: &[&str]| {
            let mut headers = reports(&["8.8.8.8"]);
            for value in values {
                headers.append(name.clone(), value.parse().unwrap());
            }
            client.key(ip(peer), &headers).to_string()
        };
        assert_eq!(key("10.0.0.1", &["203.0.113.9"]), "203.0.113.9");
        assert_eq!(key("10.0.0.1", &["2001:db8:1:2:3::4"]), "2001:db8:1:2::/64", "with prefix");
        assert_eq!(key("192.0.2.1", &["203.0.113.9"]), "192.0.2.1", "an untrusted peer");
        assert_eq!(key("10.0.0.1", &[]), "10.0.0.1", "other fields are not read");
        assert_eq!(key("10.0.0.1", &["1.1.1.1", "203.0.113.9"]), "10.0.0.1", "forged twice");
        assert_eq!(key("10.0.0.1", &["1.1.1.1, 203.0.113.9"]), "10.0.0.1");
    }
}

// ---- header fields -------------------------------------------------------------------

/// Limits of one node that live by `clock`, and of which nobody else has any.
fn limits(clock: &ManualClock, quotas: &[Quota]) -> Vec<tidegate::ActiveLimit> {
    let names: Vec<String> = (0..quotas.len()).map(|limit| format!("a/b_c-{limit}.d")).collect();
    let limiter = names
        .iter()
        .zip(quotas)
        .fold(Limiter::builder(), |builder, (name, quota)| {
            builder.limit(Limit::new(name, *quota).mode(Mode::Local))
        })
        .clock(clock)
        .build()
        .unwrap();
    names.iter().map(|name| limiter.limit(name).unwrap()).collect()
}

fn integer(item: &BareItem) -> u64 {
    i64::from(item.as_integer().expect("an integer")).try_into().expect("not negative")
}

/// Names and parameters of a list, as an independent parser reads it.
fn list(value: &HeaderValue, parameters: [&str; 2]) -> Vec<(String, [u64; 2])> {
    let list: List = Parser::new(value.as_bytes()).parse().expect("a list");
    let of = |entry: &ListEntry| {
        let ListEntry::Item(item) = entry else { panic!("an inner list: {value:?}") };
        assert_eq!(item.params.len(), 2, "{value:?}");
        let name = item.bare_item.as_string().expect("a string").as_str().to_owned();
        (name, parameters.map(|parameter| integer(&item.params[parameter])))
    };
    list.iter().map(of).collect()
}

fn number(headers: &HeaderMap, name: &str) -> u64 {
    let item: Item = Parser::new(headers[name].as_bytes()).parse().expect("an item");
    assert!(item.params.is_empty());
    integer(&item.bare_item)
}

fn up(duration: Duration) -> u64 {
    duration.as_nanos().div_ceil(1_000_000_000) as u64
}

#[test]
fn every_combination_of_styles_is_read_by_an_independent_parser() {
    let clock = ManualClock::new();
    let quotas = [
        Quota::per_second(1),
        Quota::per_second(1_000_000_000).burst(1_000_000_000),
        Quota::per_minute(7).burst(100),
        Quota::per_second(3).burst(1),
    ];
    let resets = [None, Some(Reset::Seconds), Some(Reset::Timestamp)];
    for count in 1..=quotas.len() {
        for spent in 0..3 {
            let limits = limits(&clock, &quotas[..count]);
            let decide = |limit: &tidegate::ActiveLimit| limit.check("user");
            for limit in (0..spent).flat_map(|_| &limits) {
                let _ = decide(limit);
            }
            let decisions: Vec<Decision> = limits.iter().map(decide).collect();
            let reports: Vec<LimitReport<'_>> =
                decisions.iter().copied().map(LimitReport::from).collect();
            for combination in 0..12 {
                let draft = combination % 2 == 1;
                let draft_03 = combination / 2 % 2 == 1;
                let reset = resets[combination / 4];
                let mut fields = HeaderStyle::none();
                fields = if draft { fields.and(HeaderStyle::draft()) } else { fields };
                fields = if draft_03 { fields.and(HeaderStyle::draft_03()) } else { fields };
                fields = reset.map_or(fields, |reset| fields.and(HeaderStyle::x_ratelimit(reset)));
                let mut headers = HeaderMap::new();
                fields.write(&reports, &mut headers);
                let expected = 2 * usize::from(draft)
                    + 3 * usize::from(draft_03)
                    + 3 * usize::from(reset.is_some());
                assert_eq!(headers.len(), expected, "{fields:?}");
                if draft {
                    check_draft(&headers, &reports, &quotas);
                }
                let prefixes = [("ratelimit", draft_03), ("x-ratelimit", reset.is_some())];
                for (prefix, _) in prefixes.into_iter().filter(|prefix| prefix.1) {
                    let later = prefix == "x-ratelimit" && reset == Some(Reset::Timestamp);
                    check_trio(&headers, prefix, later, &decisions);
                }
            }
        }
    }
}

fn check_draft(headers: &HeaderMap, reports: &[LimitReport<'_>], quotas: &[Quota]) {
    let policies = list(&headers["ratelimit-policy"], ["q", "w"]);
    let states = list(&headers["ratelimit"], ["r", "t"]);
    assert_eq!((policies.len(), states.len()), (reports.len(), reports.len()));
    for (((report, (named, [q, w])), (again, [r, t])), quota) in
        reports.iter().zip(policies).zip(states).zip(quotas)
    {
        let decision = &report.decision;
        assert_eq!((&*named, &*again), (report.limit, report.limit));
        assert_eq!((q, w), (quota.tokens(), quota.period().as_secs()));
        assert_eq!(r, decision.remaining());
        assert_eq!(t, up(decision.next_token_after()));
        let retry = RetryAfter::exact().seconds(decision);
        assert!(!decision.is_denied() || retry >= t, "Retry-After is not before t");
    }
}

fn check_trio(headers: &HeaderMap, prefix: &str, later: bool, decisions: &[Decision]) {
    let value = |name: &str| number(headers, &format!("{prefix}-{name}"));
    let reset = value("reset");
    let matching = decisions.iter().find(|decision| {
        let now = std::time::SystemTime::UNIX_EPOCH.elapsed().unwrap().as_secs();
        let since = if later { now.abs_diff(reset) } else { reset };
        let limits =
            value("limit") == decision.burst() && value("remaining") == decision.remaining();
        limits && since.abs_diff(up(decision.reset_after())) <= u64::from(later) * 5
    });
    let written = matching.expect("it is one of the limits");
    let longest = decisions.iter().map(Decision::retry_after).max();
    assert_eq!(Some(written.retry_after()), longest, "the one that denies longest");
}

proptest! {
    /// With no other traffic on the key.
    #[test]
    fn retry_after_is_exact_to_the_millisecond(
        tokens in 1..=10_000_u64, period_ms in 1..=600_000_u64, burst in 1..=10_000_u64,
        cost in 1..=10_000_u64, spent in 1..=20_000_u64, start_us in 0..=10_000_000_u64,
    ) {
        let quota = Quota::new(tokens, Duration::from_millis(period_ms)).burst(burst);
        let cost = cost.min(burst) as u32;
        let spent = spent.min(burst) as u32;
        // What is asked again meanwhile is other traffic: each question is another run's.
        let denied = || {
            let clock = ManualClock::new();
            clock.advance(Duration::from_micros(start_us));
            let limiter = Limiter::builder().limit(Limit::new("a", quota)).clock(&clock).build();
            let limit = limiter.ok()?.limit("a").unwrap();
            assert!(limit.check_n("key", spent).unwrap().is_allowed());
            clock.advance(Duration::from_micros(start_us / 7));
            let decision = limit.check_n("key", cost).unwrap();
            Some((clock, limit, decision)).filter(|denied| denied.2.is_denied())
        };
        let is_allowed_after = |wait: Duration| {
            let (clock, limit, _) = denied().unwrap();
            clock.advance(wait);
            limit.check_n("key", cost).unwrap().is_allowed()
        };
        if let Some((_, _, decision)) = denied() {
            let retry = decision.retry_after();
            prop_assert!(decision.next_token_after() <= retry);
            let sooner = retry.saturating_sub(Duration::from_millis(1));
            prop_assert!(!is_allowed_after(sooner), "before {:?}", retry);
            prop_assert!(is_allowed_after(retry), "after {:?}", retry);
            // The time of the next token is as exact.
            let left_after = |wait: Duration| {
                let (clock, limit, _) = denied().unwrap();
                clock.advance(wait);
                limit.check_n("key", 0).unwrap().remaining()
            };
            let next = decision.next_token_after();
            prop_assert!(left_after(next) > decision.remaining(), "after {:?}", next);
            let sooner = next.saturating_sub(Duration::from_millis(1));
            prop_assert_eq!(left_after(sooner), decision.remaining(), "before {:?}", next);
            // And of as many as the request costs.
            let wait = decision.left_after(cost);
            prop_assert!(left_after(wait) >= u64::from(cost), "after {:?}", wait);
            let sooner = wait.saturating_sub(Duration::from_millis(1));
            prop_assert!(left_after(sooner) < u64::from(cost), "before {:?}", wait);
        }
    }
}

/// Advances the clock by `ms` milliseconds, in longer steps while many are left.
async fn pass(clock: &ManualClock, limiter: &Limiter, mut ms: u64) {
    while ms > 0 {
        let step = if ms > 3000 { 100 } else { 1 };
        clock.advance(Duration::from_millis(step));
        limiter.settle().await;
        ms -= step;
    }
}

/// For a limit that nodes share: asks for `cost` every 7 ms for `greedy_ms`, and once more `sooner_s` seconds before the
/// last `Retry-After` is over. Returns that `Retry-After` in seconds, and whether the request was admitted.
async fn obeyed(quota: Quota, cost: u32, greedy_ms: u64, sooner_s: u64) -> Option<(u64, bool)> {
    let clock = ManualClock::new();
    let limit = Limit::new("api", quota);
    let store = ScriptedStore::new(&clock);
    let limiter = Limiter::builder().limit(limit).store(store).clock(&clock).build().ok()?;
    let api = limiter.limit("api").unwrap();
    pass(&clock, &limiter, 1000).await;
    let mut last = None;
    for _ in 0..greedy_ms / 7 {
        pass(&clock, &limiter, 7).await;
        last = Some(api.check_n("key", cost).unwrap());
    }
    let retry_s = RetryAfter::exact().seconds(&last?);
    let wait_s = retry_s.checked_sub(sooner_s).filter(|&wait_s| wait_s > 0)?;
    pass(&clock, &limiter, wait_s * 1000).await;
    if cost == 1 {
        return Some((retry_s, api.check("key").is_allowed()));
    }
    // More than the credit: with no lease left only the store can tell.
    let mut asked = std::pin::pin!(api.check_sure_n("key", cost));
    loop {
        tokio::select! {
            biased;
            decision = &mut asked => return Some((retry_s, decision.unwrap().is_allowed())),
            () = limiter.settle() => clock.advance(Duration::from_micros(100)),
        }
    }
}

/// The same of a limit that nodes share. A node knows the level of the store in whole tokens: so it is
/// true a token sooner at most, and what it takes to hear of it.
#[tokio::test]
async fn retry_after_of_a_shared_limit_is_exact_to_a_token() {
    let mut random = fastrand::Rng::with_seed(7);
    let (mut admitted, mut sooner) = (0, 0);
    while admitted < 30 {
        let period = Duration::from_secs(*random.choice(&[1, 10, 60, 3600]).unwrap());
        let (tokens, burst) = (random.u64(1..=100), random.u64(1..=100));
        let cost = if random.bool() { 1 } else { random.u32(1..=burst as u32) };
        let greedy_ms = random.u64(200..3000);
        let quota = Quota::new(tokens, period).burst(burst);
        let shown = format!("{quota:?} cost {cost} greedy {greedy_ms}");
        if let Some((retry_s, allowed)) = obeyed(quota, cost, greedy_ms, 0).await {
            assert!(allowed, "{shown}: after {retry_s} s");
            admitted += 1;
        }
        let sooner_s = 2 + period.as_secs().div_ceil(tokens);
        if let Some((retry_s, allowed)) = obeyed(quota, cost, greedy_ms, sooner_s).await {
            assert!(!allowed, "{shown}: {sooner_s} s before {retry_s} s");
            sooner += 1;
        }
    }
    assert!(sooner > 5, "{sooner}");
}

/// A thousand clients of one key that are denied together and obey a spread `Retry-After`.
#[test]
fn spread_clients_that_obey_return_evenly() {
    let clock = ManualClock::new();
    let limit = &limits(&clock, &[Quota::per_minute(600)])[0];
    let retry = RetryAfter::spread();
    while limit.check("shared").is_allowed() {}
    let mut returns = [0_u32; 120];
    for _client in 0..1000 {
        let denied = limit.check("shared");
        assert!(denied.is_denied());
        returns[retry.seconds(&denied) as usize] += 1;
    }
    let (mut admitted, mut waiting) = (0, 1000);
    for (second, &clients) in returns.iter().enumerate() {
        if clients > 0 {
            println!("{second:>3} s {clients:>3} {}", "#".repeat(clients as usize));
        }
        admitted += (0..clients).filter(|_| limit.check("shared").is_allowed()).count();
        waiting -= clients;
        clock.advance(Duration::from_secs(1));
    }
    println!("{admitted} of 1000 were admitted on their return");
    assert_eq!(waiting, 0, "all have returned");
    assert_eq!(returns[0], 0, "none before there is a token");
    let first = returns.iter().position(|&clients| clients > 0).unwrap();
    let last = returns.iter().rposition(|&clients| clients > 0).unwrap();
    assert_eq!((first, last), (1, 61), "over the minute in which the bucket fills");
    assert!(returns[1..=61].iter().all(|clients| (15..=18).contains(clients)), "{returns:?}");
    assert_eq!(admitted, 610, "as many as there were tokens, ten a second");
}

/// Once, clients with buckets of their own waited for up to a minute longer than needed.
#[test]
fn d6_retry_after_is_exact_by_default() {
    let clock = ManualClock::new();
    let limit = &limits(&clock, &[Quota::per_minute(1)])[0];
    for client in 0..100 {
        assert!(limit.check(&client).is_allowed());
        let denied = limit.check(&client);
        assert_eq!(RetryAfter::default().seconds(&denied), 60, "as t in RateLimit");
    }
}
