//! Who is limited: keys, the bytes that they are known by, and the fixed hash that puts a key into its lane.

use std::borrow::Cow;
use std::fmt::{self, Write as _};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::ops::Deref;
use std::rc::Rc;
use std::sync::Arc;

use hmac_sha256::HMAC;
use smallvec::SmallVec;

/// A longer key is known by its hash, in bytes.
pub const KEY_BYTES_MAX: usize = 512;

/// Bytes of a key that is put together without an allocation.
const INLINE_BYTES: usize = 128;
/// Bytes of a hash that are kept: 120 bits.
const DIGEST_BYTES: usize = 15;
/// The length of a hashed key: a mark, and two hexadecimal digits a byte.
const HASHED_BYTES: usize = 1 + 2 * DIGEST_BYTES;
const HASHED_MARK: u8 = b'#';

/// What the bucket is called in the store that keys share for which a node has no room. No key has this name,
/// because a key that looks like a hashed one is hashed.
pub(crate) const OVERFLOW_NAME: &[u8; HASHED_BYTES] = b"#overflow......................";

/// Something that can be limited: a user, an address, an API key, a route, or several of these together.
///
/// A key is a sequence of bytes. Any sequence is valid, the empty one too.
///
/// | key | bytes |
/// |---|---|
/// | `str`, `String`, `[u8]`, `Vec<u8>`, `[u8; N]` | as they are |
/// | integers, `bool`, `char`, addresses | their text |
/// | `()` | none |
/// | a tuple | its parts, with `:` between them; in each part, `\` stands before `\` and `:` |
/// | [`Hashed`] | `#` and 30 hexadecimal digits of a hash |
///
/// So two tuples have the same bytes only if their parts have, and `("a", "b")` is the same key as `"a:b"`. Keys that are longer than
/// [`KEY_BYTES_MAX`], and keys that look like a hashed key, are hashed: see [`Hashed`].
///
/// ```
/// use tidegate::{Key, KeyWriter, Quota};
///
/// struct Tenant { region: &'static str, id: u64 }
///
/// impl Key for Tenant {
///     fn write(&self, writer: &mut KeyWriter<'_>) {
///         (self.region, self.id).write(writer);
///     }
/// }
///
/// let limit = tidegate::local(Quota::per_minute(1))?;
/// assert!(limit.check(&Tenant { region: "eu", id: 7 }).is_allowed());
/// assert!(limit.check("eu:7").is_denied());
/// assert!(limit.check(&()).is_allowed());
/// # Ok::<(), tidegate::ConfigError>(())
/// ```
///
/// Cost: keys that hold their bytes are not copied. Others are put together on the stack, up to 128 bytes; longer
/// ones allocate.
pub trait Key {
    /// Writes the bytes of the key.
    fn write(&self, writer: &mut KeyWriter<'_>);

    /// The bytes that [`write`](Self::write) writes, if the key holds them: then they need not be copied. They must
    /// be the same bytes.
    #[inline(always)]
    fn held_bytes(&self) -> Option<&[u8]> {
        None
    }
}

/// A key that must not be read in the store: an API key, a session, an address.
///
/// It is known by `#` and the first 15 bytes, in hexadecimal, of HMAC-SHA-256 over the bytes of the key, with the
/// secret that [`Builder::key_secret`](crate::Builder::key_secret) sets. All nodes need the same secret. Without a
/// secret anybody who can read the store can find short keys, like addresses, by trying all of them.
///
/// Cost: HMAC-SHA-256 over the key, which takes longer than the decision.
///
/// ```
/// use tidegate::{Hashed, Quota};
///
/// let limit = tidegate::local(Quota::per_minute(1))?;
/// assert!(limit.check(&Hashed("sk-12345")).is_allowed());
/// assert!(limit.check(&Hashed("sk-12345")).is_denied());
/// # Ok::<(), tidegate::ConfigError>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Hashed<K>(pub K);

/// Takes the bytes of a key. Text can be written to it with [`write!`].
pub struct KeyWriter<'a> {
    bytes: SmallVec<[u8; INLINE_BYTES]>,
    /// The bytes are one hash and nothing else.
    hashed: bool,
    /// What was hashed then.
    plain: Option<SmallVec<[u8; INLINE_BYTES]>>,
    secret: &'a KeySecret,
}

/// A key may be secret.
impl fmt::Debug for KeyWriter<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("KeyWriter").field("bytes", &self.bytes.len()).finish_non_exhaustive()
    }
}

impl<'a> KeyWriter<'a> {
    fn new(secret: &'a KeySecret) -> Self {
        Self { bytes: SmallVec::new(), hashed: false, plain: None, secret }
    }

    /// Whether nothing was written.
    #[cfg(feature = "tower")]
    pub(crate) fn is_empty(&self) -> bool {
        self.bytes.is_empty()
    }

    /// Appends bytes. Nothing separates them from those before them: write several values as a tuple.
    pub fn push(&mut self, bytes: &[u8]) {
        self.bytes.extend_from_slice(bytes);
        self.hashed = false;
    }

    /// Appends a part of a tuple: the bytes of `key` with `\` before each `\` and `:`.
    fn push_part(&mut self, key: &(impl Key + ?Sized)) {
        self.push_part_of(|part| key.write(part));
    }

    /// Appends a part of a tuple: what `write` writes, with `\` before each `\` and `:`.
    pub(crate) fn push_part_of<R>(&mut self, write: impl FnOnce(&mut Self) -> R) -> R {
        let mut part = Self::new(self.secret);
        let written = write(&mut part);
        if !part.hashed && looks_hashed(&part.bytes) {
            // Nobody can name another's hashed key, as a part neither.
            part.bytes = SmallVec::from_slice(&self.secret.hashed(&part.bytes));
        }
        let is_special = |byte: &u8| matches!(byte, b'\\' | b':');
        let mut rest = &*part.bytes;
        while let Some(at) = rest.iter().position(is_special) {
            self.push(&rest[..at]);
            self.push(b"\\");
            self.push(&rest[at..=at]);
            rest = &rest[at + 1..];
        }
        self.push(rest);
        written
    }

    /// Appends the hash of what `write` writes.
    pub(crate) fn push_hashed_of<R>(&mut self, write: impl FnOnce(&mut Self) -> R) -> R {
        let first = self.bytes.is_empty();
        let mut inner = Self::new(self.secret);
        let written = write(&mut inner);
        let name = self.secret.hashed(&inner.bytes);
        self.push(&name);
        self.hashed = first;
        let KeyWriter { bytes, hashed, plain, .. } = inner;
        self.plain = Some(plain.filter(|_| hashed).unwrap_or(bytes));
        written
    }
}

/// A key that was written before it is used, so that it is known whether there is one. The default is the empty key.
#[cfg(feature = "tower")]
#[derive(Default)]
pub(crate) struct WrittenKey {
    bytes: SmallVec<[u8; INLINE_BYTES]>,
    hashed: bool,
    /// What was hashed. On the heap: hashing takes longer.
    plain: Option<Box<[u8]>>,
}

#[cfg(feature = "tower")]
impl Key for WrittenKey {
    fn write(&self, writer: &mut KeyWriter<'_>) {
        let first = writer.bytes.is_empty();
        writer.push(&self.bytes);
        writer.hashed = self.hashed && first;
        writer.plain = self.plain.as_deref().map(SmallVec::from_slice);
    }

    fn held_bytes(&self) -> Option<&[u8]> {
        (!self.hashed).then_some(&self.bytes)
    }
}

impl fmt::Write for KeyWriter<'_> {
    fn write_str(&mut self, text: &str) -> fmt::Result {
        self.push(text.as_bytes());
        Ok(())
    }
}

/// What keys are hashed with.
#[derive(Clone)]
pub(crate) struct KeySecret(HMAC);

impl fmt::Debug for KeySecret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("KeySecret")
    }
}

impl KeySecret {
    pub(crate) fn new(secret: &[u8]) -> Self {
        Self(HMAC::new(secret))
    }

    /// What the limiter knows `key` by, if the key holds that.
    #[inline(always)]
    #[allow(clippy::unused_self, reason = "names of keys are the secret's business")]
    pub(crate) fn held_name<'k>(&self, key: &'k (impl Key + ?Sized)) -> Option<&'k [u8]> {
        match key.held_bytes() {
            Some(bytes) if is_plain(bytes) => Some(bytes),
            _ => None,
        }
    }

    /// What the limiter knows `key` by.
    #[inline(always)]
    pub(crate) fn name<'k>(&self, key: &'k (impl Key + ?Sized)) -> KeyName<'k> {
        match key.held_bytes() {
            Some(bytes) if is_plain(bytes) => KeyName::Held(bytes),
            Some(bytes) => KeyName::Written(SmallVec::from_slice(&self.hashed(bytes))),
            None => self.written_name(key),
        }
    }

    fn written_name<'k>(&self, key: &(impl Key + ?Sized)) -> KeyName<'k> {
        let mut writer = KeyWriter::new(self);
        key.write(&mut writer);
        if writer.hashed || is_plain(&writer.bytes) {
            KeyName::Written(writer.bytes)
        } else {
            KeyName::Written(SmallVec::from_slice(&self.hashed(&writer.bytes)))
        }
    }

    /// The bytes of `key` before it is hashed. Of a tuple, hashed parts stay hashed.
    pub(crate) fn plain<'k>(&self, key: &'k (impl Key + ?Sized)) -> KeyName<'k> {
        if let Some(bytes) = key.held_bytes() {
            return KeyName::Held(bytes);
        }
        let mut writer = KeyWriter::new(self);
        key.write(&mut writer);
        let KeyWriter { bytes, hashed, plain, .. } = writer;
        KeyName::Written(plain.filter(|_| hashed).unwrap_or(bytes))
    }

    /// What the key of these bytes is known by if it is [`Hashed`]; `None` if they are a hashed key already.
    pub(crate) fn hashed_name(&self, plain: &[u8]) -> Option<[u8; HASHED_BYTES]> {
        (!looks_hashed(plain)).then(|| self.hashed(plain))
    }

    /// A key that `write` writes, and what it returns.
    #[cfg(feature = "tower")]
    pub(crate) fn write_key<R>(
        &self,
        write: impl FnOnce(&mut KeyWriter<'_>) -> R,
    ) -> (WrittenKey, R) {
        let mut writer = KeyWriter::new(self);
        let written = write(&mut writer);
        let plain = writer.plain.filter(|_| writer.hashed);
        let plain = plain.map(|plain| Box::from(&*plain));
        (WrittenKey { bytes: writer.bytes, hashed: writer.hashed, plain }, written)
    }

    #[cold]
    #[inline(never)]
    fn hashed(&self, bytes: &[u8]) -> [u8; HASHED_BYTES] {
        let mut mac = self.0.clone();
        mac.update(bytes);
        let mut name = [HASHED_MARK; HASHED_BYTES];
        for (at, byte) in mac.finalize().into_iter().take(DIGEST_BYTES).enumerate() {
            let digit = |value: u8| b"0123456789abcdef"[usize::from(value)];
            name[1 + 2 * at] = digit(byte >> 4);
            name[2 + 2 * at] = digit(byte & 15);
        }
        name
    }
}

/// What a limiter knows a key by.
pub(crate) enum KeyName<'a> {
    /// The caller's own bytes.
    Held(&'a [u8]),
    /// Bytes that were put together, or the hash of some.
    Written(SmallVec<[u8; INLINE_BYTES]>),
}

#[cfg(any(feature = "tower", feature = "server"))]
impl KeyName<'_> {
    /// The name with bytes of its own.
    pub(crate) fn into_owned(self) -> KeyName<'static> {
        KeyName::Written(match self {
            Self::Held(bytes) => SmallVec::from_slice(bytes),
            Self::Written(bytes) => bytes,
        })
    }
}

impl Deref for KeyName<'_> {
    type Target = [u8];

    #[inline(always)]
    fn deref(&self) -> &[u8] {
        match self {
            Self::Held(bytes) => bytes,
            Self::Written(bytes) => bytes,
        }
    }
}

/// Whether a key is known by its own bytes.
#[inline(always)]
fn is_plain(key: &[u8]) -> bool {
    key.len() <= KEY_BYTES_MAX && !looks_hashed(key)
}

#[inline(always)]
fn looks_hashed(key: &[u8]) -> bool {
    key.len() == HASHED_BYTES && key[0] == HASHED_MARK
}

impl<K: Key> Key for Hashed<K> {
    fn write(&self, writer: &mut KeyWriter<'_>) {
        writer.push_hashed_of(|inner| self.0.write(inner));
    }
}

macro_rules! key_of_held_bytes {
    ($($type:ty $(where $n:ident)?),*) => {$(
        impl $(<const $n: usize>)? Key for $type {
            fn write(&self, writer: &mut KeyWriter<'_>) {
                writer.push(self.as_ref());
            }

            #[inline(always)]
            fn held_bytes(&self) -> Option<&[u8]> {
                Some(self.as_ref())
            }
        }
    )*};
}

key_of_held_bytes!(str, String, [u8], Vec<u8>, [u8; N] where N);

macro_rules! key_of_text {
    ($($type:ty),*) => {$(
        impl Key for $type {
            fn write(&self, writer: &mut KeyWriter<'_>) {
                // Writing to a key cannot fail.
                let _ = write!(writer, "{self}");
            }
        }
    )*};
}

key_of_text!(u8, u16, u32, u64, u128, usize, i8, i16, i32, i64, i128, isize, bool, char);
key_of_text!(IpAddr, Ipv4Addr, Ipv6Addr);

impl Key for () {
    fn write(&self, _: &mut KeyWriter<'_>) {}

    #[inline(always)]
    fn held_bytes(&self) -> Option<&[u8]> {
        Some(&[])
    }
}

macro_rules! key_of_pointer {
    ($($type:ty $(where $bound:ident)?),*) => {$(
        impl<K: Key + ?Sized $(+ $bound)?> Key for $type {
            #[inline(always)]
            fn write(&self, writer: &mut KeyWriter<'_>) {
                (**self).write(writer);
            }

            #[inline(always)]
            fn held_bytes(&self) -> Option<&[u8]> {
                (**self).held_bytes()
            }
        }
    )*};
}

key_of_pointer!(&K, Box<K>, Rc<K>, Arc<K>, Cow<'_, K> where ToOwned);

macro_rules! key_of_tuple {
    ($first:ident $($more:ident)+) => {
        impl<$first: Key, $($more: Key),+> Key for ($first, $($more,)+) {
            #[allow(non_snake_case, reason = "each part is called like its type")]
            fn write(&self, writer: &mut KeyWriter<'_>) {
                let ($first, $($more,)+) = self;
                writer.push_part($first);
                $(
                    writer.push(b":");
                    writer.push_part($more);
                )+
            }
        }
    };
}

key_of_tuple!(A B);
key_of_tuple!(A B C);
key_of_tuple!(A B C D);
key_of_tuple!(A B C D E);
key_of_tuple!(A B C D E F);

/// The lane of `key` under `limit`, out of `lanes`.
///
/// Fixed for good, since every node must agree: 64-bit FNV-1a over the limit's name, one zero byte
/// and the key, finished with `MurmurHash3`'s 64-bit mixer, its upper half scaled to `lanes`.
pub fn lane_of(limit: &str, key: &[u8], lanes: u32) -> u32 {
    let mut hash = 0xcbf2_9ce4_8422_2325_u64;
    for byte in limit.bytes().chain([0]).chain(key.iter().copied()) {
        hash = (hash ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01b3);
    }
    hash = (hash ^ (hash >> 33)).wrapping_mul(0xff51_afd7_ed55_8ccd);
    hash = (hash ^ (hash >> 33)).wrapping_mul(0xc4ce_b9fe_1a85_ec53);
    hash ^= hash >> 33;
    (((hash >> 32) * u64::from(lanes)) >> 32) as u32
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use proptest::prelude::*;

    use super::*;

    fn name(key: &(impl Key + ?Sized)) -> Vec<u8> {
        KeySecret::new(b"").name(key).to_vec()
    }

    fn text(key: &(impl Key + ?Sized)) -> String {
        String::from_utf8(name(key)).unwrap()
    }

    #[test]
    fn keys_are_known_by_their_bytes_or_their_text() {
        assert_eq!(text("user:1"), "user:1");
        assert_eq!(text(&String::from("a")), "a");
        assert_eq!(name(&[0_u8, 255]), [0, 255]);
        assert_eq!(name(&vec![1_u8]), [1]);
        assert_eq!((text(&()), text("")), (String::new(), String::new()));
        assert_eq!((text(&-7_i64), text(&u128::MAX)), ("-7".into(), u128::MAX.to_string()));
        assert_eq!((text(&true), text(&'x')), ("true".into(), "x".into()));
        let addresses: [IpAddr; 2] = [[10, 0, 0, 1].into(), [0, 0, 0, 0, 0, 0, 0, 1].into()];
        assert_eq!(addresses.map(|address| text(&address)), ["10.0.0.1", "::1"]);
        assert_eq!(text(&Arc::<str>::from("a")), "a");
        assert_eq!(text(&Cow::Borrowed("b")), "b");
        assert_eq!(text(&&Box::new(3)), "3");
    }

    #[test]
    fn parts_of_a_tuple_are_escaped() {
        assert_eq!(text(&("eu", 7)), "eu:7");
        assert_eq!(text(&("a:b", r"c\")), r"a\:b:c\\");
        assert_eq!(text(&(("a", "b"), "c")), r"a\:b:c");
        assert_eq!(text(&("", "", ())), "::");
    }

    proptest! {
        #[test]
        fn tuples_that_differ_have_keys_that_differ(
            one in prop::collection::vec("[ab:\\\\]{0,3}", 3),
            two in prop::collection::vec("[ab:\\\\]{0,3}", 3),
        ) {
            let [keys, others] = [&one, &two].map(|parts| {
                let [a, b, c] = [0, 1, 2].map(|at| parts[at].as_str());
                [name(&(a, b, c)), name(&((a, b), c)), name(&(a, (b, c)))]
            });
            for (key, other) in keys.iter().zip(&others) {
                prop_assert_eq!(key == other, one == two);
            }
            prop_assert!(keys[0] != others[1] && keys[0] != others[2]);
        }
    }

    /// Computed with Python's `hmac.digest(secret, key, "sha256").hex()[:30]`.
    const HASHED: [(&[u8], &str, &str); 3] = [
        (b"", "", "#b613679a0814d9ec772f95d778c35f"),
        (b"secret", "sk-12345", "#7ed80cd6c47e1c044237b180c93084"),
        (b"secret", "10.0.0.1", "#eb5a0e55d511c2fe4af165cf4f0256"),
    ];

    #[test]
    fn hashed_keys_are_what_other_languages_compute() {
        for (secret, key, expected) in HASHED {
            let secret = KeySecret::new(secret);
            let name = secret.name(&Hashed(key)).to_vec();
            assert_eq!(String::from_utf8(name).unwrap(), expected, "{key:?}");
        }
    }

    #[cfg(feature = "tower")]
    #[test]
    fn written_key_has_the_same_name_as_the_key_it_was_written_from() {
        let secret = KeySecret::new(b"");
        let names: [Vec<u8>; 3] = [
            secret.write_key(|writer| Hashed("a").write(writer)),
            secret.write_key(|writer| ("a:b", 7).write(writer)),
            secret.write_key(|writer| writer.push(&name(&Hashed("a")))),
        ]
        .map(|(key, ())| name(&key));
        let expected = [name(&Hashed("a")), name(&("a:b", 7)), name(&name(&Hashed("a")))];
        assert_eq!(names, expected);
        assert_ne!(names[0], names[2], "nobody can name another's hashed key");
        let (key, ()) = secret.write_key(|writer| Hashed("a").write(writer));
        assert_eq!(name(&(&key, "b")), name(&(Hashed("a"), "b")));
    }

    #[test]
    fn long_keys_and_keys_that_look_hashed_are_hashed() {
        let digest = text(&Hashed("a"));
        assert_eq!(digest.len(), HASHED_BYTES);
        assert_ne!(text(&digest), digest, "nobody can name another's hashed key");
        assert_ne!(name(&OVERFLOW_NAME[..]), OVERFLOW_NAME);
        assert_eq!(text(&format!("#{}", "x".repeat(29))), format!("#{}", "x".repeat(29)));
        let long = "x".repeat(KEY_BYTES_MAX + 1);
        assert_eq!(text(&long), text(&Hashed(&long)));
        assert_eq!(text(&long[1..]), long[1..]);
        assert_eq!(text(&(Hashed("a"), "b")), format!("{digest}:b"));
        assert_ne!(text(&(digest.as_str(), "b")), text(&(Hashed("a"), "b")), "as a part neither");
        let names: HashSet<_> = (0..100).map(|more| name(&vec![b'x'; 513 + more])).collect();
        assert_eq!(names.len(), 100);
    }

    #[test]
    fn the_lane_hash_is_fixed_for_good() {
        let lanes: Vec<u32> = ["a", "b", "user:1", "user:2", "10.0.0.1"]
            .iter()
            .map(|key| lane_of("api", key.as_bytes(), 16))
            .collect();
        assert_eq!(lanes, LANES_OF_FIVE_KEYS);
    }

    /// Computed once by an independent Python version of the documented hash.
    const LANES_OF_FIVE_KEYS: [u32; 5] = [3, 12, 15, 5, 5];

    #[test]
    fn lanes_are_filled_evenly() {
        let mut counts = [0_u32; 16];
        for user in 0..16_000 {
            counts[lane_of("api", format!("user:{user}").as_bytes(), 16) as usize] += 1;
        }
        assert!(counts.iter().all(|count| (850..1150).contains(count)), "{counts:?}");
    }
}
