//! What a key begins with: its credit and its plan.

/// What a key begins with.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct NewKey {
    /// What may be spent on it before the store answers, in tokens.
    pub(crate) first_credit: u32,
    /// The [number](crate::limit::LimitInfo::number) of the plan that it is under, or [`NO_PLAN`](Self::NO_PLAN).
    pub(crate) plan: u32,
}

impl NewKey {
    /// In place of a plan: keys of several plans share the bucket, or the limit's own terms hold.
    pub(crate) const NO_PLAN: u32 = 0;

    /// A key of the limit's own terms.
    pub(crate) const fn with_credit(first_credit: u32) -> Self {
        Self { first_credit, plan: Self::NO_PLAN }
    }
}
