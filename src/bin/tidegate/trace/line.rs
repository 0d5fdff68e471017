//! One line of a trace: of an access log, or of a CSV.
//!
//! Strict on purpose. A line that was cut short in the middle would otherwise be taken for a
//! request with another key or time than it had. That is why no crate parses access logs here:
//! `access_log_parser` takes no name of a host for a client and no space in a user's name, and ends
//! a request at an escaped quote.

use csv_core::ReadRecordResult;
use jiff::Timestamp;

/// The highest cost of a request, in tokens; the limiter's word keeps 24 bits for them.
pub(crate) const COST_MAX: u32 = (1 << 24) - 1;

/// The longest key, in bytes; the limiter takes no longer ones.
pub(crate) const KEY_BYTES_MAX: usize = 512;

/// The last millisecond of the year 9999: what is later is no time but a mistake.
const UNIX_MS_MAX: i64 = 253_402_300_799_999;

/// The most fields of a CSV's line.
const CSV_FIELDS_MAX: usize = 3;

/// What the lines of a file look like.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Format {
    /// Common or Combined Log Format, as web servers write it.
    AccessLog,
    /// `unix_ms,key[,cost]`, where a field may be in quotes.
    Csv,
}

/// A request as its line has it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Line<'a> {
    /// When it came, in microseconds since 1970.
    pub at_unix_us: i64,
    /// Whose it is.
    pub key: &'a str,
    /// What it costs, in tokens.
    pub cost: u32,
}

/// Why a line is not a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum Reason {
    /// No format has been recognised, and this line has none.
    #[error("neither an access log's line nor unix_ms,key[,cost]")]
    Unrecognised,
    /// The client, identity and user before the time are not there.
    #[error("client, identity and user are not in front of a [time]")]
    Client,
    /// The time is not there, or no such time.
    #[error("no time such as [17/May/2015:10:05:03 +0000]")]
    Time,
    /// The quoted request is not there, or its quotes are not closed.
    #[error("no request in quotes")]
    Request,
    /// Status and size are not two numbers.
    #[error("status and size are not numbers")]
    Status,
    /// The quoted referrer and agent are cut short.
    #[error("no referrer and agent in quotes behind the size")]
    Agent,
    /// Two or three fields were expected.
    #[error("not two or three fields, unix_ms,key[,cost]")]
    Fields,
    /// The first field is no time.
    #[error("unix_ms is not a number of milliseconds from 1970 to 9999")]
    UnixMs,
    /// The key is empty or longer than [`KEY_BYTES_MAX`].
    #[error("the key is empty or longer than {KEY_BYTES_MAX} bytes")]
    Key,
    /// The cost is no number from 1 to [`COST_MAX`].
    #[error("the cost is not a number from 1 to {COST_MAX}")]
    Cost,
}

/// Parses lines one by one. Each line of a CSV is a record of its own, so that a quote that is not
/// closed ends with its line.
#[derive(Debug)]
pub(crate) struct Parser {
    csv: csv_core::Reader,
    /// The fields of a CSV's line, one behind the other, without their quotes.
    unquoted: Vec<u8>,
}

impl Parser {
    pub(crate) fn new() -> Self {
        Self { csv: csv_core::Reader::new(), unquoted: Vec::new() }
    }

    /// Parses a line of a file whose format is known.
    ///
    /// # Errors
    ///
    /// Says what the line lacks.
    pub(crate) fn parse<'a>(
        &'a mut self,
        format: Format,
        line: &'a str,
    ) -> Result<Line<'a>, Reason> {
        match format {
            Format::AccessLog => parse_access_log(line),
            Format::Csv => parse_csv(&self.fields(line)?),
        }
    }

    /// Parses a line of a file whose format is not known yet.
    ///
    /// # Errors
    ///
    /// [`Reason::Unrecognised`] when it has none of the formats.
    pub(crate) fn recognise<'a>(&'a mut self, line: &'a str) -> Result<(Format, Line<'a>), Reason> {
        if let Ok(line) = parse_access_log(line) {
            return Ok((Format::AccessLog, line));
        }
        let line = self.parse(Format::Csv, line).map_err(|_| Reason::Unrecognised)?;
        Ok((Format::Csv, line))
    }

    /// The fields of a CSV's line.
    fn fields(&mut self, line: &str) -> Result<Vec<&str>, Reason> {
        self.csv.reset();
        self.unquoted.resize(line.len() + 1, 0);
        let mut ends = [0; CSV_FIELDS_MAX];
        let (text, _, bytes, before_last) =
            self.csv.read_record(line.as_bytes(), &mut self.unquoted, &mut ends);
        // No more input ends the last field.
        let (end, ..) =
            self.csv.read_record(&[], &mut self.unquoted[bytes..], &mut ends[before_last..]);
        if (text, end) != (ReadRecordResult::InputEmpty, ReadRecordResult::Record) {
            return Err(Reason::Fields);
        }
        let mut start = 0;
        let fields = ends[..=before_last].iter().map(|&end| {
            let field = str::from_utf8(&self.unquoted[start..end]).map_err(|_| Reason::Fields)?;
            start = end;
            Ok(field.trim())
        });
        fields.collect()
    }
}

/// Whether `line` is what a CSV may start with.
pub(crate) fn is_csv_header(line: &str) -> bool {
    matches!(line.replace('"', "").as_str(), "unix_ms,key" | "unix_ms,key,cost")
}

/// `client identity user [time] "request" status size`, in Combined Log Format followed by
/// `"referrer" "agent"`; whatever a server adds behind these is not looked at.
fn parse_access_log(line: &str) -> Result<Line<'_>, Reason> {
    // A user's name may have spaces in it, so the time's bracket is what ends it.
    let (who, rest) = line.split_once(" [").ok_or(Reason::Client)?;
    let mut who = who.split(' ');
    let key = key_of(who.next().unwrap_or_default())?;
    if key.ends_with(',') || is_host_and_port(key) {
        return Err(Reason::Client);
    }
    if who.filter(|field| !field.is_empty()).count() < 2 {
        return Err(Reason::Client);
    }
    let (time, rest) = rest.split_once("] ").ok_or(Reason::Time)?;
    let at = Timestamp::strptime("%d/%b/%Y:%H:%M:%S %z", time).map_err(|_| Reason::Time)?;
    if !(0..=UNIX_MS_MAX).contains(&at.as_millisecond()) {
        return Err(Reason::Time);
    }
    let rest = skip_quoted(rest).ok_or(Reason::Request)?;
    let rest = skip_number(rest).and_then(skip_number).ok_or(Reason::Status)?;
    if !rest.is_empty() {
        skip_space(rest)
            .and_then(skip_quoted)
            .and_then(skip_space)
            .and_then(skip_quoted)
            .ok_or(Reason::Agent)?;
    }
    Ok(Line { at_unix_us: at.as_microsecond(), key, cost: 1 })
}

fn parse_csv<'a>(fields: &[&'a str]) -> Result<Line<'a>, Reason> {
    let (unix_ms, key, cost) = match *fields {
        [unix_ms, key] => (unix_ms, key, "1"),
        [unix_ms, key, cost] => (unix_ms, key, cost),
        _ => return Err(Reason::Fields),
    };
    let unix_ms: i64 = unix_ms.parse().map_err(|_| Reason::UnixMs)?;
    if !(0..=UNIX_MS_MAX).contains(&unix_ms) {
        return Err(Reason::UnixMs);
    }
    let key = key_of(key)?;
    let cost = cost.parse().map_err(|_| Reason::Cost)?;
    if !(1..=COST_MAX).contains(&cost) {
        return Err(Reason::Cost);
    }
    Ok(Line { at_unix_us: unix_ms * 1000, key, cost })
}

/// Whether a server has written its own name in front, such as `shop.example:80`.
fn is_host_and_port(field: &str) -> bool {
    let is_port = |port: &str| !port.is_empty() && port.bytes().all(|byte| byte.is_ascii_digit());
    let Some((host, port)) = field.rsplit_once(':') else { return false };
    is_port(port) && !host.contains(':')
}

fn key_of(field: &str) -> Result<&str, Reason> {
    if field.is_empty() || field.len() > KEY_BYTES_MAX {
        return Err(Reason::Key);
    }
    Ok(field)
}

/// What follows a quoted text. A backslash takes the meaning from the character behind it.
fn skip_quoted(text: &str) -> Option<&str> {
    let text = text.strip_prefix('"')?;
    let mut is_escaped = false;
    for (at, byte) in text.bytes().enumerate() {
        match byte {
            _ if is_escaped => is_escaped = false,
            b'\\' => is_escaped = true,
            // A quote is one byte and never a part of another character: no panic in slicing.
            b'"' => return Some(&text[at + 1..]),
            _ => {}
        }
    }
    None
}

/// What follows a space and a number, or a space and the `-` that stands for none.
fn skip_number(text: &str) -> Option<&str> {
    let text = skip_space(text)?;
    let (field, rest) = text.split_at(text.find(' ').unwrap_or(text.len()));
    let is_number = !field.is_empty() && field.bytes().all(|byte| byte.is_ascii_digit());
    (is_number || field == "-").then_some(rest)
}

fn skip_space(text: &str) -> Option<&str> {
    text.strip_prefix(' ')
}

#[cfg(test)]
mod tests {
    use super::*;

    const LINE: &str = r#"10.1.2.3 - - [17/May/2015:10:05:03 +0000] "GET / HTTP/1.1" 200 5"#;

    /// 17 May 2015, 10:05:03 UTC.
    const AT_UNIX_US: i64 = 1_431_857_103_000_000;

    fn log(line: &str) -> Result<Line<'_>, Reason> {
        parse_access_log(line)
    }

    /// Time, key and cost.
    fn csv(line: &str) -> Result<(i64, String, u32), Reason> {
        let mut parser = Parser::new();
        let line = parser.parse(Format::Csv, line)?;
        Ok((line.at_unix_us, line.key.to_owned(), line.cost))
    }

    fn log_time_us(time: &str) -> Result<i64, Reason> {
        log(&LINE.replace("17/May/2015:10:05:03 +0000", time)).map(|line| line.at_unix_us)
    }

    #[test]
    fn a_line_of_the_common_format_gives_client_and_time() {
        let line = Line { at_unix_us: AT_UNIX_US, key: "10.1.2.3", cost: 1 };
        assert_eq!(log(LINE), Ok(line));
    }

    #[test]
    fn a_line_of_the_combined_format_does_too_and_may_say_more() {
        for tail in [r#" "-" "-""#, r#" "http://a/" "curl \"7\"""#, r#" "-" "-" "10.9.9.9" 0.004"#]
        {
            assert_eq!(log(&format!("{LINE}{tail}")), log(LINE), "{tail}");
        }
    }

    #[test]
    fn access_log_of_a_year_before_1970_is_no_request() {
        assert_eq!(log_time_us("7/May/20:0:7:0+0000"), Err(Reason::Time));
        assert_eq!(log_time_us("31/Dec/1969:23:59:59 +0000"), Err(Reason::Time));
        assert_eq!(log_time_us("01/Jan/1970:00:00:00 +0000"), Ok(0));
    }

    #[test]
    fn absent_fields_are_dashes() {
        let line = r#"10.1.2.3 - - [17/May/2015:10:05:03 +0000] "-" 408 -"#;
        assert_eq!(log(line), log(LINE));
        let line = r#"10.1.2.3 - - [17/May/2015:10:05:03 +0000] "-" - -"#;
        assert_eq!(log(line), log(LINE));
    }

    #[test]
    fn a_client_may_have_an_address_of_version_6_or_a_name() {
        for client in ["2001:db8::8a2e:370:7334", "::1", "fe80::1%eth0", "host.example.org"] {
            let line = LINE.replace("10.1.2.3", client);
            assert_eq!(log(&line).map(|line| line.key), Ok(client));
        }
    }

    #[test]
    fn a_users_name_may_have_spaces() {
        assert_eq!(log(&LINE.replace("- -", "- Ada Lovelace")), log(LINE));
    }

    #[test]
    fn quotes_and_backslashes_in_a_request_are_escaped() {
        for request in [r#"GET /?q=\"x\" HTTP/1.1"#, r"GET /\\", r#"\x16\x03 \\\" [a] 200 7"#, ""] {
            let line = LINE.replace("GET / HTTP/1.1", request);
            assert_eq!(log(&line), log(LINE), "{request}");
        }
        assert_eq!(log(&LINE.replace("GET / ", r#"GET /"x" "#)), Err(Reason::Status));
        assert_eq!(log(&LINE.replace("1.1\"", "1.1\\\"")), Err(Reason::Request));
    }

    #[test]
    fn the_zone_counts() {
        let hour_us = 3_600_000_000;
        assert_eq!(log_time_us("17/May/2015:10:05:03 +0200"), Ok(AT_UNIX_US - 2 * hour_us));
        assert_eq!(log_time_us("17/May/2015:10:05:03 -0330"), Ok(AT_UNIX_US + 7 * hour_us / 2));
        // An hour before the year ends in UTC, a year has begun to the east of it.
        assert_eq!(
            log_time_us("01/Jan/2016:00:30:00 +0100"),
            log_time_us("31/Dec/2015:23:30:00 +0000")
        );
    }

    #[test]
    fn a_time_that_never_was_is_no_time() {
        for time in [
            "30/Feb/2015:10:05:03 +0000",
            "17/Mai/2015:10:05:03 +0000",
            "17/May/2015:24:05:03 +0000",
            "17/May/2015:10:05:03",
            "2015-05-17T10:05:03Z",
            "",
        ] {
            assert_eq!(log_time_us(time), Err(Reason::Time), "{time}");
        }
    }

    #[test]
    fn a_line_that_was_cut_short_is_refused_wherever_the_cut_is() {
        let whole = format!(r#"{LINE} "http://a/" "curl 7""#);
        // A cut behind the size leaves a line of the common format, or half of the size.
        let common = LINE.len();
        for cut in (0..whole.len()).filter(|&cut| cut != common) {
            assert!(log(&whole[..cut]).is_err(), "{}", &whole[..cut]);
        }
        let reasons = [
            (8, Reason::Client),
            (30, Reason::Time),
            (50, Reason::Request),
            (common - 3, Reason::Status),
            (common + 3, Reason::Agent),
        ];
        for (cut, reason) in reasons {
            assert_eq!(log(&whole[..cut]), Err(reason), "{}", &whole[..cut]);
        }
    }

    #[test]
    fn a_line_without_a_client_is_refused() {
        assert_eq!(log(&LINE.replace("10.1.2.3 - -", "10.1.2.3 -")), Err(Reason::Client));
        // A name of the server, or a list of clients, in front made one key of all clients.
        for other in ["shop.example:80 10.1.2.3", "10.9.9.9, 10.1.2.3"] {
            assert_eq!(log(&LINE.replace("10.1.2.3", other)), Err(Reason::Client), "{other}");
        }
        for client in ["2001:db8::1", "fe80::1%eth0", "::1", "host.example"] {
            assert!(log(&LINE.replace("10.1.2.3", client)).is_ok(), "{client}");
        }
        assert_eq!(log(&LINE.replace("10.1.2.3", "")), Err(Reason::Key));
        assert_eq!(log(&LINE.replace("10.1.2.3", &"a".repeat(513))), Err(Reason::Key));
    }

    #[test]
    fn a_csv_line_gives_time_key_and_cost() {
        assert_eq!(csv("12,a"), Ok((12_000, "a".to_owned(), 1)));
        assert_eq!(csv("12, a b ,7"), Ok((12_000, "a b".to_owned(), 7)));
        assert_eq!(csv("0,::1,16777215"), Ok((0, "::1".to_owned(), COST_MAX)));
    }

    #[test]
    fn quoted_csv_field_may_have_commas_and_quotes() {
        for (line, key) in [
            (r#"12,"a,b",7"#, "a,b"),
            (r#""12","a ""b""","7""#, r#"a "b""#),
            (r#"12,a"b,7"#, r#"a"b"#),
        ] {
            assert_eq!(csv(line), Ok((12_000, key.to_owned(), 7)), "{line}");
        }
    }

    #[test]
    fn a_csv_line_with_a_bad_field_is_refused_by_its_name() {
        for (line, reason) in [
            ("12", Reason::Fields),
            ("12,a,1,1", Reason::Fields),
            ("noon,a", Reason::UnixMs),
            ("-1,a", Reason::UnixMs),
            ("1.5,a", Reason::UnixMs),
            ("253402300800000,a", Reason::UnixMs),
            ("99999999999999999999,a", Reason::UnixMs),
            ("12,", Reason::Key),
            ("12, ,1", Reason::Key),
            ("12,a,", Reason::Cost),
            ("12,a,0", Reason::Cost),
            ("12,a,-1", Reason::Cost),
            ("12,a,16777216", Reason::Cost),
        ] {
            assert_eq!(csv(line), Err(reason), "{line}");
        }
    }
}
