//! The cases: which keys are asked for in which order, by how many threads.

/// How keys are drawn.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Draw {
    Uniform,
    /// Zipf's law, exponent 1.
    Zipf,
}

/// What a contender is asked by.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum By {
    Key,
    Handle,
}

/// What is asked of a limiter, and what is done with its answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Asks {
    /// One token, and whether it was given.
    One,
    /// Three tokens at once.
    Three,
    /// One token, and how many are left.
    OneAndReads,
    /// One token of an ordinary limit, synced as often as by default, many times as often as it allows.
    OneOfFew,
    /// One token, of a key that nobody has asked for before.
    OneOfNewKeys,
}

/// One case.
#[derive(Clone, Copy, Debug)]
pub struct Case {
    pub keys: usize,
    pub draw: Draw,
    pub by: By,
    pub denied: bool,
    pub isolated: bool,
    pub threads: usize,
    pub asks: Asks,
    /// Of a key.
    pub bytes: usize,
}

/// New keys of all rounds together.
const NEW_KEYS: usize = 1_000_000;

const BASE: Case = Case {
    keys: 1,
    draw: Draw::Uniform,
    by: By::Key,
    denied: false,
    isolated: false,
    threads: 1,
    asks: Asks::One,
    bytes: 20,
};

impl Case {
    pub fn name(&self) -> String {
        let keys = match self.keys {
            1 => "1 key".to_owned(),
            keys @ ..1_000 => format!("{keys} keys"),
            keys @ ..1_000_000 => format!("{}k keys", keys / 1_000),
            keys => format!("{}M keys", keys / 1_000_000),
        };
        let draw = match self.draw {
            _ if self.keys == 1 => "",
            Draw::Uniform => " uniform",
            Draw::Zipf => " zipf",
        };
        let by = if self.by == By::Handle { "handle" } else { "key" };
        let denied = if self.denied { ", denied" } else { "" };
        let isolated = if self.isolated { ", isolated" } else { ", tight" };
        let threads = if self.threads == 1 { "1 thread" } else { "2 threads" };
        let bytes = match self.bytes {
            20 => String::new(),
            bytes => format!(", {bytes} bytes"),
        };
        let asks = match self.asks {
            Asks::One => "",
            Asks::Three => ", 3 tokens",
            Asks::OneAndReads => ", remaining read",
            Asks::OneOfFew => ", 100/s each",
            Asks::OneOfNewKeys => ", new",
        };
        format!("by {by}, {keys}{draw}{bytes}{asks}{denied}{isolated}, {threads}")
    }

    /// One decision in so many may go the other way. A million keys are more than a store takes in
    /// before they are asked for again, and what is new to the store has one token of credit.
    pub fn strays_one_in(&self) -> u64 {
        match self.asks {
            // What flows in is allowed.
            Asks::OneOfFew => 20,
            _ if self.keys > 100_000 => 20,
            _ => 1000,
        }
    }

    /// Whether no key is asked for again.
    pub fn is_new(&self) -> bool {
        self.asks == Asks::OneOfNewKeys
    }

    /// Whether no more than that went the other way; says so if not.
    pub fn holds(&self, contender: &str, strays: f64) -> bool {
        let good = strays * self.strays_one_in() as f64 <= 1.0;
        if !good {
            let percent = strays * 100.0;
            eprintln!("{}: {contender}: {percent:.2}% went the other way", self.name());
        }
        good
    }

    /// A key. Without a colon: one of the peers takes none.
    pub fn key(&self, number: u32) -> String {
        let digits = self.bytes - 5;
        if digits < 7 {
            return format!("{number:0width$}", width = self.bytes);
        }
        format!("user_{number:0digits$}")
    }

    /// The keys, and the order in which they are asked for.
    pub fn keys(&self) -> Keys {
        // A request's key has just been read: short streams stay in the cache.
        let length = match self.keys {
            keys if self.is_new() => keys,
            0..=1_000 => 1 << 12,
            1_001..=100_000 => 1 << 18,
            _ => 1 << 21,
        };
        let mut rng = fastrand::Rng::with_seed(1);
        let zipf = Zipf::new(self.keys);
        let stream: Vec<u32> = (0..length)
            .map(|at| match self.draw {
                // Each key comes before any comes again: what is warm is what is meant to be.
                _ if at < self.keys => at as u32,
                Draw::Uniform => rng.u32(0..self.keys as u32),
                Draw::Zipf => zipf.draw(&mut rng),
            })
            .collect();
        let mut shuffled = stream;
        rng.shuffle(&mut shuffled);
        let names = shuffled.iter().map(|key| self.key(*key)).collect();
        Keys { count: self.keys, stream: shuffled, names }
    }
}

/// A stream of keys: by number, and by name, each name a string of its own in the stream's order,
/// so that reading the question costs the same whatever is done with it.
pub struct Keys {
    pub count: usize,
    pub stream: Vec<u32>,
    pub names: Vec<String>,
}

struct Zipf {
    sums: Vec<f64>,
}

impl Zipf {
    fn new(keys: usize) -> Self {
        let mut sum = 0.0;
        let sums = (1..=keys)
            .map(|rank| {
                sum += 1.0 / rank as f64;
                sum
            })
            .collect();
        Self { sums }
    }

    fn draw(&self, rng: &mut fastrand::Rng) -> u32 {
        let at = rng.f64() * self.sums.last().copied().unwrap_or_default();
        self.sums.partition_point(|sum| *sum < at).min(self.sums.len() - 1) as u32
    }
}

/// All cases.
pub fn cases() -> Vec<Case> {
    use Draw::{Uniform, Zipf};
    let base = BASE;
    let tight = [(1, Uniform), (1_000, Uniform), (100_000, Uniform), (100_000, Zipf)]
        .into_iter()
        .chain([(1_000_000, Uniform), (1_000_000, Zipf)])
        .map(|(keys, draw)| Case { keys, draw, ..base });
    let isolated = [1_000, 100_000, 1_000_000].map(|keys| Case { keys, isolated: true, ..base });
    let handle = |keys| Case { keys, by: By::Handle, ..base };
    let mut cases: Vec<Case> = tight.chain(isolated).collect();
    cases.extend([
        Case { keys: 1, denied: true, ..base },
        Case { keys: 1_000, denied: true, ..base },
        Case { keys: 1_000, threads: 2, ..base },
        Case { keys: 1, threads: 2, ..base },
        handle(1),
        handle(1_000),
        Case { denied: true, ..handle(1) },
        Case { denied: true, ..handle(1_000) },
        Case { threads: 2, ..handle(1) },
        Case { keys: 1_000, denied: true, threads: 2, ..base },
        Case { keys: 1_000, asks: Asks::Three, ..base },
        Case { keys: 1_000, asks: Asks::OneAndReads, ..base },
        Case { keys: 1_000, asks: Asks::OneOfFew, denied: true, ..base },
        Case { keys: NEW_KEYS, asks: Asks::OneOfNewKeys, ..base },
    ]);
    cases.extend([8, 36, 64].map(|bytes| Case { keys: 1_000, bytes, ..base }));
    cases
}

/// The cases in which limits are shared through a Redis: few keys, each asked for often.
pub fn shared_cases() -> Vec<Case> {
    [(false, 1), (false, 2), (true, 1)]
        .into_iter()
        .flat_map(|(denied, threads)| [1, 1_000].map(|keys| Case { keys, denied, threads, ..BASE }))
        .collect()
}
