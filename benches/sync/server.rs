//! The server that is measured, and what it says of its own work.

use crate::redis_server::RedisServer;

/// Calls that take longer are looked at one by one, in microseconds.
const SLOW_US: &str = "100";

/// A redis-server of the bench's own and a connection to it.
pub(crate) struct Server {
    server: RedisServer,
    raw: redis::Connection,
}

/// The server's work so far, or between two looks.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Spent {
    pub(crate) calls: f64,
    pub(crate) script_us: f64,
    pub(crate) cpu_us: f64,
    pub(crate) longest_us: u64,
    pub(crate) bytes_in: f64,
    pub(crate) bytes_out: f64,
}

impl Spent {
    pub(crate) fn since(&self, before: &Self) -> Self {
        Self {
            calls: self.calls - before.calls,
            script_us: self.script_us - before.script_us,
            cpu_us: self.cpu_us - before.cpu_us,
            longest_us: self.longest_us,
            bytes_in: self.bytes_in - before.bytes_in,
            bytes_out: self.bytes_out - before.bytes_out,
        }
    }
}

impl Spent {
    /// A `count`-th of it.
    pub(crate) fn over(&self, count: f64) -> Self {
        Self {
            calls: self.calls / count,
            script_us: self.script_us / count,
            cpu_us: self.cpu_us / count,
            longest_us: self.longest_us,
            bytes_in: self.bytes_in / count,
            bytes_out: self.bytes_out / count,
        }
    }
}

impl Server {
    pub(crate) fn start() -> Self {
        let server = RedisServer::start();
        let client = redis::Client::open(server.url()).expect("a good address");
        let raw = client.get_connection().expect("the server runs");
        let mut server = Self { server, raw };
        server.command(&["CONFIG", "SET", "slowlog-log-slower-than", SLOW_US]);
        server.command(&["CONFIG", "SET", "slowlog-max-len", "10000"]);
        server
    }

    pub(crate) fn url(&self) -> String {
        self.server.url()
    }

    pub(crate) fn command(&mut self, words: &[&str]) -> redis::Value {
        let command = redis::cmd(words[0]).arg(&words[1..]).to_owned();
        command.query(&mut self.raw).unwrap_or_else(|error| panic!("{words:?}: {error}"))
    }

    /// Loads a script and returns the hash to call it by.
    pub(crate) fn load(&mut self, code: &str) -> String {
        let loaded = redis::cmd("SCRIPT").arg("LOAD").arg(code).query(&mut self.raw);
        loaded.unwrap_or_else(|error| panic!("a script does not load: {error}"))
    }

    /// Sends a command that was packed before, and returns the string that it answers.
    pub(crate) fn send(&mut self, packed: &[u8]) -> Vec<u8> {
        let answer = self.raw.send_packed_command(packed).and_then(|()| self.raw.recv_response());
        match answer {
            Ok(redis::Value::BulkString(bytes)) => bytes,
            other => panic!("no reply: {other:?}"),
        }
    }

    /// What the server did so far; forgets which calls were long.
    pub(crate) fn spent(&mut self) -> Spent {
        let info = redis::cmd("INFO").arg("everything").query::<String>(&mut self.raw);
        let info = info.expect("INFO is answered");
        let field = |name: &str| {
            let line = info.lines().find_map(|line| line.strip_prefix(name));
            line.and_then(|line| line.strip_prefix(':')).unwrap_or("0")
        };
        let number = |name: &str| field(name).parse::<f64>().expect("a number");
        let part = |name: &str| {
            let parts = field("cmdstat_evalsha");
            let found = parts.split(',').find_map(|part| part.strip_prefix(name));
            found.map_or(0.0, |text| text.parse::<f64>().expect("a number"))
        };
        let seconds = number("used_cpu_user") + number("used_cpu_sys");
        let spent = Spent {
            calls: part("calls="),
            script_us: part("usec="),
            cpu_us: seconds * 1e6,
            longest_us: self.longest_us(),
            bytes_in: number("total_net_input_bytes"),
            bytes_out: number("total_net_output_bytes"),
        };
        self.command(&["SLOWLOG", "RESET"]);
        spent
    }

    /// The longest script call since this was asked last; 0 if none was long.
    fn longest_us(&mut self) -> u64 {
        let redis::Value::Array(entries) = self.command(&["SLOWLOG", "GET", "-1"]) else {
            return 0;
        };
        let long = entries.into_iter().filter_map(|entry| {
            let redis::Value::Array(fields) = entry else { return None };
            let redis::Value::Int(took_us) = fields[2] else { return None };
            let redis::Value::Array(words) = &fields[3] else { return None };
            let is_call = words[0] == redis::Value::BulkString(b"EVALSHA".to_vec());
            is_call.then_some(took_us as u64)
        });
        long.max().unwrap_or(0)
    }
}
