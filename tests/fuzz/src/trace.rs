//! Lines of an access log or a CSV file.
#![no_main]

#[allow(dead_code, reason = "the binary uses more of it")]
#[path = "../../../src/bin/tidegate/trace/line.rs"]
mod line;

use line::{Format, parse, recognise};

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    let text = String::from_utf8_lossy(bytes);
    let read = [Format::AccessLog, Format::Csv].map(|format| parse(format, &text).ok());
    assert_eq!(recognise(&text).ok().map(|(_, line)| line), read[0].or(read[1]));
    if let Some(line) = read[1]
        && !line.key.contains('"')
    {
        let written = format!("{},{},{}", line.at_unix_us / 1000, line.key, line.cost);
        assert_eq!(parse(Format::Csv, &written), Ok(line), "what was read is written");
    }
});
