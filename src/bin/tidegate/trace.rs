//! Real input: an access log, or a CSV of `unix_ms,key[,cost]`, to be replayed.
//!
//! A line that does not parse is counted and named by number; it stops nothing. Empty lines are
//! nothing at all. Bytes that are not UTF-8 become `U+FFFD`.

use std::collections::HashMap;
use std::fs::File;
use std::io::Read;
use std::path::{Path, PathBuf};

use tidegate::sim::workload::Arrival;

use self::line::{Format, Line, Parser, Reason, is_csv_header};

mod line;

/// The largest file that is loaded: it is held in memory.
pub(crate) const FILE_BYTES_MAX: u64 = 1 << 30;

/// How many rejected lines are named.
pub(crate) const REJECTIONS_MAX: usize = 20;

const US_PER_SECOND: u64 = 1_000_000;

/// A file that cannot be replayed.
#[derive(Debug, thiserror::Error)]
pub(crate) enum TraceError {
    /// The file cannot be opened or read.
    #[error("trace {}: cannot be read: {source}", path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// What the system said.
        source: std::io::Error,
    },
    /// The file is larger than [`FILE_BYTES_MAX`].
    #[error("trace {}: larger than {FILE_BYTES_MAX} bytes: replay a part of it", path.display())]
    TooLarge {
        /// The file.
        path: PathBuf,
    },
    /// No line of the file is a request.
    #[error(
        "trace {}: none of its {rejected} lines is in Common or Combined Log Format, or \
         unix_ms,key[,cost]", path.display()
    )]
    NoRequests {
        /// The file.
        path: PathBuf,
        /// How many lines did not parse.
        rejected: u64,
    },
}

/// One request of a trace.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Request {
    /// When it came, in microseconds since the trace's first request.
    pub at_us: u64,
    /// Whose it is: an index into [`Trace::keys`].
    pub key: u32,
    /// What it costs, in tokens.
    pub cost: u32,
}

/// What a file says was asked, and by whom.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Trace {
    /// The requests, ordered by time; those of one instant, in the file's order.
    pub requests: Vec<Request>,
    /// The keys, in the order in which the file first names them.
    pub keys: Vec<String>,
    /// Lines that are a request.
    pub parsed: u64,
    /// Lines that are not.
    pub rejected: u64,
    /// The numbers, from 1, of the first [`REJECTIONS_MAX`] rejected lines, and why.
    pub rejections: Vec<(u64, Reason)>,
}

impl Trace {
    /// Reads the trace in the file at `path`.
    ///
    /// # Errors
    ///
    /// When the file cannot be read, is too large, or has no request in it; each names the file.
    pub(crate) fn load(path: &Path) -> Result<Self, TraceError> {
        let bytes = read(path)?;
        let trace = Self::parse(&bytes);
        if trace.parsed == 0 {
            return Err(TraceError::NoRequests { path: path.into(), rejected: trace.rejected });
        }
        Ok(trace)
    }

    /// Reads a trace out of a file's content, which may have no request in it.
    pub(crate) fn parse(bytes: &[u8]) -> Self {
        let (mut reader, mut parser) = (Reader::default(), Parser::new());
        // A byte order mark, as spreadsheets write it, is no part of the first line.
        let bytes = bytes.strip_prefix(b"\xef\xbb\xbf").unwrap_or(bytes);
        for (number, line) in (1..).zip(bytes.split(|&byte| byte == b'\n')) {
            reader.take(&mut parser, number, String::from_utf8_lossy(line).trim());
        }
        reader.finish()
    }

    /// The requests at `speed` times their own pace, each on a random one of `nodes`, as behind a
    /// load balancer; ordered by time. `speed` is above zero, and `nodes` too.
    pub(crate) fn arrivals(&self, speed: f64, nodes: u16, seed: u64) -> Vec<Arrival> {
        let mut random = fastrand::Rng::with_seed(seed);
        let arrival = |request: &Request| Arrival {
            at_us: (request.at_us as f64 / speed) as u64,
            node: random.u16(0..nodes.max(1)),
            key: request.key,
            cost: request.cost,
        };
        self.requests.iter().map(arrival).collect()
    }
}

fn read(path: &Path) -> Result<Vec<u8>, TraceError> {
    let failed = |source| TraceError::Read { path: path.into(), source };
    let mut bytes = Vec::new();
    let file = File::open(path).map_err(failed)?;
    // The length is not asked for beforehand: that of a pipe is not known, that of a log grows.
    file.take(FILE_BYTES_MAX + 1).read_to_end(&mut bytes).map_err(failed)?;
    if bytes.len() as u64 > FILE_BYTES_MAX {
        return Err(TraceError::TooLarge { path: path.into() });
    }
    Ok(bytes)
}

/// A trace while its lines come in.
#[derive(Default)]
struct Reader {
    trace: Trace,
    /// As the first line that parses has it.
    format: Option<Format>,
    /// When each request came, in microseconds since 1970; not in order yet.
    at_unix_us: Vec<i64>,
    key_indices: HashMap<String, u32>,
}

impl Reader {
    fn take(&mut self, parser: &mut Parser, number: u64, line: &str) {
        if line.is_empty() {
            return;
        }
        if self.format.is_none() && self.trace.rejected == 0 && is_csv_header(line) {
            self.format = Some(Format::Csv);
            return;
        }
        let parsed = match self.format {
            Some(format) => parser.parse(format, line),
            None => parser.recognise(line).map(|(format, line)| {
                self.format = Some(format);
                line
            }),
        };
        match parsed {
            Ok(line) => self.keep(&line),
            Err(reason) => self.reject(number, reason),
        }
    }

    fn keep(&mut self, line: &Line<'_>) {
        let key = self.key_index(line.key);
        self.trace.parsed += 1;
        self.trace.requests.push(Request { at_us: 0, key, cost: line.cost });
        self.at_unix_us.push(line.at_unix_us);
    }

    fn reject(&mut self, number: u64, reason: Reason) {
        self.trace.rejected += 1;
        if self.trace.rejections.len() < REJECTIONS_MAX {
            self.trace.rejections.push((number, reason));
        }
    }

    /// Below 2^32 keys fit into a file of [`FILE_BYTES_MAX`].
    fn key_index(&mut self, key: &str) -> u32 {
        if let Some(&index) = self.key_indices.get(key) {
            return index;
        }
        let index = self.trace.keys.len() as u32;
        self.trace.keys.push(key.to_owned());
        self.key_indices.insert(key.to_owned(), index);
        index
    }

    fn finish(mut self) -> Trace {
        let first_unix_us = self.at_unix_us.iter().copied().min().unwrap_or(0);
        for (request, at_unix_us) in self.trace.requests.iter_mut().zip(&self.at_unix_us) {
            request.at_us = at_unix_us.abs_diff(first_unix_us);
        }
        self.trace.requests.sort_by_key(|request| request.at_us);
        if self.format == Some(Format::AccessLog) {
            spread_within_seconds(&mut self.trace.requests);
        }
        self.trace
    }
}

/// An access log knows whole seconds only. Left as they are, the requests of each would come at
/// one instant, and a replay would show bursts that never were.
fn spread_within_seconds(requests: &mut [Request]) {
    for second in requests.chunk_by_mut(|a, b| a.at_us == b.at_us) {
        let count = second.len() as u64;
        for (i, request) in (0..).zip(second) {
            request.at_us += i * US_PER_SECOND / count;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn log_line(client: &str, clock: &str) -> String {
        format!("{client} - - [17/May/2015:{clock} +0000] \"GET / HTTP/1.1\" 200 1\n")
    }

    fn keys_in_order(trace: &Trace) -> Vec<&str> {
        trace.requests.iter().map(|one| trace.keys[one.key as usize].as_str()).collect()
    }

    fn times_us(trace: &Trace) -> Vec<u64> {
        trace.requests.iter().map(|request| request.at_us).collect()
    }

    #[test]
    fn requests_are_sorted_by_time_and_those_of_a_second_keep_the_files_order() {
        let lines = [
            log_line("c", "10:00:02"),
            log_line("a", "10:00:00"),
            log_line("d", "10:00:02"),
            log_line("b", "10:00:00"),
            log_line("e", "10:00:02"),
        ];
        let trace = Trace::parse(lines.concat().as_bytes());
        assert_eq!(keys_in_order(&trace), ["a", "b", "c", "d", "e"]);
        assert_eq!(times_us(&trace), [0, 500_000, 2_000_000, 2_333_333, 2_666_666]);
    }

    #[test]
    fn a_csv_has_its_own_milliseconds_and_is_not_spread() {
        let trace = Trace::parse(b"1500,b,3\n1000,a\n1500,a\n1001,a,2\n");
        assert_eq!(times_us(&trace), [0, 1_000, 500_000, 500_000]);
        assert_eq!(keys_in_order(&trace), ["a", "a", "b", "a"]);
        let costs: Vec<u32> = trace.requests.iter().map(|request| request.cost).collect();
        assert_eq!(costs, [1, 2, 3, 1]);
    }

    #[test]
    fn a_csv_header_is_skipped_and_anything_like_it_is_rejected() {
        for header in ["unix_ms,key", "unix_ms,key,cost", "\u{feff}unix_ms,key"] {
            let trace = Trace::parse(format!("{header}\r\n\r\n1,a\r\n").as_bytes());
            assert_eq!((trace.parsed, trace.rejected), (1, 0), "{header:?}");
        }
        for header in ["unix_ms,key,costs", "time,client", "unix_ms"] {
            let trace = Trace::parse(format!("{header}\n1,a\n").as_bytes());
            assert_eq!((trace.parsed, trace.rejected), (1, 1), "{header:?}");
        }
        for text in ["1,a\nunix_ms,key\n2,a\n", "# of May\nunix_ms,key\n1,a\n"] {
            let trace = Trace::parse(text.as_bytes());
            assert!(trace.rejections.iter().any(|named| named.0 == 2), "a header on line 2");
        }
    }

    #[test]
    fn the_first_line_that_parses_says_what_the_format_is() {
        let log = log_line("a", "10:00:00");
        let trace = Trace::parse(format!("# of May\n{log}1431857100000,b\n{log}").as_bytes());
        assert_eq!((trace.parsed, trace.rejected), (2, 2));
        assert_eq!(trace.rejections[0], (1, Reason::Unrecognised));
        assert_eq!(trace.rejections[1].0, 3);
        let trace = Trace::parse(format!("5,a\n{log}6,a\n").as_bytes());
        assert_eq!((trace.parsed, trace.rejections[0].0), (2, 2));
    }

    #[test]
    fn a_line_that_does_not_parse_stops_nothing_and_is_named() {
        let good = log_line("a", "10:00:00");
        let cut = "a - - [17/May/2015:10:00\n";
        let trace = Trace::parse(format!("{good}\n{cut}  \r\n{good}{cut}").as_bytes());
        assert_eq!((trace.parsed, trace.rejected), (2, 2));
        // Line 2 is empty and line 4 blank; neither counts, both have a number.
        assert_eq!(trace.rejections, [(3, Reason::Time), (6, Reason::Time)]);
    }

    #[test]
    fn only_the_first_rejected_lines_are_named_and_all_are_counted() {
        let trace = Trace::parse(format!("1,a\n{}", "bad\n".repeat(50)).as_bytes());
        assert_eq!((trace.rejected, trace.rejections.len()), (50, REJECTIONS_MAX));
        assert_eq!(trace.rejections.last().map(|named| named.0), Some(21));
    }

    #[test]
    fn bytes_that_are_no_utf_8_stop_nothing() {
        let mut bytes = log_line("a", "10:00:00").into_bytes();
        bytes.extend(b"b - - [17/May/2015:10:00:01 +0000] \"GET /\xff\xfe HTTP/1.1\" 200 1\n");
        bytes.extend(b"\xff\xff\xff\n\0\0\0\n");
        bytes.extend(log_line("c", "10:00:02").into_bytes());
        let trace = Trace::parse(&bytes);
        assert_eq!(keys_in_order(&trace), ["a", "b", "c"]);
        assert_eq!(trace.rejected, 2);
    }

    #[test]
    fn open_quote_in_a_csv_ends_with_its_line() {
        let trace = Trace::parse(b"1,a\n2,\"b\n3,c\n");
        assert_eq!(keys_in_order(&trace), ["a", "b", "c"]);
    }

    #[test]
    fn a_log_that_crosses_the_year_runs_on() {
        let line = |time| format!("a - - [{time} +0000] \"GET / HTTP/1.1\" 200 1\n");
        let text = line("31/Dec/2015:23:59:59") + &line("01/Jan/2016:00:00:01");
        assert_eq!(times_us(&Trace::parse(text.as_bytes())), [0, 2_000_000]);
    }

    #[test]
    fn times_are_divided_by_the_speed_and_nodes_drawn_by_the_seed() {
        let lines: Vec<String> = (0..400).map(|i| format!("{},k{}", i * 10, i % 7)).collect();
        let trace = Trace::parse(lines.join("\n").as_bytes());
        let arrivals = trace.arrivals(20.0, 4, 1);
        assert_eq!(arrivals[399].at_us, 399 * 10_000 / 20);
        assert_eq!((arrivals[8].key, arrivals[8].cost), (1, 1));
        assert_eq!(arrivals, trace.arrivals(20.0, 4, 1));
        assert_ne!(arrivals, trace.arrivals(20.0, 4, 2));
        for node in 0..4 {
            let count = arrivals.iter().filter(|arrival| arrival.node == node).count();
            assert!((60..140).contains(&count), "{count} of 400 on node {node} of 4");
        }
    }

    #[test]
    fn a_file_that_cannot_be_replayed_is_named() {
        let missing = Trace::load(Path::new("/nonexistent/a.log")).unwrap_err();
        assert!(matches!(missing, TraceError::Read { .. }));
        assert!(missing.to_string().contains("/nonexistent/a.log"));
        let source = concat!(env!("CARGO_MANIFEST_DIR"), "/Cargo.toml");
        let no_trace = Trace::load(Path::new(source)).unwrap_err();
        assert!(matches!(no_trace, TraceError::NoRequests { rejected: 1.., .. }));
        assert!(no_trace.to_string().contains(source));
        let folder = Trace::load(Path::new(env!("CARGO_MANIFEST_DIR"))).unwrap_err();
        assert!(matches!(folder, TraceError::Read { .. }));
    }

    /// small.log was made by a script, seed 20240611, and holds nobody's data: at least one visit
    /// of each of 100 clients, then visits of the i-th in proportion to i^-0.9, until there were 600
    /// requests. A visit starts at even odds within 3.9 hours; it is a page and, on average, one
    /// more request, 1.5 s apart. Lines are out of order within a minute, as several servers write.
    #[test]
    fn the_small_trace_parses_whole_and_is_skewed() {
        let trace = Trace::parse(include_bytes!("../../../examples/traces/small.log"));
        assert_eq!((trace.parsed, trace.rejected), (600, 0));
        assert_eq!(trace.keys.len(), 100);
        let mut counts = vec![0; trace.keys.len()];
        trace.requests.iter().for_each(|request| counts[request.key as usize] += 1);
        let top = counts.iter().max().copied().unwrap_or(0);
        assert!(top > 600 / 20, "the top client has {top} of 600 requests");
        let hours = times_us(&trace)[599] / 3_600_000_000;
        assert_eq!(hours, 3);
    }
}
