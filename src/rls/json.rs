//! JSON as protobuf maps it: whole numbers with a point or as a text, and null for what is not set.

use std::fmt;
use std::marker::PhantomData;

use serde::de::value::MapAccessDeserializer;
use serde::de::{Error, MapAccess, Unexpected, Visitor};
use serde::{Deserialize, Deserializer};

/// 2^53: all whole numbers up to it are exact.
const LARGEST_EXACT: f64 = 9_007_199_254_740_992.0;

/// Fields as an object has them. Derived, a list of their values would be taken too.
pub(crate) struct Object<T>(pub(crate) T);

impl<'de, T: Deserialize<'de>> Deserialize<'de> for Object<T> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_map(ObjectVisitor(PhantomData)).map(Self)
    }
}

struct ObjectVisitor<T>(PhantomData<T>);

impl<'de, T: Deserialize<'de>> Visitor<'de> for ObjectVisitor<T> {
    type Value = T;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an object")
    }

    fn visit_map<M: MapAccess<'de>>(self, map: M) -> Result<T, M::Error> {
        T::deserialize(MapAccessDeserializer::new(map))
    }
}

/// What is null is not set.
pub(super) fn or_default<'de, D, T>(deserializer: D) -> Result<T, D::Error>
where
    D: Deserializer<'de>,
    T: Deserialize<'de> + Default,
{
    Option::deserialize(deserializer).map(Option::unwrap_or_default)
}

pub(super) fn some_object<'de, D, T>(deserializer: D) -> Result<Option<T>, D::Error>
where
    D: Deserializer<'de>,
    T: Deserialize<'de>,
{
    let object = Option::<Object<T>>::deserialize(deserializer)?;
    Ok(object.map(|Object(fields)| fields))
}

pub(super) fn objects<'de, D, T>(deserializer: D) -> Result<Vec<T>, D::Error>
where
    D: Deserializer<'de>,
    T: Deserialize<'de>,
{
    let objects: Vec<Object<T>> = or_default(deserializer)?;
    Ok(objects.into_iter().map(|Object(fields)| fields).collect())
}

pub(super) fn whole<'de, D: Deserializer<'de>>(deserializer: D) -> Result<u64, D::Error> {
    some_whole(deserializer).map(Option::unwrap_or_default)
}

pub(super) fn some_whole<'de, D: Deserializer<'de>>(
    deserializer: D,
) -> Result<Option<u64>, D::Error> {
    deserializer.deserialize_any(ProtobufWholeVisitor)
}

/// The whole number that this is, if it is whole and small enough for a double to be exact.
#[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "it is whole")]
pub(crate) fn whole_of(number: f64) -> Option<u64> {
    let is_whole = number.fract() == 0.0 && (0.0..=LARGEST_EXACT).contains(&number);
    is_whole.then_some(number as u64)
}

struct ProtobufWholeVisitor;

impl Visitor<'_> for ProtobufWholeVisitor {
    type Value = Option<u64>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a whole number, 0 or more")
    }

    fn visit_u64<E>(self, number: u64) -> Result<Option<u64>, E> {
        Ok(Some(number))
    }

    fn visit_f64<E: Error>(self, number: f64) -> Result<Option<u64>, E> {
        let wrong = || E::invalid_value(Unexpected::Float(number), &self);
        whole_of(number).map(Some).ok_or_else(wrong)
    }

    fn visit_str<E: Error>(self, text: &str) -> Result<Option<u64>, E> {
        let with_point = || text.parse().ok().and_then(whole_of);
        let number = text.parse().ok().or_else(with_point);
        number.map(Some).ok_or_else(|| E::invalid_value(Unexpected::Str(text), &self))
    }

    fn visit_unit<E>(self) -> Result<Option<u64>, E> {
        Ok(None)
    }
}
