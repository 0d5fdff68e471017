//! What is wrong with a configuration, for people.

use std::fmt;
use std::sync::Arc;

use super::reading::Finding;

/// A mistake in a configuration, or a warning: where it is, and what to do.
///
/// It is shown as one line: `tidegate.toml:12:9: limits.api.quota = "600/mim": expected tokens/period, ...`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Mistake {
    file: Arc<str>,
    line: usize,
    column: usize,
    field: String,
    value: String,
    remedy: String,
}

impl Mistake {
    /// The file's name as it was given; `text` where there is none.
    pub fn file(&self) -> &str {
        &self.file
    }

    /// The line, from 1; 0 where the configuration did not come as TOML.
    pub fn line(&self) -> usize {
        self.line
    }

    /// The character of the line at which the value begins, or the name of a field that should not be there, from 1; 0
    /// where the configuration did not come as TOML.
    pub fn column(&self) -> usize {
        self.column
    }

    /// The field with its tables, such as `limits.api.quota`.
    pub fn field(&self) -> &str {
        &self.field
    }

    /// The value as it was written, `none` if it is missing, and `***` if it may be a secret.
    pub fn value(&self) -> &str {
        &self.value
    }

    /// What is wrong, and what would be right.
    pub fn remedy(&self) -> &str {
        &self.remedy
    }
}

impl fmt::Display for Mistake {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { file, line, column, field, value, remedy } = self;
        if *line > 0 {
            write!(f, "{file}:{line}:{column}: ")?;
        }
        write!(f, "{field} = {value}: {remedy}")
    }
}

/// A configuration that cannot be used.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum ConfigFileError {
    /// The file cannot be read.
    Unreadable {
        /// Its path as it was given.
        file: String,
        /// Why it cannot be read.
        reason: String,
    },
    /// The file has mistakes.
    Mistakes {
        /// All of them, in the order of the file: one at least.
        mistakes: Vec<Mistake>,
        /// What is allowed, and mostly a mistake.
        warnings: Vec<Mistake>,
    },
}

impl ConfigFileError {
    /// All mistakes in the order of the file; none if it cannot be read.
    pub fn mistakes(&self) -> &[Mistake] {
        match self {
            Self::Unreadable { .. } => &[],
            Self::Mistakes { mistakes, .. } => mistakes,
        }
    }

    /// All warnings in the order of the file; none if it cannot be read.
    pub fn warnings(&self) -> &[Mistake] {
        match self {
            Self::Unreadable { .. } => &[],
            Self::Mistakes { warnings, .. } => warnings,
        }
    }
}

/// A line for each mistake.
impl fmt::Display for ConfigFileError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Unreadable { file, reason } => write!(f, "{file}: {reason}"),
            Self::Mistakes { mistakes, .. } => {
                let lines: Vec<String> = mistakes.iter().map(Mistake::to_string).collect();
                f.write_str(&lines.join("\n"))
            }
        }
    }
}

impl std::error::Error for ConfigFileError {}

/// Findings in the order of the text, with their lines; without a text they have none.
pub(super) fn placed(findings: Vec<Finding>, text: Option<&str>, file: &str) -> Vec<Mistake> {
    let file: Arc<str> = file.into();
    let mut findings = findings;
    findings.sort_by(|one, other| (one.at, &one.field).cmp(&(other.at, &other.field)));
    let lines = text.map(Lines::new);
    let place = |finding: Finding| {
        let Finding { at, field, value, remedy } = finding;
        let (line, column) = lines.as_ref().map_or((0, 0), |lines| lines.line_and_column(at));
        Mistake { file: file.clone(), line, column, field, value, remedy }
    };
    findings.into_iter().map(place).collect()
}

/// A text and where its lines begin.
struct Lines<'t> {
    text: &'t str,
    starts: Vec<usize>,
}

impl<'t> Lines<'t> {
    fn new(text: &'t str) -> Self {
        // What ends the text stands on its last line.
        let text = text.trim_end_matches(['\n', '\r']);
        let starts = text.match_indices('\n').map(|(newline, _)| newline + 1);
        Self { text, starts: std::iter::once(0).chain(starts).collect() }
    }

    /// Both from 1; the column in characters.
    fn line_and_column(&self, at: usize) -> (usize, usize) {
        let at = at.min(self.text.len());
        let line = self.starts.partition_point(|&start| start <= at);
        let start = line.checked_sub(1).and_then(|line| self.starts.get(line)).copied();
        let before = self.text.get(start.unwrap_or_default()..).unwrap_or_default();
        let length = at.saturating_sub(start.unwrap_or_default());
        let column = before.char_indices().take_while(|(is_at, _)| *is_at < length).count();
        (line, column + 1)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_and_columns_count_characters_from_one() {
        let text = "a = 1\nü = \"é\" x\n\n";
        let places = [0, 4, 5, 6, 8, text.find('x').unwrap(), text.len()];
        let found = places.map(|at| Lines::new(text).line_and_column(at));
        assert_eq!(found, [(1, 1), (1, 5), (1, 6), (2, 1), (2, 2), (2, 9), (2, 10)]);
        assert_eq!(Lines::new("").line_and_column(5), (1, 1));
    }
}
