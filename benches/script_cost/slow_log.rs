//! What each script call took, by the server's slow log.

use crate::redis_server::RedisServer;

/// Calls that do nothing take less, and calls of ours more, in microseconds.
const SLOWER_US: &str = "10";
/// More than any case makes.
const CALLS_MAX: &str = "1000000";

/// What the names of the keys begin with: of those in use, and of the new ones.
const KEY_STARTS: [&str; 2] = [":user:", ":set:"];

pub(crate) struct SlowLog {
    connection: redis::Connection,
}

/// One call of a script.
#[derive(Clone, Debug)]
pub(crate) struct Call {
    /// Keys of limits in it.
    pub(crate) entries: usize,
    pub(crate) took_us: u64,
    /// The name of its first bucket.
    first: String,
}

impl Call {
    /// Node and set of new keys that it is about.
    pub(crate) fn set(&self) -> Option<String> {
        self.first.rsplit_once(':').map(|(head, _)| head.to_owned())
    }

    /// Whether the name of its first bucket has this part.
    pub(crate) fn is_of(&self, part: &str) -> bool {
        self.first.contains(part)
    }
}

impl SlowLog {
    pub(crate) fn open(server: &RedisServer) -> Self {
        server.command(&["CONFIG", "SET", "slowlog-log-slower-than", SLOWER_US]);
        server.command(&["CONFIG", "SET", "slowlog-max-len", CALLS_MAX]);
        let client = redis::Client::open(server.url()).expect("a good address");
        Self { connection: client.get_connection().expect("the server runs") }
    }

    pub(crate) fn reset(&mut self) {
        redis::cmd("SLOWLOG").arg("RESET").exec(&mut self.connection).expect("it is answered");
    }

    /// The calls with keys since the reset, in their order.
    pub(crate) fn calls(&mut self) -> Vec<Call> {
        let entries: Vec<redis::Value> = redis::cmd("SLOWLOG")
            .arg("GET")
            .arg("-1")
            .query(&mut self.connection)
            .expect("it is answered");
        entries.iter().rev().filter_map(parse).collect()
    }
}

fn parse(entry: &redis::Value) -> Option<Call> {
    let redis::Value::Array(fields) = entry else { return None };
    let [_, _, redis::Value::Int(took_us), redis::Value::Array(words), ..] = fields.as_slice()
    else {
        return None;
    };
    let word = |place: usize| match words.get(place) {
        Some(redis::Value::BulkString(bytes)) => Some(String::from_utf8_lossy(bytes).into_owned()),
        _ => None,
    };
    if !word(0)?.eq_ignore_ascii_case("EVALSHA") {
        return None;
    }
    let names: usize = word(2)?.parse().ok()?;
    // The lane's records come before the buckets; the log shows the first names of a call only.
    let is_bucket = |name: &String| KEY_STARTS.iter().any(|start| name.contains(start));
    let lane_names =
        (0..names).take_while(|place| word(3 + place).is_some_and(|name| !is_bucket(&name)));
    let lane_names = lane_names.count();
    let first = word(3 + lane_names).filter(is_bucket)?;
    Some(Call { entries: names - lane_names, took_us: *took_us as u64, first })
}
