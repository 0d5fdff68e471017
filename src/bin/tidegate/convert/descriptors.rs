//! The domain and the descriptors of a file.

use super::yaml::{self, Node, Value, is_decimal};

/// The fields of the whole, of a descriptor and of its limit. One of another place is ignored, as the service does.
const ROOT: [&str; 2] = ["domain", "descriptors"];
const DESCRIPTOR: [&str; 9] = [
    "key",
    "value",
    "descriptors",
    "rate_limit",
    "shadow_mode",
    "detailed_metric",
    "value_to_metric",
    "share_threshold",
    "quota_mode",
];
const LIMIT: [&str; 5] = ["unit", "requests_per_unit", "unlimited", "name", "replaces"];
/// Known where they are, and without a counterpart.
const METADATA: &str = "metadata";

/// Fields of a table of ours: a descriptor of that name is written otherwise.
const OURS: [&str; 12] = [
    "quota",
    "algorithm",
    "mode",
    "switch",
    "share",
    "unlimited",
    "deny",
    "name",
    "replaces",
    "charge",
    "detailed_metric",
    "value_to_metric",
];
/// The most tokens of a quota.
const TOKENS_MAX: u64 = 1_000_000_000;
/// Units, and how a quota of ours names them.
const UNITS: [(&str, &str); 7] = [
    ("second", "s"),
    ("minute", "min"),
    ("hour", "h"),
    ("day", "d"),
    ("week", "7d"),
    ("month", "30d"),
    ("year", "365d"),
];

/// A line of a file.
#[derive(Clone, Copy)]
pub(super) struct Place {
    /// Which of the files it is.
    pub(super) file: usize,
    pub(super) line: usize,
}

/// What is found in a file, by lines.
#[derive(Default)]
pub(super) struct Reading {
    /// Which of the files it is.
    pub(super) file: usize,
    pub(super) mistakes: Vec<(usize, String)>,
    /// What has no counterpart, or means something else here.
    pub(super) notes: Vec<(usize, String)>,
}

pub(super) struct Domain {
    pub(super) place: Place,
    pub(super) name: String,
    pub(super) descriptors: Vec<Descriptor>,
}

pub(super) struct Descriptor {
    pub(super) place: Place,
    key: String,
    /// Empty: any.
    value: String,
    pub(super) limit: Option<Limit>,
    pub(super) is_shadow: bool,
    /// Fields of ours that are true.
    pub(super) flags: Vec<&'static str>,
    pub(super) descriptors: Vec<Descriptor>,
}

pub(super) struct Limit {
    pub(super) quota: Quota,
    pub(super) name: Option<String>,
    pub(super) replaces: Vec<String>,
}

pub(super) enum Quota {
    Unlimited,
    /// All is denied.
    None,
    Some(String),
}

/// A map whose names are known.
struct Fields<'n> {
    line: usize,
    entries: Vec<(&'n str, &'n Node)>,
}

impl Reading {
    pub(super) fn mistake(&mut self, line: usize, text: impl Into<String>) {
        self.mistakes.push((line, text.into()));
    }

    fn note(&mut self, line: usize, text: impl Into<String>) {
        self.notes.push((line, text.into()));
    }

    fn place(&self, line: usize) -> Place {
        Place { file: self.file, line }
    }

    /// The fields of a map. A name that no place has is a mistake, and one of another place is told.
    fn fields<'n>(&mut self, node: &'n Node, known: &[&str], of: &str) -> Fields<'n> {
        let mut fields = Fields { line: node.line, entries: Vec::new() };
        let Value::Map(entries) = &node.value else {
            self.mistake(node.line, format!("{of} must be a map"));
            return fields;
        };
        let anywhere = [&ROOT[..], &DESCRIPTOR[..], &LIMIT[..]].concat();
        for (name, value) in entries {
            let Some(text) = name.text.as_deref() else {
                self.mistake(name.line, "a name of a field must be a text");
                continue;
            };
            if known.contains(&text) {
                fields.entries.push((text, value));
            } else if text == METADATA {
                self.note(name.line, "metadata: has no counterpart, and is left out");
            } else if anywhere.contains(&text) {
                self.note(name.line, format!("{text}: has no effect in {of}, and is left out"));
            } else {
                self.mistake(name.line, format!("{text}: is no field"));
            }
        }
        fields
    }

    /// A scalar as it is written; none if there is nothing.
    fn text(&mut self, fields: &Fields<'_>, name: &str) -> Option<(usize, String)> {
        let node = fields.get(name)?;
        match &node.value {
            Value::Nothing => None,
            Value::Scalar { text, is_plain } if *is_plain && is_decimal(text) => {
                self.mistake(
                    node.line,
                    format!("{name}: {text}: put a number with a fraction into quotes"),
                );
                None
            }
            Value::Scalar { text, .. } => Some((node.line, text.clone())),
            _ => {
                self.mistake(node.line, format!("{name}: must be a text"));
                None
            }
        }
    }

    fn flag(&mut self, fields: &Fields<'_>, name: &str) -> bool {
        let Some((line, text)) = self.text(fields, name) else { return false };
        match text.as_str() {
            "true" | "True" | "TRUE" | "yes" | "on" => true,
            "false" | "False" | "FALSE" | "no" | "off" => false,
            other => {
                self.mistake(line, format!("{name}: {other}: must be true or false"));
                false
            }
        }
    }

    fn list<'n>(&mut self, fields: &Fields<'n>, name: &str) -> &'n [Node] {
        let Some(node) = fields.get(name) else { return &[] };
        match &node.value {
            Value::List(list) => list,
            Value::Nothing => &[],
            _ => {
                self.mistake(node.line, format!("{name}: must be a list"));
                &[]
            }
        }
    }
}

impl<'n> Fields<'n> {
    fn get(&self, name: &str) -> Option<&'n Node> {
        self.entries.iter().rev().find(|(known, _)| *known == name).map(|(_, node)| *node)
    }
}

impl Domain {
    /// The domain of a file; none if it cannot be read.
    pub(super) fn read(text: &str, reading: &mut Reading) -> Option<Self> {
        let node = match yaml::read(text) {
            Ok(Some(node)) => node,
            Ok(None) => {
                reading.mistake(1, "the file is empty");
                return None;
            }
            Err((line, error)) => {
                reading.mistake(line, format!("is no YAML: {error}"));
                return None;
            }
        };
        let fields = reading.fields(&node, &ROOT, "a file");
        let name = reading.text(&fields, "domain").filter(|(_, name)| !name.is_empty());
        let descriptors = descriptors(&fields, reading);
        let Some((line, name)) = name else {
            reading.mistake(fields.line, "domain: is missing: name one");
            return None;
        };
        Some(Self { place: reading.place(line), name, descriptors })
    }
}

fn descriptors(fields: &Fields<'_>, reading: &mut Reading) -> Vec<Descriptor> {
    let mut read = Vec::<Descriptor>::new();
    for node in reading.list(fields, "descriptors") {
        let fields = reading.fields(node, &DESCRIPTOR, "a descriptor");
        let Some(descriptor) = Descriptor::read(&fields, reading) else { continue };
        if read.iter().any(|known| known.is_same(&descriptor)) {
            let mistake = format!("{}: is there twice", descriptor.shown());
            reading.mistake(descriptor.place.line, mistake);
        }
        read.push(descriptor);
    }
    read
}

impl Descriptor {
    fn read(fields: &Fields<'_>, reading: &mut Reading) -> Option<Self> {
        let key = reading.text(fields, "key").filter(|(_, key)| !key.is_empty());
        let value = reading.text(fields, "value").map(|(_, value)| value).unwrap_or_default();
        let limit = fields.get("rate_limit").and_then(|node| Limit::read(node, reading));
        let descriptors = descriptors(fields, reading);
        let Some((_, key)) = key else {
            reading.mistake(fields.line, "key: is missing: name one");
            return None;
        };
        let line = fields.line;
        if key.contains('=') {
            reading.mistake(line, format!("key: {key}: a key with = has no counterpart"));
        }
        if key.contains('*') {
            reading.note(line, format!("key: {key}: in a key * is no wildcard here"));
        }
        let is_shared = reading.flag(fields, "share_threshold");
        if is_shared && !value.contains('*') {
            reading.mistake(line, "share_threshold: is for a value with *");
        }
        let mut flags = if is_shared { vec!["share"] } else { Vec::new() };
        flags.extend(
            ["detailed_metric", "value_to_metric"].iter().filter(|name| reading.flag(fields, name)),
        );
        if reading.flag(fields, "quota_mode") {
            let note = "has no counterpart: each descriptor over its limit denies the request";
            reading.note(line, format!("quota_mode: {note}"));
        }
        let is_shadow = reading.flag(fields, "shadow_mode");
        if is_shadow && limit.as_ref().is_some_and(|limit| matches!(limit.quota, Quota::None)) {
            reading.note(
                line,
                "shadow_mode: a quota of 0 that denies nothing is written as unlimited",
            );
        }
        let place = reading.place(line);
        Some(Self { place, key, value, limit, is_shadow, flags, descriptors })
    }

    /// Whether it or one below it has a quota.
    pub(super) fn has_quota(&self) -> bool {
        let quota = self.limit.as_ref().map(|limit| &limit.quota);
        matches!(quota, Some(Quota::Some(_))) || self.descriptors.iter().any(Self::has_quota)
    }

    pub(super) fn is_same(&self, other: &Self) -> bool {
        (&self.key, &self.value) == (&other.key, &other.value)
    }

    pub(super) fn shown(&self) -> String {
        if self.value.is_empty() {
            self.key.clone()
        } else {
            format!("{}={}", self.key, self.value)
        }
    }

    /// The name of its table.
    pub(super) fn table_name(&self) -> String {
        if self.value.is_empty() && OURS.contains(&self.key.as_str()) {
            return format!("{}=", self.key);
        }
        self.shown()
    }
}

impl Limit {
    /// None if the map is empty.
    fn read(node: &Node, reading: &mut Reading) -> Option<Self> {
        if matches!(node.value, Value::Nothing) {
            return None;
        }
        let fields = reading.fields(node, &LIMIT, "a rate_limit");
        if fields.entries.is_empty() {
            return None;
        }
        let quota = quota(&fields, reading)?;
        let name = reading.text(&fields, "name").map(|(_, name)| name);
        let mut replaces = Vec::new();
        for node in reading.list(&fields, "replaces") {
            let of_other = reading.fields(node, &["name"], "an item of replaces");
            match reading.text(&of_other, "name") {
                Some((line, other)) if Some(&other) == name.as_ref() => {
                    reading.mistake(line, format!("replaces: {other}: is its own name"));
                }
                Some((_, other)) if !other.is_empty() => replaces.push(other),
                _ => reading.mistake(node.line, "replaces: an item has no name"),
            }
        }
        Some(Self { quota, name: name.filter(|name| !name.is_empty()), replaces })
    }
}

fn quota(fields: &Fields<'_>, reading: &mut Reading) -> Option<Quota> {
    let unit = reading.text(fields, "unit").filter(|(_, unit)| !unit.is_empty());
    let requests = reading.text(fields, "requests_per_unit");
    if reading.flag(fields, "unlimited") {
        if let Some((line, _)) = unit {
            reading.mistake(line, "unit: is given beside unlimited: remove one of them");
        }
        return Some(Quota::Unlimited);
    }
    let requests = match requests {
        None => {
            reading.note(fields.line, "requests_per_unit: is left out, so it is 0 and denies all");
            0
        }
        Some((line, text)) => {
            // With a zero before it, YAML has it in eights.
            let is_octal = text.len() > 1 && text.starts_with('0');
            let Some(requests) = text.parse::<u32>().ok().filter(|_| !is_octal) else {
                let must = "must be a number from 0 to 4294967295, without zeros before it";
                let mistake = format!("requests_per_unit: {text}: {must}");
                reading.mistake(line, mistake);
                return None;
            };
            u64::from(requests)
        }
    };
    let Some((line, unit)) = unit else {
        reading.mistake(fields.line, "unit: is missing: name one, such as second");
        return None;
    };
    let known = UNITS.iter().find(|(name, _)| unit.eq_ignore_ascii_case(name));
    let Some((_, period)) = known else {
        let names: Vec<&str> = UNITS.iter().map(|(name, _)| *name).collect();
        reading.mistake(line, format!("unit: {unit}: must be one of {}", names.join(", ")));
        return None;
    };
    if requests > TOKENS_MAX {
        let mistake = format!(
            "requests_per_unit: {requests}: at most {TOKENS_MAX} here: lower it, or make it unlimited"
        );
        reading.mistake(line, mistake);
        return None;
    }
    Some(if requests == 0 { Quota::None } else { Quota::Some(format!("{requests}/{period}")) })
}
