//! Which points are worth a thought, and which one is recommended.

use tidegate::sim::Worst;

use super::measure::Point;

/// As good as the best: points of shortfall, or of waiting, that are given for fewer store calls.
const SLACK_PCT: f64 = 1.0;

/// As good as the best while something is broken: points of shortfall.
const FAULTY_SLACK_PCT: f64 = 5.0;

/// As cheap as the cheapest: a part of its store calls, for a shorter interval.
const CALLS_SLACK: f64 = 0.1;

/// Rounding errors of the judge, in tokens and in %.
const ERROR: f64 = 1e-6;

/// What the point must keep.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Bounds {
    pub(crate) excess_tokens_max: f64,
    pub(crate) shortfall_pct_max: Option<f64>,
}

impl Bounds {
    fn holds(&self, worst: &Worst) -> bool {
        worst.excess_tokens <= self.excess_tokens_max + ERROR
            && self.shortfall_pct_max.is_none_or(|most| worst.shortfall_pct() <= most + ERROR)
    }
}

/// Excess, shortfall and store calls: less of each is better.
fn costs(worst: &Worst) -> [f64; 3] {
    [worst.excess_tokens, worst.shortfall_pct(), worst.store_calls_per_second]
}

/// Whether `one` is nowhere worse than `other`, and somewhere better.
fn dominates(one: &Worst, other: &Worst) -> bool {
    let (one, other) = (costs(one), costs(other));
    let pairs = || one.iter().zip(&other);
    pairs().all(|(one, other)| one <= other) && pairs().any(|(one, other)| one < other)
}

/// Of each point, whether no other dominates it.
pub(crate) fn frontier(points: &[Point]) -> Vec<bool> {
    let best = |point: &Point| !points.iter().any(|other| dominates(&other.worst, &point.worst));
    points.iter().map(best).collect()
}

/// Splits off the points whose longer interval saves next to no store calls: a shorter interval
/// of the same way costs the same, and keeps the bounds if they do. The points of a way stand together, the shortest first.
pub(crate) fn without_repeats(points: Vec<Point>, bounds: &Bounds) -> (Vec<Point>, Vec<Point>) {
    let (mut kept, mut repeats): (Vec<Point>, Vec<Point>) = (Vec::new(), Vec::new());
    for point in points {
        let calls = |point: &Point| point.worst.store_calls_per_second;
        let is_repeat = kept.last().is_some_and(|shorter| {
            let keeps_as_much = bounds.holds(&shorter.worst) || !bounds.holds(&point.worst);
            let saves_little = calls(&point) > (1.0 - CALLS_SLACK) * calls(shorter);
            shorter.way == point.way && saves_little && keeps_as_much
        });
        if is_repeat { repeats.push(point) } else { kept.push(point) }
    }
    (kept, repeats)
}

/// The points that a limiter can be told to be, and that keep the bounds.
fn within(points: &[Point], bounds: &Bounds) -> Vec<usize> {
    let keeps = |&index: &usize| {
        let Point { way, worst, .. } = &points[index];
        way.is_on_offer() && bounds.holds(worst)
    };
    (0..points.len()).filter(keeps).collect()
}

/// The index of the point to use, if one keeps the bounds. First: ways that do not wait, if one of them falls short by about as
/// little as the best point, also while something is broken; else ways that wait. Among these, in turn: about the least
/// shortfall, about the fewest waits, about the fewest store calls, the shortest interval (its nodes learn soonest what the others
/// spend).
pub(crate) fn recommended(points: &[Point], bounds: &Bounds) -> Option<usize> {
    let worst = |index: usize| &points[index].worst;
    let waits = |index: usize| points[index].way.waits();
    let within = within(points, bounds);
    let need_not_wait = near_best(points, &within).into_iter().any(|index| !waits(index));
    let alike = within.into_iter().filter(|&index| waits(index) != need_not_wait);
    let mut left = near_best(points, &alike.collect::<Vec<_>>());
    keep_near_least(&mut left, |index| worst(index).waited_pct, |least| least + SLACK_PCT);
    let near_calls = |least| least * (1.0 + CALLS_SLACK);
    keep_near_least(&mut left, |index| worst(index).store_calls_per_second, near_calls);
    left.into_iter().min_by(|&one, &other| {
        let order = |index: usize| {
            let [excess, shortfall, calls] = costs(worst(index));
            [points[index].interval_ms as f64, calls, excess, shortfall]
        };
        order(one).partial_cmp(&order(other)).unwrap_or(std::cmp::Ordering::Equal)
    })
}

/// Those of `indices` that fall short by about as little as the best of them, also while something is broken.
fn near_best(points: &[Point], indices: &[usize]) -> Vec<usize> {
    let mut left = indices.to_vec();
    let shortfall = |index: usize| points[index].worst.shortfall_pct();
    keep_near_least(&mut left, shortfall, |least| least + SLACK_PCT);
    let faulty = |index: usize| points[index].faulty.map_or(0.0, |worst| worst.shortfall_pct());
    keep_near_least(&mut left, faulty, |least| least + FAULTY_SLACK_PCT);
    left
}

fn keep_near_least(indices: &mut Vec<usize>, of: impl Fn(usize) -> f64, near: impl Fn(f64) -> f64) {
    let least = indices.iter().map(|&index| of(index)).fold(f64::INFINITY, f64::min);
    indices.retain(|&index| of(index) <= near(least));
}

/// The recommendation and its reason, in a paragraph.
/// A busy key is synced each `longest_tick_s`, however long the interval.
pub(crate) fn reason(points: &[Point], bounds: &Bounds, longest_tick_s: f64) -> String {
    let Some(index) = recommended(points, bounds) else { return no_reason(points, bounds) };
    let Point { way, interval_ms, worst, faulty } = &points[index];
    let faulty = faulty.map_or_else(String::new, |faulty| {
        format!(
            " While the store is away, or half of the nodes die, {:.2}% less and {:.2} tokens more.",
            faulty.shortfall_pct(),
            faulty.excess_tokens
        )
    });
    let waiting = if way.waits() {
        let waited_pct = worst.waited_pct;
        format!("{waited_pct:.2}% of requests wait for the store; what does not wait is worse here")
    } else {
        "no request waits for the store".to_owned()
    };
    let longest_ms = longest_tick_s * 1e3;
    let longer = if *interval_ms as f64 >= longest_ms {
        format!(
            " A longer interval changes little: a busy key of this limit is synced each \
             {longest_ms:.0} ms, a quarter of the time that its burst takes to fill, or that a \
             leaky bucket's slot lasts."
        )
    } else {
        String::new()
    };
    let wait = if way.waits() { "wait" } else { "do not wait" };
    format!(
        "policy {} at {interval_ms} ms: at worst {:.2} tokens more than the limit allows ({} \
         tolerated) and {:.2}% less than an ideal limiter admits, for {:.1} store calls a second; \
         {waiting}.{faulty} Why: of the choices within what is tolerated that, like this one, {wait} for the store, those within \
         {SLACK_PCT} point of the best ({FAULTY_SLACK_PCT} while something is broken) were taken; \
         of these, those with about the fewest store calls; and of these, the shortest interval, \
         because its nodes learn soonest what the others spend.{longer}",
        way.name,
        worst.excess_tokens,
        bounds.excess_tokens_max,
        worst.shortfall_pct(),
        worst.store_calls_per_second,
    )
}

fn no_reason(points: &[Point], bounds: &Bounds) -> String {
    let least = |of: fn(&Worst) -> f64| {
        let on_offer = points.iter().filter(|point| point.way.is_on_offer());
        on_offer.map(|point| of(&point.worst)).fold(f64::INFINITY, f64::min)
    };
    let shortfall = bounds
        .shortfall_pct_max
        .map(|most| format!(" and admits at most {most:.2}% less than an ideal limiter would"));
    format!(
        "none: no choice keeps to at most {} tokens in excess{}. The least excess of any is {:.2} \
         tokens, the least shortfall {:.2}%: tolerate more of one, or raise the burst",
        bounds.excess_tokens_max,
        shortfall.unwrap_or_default(),
        least(|worst| worst.excess_tokens),
        least(Worst::shortfall_pct),
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tune::measure::Way;

    fn point(way: Way, excess: f64, shortfall: f64, calls: f64, waited: f64) -> Point {
        let worst = Worst {
            excess_tokens: excess,
            admitted_vs_ideal_pct: 100.0 - shortfall,
            store_calls_per_second: calls,
            waited_pct: waited,
            ..Worst::NONE
        };
        Point { way, interval_ms: 50, worst, faulty: None }
    }

    const BOUNDS: Bounds = Bounds { excess_tokens_max: 2.0, shortfall_pct_max: None };

    #[test]
    fn a_point_is_off_the_frontier_if_another_is_nowhere_worse_and_somewhere_better() {
        let of = |excess, shortfall, calls| point(Way::DEFAULT, excess, shortfall, calls, 0.0);
        let points = [
            of(1.0, 1.0, 100.0),
            of(1.0, 1.0, 101.0),
            of(0.0, 5.0, 100.0),
            of(2.0, 0.5, 50.0),
            of(2.0, 5.0, 50.0),
        ];
        assert_eq!(frontier(&points), [true, false, true, true, false]);
    }

    #[test]
    fn equal_points_do_not_dominate_each_other() {
        let points = [point(Way::STRICT, 1.0, 1.0, 1.0, 0.0); 2];
        assert_eq!(frontier(&points), [true, true]);
        assert!(frontier(&[]).is_empty());
    }

    #[test]
    fn the_cheapest_of_those_that_keep_the_bounds_is_recommended() {
        let points = [
            point(Way::DEFAULT, 2.1, 0.0, 10.0, 0.0),
            point(Way::DEFAULT, 2.0, 0.5, 300.0, 0.0),
            point(Way::DEFAULT, 0.0, 1.0, 200.0, 0.0),
            point(Way::STRICT, 0.0, 1.6, 100.0, 0.0),
        ];
        // The last falls short by more than a point above the best that keeps the excess.
        assert_eq!(recommended(&points, &BOUNDS), Some(2));
        let reason = reason(&points, &BOUNDS, 1.0);
        assert!(reason.starts_with("policy default at 50 ms: "), "{reason}");
        assert!(reason.contains("no request waits for the store"), "{reason}");
        assert!(!reason.contains("longer interval"), "{reason}");
        let reason = super::reason(&points, &BOUNDS, 0.05);
        assert!(reason.contains(" is synced each 50 ms, "), "{reason}");
    }

    #[test]
    fn of_points_that_cost_about_the_same_the_shortest_interval_is_recommended() {
        let of =
            |interval_ms, calls| Point { interval_ms, ..point(Way::DEFAULT, 0.0, 0.0, calls, 0.0) };
        let points = [of(20, 111.0), of(50, 110.0), of(100, 105.0), of(200, 100.0)];
        assert_eq!(recommended(&points, &BOUNDS), Some(1));
        let points = [of(200, 101.0), of(100, 100.0)];
        assert_eq!(recommended(&points, &BOUNDS), Some(1));
    }

    #[test]
    fn longer_intervals_that_save_no_calls_are_left_out() {
        let of =
            |way, interval_ms, calls| Point { interval_ms, ..point(way, 0.0, 0.0, calls, 0.0) };
        let points = vec![
            of(Way::DEFAULT, 50, 400.0),
            of(Way::DEFAULT, 200, 177.0),
            of(Way::DEFAULT, 500, 182.0),
            of(Way::DEFAULT, 1000, 171.0),
            of(Way::STRICT, 50, 399.0),
        ];
        let (kept, repeats) = without_repeats(points, &BOUNDS);
        let intervals = |points: &[Point]| -> Vec<u64> {
            points.iter().map(|point| point.interval_ms).collect()
        };
        assert_eq!(intervals(&kept), [50, 200, 50]);
        assert_eq!(intervals(&repeats), [500, 1000]);
    }

    #[test]
    fn longer_interval_that_alone_keeps_the_bounds_is_left_in() {
        let of = |interval_ms, excess| Point {
            interval_ms,
            ..point(Way::DEFAULT, excess, 0.0, 100.0, 0.0)
        };
        let (kept, _) = without_repeats(vec![of(50, 2.1), of(100, 1.9), of(200, 1.8)], &BOUNDS);
        assert_eq!(kept.iter().map(|point| point.interval_ms).collect::<Vec<_>>(), [50, 100]);
        assert_eq!(recommended(&kept, &BOUNDS), Some(1));
    }

    /// What waits was thrown out, and those that fall short by a point more than it had gone before: 3916 store calls a second.
    #[test]
    fn points_that_do_not_wait_are_compared_with_each_other() {
        let points = [
            point(Way::ASYNC, 0.0, 0.0, 300.0, 0.5),
            point(Way::DEFAULT, 0.0, 0.9, 3916.0, 0.0),
            point(Way::DEFAULT, 0.0, 1.1, 506.0, 0.0),
        ];
        assert_eq!(recommended(&points, &BOUNDS), Some(2));
    }

    #[test]
    fn tune_does_not_recommend_an_interval_that_is_much_worse_when_nodes_die() {
        let of = |interval_ms, calls, shortfall_pct| Point {
            interval_ms,
            faulty: Some(Worst { admitted_vs_ideal_pct: 100.0 - shortfall_pct, ..Worst::NONE }),
            ..point(Way::DEFAULT, 0.0, 0.0, calls, 0.0)
        };
        assert_eq!(recommended(&[of(50, 400.0, 7.0), of(1000, 100.0, 34.0)], &BOUNDS), Some(0));
        assert_eq!(recommended(&[of(50, 400.0, 7.0), of(1000, 100.0, 11.0)], &BOUNDS), Some(1));
    }

    #[test]
    fn the_usual_way_is_compared_with_and_never_recommended() {
        let points = [
            point(Way::WRITE_BEHIND, 0.0, 0.0, 1.0, 0.0),
            point(Way::DEFAULT, 1.0, 1.0, 100.0, 0.0),
        ];
        assert_eq!(recommended(&points, &BOUNDS), Some(1));
        assert_eq!(frontier(&points), [true, false]);
        let none = reason(&points[..1], &BOUNDS, 1.0);
        assert!(none.starts_with("none: "), "{none}");
    }

    #[test]
    fn a_policy_that_does_not_wait_goes_before_a_cheaper_one_that_does() {
        let waiting = point(Way::ASYNC, 0.0, 0.0, 10.0, 0.5);
        let points = [waiting, point(Way::STRICT, 0.0, 0.9, 1000.0, 0.0)];
        assert_eq!(recommended(&points, &BOUNDS), Some(1));
        assert_eq!(recommended(&[waiting], &BOUNDS), Some(0));
        // Unless it falls short by much more.
        let points = [waiting, point(Way::STRICT, 0.0, 7.0, 1000.0, 0.0)];
        assert_eq!(recommended(&points, &BOUNDS), Some(0));
    }

    #[test]
    fn of_points_that_all_wait_those_that_wait_seldom_are_compared_by_calls() {
        let of = |calls, waited| point(Way::ASYNC, 0.0, 0.0, calls, waited);
        let points = [of(10.0, 9.0), of(300.0, 1.0), of(200.0, 1.9)];
        assert_eq!(recommended(&points, &BOUNDS), Some(2));
    }

    #[test]
    fn nothing_is_recommended_that_breaks_a_bound() {
        let points =
            [point(Way::DEFAULT, 3.0, 1.0, 1.0, 0.0), point(Way::STRICT, 0.0, 8.0, 1.0, 0.0)];
        let bounds = Bounds { shortfall_pct_max: Some(3.0), ..BOUNDS };
        assert_eq!(recommended(&points, &bounds), None);
        let reason = reason(&points, &bounds, 1.0);
        assert!(reason.contains("The least excess of any is 0.00 tokens"), "{reason}");
        assert!(reason.contains("the least shortfall 1.00%"), "{reason}");
        assert_eq!(recommended(&points, &BOUNDS), Some(1));
    }
}
