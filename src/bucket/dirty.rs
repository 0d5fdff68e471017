//! The dirty queue: what decisions have to tell the engine.

use std::sync::Arc;

use crossbeam_queue::{ArrayQueue, SegQueue};

use super::bell::Bell;
use super::outcome::{Taken, Touch};

/// The most notes that wait without allocating.
pub(crate) const DIRTY_MAX: usize = 65_536;

/// What a decision has to tell. The engine reads the key from the bucket: if the place has been given
/// to another key meanwhile, that key gets a look that it need not have had, and nothing else.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Note {
    /// The limit's number.
    pub(crate) limit: u32,
    /// The bucket's place in the limit's table.
    pub(crate) place: u32,
    /// Pending tokens that no longer fitted the bucket's word.
    pub(crate) spilled: u32,
    /// What a denied request cost, if that was more than one token.
    pub(crate) refused: u32,
    /// The engine keeps no books on the bucket, as far as the decision knew.
    pub(crate) unknown: bool,
}

impl Note {
    /// What is to be told of a decision, if anything is.
    pub(crate) fn of(taken: &Taken, limit: u32, place: u32) -> Option<Self> {
        let Taken { touch, unknown, spilled, refused, .. } = *taken;
        let news = touch != Touch::None || spilled > 0 || refused > 0;
        news.then_some(Self { limit, place, spilled, refused, unknown })
    }
}

/// A lock-free queue, and the bell that wakes the driver. Pushing allocates nothing until
/// [`DIRTY_MAX`] notes wait; nothing is ever dropped that counts tokens.
#[derive(Debug)]
pub(crate) struct DirtyQueue {
    queue: ArrayQueue<Note>,
    overflow: SegQueue<Note>,
    bell: Arc<Bell>,
}

impl DirtyQueue {
    /// A queue for about `max_keys` buckets, never more than [`DIRTY_MAX`] without allocating.
    pub(crate) fn new(max_keys: usize) -> Self {
        Self {
            queue: ArrayQueue::new(max_keys.clamp(64, DIRTY_MAX)),
            overflow: SegQueue::new(),
            bell: Arc::default(),
        }
    }

    /// Tells the engine.
    #[inline]
    pub(crate) fn push(&self, note: Note, touch: Touch) {
        if let Err(note) = self.queue.push(note) {
            // A bucket is told of twice at most until the engine has heard of it, and large denials
            // are only a hint: so there are about as many of these as keys at the most.
            if touch != Touch::None || note.spilled > 0 {
                self.overflow.push(note);
            }
        }
        // Tokens that only a note knows of are not left lying about.
        if touch == Touch::Urgent || note.spilled > 0 {
            self.bell.ring();
        }
    }

    /// The next note.
    pub(crate) fn pop(&self) -> Option<Note> {
        self.queue.pop().or_else(|| self.overflow.pop())
    }

    /// Waits until a bucket runs low.
    pub(crate) async fn urgent(&self) {
        self.bell.heard().await;
    }

    /// What is rung when a bucket runs low.
    pub(crate) fn bell(&self) -> &Arc<Bell> {
        &self.bell
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bucket::Verdict;

    fn taken() -> Taken {
        let (verdict, touch) = (Verdict::Allowed, Touch::Dirty);
        let (sure, left, unknown, spilled, refused, uncounted) = (true, 0, false, 0, 0, false);
        Taken { verdict, sure, left, touch, unknown, spilled, refused, uncounted }
    }

    #[test]
    fn only_large_denials_are_dropped_when_more_waits_than_there_is_room_for() {
        let queue = DirtyQueue::new(0);
        let note = |place| Note::of(&taken(), 0, place).unwrap();
        let large = Note { refused: 5, ..note(0) };
        (0..100).for_each(|place| queue.push(note(place), Touch::Dirty));
        queue.push(large, Touch::None);
        let mut places: Vec<u32> =
            std::iter::from_fn(|| queue.pop()).map(|one| one.place).collect();
        places.sort_unstable();
        assert_eq!(places, (0..100).collect::<Vec<u32>>());
    }
}
