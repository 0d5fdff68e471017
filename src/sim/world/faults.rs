//! What goes wrong, done to nodes and store.

use super::super::faults::Fault;
use super::World;
use super::timeline::Happening;
#[cfg(all(test, feature = "redis"))]
use super::timeline::StoreCall;

impl World {
    pub(super) fn apply_fault(&mut self, fault: Fault) {
        if self.setup.audit && !self.hits_a_lease(fault) {
            self.ledger.idle_faults += 1;
        }
        match fault {
            Fault::NodeDies { place } => self.kill(place),
            Fault::NodeReplaced { place } => {
                self.kill(place);
                self.start_node(place);
            }
            Fault::NodeJoins => {
                let place = self.places.len() as u16;
                self.places.push(usize::MAX);
                self.start_node(place);
            }
            Fault::NodePauses { place, for_us } => self.pause(place, for_us),
            Fault::NodeCutOff { place, for_us } => {
                let index = self.places[usize::from(place)];
                self.nodes[index].cut_until_us = self.now_us + for_us;
            }
            Fault::ClockJumps { place, by_us } => {
                let index = self.places[usize::from(place)];
                self.nodes[index].clock.jump(self.now_us, by_us);
                self.plan(self.now_us, Happening::Timer { node: index });
            }
            Fault::ClockStalls { place, for_us } => {
                let index = self.places[usize::from(place)];
                self.nodes[index].clock.stall(self.now_us, for_us);
            }
            _ => self.apply_store_fault(fault),
        }
    }

    /// Whether the node that a fault befalls holds a lease; where it befalls the store, whether any
    /// node does.
    fn hits_a_lease(&self, fault: Fault) -> bool {
        let is_leased = |place: u16, key| {
            let node = self.places.get(usize::from(place)).and_then(|index| self.nodes.get(*index));
            node.is_some_and(|node| node.is_leased(key, self.now_us))
        };
        let any = |key| (0..self.places.len() as u16).any(|place| is_leased(place, key));
        match fault {
            Fault::NodeDies { place }
            | Fault::NodeReplaced { place }
            | Fault::NodePauses { place, .. }
            | Fault::NodeCutOff { place, .. }
            | Fault::ClockJumps { place, .. }
            | Fault::ClockStalls { place, .. } => is_leased(place, None),
            Fault::RecordLost { key } => any(Some(key)),
            _ => any(None),
        }
    }

    fn apply_store_fault(&mut self, fault: Fault) {
        let now_us = self.now_us;
        match fault {
            Fault::StoreHangs { for_us } => self.store.hang(now_us + for_us),
            Fault::StoreGone { for_us } => self.store.vanish(now_us + for_us),
            Fault::StoreStalls { for_us } => self.store.stall(now_us + for_us),
            Fault::StoreForgets => {
                #[cfg(all(test, feature = "redis"))]
                self.calls.iter_mut().for_each(|calls| calls.push(StoreCall::Forgets));
                self.store.forget();
                self.ledger.is_store_forgetful = true;
            }
            Fault::StoreLags { .. } => {
                self.ledger.is_store_forgetful |= self.store.fail_over(now_us);
            }
            Fault::StoreSaves => self.store.save(),
            Fault::StoreRestores => self.ledger.is_store_forgetful |= self.store.restore(now_us),
            Fault::RecordLost { key } => {
                self.store.lose(key);
                self.ledger.lost_keys.insert(key);
            }
            Fault::StoreClockSteps { by_us } => {
                self.store.step_clock(by_us, now_us);
                self.ledger.is_store_forgetful |= by_us > 0;
            }
            _ => {}
        }
    }

    /// Freezes the whole process of a node: its clock goes on, its loop and its decisions do not.
    /// What comes meanwhile waits in sockets and is seen when the node goes on, by the time of then.
    fn pause(&mut self, place: u16, for_us: u64) {
        let index = self.places[usize::from(place)];
        let until_us = self.nodes[index].paused_until_us.max(self.now_us + for_us);
        self.nodes[index].paused_until_us = until_us;
        self.plan(until_us, Happening::Resumption { node: index });
    }
}
