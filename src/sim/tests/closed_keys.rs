//! A store loses its memory a moment after a node has spent a key and closed its account of it.

use super::*;
use crate::algorithm::{FixedWindow, SlidingLog, SlidingWindow};

/// The excess of a run with such a loss, and its bound.
fn excess_after_a_loss(setup: &Setup, arrivals: &[Arrival], lost_us: u64) -> (f64, f64) {
    let loss = at(lost_us, Fault::StoreForgets);
    let mut world = World::new(setup.clone()).unwrap();
    world.plan_fault(&loss);
    play(&mut world, arrivals, 24 * SECOND_US);
    let bound = excess_bound(&[loss], setup);
    (world.judge.excess_tokens(), bound)
}

/// Its idle lanes heard of the loss when the account was closed: 21 of 47 tokens were admitted again.
#[test]
fn key_that_a_node_spent_before_a_loss_of_memory_is_not_full_after_its_account_is_closed() {
    let period = Duration::from_micros(44_044_157);
    for (limit, seed) in [
        Limit::new("bucket", Quota::new(47, period)),
        Limit::new("fixed", FixedWindow::new(47, period)),
        Limit::new("sliding", SlidingWindow::new(47, period)),
        Limit::new("log", SlidingLog::new(47, period)),
    ]
    .into_iter()
    .flat_map(|limit| (410..415).map(move |seed| (limit.clone(), seed)))
    {
        let limit = limit.credit(1).sync_interval(Duration::from_micros(16_238));
        let setup = Setup { form: Form::Async, ..audited(limit, 4, seed) };
        let lost_us = 13_323_527;
        let before = [(12_418_702, 1, 1), (12_736_822, 0, 21), (12_782_241, 0, 21)];
        let after = (0..71).map(|index| (13_400_549 + 22_000 * index, 1, 1));
        let asked = before.into_iter().chain(after);
        let arrivals: Vec<_> = asked.map(|(us, node, cost)| request(us, node, cost)).collect();
        let (excess, bound) = excess_after_a_loss(&setup, &arrivals, lost_us);
        assert!(excess <= bound + 1e-9, "{:?}, seed {seed}: {excess} of {bound}", setup.limit);
    }
}

/// Each node told of a token that it did not hold; what was given back of these was admitted in excess.
#[test]
fn window_that_nodes_register_anew_has_no_more_tokens_than_they_hold() {
    let period = Duration::from_micros(1_202_991);
    for (limit, seed) in [
        Limit::new("fixed", FixedWindow::new(2, period)),
        Limit::new("log", SlidingLog::new(2, period)),
        Limit::new("sliding", SlidingWindow::new(2, period)),
    ]
    .into_iter()
    .flat_map(|limit| (13_203..13_213).map(move |seed| (limit.clone(), seed)))
    {
        let limit = limit.credit(0).sync_interval(Duration::from_micros(586_981));
        let setup = Setup { form: Form::Async, ..audited(limit, 2, seed) };
        let of_node = |node, us: &'static [u64]| us.iter().map(move |us| request(*us, node, 1));
        let mut arrivals: Vec<_> = of_node(
            0,
            &[
                597_277, 789_567, 827_957, 861_359, 863_879, 898_470, 998_832, 1_050_155,
                1_161_829, 1_264_802,
            ],
        )
        .chain(of_node(
            1,
            &[
                556_850, 814_994, 1_063_375, 1_195_008, 1_197_520, 1_237_405, 1_250_743, 1_258_152,
                1_313_657, 1_326_555,
            ],
        ))
        .chain((0..100).map(|index| request(1_330_000 + 20_000 * index, (index % 2) as u16, 1)))
        .collect();
        arrivals.sort_by_key(|arrival| arrival.at_us);
        let (excess, bound) = excess_after_a_loss(&setup, &arrivals, 1_258_689);
        assert!(excess <= bound + 1e-9, "{:?}, seed {seed}: {excess} of {bound}", setup.limit);
    }
}
