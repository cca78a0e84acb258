//! Rank tests: Mann-Whitney for two runs, Wilcoxon's for two builds in one run.
//!
//! Both ask how likely a difference at least this large is if nothing changed. They assume no
//! distribution of noise, so one round that an interrupt spoilt weighs no more than any other. Up
//! to [`EXACT`] values they count all arrangements, ties included; above, they use the normal
//! approximation.

/// The most values whose arrangements are counted.
const EXACT: usize = 50;

/// Two-sided p of Mann-Whitney's test.
pub(super) fn mann_whitney(a: &[f64], b: &[f64]) -> f64 {
    let (n, total) = (a.len(), a.len() + b.len());
    if n == 0 || b.is_empty() {
        return 1.0;
    }
    let all: Vec<f64> = a.iter().chain(b).copied().collect();
    let ranks = doubled_ranks(&all);
    let sum: usize = ranks[..n].iter().sum();
    let expected = n * (total + 1);
    let distance = sum.abs_diff(expected);
    if total <= EXACT {
        return tail(&sums_of_subsets(&ranks, n), expected, distance);
    }
    // The variance of the doubled sum, from the ranks themselves: ties are in it.
    let mean = (total + 1) as f64;
    let squares: f64 = ranks.iter().map(|&rank| (rank as f64 - mean).powi(2)).sum();
    let variance = n as f64 * (total - n) as f64 * squares / (total as f64 * (total as f64 - 1.0));
    normal(distance as f64, variance)
}

/// Two-sided p of Wilcoxon's test of differences. Differences of zero are left out.
pub(super) fn signed_rank(differences: &[f64]) -> f64 {
    let differences: Vec<f64> = differences.iter().copied().filter(|value| *value != 0.0).collect();
    let sizes: Vec<f64> = differences.iter().map(|value| value.abs()).collect();
    let ranks = doubled_ranks(&sizes);
    let all: usize = ranks.iter().sum();
    let positive: usize =
        ranks.iter().zip(&differences).filter(|(_, value)| **value > 0.0).map(|(rank, _)| rank).sum();
    // Doubled once more, because half of the sum may be no integer.
    let distance = (2 * positive).abs_diff(all);
    if ranks.len() <= EXACT {
        let counts = sums_of_signs(&ranks);
        let extreme =
            |(sum, count): (usize, &f64)| if (2 * sum).abs_diff(all) >= distance { *count } else { 0.0 };
        return (counts.iter().enumerate().map(extreme).sum::<f64>() / counts.iter().sum::<f64>()).min(1.0);
    }
    let variance: f64 = ranks.iter().map(|&rank| (rank * rank) as f64).sum();
    normal(distance as f64, variance)
}

/// The smallest p that [`mann_whitney`] can return for this many values.
pub(super) fn smallest_of_runs(n: usize, m: usize) -> f64 {
    let small = n.min(m);
    let combinations: f64 = (1..=small).map(|i| (n + m - small + i) as f64 / i as f64).product();
    (2.0 / combinations).min(1.0)
}

/// The smallest p that [`signed_rank`] can return for this many differences.
pub(super) fn smallest_of_pairs(n: usize) -> f64 {
    (2.0 * 0.5_f64.powi(i32::try_from(n).unwrap_or(i32::MAX))).min(1.0)
}

/// Place where the 95 % interval begins, for runs of `n` and `m` rounds.
///
/// Counted from 1 and from either end of the sorted differences between the runs.
///
/// With few rounds it is 1, and the interval holds less.
pub(super) fn place_in_runs(n: usize, m: usize) -> usize {
    let total = n + m;
    if total <= EXACT {
        let ranks: Vec<usize> = (1..=total).collect();
        return place(&sums_of_subsets(&ranks, n)[n * (n + 1) / 2..]);
    }
    let (n, m) = (n as f64, m as f64);
    (n * m / 2.0 - 1.96 * (n * m * (n + m + 1.0) / 12.0).sqrt()).max(1.0) as usize
}

/// Place where the 95 % interval begins, for `n` pairs.
///
/// Counted as by [`place_in_runs`], in the sorted means of any two differences, each paired with
/// itself, too.
pub(super) fn place_in_pairs(n: usize) -> usize {
    if n <= EXACT {
        let ranks: Vec<usize> = (1..=n).collect();
        return place(&sums_of_signs(&ranks));
    }
    let n = n as f64;
    (n * (n + 1.0) / 4.0 - 1.96 * (n * (n + 1.0) * (2.0 * n + 1.0) / 24.0).sqrt()).max(1.0) as usize
}

/// How many counts make up a lower tail of at most 2.5 %; at least 1.
fn place(counts: &[f64]) -> usize {
    let all: f64 = counts.iter().sum();
    let mut below = 0.0;
    counts
        .iter()
        .take_while(|count| {
            below += **count;
            below <= 0.025 * all
        })
        .count()
        .max(1)
}

/// Doubled ranks of the values; equal values share the mean of their ranks.
fn doubled_ranks(values: &[f64]) -> Vec<usize> {
    let mut order: Vec<usize> = (0..values.len()).collect();
    order.sort_by(|&a, &b| values[a].total_cmp(&values[b]));
    let mut ranks = vec![0; values.len()];
    let mut first = 0;
    for group in order.chunk_by(|&a, &b| values[a] == values[b]) {
        // Ranks first + 1 to first + length.
        for &at in group {
            ranks[at] = 2 * first + group.len() + 1;
        }
        first += group.len();
    }
    ranks
}

/// The number of subsets of `size` for each sum of ranks.
fn sums_of_subsets(ranks: &[usize], size: usize) -> Vec<f64> {
    let most: usize = ranks.iter().sum();
    let mut counts = vec![vec![0.0; most + 1]; size + 1];
    counts[0][0] = 1.0;
    let mut reached = 0;
    for &rank in ranks {
        for chosen in (1..=size).rev() {
            let (below, here) = counts.split_at_mut(chosen);
            let from = &below[chosen - 1][..=reached];
            for (to, from) in here[0][rank..].iter_mut().zip(from) {
                *to += from;
            }
        }
        reached += rank;
    }
    counts.swap_remove(size)
}

/// The number of choices of signs for each sum of the ranks with a positive sign.
fn sums_of_signs(ranks: &[usize]) -> Vec<f64> {
    let most: usize = ranks.iter().sum();
    let mut counts = vec![0.0; most + 1];
    counts[0] = 1.0;
    for &rank in ranks {
        for sum in (rank..=most).rev() {
            counts[sum] += counts[sum - rank];
        }
    }
    counts
}

/// The share of counts at least `distance` from `expected`.
fn tail(counts: &[f64], expected: usize, distance: usize) -> f64 {
    let all: f64 = counts.iter().sum();
    let extreme: f64 =
        counts.iter().enumerate().filter(|(sum, _)| sum.abs_diff(expected) >= distance).map(|(_, n)| n).sum();
    (extreme / all).min(1.0)
}

/// Two-sided tail of a normal distribution.
fn normal(distance: f64, variance: f64) -> f64 {
    if variance <= 0.0 {
        return 1.0;
    }
    let z = distance / variance.sqrt();
    // Abramowitz and Stegun 7.1.26, good to 1.5e-7.
    let x = z / std::f64::consts::SQRT_2;
    let t = 1.0 / (1.0 + 0.327_591_1 * x);
    let series = [0.254_829_592, -0.284_496_736, 1.421_413_741, -1.453_152_027, 1.061_405_429];
    let sum = series.iter().rev().fold(0.0, |sum, factor| (sum + factor) * t);
    (sum * (-x * x).exp()).clamp(0.0, 1.0)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn near(value: f64, expected: f64) {
        assert!((value - expected).abs() < 1e-9, "{value} is not {expected}");
    }

    /// Expected values: scipy.stats.mannwhitneyu and wilcoxon, and tables.
    #[test]
    fn small_samples_are_exact() {
        near(mann_whitney(&[1.0, 2.0, 3.0, 4.0, 5.0], &[6.0, 7.0, 8.0, 9.0, 10.0]), 2.0 / 252.0);
        near(mann_whitney(&[1.0, 2.0, 3.0], &[1.5, 2.5, 3.5]), 0.7);
        near(mann_whitney(&[1.0; 5], &[1.0; 5]), 1.0);
        near(mann_whitney(&[1.0; 5], &[2.0; 5]), 2.0 / 252.0);
        near(signed_rank(&[1.0, 2.0, 3.0, 4.0, 5.0]), 2.0 / 32.0);
        near(signed_rank(&[1.0, -2.0, 3.0, 4.0, 5.0]), 6.0 / 32.0);
        near(signed_rank(&[0.0, 0.0]), 1.0);
        near(smallest_of_runs(5, 5), 2.0 / 252.0);
        near(smallest_of_runs(9, 5), 2.0 / 2002.0);
        near(smallest_of_pairs(8), 2.0 / 256.0);
    }

    #[test]
    fn cuts_are_those_of_tables() {
        // Critical values of U and of W at 5 %, two-sided, plus one.
        for (n, m, critical) in [(5, 5, 2), (8, 8, 13), (10, 10, 23), (5, 9, 7)] {
            assert_eq!(place_in_runs(n, m), critical + 1, "{n} {m}");
        }
        assert_eq!(place_in_runs(3, 3), 1);
        for (n, place) in [(5, 1), (6, 1), (8, 4), (10, 9), (15, 26)] {
            assert_eq!(place_in_pairs(n), place, "{n}");
        }
    }

    #[test]
    fn large_samples_agree_with_small_ones() {
        let a: Vec<f64> = (0..25).map(|i| f64::from(i * 7 % 25)).collect();
        let b: Vec<f64> = a.iter().map(|value| value + 4.3).collect();
        let exact = mann_whitney(&a, &b);
        let (a, b): (Vec<f64>, Vec<f64>) = ([&a[..], &[3.5]].concat(), [&b[..], &[7.5]].concat());
        let close = mann_whitney(&a, &b);
        assert!((exact - close).abs() < 0.01 && exact < 0.05, "{exact} {close}");
        let differences: Vec<f64> =
            (1..=60).map(|i| f64::from(i) * if i % 3 == 0 { -1.0 } else { 1.0 }).collect();
        let p = signed_rank(&differences);
        assert!(p > 0.001 && p < 0.05, "{p}");
        assert_eq!(signed_rank(&differences[..0]), 1.0);
    }
}
