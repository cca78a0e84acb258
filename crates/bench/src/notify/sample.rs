//! One sample: a run of the microVM, and the figures of its measured phase.
use super::case::{Case, SampleSize, Subject};
use super::inline::Inline;
use super::process::Process;
use crate::figures::{Figure, by};
use crate::guest::{self, Image, Sample};
use paravane_vmm::{AccelChoice, MsiDelivery, RunConfig, TransportChoice};
use std::sync::Arc;

/// Runs the machine once, with the guest on `cpu`.
///
/// `real_time` is part of the method.
///
/// # Errors
/// Why there are no figures, in one line.
pub(super) fn sample(
    case: Case,
    subject: Subject,
    accel: AccelChoice,
    size: SampleSize,
    image: &Image,
    cpu: Option<usize>,
    real_time: bool,
) -> Result<Vec<(Figure, f64)>, String> {
    let device = case.device(size, image);
    let mut config = RunConfig {
        accel,
        transport: TransportChoice::MmioMsi,
        // Another process can interrupt the guest only by a file descriptor.
        msi_delivery: if subject == Subject::Process { MsiDelivery::Irqfd } else { MsiDelivery::default() },
        ioeventfd: matches!(subject, Subject::IoEventFd | Subject::Process),
        time_kicks: true,
        vcpu_cpus: cpu.into_iter().collect(),
        ..case.machine(size, device)
    };
    if subject == Subject::Inline {
        let inline = Inline::new().map_err(|error| format!("cannot find its CPUs: {error}"))?;
        config.server = Some(Arc::new(inline));
    }
    if subject != Subject::Process {
        return Ok(figures(case, &guest::run(&config, &[device])?, real_time));
    }
    let refused = |error| format!("cannot start a process that serves queues: {error}");
    let process = Process::spawn(config.memory, device, image.fd()).map_err(refused)?;
    config.server = Some(process.clone());
    let sample = guest::run(&config, &[device])?;
    process.check()?;
    Ok(figures(case, &sample, real_time))
}

fn figures(case: Case, sample: &Sample, real_time: bool) -> Vec<(Figure, f64)> {
    let Sample { accel, count, per_s, phase, stops, .. } = sample;
    let figure = |metric, unit, method| Figure::new(metric, unit, by(method, accel, real_time));
    let megabytes = case.bytes() / 1e6;
    let rate = if case.is_exchange() {
        (figure("rate", "transactions/s", "clock"), *per_s)
    } else {
        (figure("rate", "MB/s", "clock"), per_s * megabytes)
    };
    let mut figures = vec![rate];
    if phase.cpu_s > 0.0 {
        let efficiency = count * megabytes / phase.cpu_s;
        figures.push((figure("mb-per-cpu", "MB/CPU s", "process clock"), efficiency));
    }
    // A run without kicks has no such figure.
    if let Some(stops) = stops {
        figures.push((figure("kick-stop", "us", "guest's tsc"), stops.mean_ns / 1e3));
        figures.push((figure("kick-stop-p50", "us", "guest's tsc"), stops.median_ns / 1e3));
    }
    let counts = [("kicks", phase.kicks), ("exits", phase.exits.total()), ("interrupts", phase.interrupts)];
    for (metric, value) in counts {
        figures.push((figure(metric, "1/request", "count"), value as f64 / count));
    }
    figures.push((figure("cpu", "us/request", "process clock"), sample.cpu_us()));
    figures
}
