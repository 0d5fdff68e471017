//! A client that keeps the limits of an API, as its responses state them: it sends many requests at once, each waits
//! for its turn, and denied ones are sent again. `examples/axum.rs` is such an API.
//!
//! ```text
//! cargo run --release --features retry,tower --example client [http://127.0.0.1:3000/ [1000]]
//! ```

use std::collections::BTreeMap;
use std::error::Error;
use std::time::Duration;

use http::Request;
use http_body_util::BodyExt;
use hyper_util::client::legacy::Client;
use hyper_util::rt::TokioExecutor;
use tidegate::retry::{PaceLayer, Pacer};
use tokio::task::JoinSet;
use tokio::time::Instant;
use tower::{BoxError, Layer, ServiceExt};

#[tokio::main]
async fn main() -> Result<(), Box<dyn Error>> {
    let mut arguments = std::env::args().skip(1);
    let url = arguments.next().unwrap_or_else(|| "http://127.0.0.1:3000/".to_owned());
    let requests: u32 = arguments.next().unwrap_or_else(|| "1000".to_owned()).parse()?;

    let http = Client::builder(TokioExecutor::new()).build_http::<String>();
    let client = PaceLayer::new(Pacer::new()).within(Duration::from_secs(60)).layer(http);

    let begun = Instant::now();
    let mut calls = JoinSet::new();
    for _ in 0..requests {
        let request = Request::get(&url).body(String::new())?;
        let client = client.clone();
        calls.spawn(async move {
            let response = client.oneshot(request).await?;
            let status = response.status();
            // Read to its end, so that the connection can be used again.
            response.into_body().collect().await?;
            Ok::<_, BoxError>(status)
        });
    }
    let mut answers = BTreeMap::new();
    while let Some(call) = calls.join_next().await {
        let answer = call?.map_or_else(|error| error.to_string(), |status| status.to_string());
        *answers.entry(answer).or_insert(0) += 1;
    }
    for (answer, count) in answers {
        println!("{count} of {requests}: {answer}");
    }
    println!("in {:.1} s", begun.elapsed().as_secs_f64());
    Ok(())
}
