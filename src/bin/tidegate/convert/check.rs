//! What would be refused of a configuration that is converted: it is not written.

use tidegate::config::{Config, FILE_BYTES_MAX, Mistake};

use super::descriptors::Place;
use super::written::Written;

/// With a store some quotas are refused that a node alone keeps, and without one some that nodes can share.
const STORE: &str = "[store]\nmemory = true\n";

/// How the remedies of a file are written as flags.
const WORDS: [(&str, &str); 2] = [
    ("set mode = \"exact\" or \"local\"", "give --mode exact or --mode local"),
    ("use a sliding window", "give --algorithm sliding-window"),
];

/// All mistakes, each with the line that it comes from unless it is one of the whole. `has_quota`: otherwise a note says
/// already that limits are missing.
pub(super) fn mistakes(written: &Written, has_quota: bool) -> Vec<(Option<Place>, String)> {
    let mut mistakes = Vec::new();
    let bytes = written.text.len();
    if bytes as u64 > FILE_BYTES_MAX {
        let mistake = format!(
            "the configuration has {bytes} bytes, and at most {FILE_BYTES_MAX} are read: convert fewer files at a \
             time, each configuration for a service of its own, or leave descriptors out"
        );
        mistakes.push((None, mistake));
    }
    let mut found = of_text(&written.text);
    found.extend(of_text(&(written.text.clone() + STORE)));
    let order = |it: &Mistake| (it.line(), it.column(), it.remedy().to_owned());
    found.sort_by_cached_key(order);
    found.dedup();
    let told = found.iter().filter(|it| has_quota || it.field() != "domains");
    mistakes.extend(told.map(|mistake| (written.place(mistake.line()), shown(mistake))));
    mistakes
}

fn of_text(text: &str) -> Vec<Mistake> {
    Config::from_toml(text).err().map_or(Vec::new(), |error| error.mistakes().to_vec())
}

fn shown(mistake: &Mistake) -> String {
    let remedy = mistake.remedy().to_owned();
    let remedy = WORDS.iter().fold(remedy, |text, (field, flag)| text.replace(field, flag));
    format!("{} = {}: {remedy}", mistake.field(), mistake.value())
}
