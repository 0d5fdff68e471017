//! The fields of a table: each is read as what it has to be, or named as a mistake.

use std::collections::BTreeSet;
use std::fmt;
use std::time::Duration;

use serde::de::value::StrDeserializer;
use serde::de::{Deserialize, Error, IntoDeserializer};

use super::node::{Entry, Node, Value};
use super::reading::{HIDDEN, Place, Reading, Setting};
use super::secret::{self, Fault};
use crate::quota::duration;

/// The fields of the whole.
pub(super) const ROOT: &[&str] = &[
    "name",
    "max_nodes",
    "max_keys",
    "lanes",
    "key_secret",
    "key_secret_file",
    "store",
    "limits",
    "concurrency",
    "domains",
    "server",
];

/// The fields of the table `store`.
pub(super) const STORE: &[&str] =
    &["redis", "redis_file", "user", "password", "password_file", "namespace", "timeout", "memory"];

/// The fields of the table `server`.
pub(super) const SERVER: &[&str] = &[
    "http",
    "grpc",
    "tls_cert",
    "tls_key",
    "client_ca",
    "max_connections",
    "head_timeout",
    "client_quota",
    "token",
    "token_file",
    "body_timeout",
    "access_log",
    "drain",
    "unknown_domain",
    "shadow_domains",
    "limit_headers",
    "ratelimit_metrics",
    "near_limit_ratio",
];

/// The fields of a limit. Overrides will be a list of the whole.
pub(super) const LIMIT: &[&str] = &[
    "algorithm",
    "quota",
    "burst",
    "queue",
    "zone",
    "mode",
    "sync_interval",
    "accuracy",
    "key_syncs_per_second_max",
    "outage",
    "grace",
    "max_wait",
    "max_waiting",
    "credit",
    "strict",
    "version",
    "switch",
    "block_for",
    "plans",
];

/// The fields of a concurrency limit.
pub(super) const CONCURRENCY: &[&str] = &["max", "local", "outage", "max_wait", "max_waiting"];

/// The fields of a descriptor beside those of its limit.
pub(super) const DESCRIPTOR: &[&str] = &[
    "unlimited",
    "deny",
    "share",
    "charge",
    "name",
    "replaces",
    "detailed_metric",
    "value_to_metric",
];

/// The fields of a plan: those of a rule, without the algorithm.
pub(super) const PLAN: &[&str] = &["quota", "burst", "queue", "zone"];

/// The table of a limit's fields, in messages.
const OF_LIMIT: &str = "a limit";

/// Fields whose values are never shown.
const SECRET: &[&str] = &["key_secret", "password", "redis", "token"];

/// A name may differ from a field's in so many letters and still be taken for it.
const LETTERS_WRONG_MAX: usize = 2;

/// Whether a table has such a field.
pub(super) fn is_field(name: &str) -> bool {
    table_of_field(name).is_some()
}

/// Whether values of the field may be shown, whatever is wrong with them.
pub(super) fn is_shown(name: &str) -> bool {
    is_field(name) && !SECRET.contains(&name)
}

/// The name of a field in a table.
pub(super) fn join(table: &str, field: &str) -> String {
    let is_bare = |byte: u8| byte.is_ascii_alphanumeric() || b"_-".contains(&byte);
    let is_plain = !field.is_empty() && field.bytes().all(is_bare);
    let field = if is_plain { field.to_owned() } else { format!("{field:?}") };
    if table.is_empty() { field } else { format!("{table}.{field}") }
}

/// The nearest of some names, if one is near.
fn nearest<'n>(name: &str, known: &[&'n str]) -> Option<&'n str> {
    let distance = |known: &str| strsim::damerau_levenshtein(name, known);
    let (wrong, nearest) = known.iter().map(|known| (distance(known), *known)).min()?;
    (wrong <= LETTERS_WRONG_MAX.min(nearest.len() / 2)).then_some(nearest)
}

/// The names that a word can be, and the nearest to what was written.
pub(super) fn one_of(text: &str, names: &[&str]) -> String {
    let all = format!("must be {}", listed(names));
    match nearest(&text.to_ascii_lowercase(), names) {
        Some(name) => format!("{all}: did you mean {name:?}?"),
        None => all,
    }
}

fn listed(names: &[&str]) -> String {
    let quoted: Vec<String> = names.iter().map(|name| format!("{name:?}")).collect();
    match quoted.split_last() {
        Some((last, rest)) if !rest.is_empty() => format!("{} or {last}", rest.join(", ")),
        _ => quoted.concat(),
    }
}

/// A table of the configuration.
pub(super) struct Fields<'n> {
    pub(super) path: String,
    /// Where its name is.
    pub(super) at: usize,
    entries: Vec<&'n Entry>,
}

impl<'n> Fields<'n> {
    pub(super) fn of_root(root: &'n Node) -> Self {
        let entries: &[Entry] = match &root.value {
            Value::Table(entries) => entries,
            _ => &[],
        };
        Self { path: String::new(), at: root.at, entries: entries.iter().collect() }
    }

    /// A table in this one.
    pub(super) fn table(&self, name: &str, example: &str, reading: &mut Reading) -> Option<Self> {
        self.table_of(self.entry(name)?, example, reading)
    }

    /// All tables in this one.
    pub(super) fn tables(&self, example: &str, reading: &mut Reading) -> Vec<(&'n str, Self)> {
        let mut tables = Vec::new();
        for entry in &self.entries {
            if let Some(table) = self.table_of(entry, example, reading) {
                tables.push((entry.name.as_str(), table));
            }
        }
        tables
    }

    fn table_of(&self, entry: &'n Entry, example: &str, reading: &mut Reading) -> Option<Self> {
        let path = join(&self.path, &entry.name);
        if let Value::Table(entries) = &entry.node.value {
            // A table that is written in one line begins with its name.
            return Some(Self { path, at: entry.at, entries: entries.iter().collect() });
        }
        // An address of a store has a password, perhaps, and a server a token.
        let has_secrets = ["store", "server"].contains(&&*entry.name);
        let shown = if has_secrets { HIDDEN } else { &entry.node.shown };
        let place = Place { at: entry.node.at, field: path, shown: shown.to_owned() };
        reading.mistake(&place, format!("must be a table, such as {example}"));
        None
    }

    /// The fields that are no tables, and the tables in this one.
    pub(super) fn apart(self) -> (Self, Self) {
        let is_table = |entry: &&Entry| matches!(entry.node.value, Value::Table(_));
        let (tables, others) = self.entries.into_iter().partition(is_table);
        let tables = Self { path: self.path.clone(), at: self.at, entries: tables };
        (Self { path: self.path, at: self.at, entries: others }, tables)
    }

    pub(super) fn without(mut self, name: &str) -> Self {
        self.entries.retain(|entry| entry.name != name);
        self
    }

    pub(super) fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }

    fn entry(&self, name: &str) -> Option<&'n Entry> {
        self.entries.iter().copied().find(|entry| entry.name == name)
    }

    pub(super) fn has(&self, name: &str) -> bool {
        self.entry(name).is_some()
    }

    /// Whether a field is a text with variables.
    #[cfg(feature = "redis")]
    pub(super) fn has_variables(&self, name: &str) -> bool {
        let text = self.entry(name).map(|entry| &entry.node.value);
        matches!(text, Some(Value::Text(text)) if text.contains("${"))
    }

    /// Where a field is; where the table is, if it does not have the field.
    pub(super) fn place(&self, name: &str) -> Place {
        let field = join(&self.path, name);
        match self.entry(name) {
            Some(entry) => Place { at: entry.node.at, field, shown: shown(entry) },
            None => Place { at: self.at, field, shown: "none".to_owned() },
        }
    }

    /// Where the burst of a rule is written.
    pub(super) fn place_of_burst(&self) -> Place {
        self.place(if self.has("burst") { "burst" } else { "quota" })
    }

    /// The place of the table's own name.
    pub(super) fn place_of_name(&self, name: &str) -> Place {
        Place { at: self.at, field: self.path.clone(), shown: format!("{name:?}") }
    }

    pub(super) fn refuse_unknown(&self, known: &[&str], reading: &mut Reading) {
        for entry in self.entries.iter().filter(|entry| !known.contains(&entry.name.as_str())) {
            let name = entry.name.as_str();
            let (near, elsewhere) = (nearest(name, known), table_of_field(name));
            let remedy = match (near, elsewhere) {
                (_, Some(OF_LIMIT)) if known == PLAN => {
                    "is a field of the limit, and holds for its plans: remove it, or move it there"
                        .to_owned()
                }
                (Some(near), _) => format!("is no field: did you mean {near:?}?"),
                (None, Some(table)) => format!("is a field of {table}: move it there"),
                (None, None) => {
                    let known: BTreeSet<&str> = known.iter().copied().collect();
                    let known: Vec<&str> = known.into_iter().collect();
                    format!("is no field; there are {}", known.join(", "))
                }
            };
            // What is not known may be a secret.
            let is_harmless = match &entry.node.value {
                Value::Text(_) => near.or(elsewhere.map(|_| name)).is_some_and(is_shown),
                Value::Table(_) => !entry.node.shown.starts_with('{'),
                Value::List(_) => entry.node.shown.starts_with("[["),
                _ => near.or(elsewhere.map(|_| name)).is_none_or(is_shown),
            };
            let shown = if is_harmless { entry.node.shown.clone() } else { HIDDEN.to_owned() };
            let place = Place { at: entry.at, field: join(&self.path, name), shown };
            reading.mistake(&place, remedy);
        }
    }

    /// A text, its variables replaced.
    pub(super) fn text(&self, name: &str, reading: &mut Reading) -> Option<Setting<String>> {
        let entry = self.entry(name)?;
        let place = self.place(name);
        let Value::Text(text) = &entry.node.value else {
            let kind = entry.node.value.kind();
            reading.mistake(&place, format!("is {kind}: must be a text in quotes"));
            return None;
        };
        expanded(&place, text, reading)
    }

    /// A text, or a list of texts.
    pub(super) fn texts(&self, name: &str, reading: &mut Reading) -> Vec<String> {
        let Some(entry) = self.entry(name) else { return Vec::new() };
        let nodes = match &entry.node.value {
            Value::List(nodes) => nodes.iter().collect(),
            _ => vec![&entry.node],
        };
        let mut texts = Vec::new();
        for node in nodes {
            let place = Place { at: node.at, shown: node.shown.clone(), ..self.place(name) };
            match &node.value {
                Value::Text(text) if !text.is_empty() => {
                    let text = expanded(&place, text, reading);
                    texts.extend(text.map(|text| text.value));
                }
                _ => reading.mistake(&place, "must be a text in quotes, or a list of such texts"),
            }
        }
        texts
    }

    /// What is not to be shown: the bytes of a field, or those of the file that the field `<name>_file` names.
    pub(super) fn secret(&self, name: &str, reading: &mut Reading) -> Option<Setting<Vec<u8>>> {
        let of_file = format!("{name}_file");
        if !self.has(&of_file) {
            let Setting { value, place } = self.text(name, reading)?;
            return Some(Setting { value: value.into_bytes(), place });
        }
        if self.has(name) {
            let remedy = format!("is given beside {name:?}: remove one of them");
            reading.mistake(&self.place(&of_file), remedy);
            return None;
        }
        let Setting { value, place } = self.text(&of_file, reading)?;
        match secret::read(&reading.folder.join(value)) {
            Ok(value) => {
                Some(Setting { value, place: Place { shown: HIDDEN.to_owned(), ..place } })
            }
            Err(reason) => {
                reading.mistake(&place, reason);
                None
            }
        }
    }

    /// A secret that has to be a text.
    pub(super) fn secret_text(&self, name: &str, reading: &mut Reading) -> Option<Setting<String>> {
        let Setting { value, place } = self.secret(name, reading)?;
        let place = Place { shown: HIDDEN.to_owned(), ..place };
        let Ok(value) = String::from_utf8(value) else {
            reading.mistake(&place, "is no text: write it as UTF-8");
            return None;
        };
        Some(Setting { value, place })
    }

    /// A number, or a text that variables make one.
    fn number<T>(
        &self,
        name: &str,
        (of_value, of_text): (impl Fn(&Value) -> Option<T>, impl Fn(&str) -> Option<T>),
        must: &str,
        reading: &mut Reading,
    ) -> Option<Setting<T>> {
        let entry = self.entry(name)?;
        let mut place = self.place(name);
        let number = match &entry.node.value {
            Value::Text(text) if text.contains('$') => {
                let expanded = expanded(&place, text, reading)?;
                place = expanded.place;
                of_text(expanded.value.trim())
            }
            Value::Text(text) if of_text(text).is_some() => {
                reading.mistake(&place, format!("{must}: write it without quotes"));
                return None;
            }
            value => of_value(value),
        };
        if number.is_none() {
            reading.mistake(&place, must);
        }
        number.map(|value| Setting { value, place })
    }

    pub(super) fn whole<T: Whole>(&self, name: &str, reading: &mut Reading) -> Option<Setting<T>> {
        let of_value = |value: &Value| match value {
            Value::Whole(whole) => T::try_from(*whole).ok(),
            _ => None,
        };
        self.number(name, (of_value, |text: &str| text.parse().ok()), T::MUST, reading)
    }

    pub(super) fn decimal(&self, name: &str, reading: &mut Reading) -> Option<Setting<f64>> {
        let of_value = |value: &Value| match value {
            Value::Whole(whole) => Some(*whole as f64),
            Value::Number(number) => Some(*number),
            _ => None,
        };
        let must = "must be a number, such as 0.01";
        self.number(name, (of_value, |text: &str| text.parse().ok()), must, reading)
    }

    pub(super) fn flag(&self, name: &str, reading: &mut Reading) -> Option<Setting<bool>> {
        let of_value = |value: &Value| match value {
            Value::Flag(flag) => Some(*flag),
            _ => None,
        };
        let of_text = |text: &str| text.parse().ok();
        self.number(name, (of_value, of_text), "must be true or false", reading)
    }

    pub(super) fn duration(&self, name: &str, reading: &mut Reading) -> Option<Setting<Duration>> {
        let entry = self.entry(name)?;
        let must = "must be a time with its unit, such as \"50ms\", \"2s\" or \"1min\"; units are us, ms, s, min, h, d";
        if !matches!(entry.node.value, Value::Text(_)) {
            reading.mistake(&self.place(name), must);
            return None;
        }
        let Setting { value, place } = self.text(name, reading)?;
        let Some(value) = duration(&value) else {
            reading.mistake(&place, must);
            return None;
        };
        Some(Setting { value, place })
    }

    /// One of the words that a type has.
    pub(super) fn word<T: for<'de> Deserialize<'de>>(
        &self,
        name: &str,
        reading: &mut Reading,
    ) -> Option<Setting<T>> {
        let Setting { value: text, place } = self.text(name, reading)?;
        let deserializer: StrDeserializer<'_, Unknown> = text.as_str().into_deserializer();
        match T::deserialize(deserializer) {
            Ok(value) => Some(Setting { value, place }),
            Err(Unknown(names)) => {
                reading.mistake(&place, one_of(&text, names));
                None
            }
        }
    }
}

/// A text with its variables replaced. Their values are not shown.
fn expanded(place: &Place, text: &str, reading: &mut Reading) -> Option<Setting<String>> {
    match secret::expand(text, reading.variables) {
        Ok((value, has_variables)) => {
            let shown = if has_variables { HIDDEN.to_owned() } else { place.shown.clone() };
            Some(Setting { value, place: Place { shown, ..place.clone() } })
        }
        Err(faults) => {
            for fault in faults {
                reading.mistake(&of_variable(place, &fault), fault.to_string());
            }
            None
        }
    }
}

/// What whole numbers can be.
pub(super) trait Whole: TryFrom<i128> + std::str::FromStr {
    const MUST: &str;
}

impl Whole for u32 {
    const MUST: &str = "must be a whole number from 0 to 4294967295";
}

impl Whole for u64 {
    const MUST: &str = "must be a whole number, 0 or more";
}

impl Whole for usize {
    const MUST: &str = "must be a whole number, 0 or more";
}

/// The words that there are.
#[derive(Debug)]
struct Unknown(&'static [&'static str]);

impl fmt::Display for Unknown {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&listed(self.0))
    }
}

impl std::error::Error for Unknown {}

impl Error for Unknown {
    fn custom<T: fmt::Display>(_: T) -> Self {
        Self(&[])
    }

    fn unknown_variant(_: &str, expected: &'static [&'static str]) -> Self {
        Self(expected)
    }
}

fn shown(entry: &Entry) -> String {
    if is_shown(&entry.name) { entry.node.shown.clone() } else { HIDDEN.to_owned() }
}

fn of_variable(place: &Place, fault: &Fault) -> Place {
    match fault {
        Fault::Unset(name) => Place { shown: format!("${{{name}}}"), ..place.clone() },
        _ => Place { shown: HIDDEN.to_owned(), ..place.clone() },
    }
}

/// The table that has such a field.
fn table_of_field(name: &str) -> Option<&'static str> {
    let tables = [
        (ROOT, "the whole file"),
        (STORE, "[store]"),
        (SERVER, "[server]"),
        (LIMIT, OF_LIMIT),
        (CONCURRENCY, "a concurrency limit"),
        (DESCRIPTOR, "a descriptor"),
    ];
    tables.into_iter().find(|(fields, _)| fields.contains(&name)).map(|(_, table)| table)
}
