//! The descriptors of a domain, and which of them a request means: as users of Envoy's rate limit service know them.

#![cfg_attr(not(feature = "server"), allow(dead_code, reason = "only the service is asked"))]

use std::collections::BTreeMap;

use smallvec::SmallVec;

/// Any characters, in a value.
pub(super) const WILDCARD: char = '*';

/// The descriptors of one level.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct Level(BTreeMap<String, OfKey>);

/// Those of one key.
#[derive(Clone, Debug, Default, PartialEq)]
struct OfKey {
    values: BTreeMap<String, Descriptor>,
    /// Those whose values have wildcards, in the order of the file.
    patterns: Vec<(String, Descriptor)>,
    /// The one of all other values.
    any: Option<Box<Descriptor>>,
}

/// What holds for requests whose entries lead here.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct Descriptor {
    /// None: they have no limit.
    pub(crate) rule: Option<DescriptorRule>,
    /// By which others replace it.
    pub(crate) name: Option<String>,
    /// The names of those that do not count where this one does.
    pub(crate) replaces: Vec<String>,
    /// All values of its pattern are one.
    pub(crate) is_shared: bool,
    /// Its metrics have all values of a request, or the value of its own level.
    pub(super) has_detailed_metric: bool,
    pub(super) has_value_in_metric: bool,
    pub(super) level: Level,
}

/// What a descriptor's requests get.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum DescriptorRule {
    Unlimited,
    Deny,
    Limit {
        /// Its place among the limits of the configuration.
        limit: usize,
        charge: ChargeRule,
    },
}

/// When a descriptor's hits are charged to its limit.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum ChargeRule {
    /// If all limits of the request allow it.
    #[default]
    Together,
    /// If this limit allows it, though another one denies.
    Always,
    /// In any case: the key goes into debt. For costs that are known after the response.
    InFull,
}

/// The values that tell a descriptor's keys apart.
pub(crate) type PathValues<'v> = SmallVec<[&'v str; 4]>;

/// An entry as metrics name it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct MetricKey<'a> {
    pub(crate) key: &'a str,
    /// Empty: its values are not told apart.
    pub(crate) value: &'a str,
    /// The value is one of the request, of which there may be any number.
    pub(crate) is_of_request: bool,
}

/// How a value leads to a descriptor.
#[derive(Clone, Copy)]
enum Way<'a> {
    Value,
    Pattern(&'a str),
    Any,
}

impl OfKey {
    /// The descriptor of a value: that of exactly it, else of the first pattern that fits, else of all values.
    fn find(&self, value: &str) -> Option<(&Descriptor, Way<'_>)> {
        if let Some(descriptor) = self.values.get(value) {
            return Some((descriptor, Way::Value));
        }
        let fits = |(pattern, _): &&(String, Descriptor)| fits(pattern, value);
        if let Some((pattern, descriptor)) = self.patterns.iter().find(fits) {
            return Some((descriptor, Way::Pattern(pattern)));
        }
        self.any.as_deref().map(|descriptor| (descriptor, Way::Any))
    }
}

impl Level {
    /// Adds a descriptor. `false` if there is one of this key and value, or of all values of the key.
    pub(super) fn add(&mut self, key: &str, value: &str, descriptor: Descriptor) -> bool {
        let of_key = self.0.entry(key.to_owned()).or_default();
        let is_new = match value {
            "" => of_key.any.is_none(),
            value => {
                !of_key.values.contains_key(value)
                    && of_key.patterns.iter().all(|(pattern, _)| pattern != value)
            }
        };
        if is_new {
            match value {
                "" => of_key.any = Some(Box::new(descriptor)),
                value if value.contains(WILDCARD) => {
                    of_key.patterns.push((value.to_owned(), descriptor));
                }
                value => {
                    of_key.values.insert(value.to_owned(), descriptor);
                }
            }
        }
        is_new
    }

    /// Whether any of them, or of those in them, replaces others.
    pub(super) fn has_replacements(&self) -> bool {
        self.0.values().any(|OfKey { values, patterns, any }| {
            let patterns = patterns.iter().map(|(_, descriptor)| descriptor);
            let mut all = values.values().chain(patterns).chain(any.as_deref());
            all.any(|it| !it.replaces.is_empty() || it.level.has_replacements())
        })
    }

    /// The descriptor to which entries lead, one level each: that of the exact value, else the first pattern that fits, else
    /// that of all values. There is no way back: if it does not lead on, there is none. The values that tell its keys apart are
    /// in `values` then, in place of what was there.
    pub(crate) fn find<'a: 'v, 'v>(
        &'a self,
        entries: impl IntoIterator<Item = (&'v str, &'v str)>,
        values: &mut PathValues<'v>,
    ) -> Option<&'a Descriptor> {
        values.clear();
        let (mut level, mut matched) = (self, None);
        for (key, value) in entries {
            let (descriptor, way) = level.0.get(key)?.find(value)?;
            match way {
                Way::Value => {}
                Way::Pattern(pattern) if descriptor.is_shared => values.push(pattern),
                Way::Pattern(_) | Way::Any => values.push(value),
            }
            level = &descriptor.level;
            matched = Some(descriptor);
        }
        matched
    }

    /// How metrics name the entries that lead to a descriptor: by the values and patterns of the file, and where it says so by
    /// those of the request.
    #[cfg(feature = "server")]
    pub(crate) fn metric_keys<'a>(
        &'a self,
        entries: impl IntoIterator<Item = (&'a str, &'a str)>,
    ) -> Option<Vec<MetricKey<'a>>> {
        let (mut level, mut is_detailed) = (self, false);
        let (mut keys, mut detailed) = (Vec::new(), Vec::new());
        for (key, value) in entries {
            let (descriptor, way) = level.0.get(key)?.find(value)?;
            let of_file = |value| MetricKey { key, value, is_of_request: false };
            let of_request = MetricKey { key, value, is_of_request: true };
            let has_value = descriptor.has_value_in_metric;
            keys.push(match way {
                Way::Value => of_file(value),
                Way::Pattern(pattern) if descriptor.is_shared || !has_value => of_file(pattern),
                Way::Any if !has_value => of_file(""),
                Way::Pattern(_) | Way::Any => of_request,
            });
            detailed.push(match way {
                Way::Value => of_file(value),
                Way::Pattern(pattern) if descriptor.is_shared => of_file(pattern),
                Way::Pattern(_) | Way::Any => of_request,
            });
            is_detailed = descriptor.has_detailed_metric;
            level = &descriptor.level;
        }
        Some(if is_detailed { detailed } else { keys })
    }
}

/// Whether a value is that of a pattern, in which each wildcard stands for any characters, or for none.
fn fits(pattern: &str, value: &str) -> bool {
    let mut parts = pattern.split(WILDCARD);
    // There always is a first part.
    let Some(mut left) = parts.next().and_then(|first| value.strip_prefix(first)) else {
        return false;
    };
    let mut parts = parts.peekable();
    while let Some(part) = parts.next() {
        if parts.peek().is_none() {
            return left.ends_with(part);
        }
        match left.find(part) {
            Some(at) => left = &left[at + part.len()..],
            None => return false,
        }
    }
    left.is_empty()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn level(descriptors: &[(&str, &str)]) -> Level {
        let mut level = Level::default();
        for (place, (key, value)) in descriptors.iter().enumerate() {
            let descriptor = Descriptor { name: Some(place.to_string()), ..Default::default() };
            assert!(level.add(key, value, descriptor), "{key}={value}");
        }
        level
    }

    fn found<'a>(level: &'a Level, key: &'a str, value: &'a str) -> Option<&'a str> {
        level.find([(key, value)], &mut PathValues::new()).and_then(|it| it.name.as_deref())
    }

    #[test]
    fn pattern_fits_the_whole_value_and_its_wildcards_any_characters_or_none() {
        let fitting = [
            ("*", ""),
            ("*", "a/b"),
            ("value*", "value"),
            ("/api/*/action", "/api//action"),
            ("/api/*/action", "/api/a/b/action"),
            ("*a*", "a"),
            ("a*a", "aa"),
            ("a**b", "ab"),
            ("a*ba", "aba"),
            ("a*b*c", "abbc"),
        ];
        for (pattern, value) in fitting {
            assert!(fits(pattern, value), "{pattern} {value}");
        }
        let others = [
            ("value*", "xvalue"),
            ("value*", "valu"),
            ("/api/*/action", "/api/action"),
            ("a*a", "a"),
            ("a*b", "abc"),
            ("*a", "ab"),
            ("a*b*c", "acb"),
        ];
        for (pattern, value) in others {
            assert!(!fits(pattern, value), "{pattern} {value}");
        }
    }

    #[test]
    fn exact_value_is_found_before_patterns_and_the_first_pattern_before_all_values() {
        let level = level(&[("k", "ab*"), ("k", "a*"), ("k", "abc"), ("k", ""), ("a", "x")]);
        for (value, expected) in [("abc", "2"), ("abd", "0"), ("a", "1"), ("zz", "3"), ("", "3")] {
            assert_eq!(found(&level, "k", value), Some(expected), "{value}");
        }
        assert_eq!((found(&level, "a", "y"), found(&level, "b", "x")), (None, None));
    }

    #[test]
    fn replacements_are_found_behind_values_patterns_and_all_values() {
        for value in ["x", "x*", ""] {
            let replacing = || Descriptor { replaces: vec!["a".to_owned()], ..Default::default() };
            let (mut inner, mut outer, mut flat) =
                (Level::default(), Level::default(), Level::default());
            assert!(inner.add("k", value, replacing()) && flat.add("k", value, replacing()));
            let of_inner = Descriptor { level: inner, ..Default::default() };
            assert!(outer.add("k", value, of_inner));
            assert!(flat.has_replacements() && outer.has_replacements(), "{value:?}");
            assert!(!level(&[("k", value)]).has_replacements(), "{value:?}");
        }
    }

    #[test]
    fn entries_that_lead_nowhere_find_no_descriptor_of_a_sibling() {
        let mut of_x = Descriptor::default();
        assert!(of_x.level.add("m", "GET", Descriptor::default()));
        let mut of_any = Descriptor::default();
        assert!(of_any.level.add("m", "", Descriptor::default()));
        let mut level = Level::default();
        assert!(level.add("p", "x", of_x) && level.add("p", "", of_any));
        assert!(!level.add("p", "x", Descriptor::default()), "twice");
        assert!(!level.add("p", "", Descriptor::default()), "twice");
        let is_found = |entries: &[(&'static str, &'static str)]| {
            level.find(entries.iter().copied(), &mut PathValues::new()).is_some()
        };
        assert!(is_found(&[("p", "x"), ("m", "GET")]) && is_found(&[("p", "y"), ("m", "POST")]));
        assert!(!is_found(&[("p", "x"), ("m", "POST")]), "a sibling would fit");
        assert!(!is_found(&[]));
        assert!(!is_found(&[("p", "x"), ("m", "GET"), ("n", "1")]), "too many");
    }
}
