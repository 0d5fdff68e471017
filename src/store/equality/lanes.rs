//! Lanes that the store does not know, or that begin ahead of its clock.

use super::*;

/// The first batch of a node that knows that it is `known_us` by the lane's time.
fn first_batch(template: &Request, sequence: i64, known_us: i64) -> Arc<Request> {
    let header = Header {
        lane: 0,
        lanes: LANES,
        instance: template.instance,
        incarnation: None,
        sequence,
        times: template.times,
        knowledge: Knowledge { known_us, ..Knowledge::default() },
        limits: Vec::new(),
    };
    Arc::new(Request::new(header, template.entries.clone()))
}

#[test]
fn lane_that_begins_ahead_of_the_clock_is_equal_in_model_and_script() {
    let mut world = World::new();
    let (template, _) = three_keys(&mut world);
    let ahead_us = 3_600_000_000;
    let known_us = time_us(&mut world.raw) + ahead_us;
    let reply = world.compare(&first_batch(&template, 1, known_us));
    assert_eq!(reply.time_us, known_us);
    let offset_us = world.offset_us(0);
    assert!((ahead_us - 60_000_000..=ahead_us).contains(&offset_us), "{offset_us}");
}

#[test]
fn late_batch_to_a_lost_lane_is_stale_and_makes_no_lane_in_model_and_script() {
    let mut world = World::new();
    let (template, _) = three_keys(&mut world);
    let known_us = time_us(&mut world.raw) - 1_400_000_000;
    let reply = world.compare(&first_batch(&template, 7, known_us));
    assert_eq!(reply.verdict, BatchVerdict::Stale);
    // Both have the same lanes, as was compared.
    assert_eq!(world.model.lanes.get(&0), None);
}
