//! Many clients of a limited service, each by an address of its own in X-Forwarded-For: what they are answered
//! beside what one central bucket would answer to the same requests.
//!
//! ```text
//! cargo bench --features cli --bench clients -- http://127.0.0.1:8080/ cold
//! cargo bench --features cli --bench clients -- http://127.0.0.1:8080/ logins
//! ```
//!
//! `cold`: 200 new clients with six requests at once each; a service that gives each 100 a second has to admit all.
//! `logins`: 500 clients at nine tenths of 5 a minute for a minute; the service has to admit 99.5% of the ideal, and
//! nothing in excess. The exit status is 1 where it does not.
#![allow(clippy::disallowed_methods, reason = "a load on a real service waits for real time")]

use std::error::Error;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use hyper_util::client::legacy::Client;
use hyper_util::client::legacy::connect::HttpConnector;
use hyper_util::rt::TokioExecutor;
use tokio::task::JoinSet;

const COLD_CLIENTS: u32 = 200;
const COLD_REQUESTS: u32 = 6;
const COLD_GAP: Duration = Duration::from_millis(10);

const LOGIN_CLIENTS: u32 = 500;
const LOGIN_BURST: f64 = 5.0;
/// Tokens a second.
const LOGIN_RATE: f64 = 5.0 / 60.0;
const LOGIN_LOAD: f64 = 0.9;
const LOGIN_S: f64 = 60.0;
const LOGIN_IDEAL_PCT: f64 = 99.5;
/// A request is decided a little later than it is sent; so much flows into a bucket meanwhile, in tokens.
const CLOCK_ERROR: f64 = 0.05;

/// One request and its answer.
#[derive(Clone, Copy, Debug)]
struct Answered {
    client: u32,
    /// When it was sent, in seconds.
    at_s: f64,
    status: u16,
}

struct Service {
    client: Client<HttpConnector, EmptyBody>,
    url: http::Uri,
    began: Instant,
}

type EmptyBody = http_body_util::Empty<std::collections::VecDeque<u8>>;

impl Service {
    async fn ask(&self, client: u32) -> Result<Answered, Box<dyn Error + Send + Sync>> {
        let address = format!("10.{}.{}.1", client / 256, client % 256);
        let request = http::Request::get(self.url.clone()).header("x-forwarded-for", address);
        let request = request.body(EmptyBody::new())?;
        let at_s = self.began.elapsed().as_secs_f64();
        let status = self.client.request(request).await?.status().as_u16();
        Ok(Answered { client, at_s, status })
    }
}

/// Requests that are sent at these times, in seconds; returns them in their order.
async fn ask_all(
    url: &str,
    requests: Vec<(f64, u32)>,
) -> Result<Vec<Answered>, Box<dyn Error + Send + Sync>> {
    let client = Client::builder(TokioExecutor::new()).build_http();
    let service = Service { client, url: url.parse()?, began: Instant::now() };
    let service = std::sync::Arc::new(service);
    let mut tasks = JoinSet::new();
    for (at_s, client) in requests {
        let service = service.clone();
        tasks.spawn(async move {
            let due = service.began + Duration::from_secs_f64(at_s);
            tokio::time::sleep_until(due.into()).await;
            service.ask(client).await
        });
    }
    let mut answered = Vec::new();
    while let Some(done) = tasks.join_next().await {
        answered.push(done??);
    }
    answered.sort_by(|one, other| one.at_s.total_cmp(&other.at_s));
    Ok(answered)
}

fn cold() -> Vec<(f64, u32)> {
    let at_s = |client: u32| COLD_GAP.as_secs_f64() * f64::from(client);
    (0..COLD_CLIENTS)
        .flat_map(|client| (0..COLD_REQUESTS).map(move |_| (at_s(client), client)))
        .collect()
}

fn judge_cold(answered: &[Answered]) -> bool {
    let count = |status| answered.iter().filter(|one| one.status == status).count();
    let (admitted, denied) = (count(200), count(429));
    println!("cold: {} requests, 200s: {admitted}, 429s: {denied}", answered.len());
    admitted == answered.len()
}

fn logins() -> Vec<(f64, u32)> {
    let mut rng = fastrand::Rng::with_seed(1);
    let mut requests = Vec::new();
    for client in 0..LOGIN_CLIENTS {
        let mut at_s = 0.0;
        loop {
            at_s -= (1.0 - rng.f64()).ln() / (LOGIN_RATE * LOGIN_LOAD);
            if at_s >= LOGIN_S {
                break;
            }
            requests.push((at_s, client));
        }
    }
    requests
}

/// A bucket that is full at first, and may go below zero.
struct Bucket {
    level: f64,
    at_s: f64,
}

impl Bucket {
    const FULL: Self = Self { level: LOGIN_BURST, at_s: 0.0 };

    fn refill(&mut self, at_s: f64) {
        self.level = (self.level + (at_s - self.at_s) * LOGIN_RATE).min(LOGIN_BURST);
        self.at_s = at_s;
    }
}

fn judge_logins(answered: &[Answered]) -> bool {
    let (mut admitted, mut ideal, mut excess) = (0, 0, 0.0_f64);
    for client in 0..LOGIN_CLIENTS {
        let (mut central, mut real) = (Bucket::FULL, Bucket::FULL);
        for one in answered.iter().filter(|one| one.client == client) {
            central.refill(one.at_s);
            real.refill(one.at_s);
            if central.level >= 1.0 {
                central.level -= 1.0;
                ideal += 1;
            }
            if one.status == 200 {
                real.level -= 1.0;
                admitted += 1;
                excess = excess.max(-real.level);
            }
        }
    }
    let pct = 100.0 * f64::from(admitted) / f64::from(ideal);
    println!(
        "logins: {} requests, {admitted} admitted of {ideal} by one central bucket, {pct:.2}%, excess {excess:.2}",
        answered.len()
    );
    pct >= LOGIN_IDEAL_PCT && excess <= CLOCK_ERROR
}

fn main() -> Result<ExitCode, Box<dyn Error + Send + Sync>> {
    let arguments: Vec<String> = std::env::args().skip(1).filter(|one| one != "--bench").collect();
    let [url, load] = &arguments[..] else { return Err("usage: URL cold|logins".into()) };
    let (requests, judge): (_, fn(&[Answered]) -> bool) = match load.as_str() {
        "cold" => (cold(), judge_cold),
        "logins" => (logins(), judge_logins),
        unknown => return Err(format!("no load is called {unknown}").into()),
    };
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let answered = runtime.block_on(ask_all(url, requests))?;
    Ok(if judge(&answered) { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}
