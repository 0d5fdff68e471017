//! What a limit's users are told once, and not for each key: that its outage policy has taken over, and that it is
//! left without credit.

use super::engine::{Context, Engine, LimitBooks};
use super::event::Event;
use super::lane::Lane;
use crate::limit::Mode;
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

impl Context {
    /// Says of each limit once if there are so many nodes that its accuracy leaves no node a token of credit.
    pub(crate) fn tell_of_missing_credit(&mut self) {
        let mut events = Vec::new();
        for limit in &mut self.limits {
            let Some(nodes) = limit.nodes.alive().and_then(|nodes| u32::try_from(nodes).ok())
            else {
                continue;
            };
            let rule = &limit.terms.credit_rule;
            let wanted = rule.together.is_some() && rule.known > 0;
            let told = limit.told_of_missing_credit || limit.terms.mode == Mode::Local;
            if wanted && !told && rule.at(Some(nodes)).first == 0 {
                limit.told_of_missing_credit = true;
                events.push(Event::NoCredit { limit: limit.name.clone(), nodes });
            }
        }
        for event in events {
            self.event(event);
        }
    }
}
