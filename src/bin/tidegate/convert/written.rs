//! The configuration as it is written, and where each of its tables comes from.

use std::fmt::Write as _;

use super::Options;
use super::descriptors::{Descriptor, Domain, Place, Quota};

#[derive(Default)]
pub(super) struct Written {
    pub(super) text: String,
    /// How many lines it has.
    lines: usize,
    /// The line of each table's name, and what the table is written for.
    tables: Vec<(usize, Place)>,
}

impl Written {
    pub(super) fn of(domains: &[Domain], options: &Options) -> Self {
        let mut written = Self::default();
        written.line("# Written by tidegate convert.");
        for domain in domains {
            let path = format!("domains.{}", quoted_name(&domain.name));
            written.table(&path, domain.place);
            written.descriptors_in(&path, &domain.descriptors, options);
        }
        written
    }

    /// What the table is written for that a line belongs to.
    pub(super) fn place(&self, line: usize) -> Option<Place> {
        let begun = self.tables.partition_point(|(name, _)| *name <= line);
        self.tables[..begun].last().map(|(_, place)| *place)
    }

    fn line(&mut self, line: &str) {
        self.text.push_str(line);
        self.text.push('\n');
        self.lines += 1;
    }

    fn table(&mut self, path: &str, place: Place) {
        self.line("");
        self.line(&format!("[{path}]"));
        self.tables.push((self.lines, place));
    }

    fn field(&mut self, name: &str, value: &str) {
        self.line(&format!("{name} = {value}"));
    }

    fn descriptors_in(&mut self, path: &str, descriptors: &[Descriptor], options: &Options) {
        for descriptor in descriptors {
            let path = format!("{path}.{}", quoted_name(&descriptor.table_name()));
            self.table(&path, descriptor.place);
            self.fields(descriptor, options);
            self.descriptors_in(&path, &descriptor.descriptors, options);
        }
    }

    fn fields(&mut self, descriptor: &Descriptor, options: &Options) {
        for name in &descriptor.flags {
            self.field(name, "true");
        }
        let Some(limit) = &descriptor.limit else { return };
        match &limit.quota {
            Quota::None if !descriptor.is_shadow => self.field("deny", "true"),
            Quota::Unlimited | Quota::None => self.field("unlimited", "true"),
            Quota::Some(quota) => {
                self.field("quota", &quoted(quota));
                self.field("algorithm", &quoted(&options.algorithm));
                if options.mode != "hybrid" {
                    self.field("mode", &quoted(&options.mode));
                }
                if descriptor.is_shadow {
                    self.field("switch", &quoted("shadow"));
                }
            }
        }
        if let Some(name) = &limit.name {
            self.field("name", &quoted_text(name));
        }
        if !limit.replaces.is_empty() {
            let names: Vec<String> = limit.replaces.iter().map(|name| quoted_text(name)).collect();
            self.field("replaces", &format!("[{}]", names.join(", ")));
        }
    }
}

/// A text in which a dollar is a dollar, and no variable.
fn quoted_text(text: &str) -> String {
    quoted(&text.replace('$', "$$"))
}

/// A name in TOML.
fn quoted_name(name: &str) -> String {
    let is_bare = |byte: u8| byte.is_ascii_alphanumeric() || b"_-".contains(&byte);
    if !name.is_empty() && name.bytes().all(is_bare) { name.to_owned() } else { quoted(name) }
}

/// A text in TOML.
fn quoted(text: &str) -> String {
    let mut quoted = String::from("\"");
    for char in text.chars() {
        match char {
            '"' | '\\' => quoted.extend(['\\', char]),
            char if char.is_control() => {
                let _ = write!(quoted, "\\u{:04X}", u32::from(char));
            }
            char => quoted.push(char),
        }
    }
    quoted.push('"');
    quoted
}
