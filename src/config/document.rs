//! TOML, of which a part may be wrong: all that can be read, and what cannot.
//!
//! The parser goes on after a mistake, but it may leave out what follows, or take it for a part of a value that does not
//! end. So lines with mistakes are blanked, and the rest is read again, until nothing is wrong.

use std::collections::BTreeSet;
use std::ops::Range;

use toml::de::{DeTable, DeValue, Error};

use super::fields::{is_field, is_shown, join};
use super::node::{Node, shortened};
use super::reading::{Finding, HIDDEN};

/// Texts with more mistakes that follow from each other are not read to the end.
const READINGS_MAX: usize = 100;

/// What could be read of a text.
pub(super) struct Document {
    pub(super) root: Node,
    pub(super) mistakes: Vec<Finding>,
    pub(super) sections: Sections,
}

/// The parts of a text: what is before the first line that names a table, and what follows each such line.
#[derive(Default)]
pub(super) struct Sections {
    headers: Vec<usize>,
    /// The numbers of those of which something could not be read.
    unread: BTreeSet<usize>,
}

impl Sections {
    fn of(text: &str) -> Self {
        let lines = lines(text).filter(|line| is_header(&text[line.clone()]));
        Self { headers: lines.map(|line| line.start).collect(), unread: BTreeSet::new() }
    }

    fn number(&self, at: usize) -> usize {
        self.headers.partition_point(|&header| header <= at)
    }

    /// Where the section of a place ends.
    fn end(&self, at: usize) -> usize {
        self.headers.get(self.number(at)).copied().unwrap_or(usize::MAX)
    }

    fn name<'t>(&self, text: &'t str, at: usize) -> &'t str {
        let header = self.number(at).checked_sub(1).and_then(|number| self.headers.get(number));
        let line = header.and_then(|&header| text.get(header..)?.lines().next());
        let line = line.unwrap_or_default().trim().trim_start_matches('[');
        line.split(']').next().unwrap_or_default().trim()
    }

    /// Whether what is missing in the section of `at` may stand in a part that could not be read.
    pub(super) fn may_hide(&self, at: usize) -> bool {
        self.unread.contains(&self.number(at))
    }

    pub(super) fn may_hide_a_table(&self) -> bool {
        !self.unread.is_empty()
    }
}

impl Document {
    pub(super) fn read(text: &str) -> Self {
        let mut mistakes: Vec<Finding> = Vec::new();
        let mut sections = Sections::of(text);
        let mut left = text.to_owned();
        for _ in 0..READINGS_MAX {
            let (table, errors) = DeTable::parse_recoverable(&left);
            let mut faults: Vec<(usize, &str)> = match unclosed(&left, table.get_ref()) {
                Some(start) if errors.iter().map(fault).any(|(at, _)| at > start) => {
                    vec![(start, "a value that does not end")]
                }
                _ => errors.iter().map(fault).collect(),
            };
            faults.sort_unstable();
            let mut blanks: Vec<Range<usize>> = Vec::new();
            for (at, problem) in faults {
                let line = line_of(&left, at);
                let is_blanked = blanks.last().is_some_and(|blank| blank.contains(&line.start));
                let written = &left[line.clone()];
                if is_blanked || written.trim().is_empty() {
                    continue;
                }
                mistakes.push(finding(text, &sections, at, problem));
                sections.unread.insert(sections.number(line.start));
                // Without its name, what follows would be another table's.
                let end = if is_header(written) { sections.end(line.start) } else { line.end };
                blanks.push(line.start..end);
            }
            if blanks.is_empty() {
                let root = Node::of_toml(text, table.get_ref());
                return Self { root, mistakes, sections };
            }
            for part in blanks {
                blank(&mut left, part);
            }
        }
        Self { root: Node::of_toml(text, &DeTable::new()), mistakes, sections }
    }
}

fn fault(error: &Error) -> (usize, &str) {
    (error.span().map_or(0, |span| span.start), error.message())
}

/// Where a value begins that has several lines and reaches to the end of the text.
fn unclosed(text: &str, table: &DeTable<'_>) -> Option<usize> {
    let end = text.trim_end().len();
    table.iter().find_map(|(_, value)| {
        let span = value.span();
        let is_long = span.end >= end && text.get(span.clone()).is_some_and(|it| it.contains('\n'));
        match value.get_ref() {
            _ if is_long => Some(span.start),
            DeValue::Table(inner) => unclosed(text, inner),
            _ => None,
        }
    })
}

fn finding(text: &str, sections: &Sections, at: usize, problem: &str) -> Finding {
    let line = text[line_of(text, at)].trim();
    let table = sections.name(text, at);
    let (name, value) = line.split_once('=').unwrap_or((line, ""));
    let (name, value) = (name.trim(), value.trim());
    let nameless = if table.is_empty() { "?" } else { table }.to_owned();
    let (field, shown) = if is_header(line) {
        (nameless, line.split_inclusive([']', ' ']).next().unwrap_or(line).to_owned())
    } else if is_field(name) {
        // A line may be two that a newline was lost between.
        let shown = match first_part(value) {
            "" => "none",
            part if is_shown(name) => part,
            _ => HIDDEN,
        };
        (join(table, name), shortened(shown))
    } else {
        // It may be a part of a secret that has several lines.
        (nameless, HIDDEN.to_owned())
    };
    let is_word = value.starts_with(|char: char| char.is_ascii_alphanumeric())
        && value.contains(|char: char| char.is_ascii_alphabetic())
        && !value.contains(['"', '\'', '[', '{', '#'])
        && !["true", "false"].contains(&value.to_ascii_lowercase().as_str());
    let remedy = match problem {
        _ if is_word && is_field(name) => "is no TOML: put a text into quotes".to_owned(),
        _ if value.is_empty() && line.contains('=') => "is no TOML: there is no value".to_owned(),
        "duplicate key" => "is there twice: remove one of them".to_owned(),
        problem => format!("is no TOML: {problem}"),
    };
    Finding { at, field, value: shown, remedy }
}

/// A value up to what may belong to another line.
fn first_part(value: &str) -> &str {
    let first = value.chars().next();
    let mut later = value.char_indices().skip(1);
    match later.find(|(_, char)| ['=', '"', '\''].contains(char)) {
        Some((at, quote)) if Some(quote) == first => &value[..=at],
        Some((at, _)) => value[..at].trim_end(),
        None => value,
    }
}

fn is_header(line: &str) -> bool {
    line.trim_start().starts_with('[')
}

/// The lines of a text, without their ends.
fn lines(text: &str) -> impl Iterator<Item = Range<usize>> {
    let mut at = 0;
    text.split('\n').map(move |line| {
        let start = at;
        at += line.len() + 1;
        start..start + line.len()
    })
}

fn line_of(text: &str, at: usize) -> Range<usize> {
    let at = (0..=at.min(text.len())).rev().find(|&at| text.is_char_boundary(at)).unwrap_or(0);
    let start = text[..at].rfind('\n').map_or(0, |newline| newline + 1);
    let end = text[at..].find('\n').map_or(text.len(), |newline| at + newline);
    start..end
}

/// Writes spaces over a part, so that all others stay where they are.
fn blank(text: &mut String, part: Range<usize>) {
    let part = part.start..part.end.min(text.len());
    let blanks: String =
        text[part.clone()].bytes().map(|byte| if byte == b'\n' { '\n' } else { ' ' }).collect();
    text.replace_range(part, &blanks);
}
