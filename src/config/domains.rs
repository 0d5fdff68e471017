//! The tables `[domains.<name>]`: the descriptors of requests that Envoy asks about, each with its limit.
//!
//! A descriptor is a table whose name is `key=value`, or `key` for all values. It has the fields of a limit, and the
//! descriptors of further entries are tables in it.

use std::collections::BTreeSet;
#[cfg(feature = "server")]
use std::time::Duration;

use hmac_sha256::Hash;

use super::check;
use super::descriptor::{ChargeRule, Descriptor, DescriptorRule, Level, WILDCARD};
use super::fields::{DESCRIPTOR, Fields, LIMIT};
use super::limits;
use super::reading::Reading;
use super::warnings;
use crate::algorithm::Rule;
use crate::builder::Builder;
use crate::limit::{Limit, NAME_BYTES_MAX};
#[cfg(feature = "server")]
use crate::quota::Quota;

/// A domain, in messages.
const EXAMPLE: &str = "[domains.web.remote_address] with quota = \"10/s\"";

/// The limit whose keys have the quotas that requests bring with them.
#[cfg(feature = "server")]
pub(crate) const REQUEST_LIMITS: &str = "limits-of-requests";

/// How long its requests wait for the store, if Envoy does not say.
#[cfg(feature = "server")]
const REQUEST_LIMITS_WAIT: Duration = Duration::from_secs(1);

/// That limit. Requests say its quotas, of which other nodes hear only by the store: so that decides.
#[cfg(feature = "server")]
pub(crate) fn request_limits() -> Limit {
    Limit::new(REQUEST_LIMITS, Quota::per_second(1)).exact().max_wait(REQUEST_LIMITS_WAIT)
}

/// The descriptors of a domain.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Domain {
    pub(crate) name: String,
    pub(crate) level: Level,
    /// Whether any of its descriptors replaces others.
    pub(crate) has_replacements: bool,
}

/// What is read of all domains.
pub(super) struct Domains<'r, 'a> {
    pub(super) all: Vec<Domain>,
    /// Those of descriptors.
    pub(super) limits: Vec<Limit>,
    /// How many there are beside domains.
    others: usize,
    /// Names that limits have.
    names: BTreeSet<String>,
    builder: &'r Builder,
    reading: &'r mut Reading<'a>,
}

/// Reads the table `[domains]` of the whole. Limits are checked on the node that `builder` describes.
/// `others` are the limits beside domains.
pub(super) fn read(
    root: &Fields<'_>,
    others: &[Limit],
    builder: &Builder,
    reading: &mut Reading<'_>,
) -> (Vec<Domain>, Vec<Limit>) {
    let Some(table) = root.table("domains", EXAMPLE, reading) else {
        return (Vec::new(), Vec::new());
    };
    let tables = table.tables(EXAMPLE, reading);
    let names = others.iter().map(|limit| limit.name().to_owned()).collect();
    let (all, limits, others) = (Vec::new(), Vec::new(), others.len());
    let mut domains = Domains { all, limits, others, names, builder, reading };
    for (name, fields) in tables {
        let level = domains.level(&[name.to_owned()], &fields);
        let has_replacements = level.has_replacements();
        domains.all.push(Domain { name: name.to_owned(), level, has_replacements });
    }
    (domains.all, domains.limits)
}

impl Domains<'_, '_> {
    /// The descriptors in a table that has nothing else; `path` leads there.
    fn level(&mut self, path: &[String], fields: &Fields<'_>) -> Level {
        let mut level = Level::default();
        for (name, fields) in fields.tables(EXAMPLE, self.reading) {
            let place = fields.place_of_name(name);
            let (key, value) = name.split_once('=').unwrap_or((name, ""));
            if key.is_empty() {
                let remedy = "has no key: write it as key=value, or key for all values";
                self.reading.mistake(&place, remedy);
            }
            let path = [path, &[part_of_name(key, value)]].concat();
            let descriptor = self.descriptor(&path, value, fields);
            if !level.add(key, value, descriptor) {
                self.reading.mistake(&place, "is there twice: remove one of them");
            }
        }
        level
    }

    fn descriptor(&mut self, path: &[String], value: &str, fields: Fields<'_>) -> Descriptor {
        let (own, inner) = fields.apart();
        let known: Vec<&str> = of_limit().chain(DESCRIPTOR.iter().copied()).collect();
        own.refuse_unknown(&known, self.reading);
        let is_shared = own.flag("share", self.reading).is_some_and(|share| share.value);
        if is_shared && !value.contains(WILDCARD) {
            let remedy = "is for a value with a wildcard, such as \"files/*\": remove it";
            self.reading.mistake(&own.place("share"), remedy);
        }
        let name = own.text("name", self.reading).map(|name| name.value);
        let replaces = own.texts("replaces", self.reading);
        if name.as_ref().is_some_and(|name| replaces.contains(name)) {
            self.reading.mistake(&own.place("replaces"), "is its own name: remove it");
        }
        let [has_detailed_metric, has_value_in_metric] = ["detailed_metric", "value_to_metric"]
            .map(|field| own.flag(field, self.reading).is_some_and(|flag| flag.value));
        let rule = self.rule(path, own.without("plans"));
        let level = self.level(path, &inner);
        Descriptor {
            rule,
            name,
            replaces,
            is_shared,
            has_detailed_metric,
            has_value_in_metric,
            level,
        }
    }

    fn rule(&mut self, path: &[String], own: Fields<'_>) -> Option<DescriptorRule> {
        let is_unlimited = own.flag("unlimited", self.reading).is_some_and(|flag| flag.value);
        let denies = own.flag("deny", self.reading).is_some_and(|flag| flag.value);
        let charge = self.charge_rule(&own);
        let of_limit = of_limit().find(|field| own.has(field));
        match (is_unlimited, denies, of_limit) {
            (true, true, _) => {
                let remedy = "is unlimited too: remove one of them";
                self.reading.mistake(&own.place("deny"), remedy);
                None
            }
            (true, _, Some(field)) | (_, true, Some(field)) => {
                let other = if is_unlimited { "unlimited" } else { "deny" };
                let remedy = format!("has no effect beside {other} = true: remove one of them");
                self.reading.mistake(&own.place(field), remedy);
                None
            }
            (true, false, None) => Some(DescriptorRule::Unlimited),
            (false, true, None) => Some(DescriptorRule::Deny),
            (false, false, None) => {
                for field in ["name", "replaces"].iter().filter(|field| own.has(field)) {
                    let remedy = "has no effect without quota, unlimited or deny: add one of them";
                    self.reading.mistake(&own.place(field), remedy);
                }
                None
            }
            (false, false, Some(_)) => Some(self.limit(path, own, charge)),
        }
    }
}

impl Domains<'_, '_> {
    /// When the hits of a descriptor are charged.
    fn charge_rule(&mut self, own: &Fields<'_>) -> ChargeRule {
        let Some(charge) = own.text("charge", self.reading) else { return ChargeRule::Together };
        if !of_limit().any(|field| own.has(field)) {
            let remedy = "has no effect without a quota: add one, or remove it";
            self.reading.mistake(&charge.place, remedy);
        }
        match &*charge.value {
            "always" => ChargeRule::Always,
            "in-full" => ChargeRule::InFull,
            _ => {
                let remedy = "must be \"always\" (charged though another limit denies) or \"in-full\" (in any case: what \
                              its limit has not is owed)";
                self.reading.mistake(&charge.place, remedy);
                ChargeRule::Together
            }
        }
    }

    /// The limit of a descriptor.
    fn limit(&mut self, path: &[String], own: Fields<'_>, charge: ChargeRule) -> DescriptorRule {
        let before = self.reading.mistakes.len();
        let limit = name_of_limit(path);
        if !self.names.insert(limit.clone()) {
            let remedy = format!("has the name of another limit, {limit:?}: change that");
            self.reading.mistake(&own.place_of_name(&limit), remedy);
        }
        let place_of_charge = own.place("charge");
        let read = limits::read_known(&limit, own, self.reading);
        check::limit(&read, self.builder, self.reading);
        if self.reading.mistakes.len() == before {
            warnings::without_effect(&read, self.reading);
        }
        if charge == ChargeRule::InFull
            && matches!(read.limit.rule(), Rule::LeakyBucket(_) | Rule::SlidingLog(_))
        {
            let remedy = "cannot be \"in-full\" of a leaky bucket or a sliding log, whose tokens cannot be owed: choose \
                          another algorithm, or \"always\"";
            self.reading.mistake(&place_of_charge, remedy);
        }
        DescriptorRule::Limit { limit: self.add(read.limit), charge }
    }

    /// Adds a limit, and returns its place among all.
    fn add(&mut self, limit: Limit) -> usize {
        self.limits.push(limit);
        self.others + self.limits.len() - 1
    }
}

/// The fields of a limit that a descriptor has. A table `plans` is the descriptor of that key.
fn of_limit() -> impl Iterator<Item = &'static str> {
    LIMIT.iter().copied().filter(|field| *field != "plans")
}

/// A descriptor in the name of its limit.
fn part_of_name(key: &str, value: &str) -> String {
    if value.is_empty() { key.to_owned() } else { format!("{key}={value}") }
}

/// The name of a descriptor's limit: the path to it, as `domain/key.value/key`. Where that is too long, or has characters that
/// no name has, a part of the path's hash tells it from others.
fn name_of_limit(path: &[String]) -> String {
    let is_plain = |char: char| char.is_ascii_alphanumeric() || char == '_' || char == '-';
    let plain = |part: &String| {
        let mut halves = part.splitn(2, '=');
        halves.all(|half| !half.is_empty() && half.chars().all(is_plain))
    };
    let name = path.join("/");
    let spelled = name.replace('=', ".");
    if path.iter().all(plain) && spelled.len() <= NAME_BYTES_MAX {
        return spelled;
    }
    // So that no two paths are one text.
    let told_apart: Vec<String> =
        path.iter().map(|part| format!("{}:{part}", part.len())).collect();
    let hash = Hash::hash(told_apart.concat().as_bytes());
    let hash = hash.first_chunk().map_or(0, |first| u64::from_be_bytes(*first));
    let hash = format!("{hash:016x}");
    let known = |char: char| if is_plain(char) || char == '/' { char } else { '_' };
    let length = NAME_BYTES_MAX - 1 - hash.len();
    let known: String = spelled.chars().map(known).take(length).collect();
    format!("{known}-{hash}")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn named(path: &[&str]) -> String {
        name_of_limit(&path.iter().map(|&part| part.to_owned()).collect::<Vec<_>>())
    }

    #[test]
    fn limit_of_a_descriptor_is_named_by_its_path_and_else_by_a_hash() {
        assert_eq!(named(&["mongo_cps", "database=users"]), "mongo_cps/database.users");
        assert_eq!(named(&["web", "a", "b=c"]), "web/a/b.c");
        let odd = ["path=/api/*/action", "path=/api/+/action", "a.b", "a=b=c", "ü"];
        let mut names: Vec<String> = odd.iter().map(|part| named(&["web", part])).collect();
        names.push(named(&["web", &"a".repeat(100)]));
        names.push(named(&["web", &"a".repeat(101)]));
        for name in &names {
            let limit = Limit::new(name, crate::quota::Quota::per_second(1));
            assert!(check::empty().limit(limit).validate().is_ok(), "{name}");
        }
        let all = names.len();
        names.sort();
        names.dedup();
        assert_eq!(names.len(), all, "{names:?}");
        assert_ne!(named(&["web", "a=b.c"]), named(&["web", "a.b=c"]));
        assert_ne!(named(&["web", "path=/a", "b"]), named(&["web", "path=/a/b"]));
    }
}
