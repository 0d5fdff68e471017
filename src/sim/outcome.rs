//! What came of a run.

use super::figures::Figures;
use super::setup::Traffic;

/// What came of a run.
#[derive(Clone, Debug, PartialEq)]
pub struct Outcome {
    /// What was admitted, against the ideal.
    pub figures: Figures,
    /// What it cost.
    pub traffic: Traffic,
}
