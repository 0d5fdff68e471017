//! Which points are worth a thought, and which one is recommended.

use super::measure::{Point, PointFigures};

/// As good as the best: points of shortfall, or of waiting, that are given for fewer store calls.
const SLACK_PCT: f64 = 1.0;

/// Rounding errors of the judge, in tokens and in %.
const ERROR: f64 = 1e-6;

/// What the point must keep.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Bounds {
    pub(crate) excess_tokens_max: f64,
    pub(crate) shortfall_pct_max: Option<f64>,
}

impl Bounds {
    fn holds(&self, figures: &PointFigures) -> bool {
        figures.excess_tokens <= self.excess_tokens_max + ERROR
            && self.shortfall_pct_max.is_none_or(|most| figures.shortfall_pct <= most + ERROR)
    }
}

/// Excess, shortfall and store calls: less of each is better.
fn costs(figures: &PointFigures) -> [f64; 3] {
    [figures.excess_tokens, figures.shortfall_pct, figures.store_calls_per_second]
}

/// Whether `one` is nowhere worse than `other`, and somewhere better.
fn dominates(one: &PointFigures, other: &PointFigures) -> bool {
    let (one, other) = (costs(one), costs(other));
    let pairs = || one.iter().zip(&other);
    pairs().all(|(one, other)| one <= other) && pairs().any(|(one, other)| one < other)
}

/// Of each point, whether no other dominates it.
pub(crate) fn frontier(points: &[Point]) -> Vec<bool> {
    let best =
        |point: &Point| !points.iter().any(|other| dominates(&other.figures, &point.figures));
    points.iter().map(best).collect()
}

/// The index of the point to use, if one keeps the bounds. Of those that do and that fall short by
/// about as little as the best of them: one that does not wait, or else one that waits about as
/// seldom as the best; of these, the cheapest in store calls.
pub(crate) fn recommended(points: &[Point], bounds: &Bounds) -> Option<usize> {
    let figures = |index: usize| &points[index].figures;
    let mut left: Vec<usize> =
        (0..points.len()).filter(|&index| bounds.holds(figures(index))).collect();
    keep_near_least(&mut left, |index| figures(index).shortfall_pct);
    if left.iter().any(|&index| !points[index].policy.waits()) {
        left.retain(|&index| !points[index].policy.waits());
    }
    keep_near_least(&mut left, |index| figures(index).waited_pct);
    left.into_iter().min_by(|&one, &other| {
        let order = |index| {
            let [excess, shortfall, calls] = costs(figures(index));
            [calls, excess, shortfall]
        };
        order(one).partial_cmp(&order(other)).unwrap_or(std::cmp::Ordering::Equal)
    })
}

fn keep_near_least(indices: &mut Vec<usize>, of: impl Fn(usize) -> f64) {
    let least = indices.iter().map(|&index| of(index)).fold(f64::INFINITY, f64::min);
    indices.retain(|&index| of(index) <= least + SLACK_PCT);
}

/// The recommendation and its reason, in a line.
pub(crate) fn reason(points: &[Point], bounds: &Bounds) -> String {
    let allowed = bounds.excess_tokens_max;
    let Some(index) = recommended(points, bounds) else {
        let least = |of: fn(&PointFigures) -> f64| {
            points.iter().map(|point| of(&point.figures)).fold(f64::INFINITY, f64::min)
        };
        return format!(
            "none: no point keeps excess at {allowed} tokens{}; the least excess is {:.2} tokens, \
             the least shortfall {:.2}%",
            bounds
                .shortfall_pct_max
                .map_or_else(String::new, |most| { format!(" and shortfall at {most:.2}%") }),
            least(|figures| figures.excess_tokens),
            least(|figures| figures.shortfall_pct),
        );
    };
    let Point { policy, interval_ms, figures } = &points[index];
    let waiting = if policy.waits() {
        format!("{:.2}% of requests wait for the store", figures.waited_pct)
    } else {
        "nothing waits".to_owned()
    };
    format!(
        "{} at {interval_ms} ms: the fewest store calls ({:.1}/s) among those with excess of at \
         most {allowed} tokens ({:.2}) and shortfall within {SLACK_PCT} point of the best \
         ({:.2}%); {waiting}",
        policy.name(),
        figures.store_calls_per_second,
        figures.excess_tokens,
        figures.shortfall_pct,
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tune::measure::Policy;

    fn point(policy: Policy, excess: f64, shortfall: f64, calls: f64, waited: f64) -> Point {
        let figures = PointFigures {
            excess_tokens: excess,
            shortfall_pct: shortfall,
            store_calls_per_second: calls,
            waited_pct: waited,
            ..PointFigures::default()
        };
        Point { policy, interval_ms: 50, figures }
    }

    const BOUNDS: Bounds = Bounds { excess_tokens_max: 2.0, shortfall_pct_max: None };

    #[test]
    fn a_point_is_off_the_frontier_if_another_is_nowhere_worse_and_somewhere_better() {
        let of = |excess, shortfall, calls| point(Policy::Default, excess, shortfall, calls, 0.0);
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
        let points = [point(Policy::Strict, 1.0, 1.0, 1.0, 0.0); 2];
        assert_eq!(frontier(&points), [true, true]);
        assert!(frontier(&[]).is_empty());
    }

    #[test]
    fn the_cheapest_of_those_that_keep_the_bounds_is_recommended() {
        let points = [
            point(Policy::Default, 2.1, 0.0, 10.0, 0.0),
            point(Policy::Default, 2.0, 0.5, 300.0, 0.0),
            point(Policy::Default, 0.0, 1.0, 200.0, 0.0),
            point(Policy::Strict, 0.0, 1.6, 100.0, 0.0),
        ];
        // The last falls short by more than a point above the best that keeps the excess.
        assert_eq!(recommended(&points, &BOUNDS), Some(2));
        assert!(reason(&points, &BOUNDS).starts_with("default at 50 ms: "));
    }

    #[test]
    fn a_policy_that_does_not_wait_goes_before_a_cheaper_one_that_does() {
        let waiting = point(Policy::Async, 0.0, 0.0, 10.0, 0.5);
        let points = [waiting, point(Policy::Strict, 0.0, 0.9, 1000.0, 0.0)];
        assert_eq!(recommended(&points, &BOUNDS), Some(1));
        assert_eq!(recommended(&[waiting], &BOUNDS), Some(0));
        // Unless it falls short by much more.
        let points = [waiting, point(Policy::Strict, 0.0, 7.0, 1000.0, 0.0)];
        assert_eq!(recommended(&points, &BOUNDS), Some(0));
    }

    #[test]
    fn of_points_that_all_wait_those_that_wait_seldom_are_compared_by_calls() {
        let of = |calls, waited| point(Policy::Async, 0.0, 0.0, calls, waited);
        let points = [of(10.0, 9.0), of(300.0, 1.0), of(200.0, 1.9)];
        assert_eq!(recommended(&points, &BOUNDS), Some(2));
    }

    #[test]
    fn nothing_is_recommended_that_breaks_a_bound() {
        let points =
            [point(Policy::Default, 3.0, 1.0, 1.0, 0.0), point(Policy::Strict, 0.0, 8.0, 1.0, 0.0)];
        let bounds = Bounds { shortfall_pct_max: Some(3.0), ..BOUNDS };
        assert_eq!(recommended(&points, &bounds), None);
        let reason = reason(&points, &bounds);
        assert!(reason.contains("the least excess is 0.00 tokens"), "{reason}");
        assert!(reason.contains("the least shortfall 1.00%"), "{reason}");
        assert_eq!(recommended(&points, &BOUNDS), Some(1));
    }
}
