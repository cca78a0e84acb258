//! Interrupts by irqfd and by KVM_SIGNAL_MSI.
use crate::figures::{Figure, by};
use crate::spread::Spread;
use paravane_vmm::MsiDelivery;
use paravane_vmm::injection::{GuestState, Injections, measure};

/// The deliveries, KVM_SIGNAL_MSI first.
const DELIVERIES: [MsiDelivery; 2] = [MsiDelivery::Signal, MsiDelivery::Irqfd];

/// The states of the guest, and the names of the cases.
pub(super) const STATES: [(GuestState, &str); 3] = [
    (GuestState::Halted, "injection/halted"),
    (GuestState::Computing, "injection/computing"),
    (GuestState::Stopped, "injection/stopped"),
];

/// Takes one sample of both deliveries, by name; `None` without KVM.
///
/// The guest runs on `cpu`. `real_time` is part of the method.
///
/// # Errors
/// Why there are no figures, in one line.
#[allow(clippy::type_complexity, reason = "names and their figures")]
pub(super) fn sample(
    state: GuestState,
    samples: usize,
    cpu: Option<usize>,
    real_time: bool,
) -> Result<Option<[(&'static str, Vec<(Figure, f64)>); 2]>, String> {
    match measure(state, DELIVERIES, samples, cpu) {
        Ok([signal, irqfd]) => {
            let figures = |found: &Injections| figures(found, real_time);
            Ok(Some([("signal-msi", figures(&signal)), ("irqfd", figures(&irqfd))]))
        }
        Err(paravane_vmm::RunError::NoKvm(_)) => Ok(None),
        Err(error) => Err(error.to_string()),
    }
}

fn figures(found: &Injections, real_time: bool) -> Vec<(Figure, f64)> {
    let figure = |metric, unit| Figure::new(metric, unit, by("clock", "kvm", real_time));
    let [call, _] = percentiles(&found.call);
    let mut figures = vec![(figure("call", "ns"), call)];
    if !found.latency.is_empty() {
        let [median, p99] = percentiles(&found.latency);
        figures.push((figure("latency-p50", "us"), median / 1e3));
        figures.push((figure("latency-p99", "us"), p99 / 1e3));
    }
    figures
}

/// Median and 99th percentile.
fn percentiles(values: &[u64]) -> [f64; 2] {
    let mut sorted: Vec<f64> = values.iter().map(|&value| value as f64).collect();
    sorted.sort_by(f64::total_cmp);
    let median = Spread::of(&sorted).map_or(0.0, |spread| spread.median);
    let p99 = sorted.get(sorted.len() * 99 / 100).copied().unwrap_or(0.0);
    [median, p99]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn percentiles_of_known_values() {
        let values: Vec<u64> = (1..=200).rev().collect();
        assert_eq!(percentiles(&values), [100.5, 199.0]);
        assert_eq!(percentiles(&[]), [0.0, 0.0]);
    }
}
