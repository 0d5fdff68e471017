//! Lines of an access log or a CSV file.
#![no_main]

#[allow(dead_code, reason = "the binary uses more of it")]
#[path = "../../../src/bin/tidegate/trace/line.rs"]
mod line;

use line::{Format, Line, Parser};

/// A line's time, key and cost, with the key quoted where it has to be.
fn written(line: &Line<'_>) -> String {
    let key = line.key.replace('"', "\"\"");
    format!("{},\"{key}\",{}", line.at_unix_us / 1000, line.cost)
}

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    let text = String::from_utf8_lossy(bytes);
    let mut parser = Parser::new();
    let read = [Format::AccessLog, Format::Csv].map(|format| {
        let line = parser.parse(format, &text).ok()?;
        Some((format, written(&line)))
    });
    let recognised = parser.recognise(&text).ok().map(|(format, line)| (format, written(&line)));
    assert_eq!(recognised, read[0].clone().or(read[1].clone()));
    if let [_, Some((_, line))] = read {
        let again = parser.parse(Format::Csv, &line).map(|line| written(&line));
        assert_eq!(again, Ok(line), "what was read is written");
    }
});
