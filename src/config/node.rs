//! A configuration as a tree, whichever format it came in.

use std::fmt;

use serde::de::{Deserialize, Deserializer, MapAccess, SeqAccess, Visitor};
use toml::Spanned;
use toml::de::{DeString, DeTable, DeValue};

/// The longest part of a value that is shown, in characters.
const SHOWN_CHARS_MAX: usize = 60;

/// A value, and where it is.
pub(super) struct Node {
    /// The byte of the text at which it begins; 0 where there is no text.
    pub(super) at: usize,
    /// As it was written, for people.
    pub(super) shown: String,
    pub(super) value: Value,
}

pub(super) enum Value {
    Text(String),
    Whole(i128),
    Number(f64),
    Flag(bool),
    Table(Vec<Entry>),
    List(Vec<Node>),
    /// What no field takes, by its name.
    Other(&'static str),
}

/// A name in a table, where it is, and its value.
pub(super) struct Entry {
    pub(super) name: String,
    pub(super) at: usize,
    pub(super) node: Node,
}

impl Value {
    pub(super) const fn kind(&self) -> &'static str {
        match self {
            Self::Text(_) => "a text",
            Self::Whole(_) => "a whole number",
            Self::Number(_) => "a number",
            Self::Flag(_) => "true or false",
            Self::Table(_) => "a table",
            Self::List(_) => "a list",
            Self::Other(kind) => kind,
        }
    }
}

impl Node {
    /// The tree of a document, each table in the order of the text.
    pub(super) fn of_toml(text: &str, table: &DeTable<'_>) -> Self {
        Self { at: 0, shown: String::new(), value: table_of_toml(text, table) }
    }
}

fn table_of_toml(text: &str, table: &DeTable<'_>) -> Value {
    let entry = |(name, value): (&Spanned<DeString<'_>>, &Spanned<DeValue<'_>>)| Entry {
        name: name.get_ref().to_string(),
        at: name.span().start,
        node: node_of_toml(text, value),
    };
    let mut entries: Vec<Entry> = table.iter().map(entry).collect();
    entries.sort_by_key(|entry| entry.at);
    Value::Table(entries)
}

fn node_of_toml(text: &str, value: &Spanned<DeValue<'_>>) -> Node {
    let span = value.span();
    let shown = shortened(text.get(span.clone()).unwrap_or_default());
    let value = match value.get_ref() {
        DeValue::String(text) => Value::Text(text.to_string()),
        DeValue::Integer(whole) => match i128::from_str_radix(whole.as_str(), whole.radix()) {
            Ok(whole) => Value::Whole(whole),
            Err(_) => Value::Other("a number with too many digits"),
        },
        DeValue::Float(number) => match number.as_str().parse() {
            Ok(number) => Value::Number(number),
            Err(_) => Value::Other("no number"),
        },
        DeValue::Boolean(flag) => Value::Flag(*flag),
        DeValue::Datetime(_) => Value::Other("a date or time"),
        DeValue::Array(list) => Value::List(list.iter().map(|it| node_of_toml(text, it)).collect()),
        DeValue::Table(table) => table_of_toml(text, table),
    };
    Node { at: span.start, shown, value }
}

/// The first line, not too long.
pub(super) fn shortened(text: &str) -> String {
    let line = text.lines().next().unwrap_or_default().trim_end();
    let is_all = line.len() == text.trim_end().len();
    let mut shown: String = line.chars().take(SHOWN_CHARS_MAX).collect();
    if !is_all || shown.len() < line.len() {
        shown.push_str("...");
    }
    shown
}

impl<'de> Deserialize<'de> for Node {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(AnyNode)
    }
}

struct AnyNode;

fn node(shown: String, value: Value) -> Node {
    Node { at: 0, shown, value }
}

impl<'de> Visitor<'de> for AnyNode {
    type Value = Node;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a text, a number, true or false, or a table")
    }

    fn visit_bool<E>(self, flag: bool) -> Result<Node, E> {
        Ok(node(flag.to_string(), Value::Flag(flag)))
    }

    fn visit_i64<E>(self, whole: i64) -> Result<Node, E> {
        Ok(node(whole.to_string(), Value::Whole(whole.into())))
    }

    fn visit_u64<E>(self, whole: u64) -> Result<Node, E> {
        Ok(node(whole.to_string(), Value::Whole(whole.into())))
    }

    fn visit_f64<E>(self, number: f64) -> Result<Node, E> {
        Ok(node(number.to_string(), Value::Number(number)))
    }

    fn visit_str<E>(self, text: &str) -> Result<Node, E> {
        Ok(node(shortened(&format!("{text:?}")), Value::Text(text.to_owned())))
    }

    fn visit_unit<E>(self) -> Result<Node, E> {
        Ok(node("null".to_owned(), Value::Other("nothing")))
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<Node, A::Error> {
        let mut nodes = Vec::new();
        while let Some(node) = list.next_element()? {
            nodes.push(node);
        }
        Ok(node("[...]".to_owned(), Value::List(nodes)))
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Node, A::Error> {
        let mut entries = Vec::new();
        while let Some((name, node)) = map.next_entry::<String, Node>()? {
            entries.push(Entry { name, at: 0, node });
        }
        Ok(node("{...}".to_owned(), Value::Table(entries)))
    }
}
