//! What a configuration is read with, and what was found in it.

use std::path::{Path, PathBuf};

use super::document::Sections;

/// What stands for a value that may be a secret.
pub(super) const HIDDEN: &str = "***";

/// Something about a field, before its line is known.
pub(super) struct Finding {
    /// The byte of the text.
    pub(super) at: usize,
    pub(super) field: String,
    pub(super) value: String,
    pub(super) remedy: String,
}

/// Where a value is, and how it is shown.
#[derive(Clone)]
pub(super) struct Place {
    pub(super) at: usize,
    pub(super) field: String,
    pub(super) shown: String,
}

/// A value of a field.
pub(super) struct Setting<T> {
    pub(super) value: T,
    pub(super) place: Place,
}

/// One reading of a configuration.
pub(super) struct Reading<'a> {
    pub(super) mistakes: Vec<Finding>,
    pub(super) warnings: Vec<Finding>,
    /// The environment.
    pub(super) variables: &'a dyn Fn(&str) -> Option<String>,
    /// Where the paths of files begin.
    pub(super) folder: PathBuf,
    pub(super) sections: Sections,
}

impl<'a> Reading<'a> {
    pub(super) fn new(variables: &'a dyn Fn(&str) -> Option<String>, folder: &Path) -> Self {
        Self {
            mistakes: Vec::new(),
            warnings: Vec::new(),
            variables,
            folder: folder.to_owned(),
            sections: Sections::default(),
        }
    }

    pub(super) fn mistake(&mut self, place: &Place, remedy: impl Into<String>) {
        self.mistakes.push(place.finding(remedy.into()));
    }

    pub(super) fn warn(&mut self, place: &Place, remedy: impl Into<String>) {
        self.warnings.push(place.finding(remedy.into()));
    }

    /// A field is missing in the table that begins at `at`, unless it is in a part that could not be read.
    pub(super) fn missing(&mut self, at: usize, field: String, remedy: &str) {
        if !self.sections.may_hide(at) {
            let place = Place { at, field, shown: "none".to_owned() };
            self.mistake(&place, remedy);
        }
    }
}

impl Place {
    fn finding(&self, remedy: String) -> Finding {
        let Self { at, field, shown } = self.clone();
        Finding { at, field, value: shown, remedy }
    }
}
