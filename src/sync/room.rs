//! Room that books took up while there were many, and that is given back when there are few.

use slab::Slab;

/// Room for so many is kept.
const ROOM_KEPT: usize = 64;

/// Frees what is not used at the end, now and then: when a quarter is left, and when nothing is.
pub(super) fn give_back<T>(slab: &mut Slab<T>) {
    let few = slab.len() == slab.capacity() / 4 || slab.is_empty();
    if few && slab.capacity() > ROOM_KEPT {
        slab.shrink_to_fit();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_many_takes_no_room_when_it_is_gone() {
        let mut slab = Slab::new();
        (0..10_000).for_each(|number| assert_eq!(slab.insert(number), number));
        let most = slab.capacity();
        for number in (0..10_000).rev() {
            assert_eq!(slab.remove(number), number);
            give_back(&mut slab);
            assert!(slab.is_empty() || slab.contains(0));
            assert!(slab.len() > most / 4 || slab.capacity() <= most / 2);
        }
        assert!(slab.capacity() <= ROOM_KEPT);
    }
}
