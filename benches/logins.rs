//! How long nodes that answer at once, and know more than real ones can, exceed a login limit: 5 a minute, burst 5.
//!
//! ```text
//! cargo bench --bench logins
//! ```
//!
//! Each node knows the load, and after each request of its own the key's true level. What it cannot
//! know is what other nodes have admitted since. It admits a request if it expects `threshold` tokens or more. The table has,
//! of 500 keys in an hour, what is admitted of what one central bucket admits; the deepest excess; and the longest time until
//! excess was repaid. The target is 60 s, at 97% and more.
//!
//! The limiter's own figures: `cargo tidegate sweep --seeds 1 --scenario logins,logins_over`.

use fastrand::Rng;

/// Tokens a second.
const RATE: f64 = 5.0 / 60.0;
const BURST: f64 = 5.0;
const KEYS: u32 = 500;
const SECONDS: f64 = 3600.0;

/// One key on all nodes.
struct Key {
    at_s: f64,
    /// Of the bucket of what was admitted; below zero by the excess.
    level: f64,
    /// Of one central bucket that sees all requests.
    ideal_level: f64,
    /// When the level fell below zero.
    exceeded_at_s: Option<f64>,
    /// When each node saw the level last, and what it was.
    seen: Vec<(f64, f64)>,
}

/// Of all keys.
#[derive(Default)]
struct Figures {
    admitted: u64,
    ideal: u64,
    deepest: f64,
    longest_s: f64,
}

impl Key {
    fn new(nodes: usize) -> Self {
        let seen = vec![(0.0, BURST); nodes];
        Self { at_s: 0.0, level: BURST, ideal_level: BURST, exceeded_at_s: None, seen }
    }

    fn pass(&mut self, to_s: f64, figures: &mut Figures) {
        let flowed = RATE * (to_s - self.at_s);
        if self.level + flowed >= 0.0
            && let Some(since_s) = self.exceeded_at_s.take()
        {
            let repaid_s = self.at_s - self.level / RATE;
            figures.longest_s = figures.longest_s.max(repaid_s - since_s);
        }
        self.level = BURST.min(self.level + flowed);
        self.ideal_level = BURST.min(self.ideal_level + flowed);
        self.at_s = to_s;
    }

    fn ask(&mut self, node: usize, load: f64, threshold: f64, figures: &mut Figures) {
        if self.ideal_level >= 1.0 {
            self.ideal_level -= 1.0;
            figures.ideal += 1;
        }
        let (seen_s, seen) = self.seen[node];
        let others = 1.0 - 1.0 / self.seen.len() as f64;
        let growth = RATE * (1.0 - load.min(1.0) * others);
        let expected = BURST.min(seen + growth * (self.at_s - seen_s));
        if expected >= threshold {
            self.level -= 1.0;
            figures.admitted += 1;
            figures.deepest = figures.deepest.max(-self.level);
            if self.level < 0.0 {
                self.exceeded_at_s.get_or_insert(self.at_s);
            }
        }
        self.seen[node] = (self.at_s, self.level);
    }
}

fn run(nodes: usize, load: f64, threshold: f64) -> Figures {
    let mut random = Rng::with_seed(1);
    let mut figures = Figures::default();
    for _ in 0..KEYS {
        let mut key = Key::new(nodes);
        loop {
            let gap_s = -(1.0 - random.f64()).ln() / (load * RATE);
            key.pass((key.at_s + gap_s).min(SECONDS), &mut figures);
            if key.at_s >= SECONDS {
                break;
            }
            key.ask(random.usize(..nodes), load, threshold, &mut figures);
        }
        // What is not repaid at the end has lasted until then.
        let since_s = key.exceeded_at_s.unwrap_or(SECONDS);
        figures.longest_s = figures.longest_s.max(SECONDS - since_s);
    }
    figures
}

fn main() {
    println!("| nodes | load | threshold | of the ideal, % | excess, tokens | longest, s |");
    println!("|---|---|---|---|---|---|");
    for nodes in [4, 8, 20, 100] {
        for load in [0.9, 3.0] {
            for threshold in [0.5, 1.0, 1.5, 2.0, 2.5, 3.0] {
                let Figures { admitted, ideal, deepest, longest_s } = run(nodes, load, threshold);
                let pct = 100.0 * admitted as f64 / ideal as f64;
                println!(
                    "| {nodes} | {load} | {threshold} | {pct:.1} | {deepest:.1} | {longest_s:.0} |"
                );
            }
        }
    }
}
