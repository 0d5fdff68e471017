//! A node of wire version 1, frozen: as much of it as sends batches to the scripts beside this file.
//!
//! It speaks for keys that are in use, or new; it neither resends nor recovers. Nothing here follows
//! `src/sync`: these are the bytes as they were.

/// The scripts as nodes sent them.
pub(crate) const SCRIPT: &str = concat!(include_str!("bucket-v1.lua"), include_str!("sync-v1.lua"));

const WIRE_VERSION: i64 = 1;
const MAGIC: [u8; 2] = *b"T1";
const REPLY_HEADER_BYTES: usize = 2 + 8 * 8 + 8 + 24;
const FLAG_CLAIM: u8 = 2;
const FLAG_REST: u8 = 4;
const TIMED: u8 = 4;
const VOID: u8 = 3;

/// Units of a token.
const TOKEN: i64 = 10_485_760_000;
/// Tokens that a busy key wants on top of its lease, and that its callers wait for.
const WANT: i64 = 4;

/// What the batches are about.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Terms {
    /// Tokens a second.
    pub(crate) rate: i64,
    /// Tokens.
    pub(crate) burst: i64,
    /// Length of a lease epoch.
    pub(crate) epoch_us: i64,
}

impl Terms {
    fn units_per_us(self) -> i64 {
        self.rate * TOKEN / 1_000_000
    }
}

/// What the node holds of a key.
#[derive(Clone, Copy, Debug, Default)]
struct Held {
    rate: i64,
    depth: i64,
    lent: i64,
    stamp_us: i64,
    demand: i64,
    tag: i64,
}

/// A node with one lane.
pub(crate) struct Node {
    terms: Terms,
    namespace: String,
    instance: [u8; 16],
    incarnation: [u8; 24],
    sequence: i64,
    time_us: i64,
    held: Vec<Held>,
}

impl Node {
    pub(crate) fn new(terms: Terms, namespace: &str, number: u8) -> Self {
        Self {
            terms,
            namespace: namespace.to_owned(),
            instance: [number; 16],
            incarnation: [0; 24],
            sequence: 0,
            time_us: 0,
            held: Vec::new(),
        }
    }

    /// The arguments of the call, keys first, that reports what was spent on `keys` since the last
    /// call, which had the same.
    pub(crate) fn steady(&mut self, keys: &[String]) -> (Vec<Vec<u8>>, Vec<Vec<u8>>) {
        self.held.resize(keys.len(), Held::default());
        let held = std::mem::take(&mut self.held);
        let mut body = Vec::new();
        for held in &held {
            self.put_steady(&mut body, held);
        }
        self.held = held;
        self.call(keys, &body, keys.len() as i64)
    }

    /// The arguments of the call that brings keys that are new to it, each with a token spent.
    pub(crate) fn first(&mut self, keys: &[String]) -> (Vec<Vec<u8>>, Vec<Vec<u8>>) {
        self.held.clear();
        self.held.resize(keys.len(), Held::default());
        let mut body = Vec::new();
        for _ in keys {
            body.extend([1, FLAG_REST]);
            put(&mut body, &[0, 0, 0, 0, 0, 0, 0, self.terms.units_per_us(), WANT + 1, 0, 0, 0]);
            // One token on credit.
            put(&mut body, &[1, 0, 0, 0, 0, 0]);
        }
        self.call(keys, &body, keys.len() as i64)
    }

    /// What a busy key reports: its leased refill came in and was spent as whole tokens.
    fn put_steady(&self, body: &mut Vec<u8>, held: &Held) {
        let spent = (held.lent / TOKEN).max(0);
        let demand = 2 * self.terms.units_per_us();
        body.extend([1, FLAG_CLAIM | FLAG_REST]);
        let claim = self.terms.burst * TOKEN;
        let Held { rate, depth, lent, stamp_us, demand: registered, tag } = *held;
        put(
            body,
            &[spent, rate, depth, lent, stamp_us, registered, tag, demand, WANT, demand, 0, claim],
        );
        put(body, &[0, 0, 0, 0, 0, WANT]);
    }

    fn call(&mut self, keys: &[String], body: &[u8], rests: i64) -> (Vec<Vec<u8>>, Vec<Vec<u8>>) {
        self.sequence += 1;
        let Terms { burst, epoch_us, .. } = self.terms;
        let mut bytes = Vec::with_capacity(160 + body.len());
        let header = [
            WIRE_VERSION,
            1,
            self.sequence,
            450_000,
            1_000_000_000,
            4_400_000,
            keys.len() as i64,
            1,
            rests,
        ];
        put(&mut bytes, &header);
        bytes.extend(self.instance);
        bytes.extend(self.incarnation);
        bytes.extend(MAGIC);
        put(&mut bytes, &[self.terms.units_per_us(), TOKEN, burst * TOKEN, 0, epoch_us]);
        bytes.extend(body);
        let hash = bytes.iter().fold(0xcbf2_9ce4_8422_2325_u64, |hash, byte| {
            (hash ^ u64::from(*byte)).wrapping_mul(0x0000_0100_0000_01b3)
        });
        let node = format!("{:032x}", u128::from_be_bytes(self.instance));
        let name = |suffix: &str| format!("tg1:{{{}/0}}:{suffix}", self.namespace).into_bytes();
        let mut names = vec![name("lane"), name(&format!("node:{node}")), name("nodes")];
        names.extend(keys.iter().map(|key| name(&format!("key:api:{key}"))));
        (names, vec![bytes, hash.to_le_bytes().to_vec()])
    }

    /// Takes the reply to the last call. Panics where it is not one that was applied to all keys.
    pub(crate) fn hear(&mut self, reply: &[u8]) {
        let (head, mut grants) = reply.split_at(REPLY_HEADER_BYTES);
        let number = |at: usize| f64_at(head, at) as i64;
        assert_eq!((&head[..2], number(26)), (&MAGIC[..], 0), "applied");
        self.time_us = number(42);
        self.incarnation.copy_from_slice(&head[74..98]);
        for held in &mut self.held {
            let status = grants[0];
            let [tokens, rate, depth] = [0, 1, 2].map(|place| f64_at(grants, 1 + 8 * place) as i64);
            assert!(matches!(status & !TIMED, 0 | VOID), "given");
            let spent = (held.lent / TOKEN).max(0) * TOKEN;
            let passed_us = (self.time_us - held.stamp_us).max(0);
            if status & !TIMED == VOID || held.stamp_us == 0 {
                *held = Held::default();
            } else {
                held.lent += held.rate * passed_us - spent;
            }
            held.rate += rate;
            held.depth += depth;
            held.lent += tokens * TOKEN;
            held.stamp_us = self.time_us;
            held.tag = self.time_us / self.terms.epoch_us;
            held.demand = 2 * self.terms.units_per_us();
            let numbers = if status >= TIMED { 10 } else { 7 };
            if status >= TIMED {
                held.stamp_us = f64_at(grants, 1 + 8 * 7) as i64;
                held.tag = f64_at(grants, 1 + 8 * 8) as i64;
            }
            grants = &grants[1 + 8 * numbers..];
        }
        assert!(grants.is_empty(), "a grant a key");
    }
}

fn put(bytes: &mut Vec<u8>, numbers: &[i64]) {
    for number in numbers {
        bytes.extend((*number as f64).to_le_bytes());
    }
}

fn f64_at(bytes: &[u8], at: usize) -> f64 {
    f64::from_le_bytes(bytes[at..at + 8].try_into().expect("eight bytes"))
}
