//! One round of one contender.

use std::ops::Range;
use std::time::{Duration, Instant};

use hdrhistogram::Histogram;
use rustix::time::{ClockId, clock_gettime};

use crate::case::{Case, Keys};
use crate::contender::Contender;

/// How long a round is.
#[derive(Clone, Copy)]
pub struct Length {
    /// Begins each round and does not count: the load that a limiter has seen coming.
    pub run_up: Duration,
    pub counted: Duration,
}

/// What a round came to.
pub struct Round {
    pub decisions: u64,
    /// Those that went the other way than the case says.
    pub wrong: u64,
    /// Of wall-clock time; the mean of all threads.
    pub nanoseconds: f64,
    /// Of processor time of the whole process: drivers and stores in memory count too.
    pub cpu_nanoseconds: f64,
}

impl Round {
    pub fn strays(&self) -> f64 {
        self.wrong as f64 / self.decisions as f64
    }

    pub fn ns_a_decision(&self) -> f64 {
        self.nanoseconds / self.decisions as f64
    }

    pub fn cpu_ns_a_decision(&self) -> f64 {
        self.cpu_nanoseconds / self.decisions as f64
    }
}

/// Processor time of this process.
fn cpu_nanoseconds() -> f64 {
    let time = clock_gettime(ClockId::ProcessCPUTime);
    time.tv_sec as f64 * 1e9 + time.tv_nsec as f64
}

/// Decides, one block after the other.
pub fn tight(case: &Case, contender: &dyn Contender, keys: &Keys, length: Length) -> Round {
    let decide = |part, (): &mut ()| contender.decide(keys, part, case.isolated);
    run(case, contender, keys, length, decide).0
}

/// Decides once about each of these keys, which are new.
pub fn once(contender: &dyn Contender, keys: &Keys, part: Range<usize>) -> Round {
    let (decisions, begin, cpu_before) = (part.len() as u64, Instant::now(), cpu_nanoseconds());
    let wrong = contender.decide(keys, part, false);
    let nanoseconds = begin.elapsed().as_nanos() as f64;
    Round { decisions, wrong, nanoseconds, cpu_nanoseconds: cpu_nanoseconds() - cpu_before }
}

/// As [`tight`], with the clock read around each decision; nanoseconds.
pub fn timed(
    case: &Case,
    contender: &dyn Contender,
    keys: &Keys,
    length: Length,
) -> (Round, Histogram<u64>) {
    let decide = |part, took: &mut Took| contender.decide_timed(keys, part, &mut took.0);
    let (round, took) = run(case, contender, keys, length, decide);
    let mut all = Took::default().0;
    for one in took {
        all.add(one.0).expect("the same bounds");
    }
    (round, all)
}

/// Nanoseconds, up to a minute.
struct Took(Histogram<u64>);

impl Default for Took {
    fn default() -> Self {
        let histogram = Histogram::new_with_bounds(1, 60_000_000_000, 3);
        Self(histogram.expect("good bounds"))
    }
}

/// Runs `decide` on all threads of the case; each has a `State`, new when the run-up is over.
fn run<State: Default + Send>(
    case: &Case,
    contender: &dyn Contender,
    keys: &Keys,
    length: Length,
    decide: impl Fn(Range<usize>, &mut State) -> u64 + Sync,
) -> (Round, Vec<State>) {
    let (all, block) = (keys.stream.len(), contender.block());
    let start = Instant::now() + length.run_up;
    let one_thread = |thread: usize| {
        let mut at = thread * all / case.threads;
        let mut ask = |state: &mut State| {
            let part = at..(at + block).min(all);
            at = if part.end == all { 0 } else { part.end };
            let asked = part.len() as u64;
            let denied = decide(part, state);
            (asked, if case.denied { asked - denied } else { denied })
        };
        let mut state = State::default();
        while Instant::now() < start {
            ask(&mut state);
        }
        state = State::default();
        let (mut decisions, mut wrong) = (0, 0);
        // A block may be long: time counts from the end of the last one of the run-up.
        let (begin, cpu_before) = (Instant::now(), cpu_nanoseconds());
        while begin.elapsed() < length.counted {
            let (asked, strays) = ask(&mut state);
            decisions += asked;
            wrong += strays;
        }
        let nanoseconds = begin.elapsed().as_nanos() as f64;
        let cpu_nanoseconds = cpu_nanoseconds() - cpu_before;
        (Round { decisions, wrong, nanoseconds, cpu_nanoseconds }, state)
    };
    let ended: Vec<(Round, State)> = std::thread::scope(|scope| {
        let one_thread = &one_thread;
        let threads: Vec<_> =
            (0..case.threads).map(|thread| scope.spawn(move || one_thread(thread))).collect();
        threads.into_iter().map(|thread| thread.join().expect("no thread panics")).collect()
    });
    let sum = |of: fn(&Round) -> u64| ended.iter().map(|(round, _)| of(round)).sum();
    let mean = |of: fn(&Round) -> f64| {
        ended.iter().map(|(round, _)| of(round)).sum::<f64>() / case.threads as f64
    };
    let round = Round {
        decisions: sum(|round| round.decisions),
        wrong: sum(|round| round.wrong),
        nanoseconds: mean(|round| round.nanoseconds),
        cpu_nanoseconds: mean(|round| round.cpu_nanoseconds),
    };
    std::thread::sleep(contender.rest());
    (round, ended.into_iter().map(|(_, state)| state).collect())
}

pub fn median(mut numbers: Vec<f64>) -> f64 {
    numbers.sort_by(f64::total_cmp);
    numbers[numbers.len() / 2]
}
