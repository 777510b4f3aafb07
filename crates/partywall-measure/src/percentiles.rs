//! Percentiles by nearest rank.
//!
//! All samples are stored, because there are thousands of them, not millions, and in every unit. A histogram such as
//! hdrhistogram would round each sample to an integer bucket of a range that is chosen in advance, and only save
//! sorting.

use serde::{Deserialize, Serialize};

use crate::Error;

/// The distribution of a set of samples.
///
/// There is no mean, because a mean hides the slow samples that users notice. Percentiles are by
/// nearest rank, so each number is a sample that occurred. With fewer than 1,000 samples `p999` is
/// therefore the maximum, and with fewer than 100 so is `p99`; judge them together with `n`.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Percentiles {
    /// The number of samples.
    pub n: usize,
    /// The smallest sample: for a rate, the worst one.
    pub min: f64,
    /// 25 % of the samples are at most this.
    pub p25: f64,
    /// The median.
    pub p50: f64,
    /// 75 % of the samples are at most this.
    pub p75: f64,
    /// 90 % of the samples are at most this.
    pub p90: f64,
    /// 99 % of the samples are at most this.
    pub p99: f64,
    /// 99.9 % of the samples are at most this.
    #[serde(rename = "p99.9")]
    pub p999: f64,
    /// The largest sample.
    pub max: f64,
}

impl Percentiles {
    /// Summarises samples in any order. Fails when there are none.
    ///
    /// Samples must be finite; [`crate::Comparison::run`] refuses others before.
    pub fn of(samples: &[f64]) -> Result<Self, Error> {
        let mut sorted = samples.to_vec();
        sorted.sort_unstable_by(f64::total_cmp);
        let (Some(&min), Some(&max)) = (sorted.first(), sorted.last()) else {
            return Err(Error::NoSamples);
        };
        Ok(Self {
            n: sorted.len(),
            min,
            p25: nearest_rank(&sorted, 250),
            p50: nearest_rank(&sorted, 500),
            p75: nearest_rank(&sorted, 750),
            p90: nearest_rank(&sorted, 900),
            p99: nearest_rank(&sorted, 990),
            p999: nearest_rank(&sorted, 999),
            max,
        })
    }
}

/// Returns the smallest sample that at least `per_mille` thousandths of all samples do not exceed.
///
/// The rank is computed in integers: in floating point 0.999 × 1000 is above 999, and the percentile
/// would be one sample too high.
fn nearest_rank(sorted: &[f64], per_mille: usize) -> f64 {
    let rank = (sorted.len() * per_mille).div_ceil(1000).max(1);
    sorted[rank - 1]
}

#[cfg(test)]
mod tests {
    use super::*;

    fn one_to(n: u32) -> Vec<f64> {
        // Backwards, because the order must not matter.
        (1..=n).rev().map(f64::from).collect()
    }

    #[test]
    fn a_thousand_samples_hit_the_ranks_exactly() {
        let p = Percentiles::of(&one_to(1000)).unwrap();
        assert_eq!((p.n, p.min, p.p50, p.p90, p.p99, p.p999, p.max), (1000, 1.0, 500.0, 900.0, 990.0, 999.0, 1000.0));
    }

    #[test]
    fn ranks_between_samples_round_up() {
        // The textbook example of nearest rank: five values, the 30th percentile is the second.
        let sorted = [15.0, 20.0, 35.0, 40.0, 50.0];
        assert_eq!(nearest_rank(&sorted, 50), 15.0);
        assert_eq!(nearest_rank(&sorted, 300), 20.0);
        assert_eq!(nearest_rank(&sorted, 400), 20.0);
        assert_eq!(nearest_rank(&sorted, 500), 35.0);
        assert_eq!(nearest_rank(&sorted, 1000), 50.0);
        assert_eq!(nearest_rank(&sorted, 0), 15.0);
    }

    #[test]
    fn few_samples_have_their_maximum_as_tail() {
        let p = Percentiles::of(&one_to(10)).unwrap();
        assert_eq!((p.p50, p.p90, p.p99, p.p999), (5.0, 9.0, 10.0, 10.0));
        let p = Percentiles::of(&[7.0]).unwrap();
        assert_eq!((p.n, p.min, p.p50, p.p999, p.max), (1, 7.0, 7.0, 7.0, 7.0));
    }

    #[test]
    fn one_outlier_in_ten_thousand_shows_only_in_the_maximum() {
        let mut samples = vec![1.0; 9_999];
        samples.push(1e6);
        let p = Percentiles::of(&samples).unwrap();
        assert_eq!((p.p50, p.p999, p.max), (1.0, 1.0, 1e6));
    }

    #[test]
    fn no_samples_is_an_error() {
        assert!(matches!(Percentiles::of(&[]), Err(Error::NoSamples)));
    }
}
