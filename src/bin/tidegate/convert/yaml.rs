//! YAML as envoyproxy/ratelimit reads it: scalars as they are written.

use saphyr::{MarkedYaml, ScalarStyle, YamlData, YamlLoader};
use saphyr_parser::Parser;

/// A value, and where it is.
#[derive(Debug)]
pub(super) struct Node {
    pub(super) line: usize,
    pub(super) value: Value,
}

#[derive(Debug)]
pub(super) enum Value {
    /// Nothing, or `null`.
    Nothing,
    /// Without its quotes.
    Scalar {
        text: String,
        is_plain: bool,
    },
    List(Vec<Node>),
    /// A name that comes twice has its last value.
    Map(Vec<(Name, Node)>),
    Other,
}

/// A name in a map.
#[derive(Debug)]
pub(super) struct Name {
    pub(super) line: usize,
    /// None if it is no text.
    pub(super) text: Option<String>,
}

/// The first document of a text.
pub(super) fn read(text: &str) -> Result<Option<Node>, (usize, String)> {
    let mut loader = YamlLoader::<MarkedYaml<'_>>::default();
    loader.early_parse(false);
    loader.allow_duplicate_keys(true);
    let loaded = Parser::new_from_str(text).load(&mut loader, true);
    loaded.map_err(|error| (error.marker().line(), error.info().to_owned()))?;
    Ok(loader.into_documents().first().map(node))
}

fn node(yaml: &MarkedYaml<'_>) -> Node {
    let value = match &yaml.data {
        YamlData::Representation(text, ScalarStyle::Plain, _) if is_nothing(text) => Value::Nothing,
        YamlData::Representation(text, style, _) => {
            Value::Scalar { text: text.to_string(), is_plain: *style == ScalarStyle::Plain }
        }
        YamlData::Sequence(list) => Value::List(list.iter().map(node).collect()),
        YamlData::Mapping(map) => {
            let name = |yaml: &MarkedYaml<'_>| match node(yaml) {
                Node { line, value: Value::Scalar { text, is_plain } } => {
                    let is_text = !is_plain || is_text(&text);
                    Name { line, text: is_text.then_some(text) }
                }
                Node { line, .. } => Name { line, text: None },
            };
            Value::Map(map.iter().map(|(key, value)| (name(key), node(value))).collect())
        }
        _ => Value::Other,
    };
    Node { line: yaml.span.start.line(), value }
}

fn is_nothing(text: &str) -> bool {
    ["", "~", "null", "Null", "NULL"].contains(&text)
}

/// Whether a plain scalar is a text, and not a number or a truth value.
fn is_text(text: &str) -> bool {
    !is_whole(text) && !is_decimal(text) && text.parse::<bool>().is_err()
}

fn is_whole(text: &str) -> bool {
    text.parse::<i128>().is_ok()
}

/// Whether a plain scalar is a number with a fraction or an exponent.
pub(super) fn is_decimal(text: &str) -> bool {
    let digits = text.trim_start_matches(['+', '-']);
    let is_number = digits.starts_with(|char: char| char.is_ascii_digit() || char == '.');
    is_number && !is_whole(text) && text.parse::<f64>().is_ok()
}
