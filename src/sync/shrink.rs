//! Room that accounts took up while there were many, and that is freed when there are few.

use slab::Slab;

/// Room for this many is kept.
const ROOM_KEPT: usize = 64;

/// Frees what is not used at the end, now and then, when a quarter is left or less.
pub(super) fn give_back<T>(slab: &mut Slab<T>) {
    // What is left may stand at the end: so it is tried again each time that half of them are gone.
    let halved = slab.len().is_power_of_two() || slab.is_empty();
    if halved && slab.len() <= slab.capacity() / 4 && slab.capacity() > ROOM_KEPT {
        slab.shrink_to_fit();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn room_of_accounts_is_freed_when_most_are_closed() {
        let mut slab = Slab::new();
        (0..10_000).for_each(|number| assert_eq!(slab.insert(number), number));
        let most = slab.capacity();
        for number in (0..10_000).rev() {
            assert_eq!(slab.remove(number), number);
            give_back(&mut slab);
            assert!(slab.is_empty() || slab.contains(0));
            assert!(slab.len() > most / 8 || slab.capacity() <= most / 2);
        }
        assert!(slab.capacity() <= ROOM_KEPT);
    }

    #[test]
    fn room_of_accounts_is_kept_while_more_than_a_quarter_of_it_is_used() {
        let mut slab = Slab::with_capacity(1_000);
        (0..256).for_each(|number| assert_eq!(slab.insert(number), number));
        give_back(&mut slab);
        assert!(slab.capacity() >= 1_000);
        (128..256).for_each(|number| assert_eq!(slab.remove(number), number));
        give_back(&mut slab);
        assert!(slab.capacity() < 1_000, "half of them are gone");
    }
}
