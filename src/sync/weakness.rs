//! Switches that break the protocol on purpose, so that the search for counter-examples can show
//! that it would find such a mistake. Only the crate's own tests can throw them.

/// One way in which the protocol could be wrong.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[cfg_attr(not(all(test, feature = "sim")), allow(dead_code, reason = "only tests weaken"))]
pub(crate) enum Weakness {
    /// The store applies whatever arrives, however often.
    SequenceIgnored,
    /// A reply sets the balance, whatever was spent while it was under way.
    RepliesOverwrite,
    /// What was spent on credit is not subtracted from the level.
    DebtSkipped,
    /// A node goes on with a lease that has ended.
    LeasesNeverEnd,
    /// What is given back stays in the bucket.
    ReturnsKept,
    /// A store that lost its memory grants at once.
    NoWaitAfterLoss,
}

#[cfg(all(test, feature = "sim"))]
thread_local! {
    static THROWN: std::cell::Cell<Option<Weakness>> = const { std::cell::Cell::new(None) };
}

/// Whether the protocol is to be broken in this way, on this thread.
#[cfg(all(test, feature = "sim"))]
pub(crate) fn is_weak(weakness: Weakness) -> bool {
    THROWN.get() == Some(weakness)
}

/// Never, outside tests.
#[cfg(not(all(test, feature = "sim")))]
#[inline]
pub(crate) const fn is_weak(_: Weakness) -> bool {
    false
}

/// Runs `body` with the protocol broken in this way, on this thread.
#[cfg(all(test, feature = "sim"))]
pub(crate) fn weakened<T>(weakness: Weakness, body: impl FnOnce() -> T) -> T {
    THROWN.set(Some(weakness));
    let result = body();
    THROWN.set(None);
    result
}
