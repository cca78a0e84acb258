//! What changed between two questions to all daemons.
use super::history::History;
use crate::serve::report::{Device, Report};
use crate::serve::status::latency::{DeviceValues, Percentiles};
use crate::serve::status::rates::{Rates, rates};
use crate::serve::status::{Answers, reports};
use serde::Serialize;
use std::collections::HashMap;
use std::path::PathBuf;
use std::time::{Duration, Instant};

/// Figures of one device over one interval.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub(super) struct Row {
    pub(super) device: String,
    pub(super) kind: String,
    /// Process of the daemon.
    pub(super) pid: u32,
    pub(super) connected: bool,
    pub(super) problem: bool,
    #[serde(flatten)]
    pub(super) rates: Rates,
    /// Stage in which requests spent most of their time, and its share of it.
    pub(super) stage: Option<String>,
    pub(super) stage_share: Option<f64>,
    /// Buffers taken and not yet returned, now.
    pub(super) in_flight: u64,
    /// Buffers returned for each kick; `None`: there were no kicks.
    pub(super) completed_per_kick: Option<f64>,
    pub(super) completed_per_interrupt: Option<f64>,
    /// CPU time of its I/O threads, or time for which shared ones served it, in percent of one CPU.
    pub(super) cpu_percent: f64,
    /// Time for which they could run and no CPU ran them, in the same unit.
    pub(super) wait_percent: f64,
    pub(super) errors: u64,
    /// Its bytes are counted.
    #[serde(skip)]
    pub(super) has_traffic: bool,
    #[serde(skip)]
    pub(super) history: History,
}

impl Row {
    pub(super) fn latency(&self, of: fn(Percentiles) -> u64) -> Option<u64> {
        self.rates.latency.map(of)
    }
}

/// Figures of one interval.
#[derive(Clone, Debug, Default)]
pub(super) struct Sample {
    pub(super) rows: Vec<Row>,
    pub(super) daemons: usize,
    /// CPU time of the daemons with all their threads, in percent of one CPU.
    pub(super) cpu_percent: f64,
    /// Daemons without an answer, and why.
    pub(super) silent: Vec<String>,
    /// `false`: there is nothing to compare with yet, so there are no rates.
    pub(super) has_rates: bool,
}

/// Device of a daemon.
type Key = (PathBuf, u32, String);

/// Asks daemons and remembers their last answers.
#[derive(Debug)]
pub(super) struct Sampler {
    control: Option<PathBuf>,
    last: Option<(Instant, Answers)>,
    histories: HashMap<Key, History>,
}

impl Sampler {
    /// `control`: the socket of the only daemon to ask.
    pub(super) fn new(control: Option<PathBuf>) -> Self {
        Self { control, last: None, histories: HashMap::new() }
    }

    /// Asks all daemons.
    ///
    /// # Errors
    /// The only daemon does not answer, or there is no directory of control sockets.
    pub(super) fn sample(&mut self) -> Result<Sample, anyhow::Error> {
        let answers = reports(self.control.as_deref())?;
        let now = Instant::now();
        let sample = self.compare(&answers, now);
        self.last = Some((now, answers));
        Ok(sample)
    }

    fn compare(&mut self, answers: &Answers, now: Instant) -> Sample {
        let mut sample = Sample {
            daemons: answers.reports.len(),
            silent: answers.silent.clone(),
            has_rates: self.last.is_some(),
            ..Sample::default()
        };
        // The histories of devices that are gone are dropped.
        let mut histories = HashMap::new();
        for (control, report) in &answers.reports {
            let last = self.last.as_ref().and_then(|(then, last)| {
                let is_it = |(path, before): &&(PathBuf, Report)| path == control && before.pid == report.pid;
                let (_, before) = last.reports.iter().find(is_it)?;
                Some((before, now.saturating_duration_since(*then)))
            });
            if let Some((before, elapsed)) = last {
                sample.cpu_percent += percent(before.process.cpu_s, report.process.cpu_s, elapsed);
            }
            let all = last.map_or_else(Vec::new, |(before, elapsed)| rates(before, report, elapsed));
            for (index, device) in report.devices.iter().enumerate() {
                let key = (control.clone(), report.pid, device.name.clone());
                let mut history = self.histories.remove(&key).unwrap_or_default();
                let earlier = last.and_then(|(before, elapsed)| {
                    let of = before.devices.iter().find(|earlier| earlier.name == device.name)?;
                    Some((of, elapsed))
                });
                let mut row = row(device, report.pid, earlier, all.get(index).copied().unwrap_or_default());
                if earlier.is_some() {
                    history.push(row.rates.completed_per_s);
                }
                row.history = history.clone();
                histories.insert(key, history);
                sample.rows.push(row);
            }
        }
        self.histories = histories;
        sample
    }
}

fn percent(before: f64, now: f64, elapsed: Duration) -> f64 {
    if elapsed.is_zero() { 0.0 } else { (now - before).max(0.0) / elapsed.as_secs_f64() * 100.0 }
}

fn row(device: &Device, pid: u32, earlier: Option<(&Device, Duration)>, rates: Rates) -> Row {
    let ratio = |other: f64| (other > 0.0).then(|| rates.completed_per_s / other);
    let mut row = Row {
        device: device.name.clone(),
        kind: device.kind.clone(),
        has_traffic: device.net.is_some(),
        pid,
        connected: device.connected,
        problem: device.has_problem(),
        rates,
        in_flight: device.queues.iter().fold(0, |sum, queue| queue.in_flight.saturating_add(sum)),
        completed_per_kick: ratio(rates.kicks_per_s),
        completed_per_interrupt: ratio(rates.interrupts_per_s),
        errors: device.errors(),
        ..Row::default()
    };
    let Some((earlier, elapsed)) = earlier else { return row };
    let values = DeviceValues::between(earlier, device);
    if let Some((stage, share)) = values.longest_stage() {
        (row.stage, row.stage_share) = (Some(stage.to_owned()), Some(share));
    }
    if device.threads.is_empty() {
        let busy = |device: &Device| device.queues.iter().map(|queue| queue.busy_s).sum();
        row.cpu_percent = percent(busy(earlier), busy(device), elapsed);
    }
    for thread in &device.threads {
        let before = earlier.threads.iter().find(|before| before.name == thread.name);
        let (cpu, wait) = before.map_or((0.0, 0.0), |before| (before.cpu_s, before.run_delay_s));
        row.cpu_percent += percent(cpu, thread.cpu_s, elapsed);
        row.wait_percent += percent(wait, thread.run_delay_s, elapsed);
    }
    row
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::serve::report::{Distribution, Queue, StageLatency, Thread};

    fn answers(pid: u32, completed: u64, cpu_s: f64) -> Answers {
        let host = Distribution { count: completed, sum: completed, ..Distribution::default() };
        let queue = Queue {
            completed,
            kicks: completed / 10,
            stages: vec![StageLatency { stage: "host".into(), latency: host }],
            ..Queue::default()
        };
        let thread = Thread { name: "io0".into(), cpu_s, run_delay_s: cpu_s / 2.0 };
        let device =
            Device { name: "vm0".into(), queues: vec![queue], threads: vec![thread], ..Device::default() };
        let report = Report { pid, devices: vec![device], ..Report::default() };
        Answers { reports: vec![("c".into(), report)], silent: Vec::new() }
    }

    #[test]
    fn a_sample_has_the_figures_of_one_interval() {
        let mut sampler = Sampler::new(None);
        let start = Instant::now();
        let mut take = |answers: Answers, seconds: u64| {
            let now = start + Duration::from_secs(seconds);
            let sample = sampler.compare(&answers, now);
            sampler.last = Some((now, answers));
            sample
        };
        let first = take(answers(7, 1000, 1.0), 0);
        assert!(!first.has_rates);
        assert_eq!((first.rows[0].rates, first.rows[0].cpu_percent), (Rates::default(), 0.0));
        let second = take(answers(7, 3000, 2.0), 2);
        let row = &second.rows[0];
        assert_eq!((row.rates.completed_per_s, row.completed_per_kick), (1000.0, Some(10.0)));
        assert_eq!((row.cpu_percent, row.wait_percent), (50.0, 25.0));
        assert_eq!((row.completed_per_interrupt, row.stage.as_deref()), (None, Some("host")));
        assert_eq!(row.history.line(2, true), " █");
        // Another process has other counters.
        let other = take(answers(8, 9000, 9.0), 3);
        assert_eq!((other.rows[0].cpu_percent, other.rows[0].history.line(2, true)), (0.0, "  ".to_owned()));
    }
}
