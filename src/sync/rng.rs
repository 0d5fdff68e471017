//! The engine's own seeded randomness, for jitter only: the same seed gives the same run.

/// `SplitMix64` (Steele, Lea, Flood 2014): one multiply-xorshift step a number.
#[derive(Clone, Debug)]
pub(crate) struct Rng(u64);

impl Rng {
    pub(crate) fn new(seed: u64) -> Self {
        Self(seed)
    }

    pub(crate) fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = self.0;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ (mixed >> 31)
    }

    /// A number below `bound`, 0 for a bound of 0.
    pub(crate) fn below(&mut self, bound: u64) -> u64 {
        ((u128::from(self.next()) * u128::from(bound)) >> 64) as u64
    }

    /// `span` and up to an eighth of it more or less, so that nodes do not fall into step.
    pub(crate) fn jitter(&mut self, span: u64) -> u64 {
        span - span / 8 + self.below(span / 4 + 1)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The first numbers that the authors' code gives for this seed.
    #[test]
    fn numbers_are_those_of_splitmix64() {
        let mut rng = Rng::new(1_234_567);
        let numbers = [(); 3].map(|()| rng.next());
        assert_eq!(
            numbers,
            [6_457_827_717_110_365_317, 3_203_168_211_198_807_973, 9_817_491_932_198_370_423]
        );
    }

    #[test]
    fn jitter_is_an_eighth_either_way() {
        let mut rng = Rng::new(1);
        let spans: Vec<u64> = (0..1_000).map(|_| rng.jitter(800)).collect();
        assert_eq!(rng.jitter(0), 0);
        assert!(spans.iter().all(|span| (700..=900).contains(span)));
        assert!(spans.iter().any(|span| *span < 720) && spans.iter().any(|span| *span > 880));
    }
}
