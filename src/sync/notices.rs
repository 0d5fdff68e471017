//! Events that users get once for a limit, and not for each key: that its outage policy has taken over, and that it
//! has ended.

use super::context::LimitBooks;
use super::engine::Engine;
use super::event::Event;
use super::lane::Lane;
use crate::time::Timestamp;

impl Engine {
    /// Limits whose outage policy has taken over, or has ended, since the last time.
    pub(crate) fn take_policy_changes(&mut self, now: Timestamp) -> Vec<Event> {
        let mut on_policy = vec![false; self.context.limits.len()];
        for lane in &self.lanes {
            lane.mark_policies(&mut on_policy);
        }
        let all_down = self.lanes.iter().all(Lane::is_down);
        let was_down = std::mem::replace(&mut self.context.all_down, all_down);
        let change = |(limit, on_policy): (&mut LimitBooks, bool)| {
            if std::mem::replace(&mut limit.on_policy, on_policy) == on_policy {
                return None;
            }
            let name = limit.name.clone();
            Some(if on_policy {
                Event::OutagePolicyBegan {
                    limit: name,
                    policy: limit.terms.outage,
                    store_was_reached: limit.nodes.alive().is_some(),
                    nodes: limit.nodes.sharing_in_outage(limit.terms.scale.fill_us(), now),
                }
            } else {
                Event::OutagePolicyEnded { limit: name }
            })
        };
        let limits = &mut self.context.limits;
        let events: Vec<Event> = limits.iter_mut().zip(on_policy).filter_map(change).collect();
        if !events.is_empty() || all_down != was_down {
            self.context.set_credit(now);
        }
        events
    }
}
