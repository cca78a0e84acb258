//! Judges the jobs: the guest's figures, and whether the host agrees.
use super::plan::DiskPlan;
use super::queue_reports::QueueReports;
use super::report::Over;
use super::work::{Card, Disk, Entropy};
use crate::job::{DiskWork, Traffic};
use crate::report::{DiskResult, GuestFailure, NetResult, Outcome};
use crate::run::verify::{self, Expected, Unfinished};
use crate::run::watch::Verdict;
use paravane_device::net::Totals;
use paravane_spec::builtin::{DiskReport, error, exit, state};
use std::ops::Range;

impl Over<'_> {
    /// The outcome, the disks' figures, and the bytes moved.
    pub(super) fn judge(&self, verdict: Verdict) -> (Outcome, Vec<DiskResult>, u64) {
        let disks = &self.work.disks;
        let mut outcome = match verdict {
            Verdict::Exit(exit::DONE, _) => Outcome::Verified,
            Verdict::Exit(code, registers) => Outcome::GuestFailed(GuestFailure {
                reason: exit_reason(code, &self.machine.bus.console().last_message()),
                registers,
            }),
            Verdict::Failed(failure) => Outcome::GuestFailed(failure),
            Verdict::Cancelled => Outcome::Cancelled,
        };
        let done = outcome == Outcome::Verified;
        let mut problems = Vec::new();
        let mut moved = 0_u64;
        let mut results = Vec::with_capacity(disks.len());
        for disk in disks {
            let reports = QueueReports::read(self.area, &disk.reports);
            let mut result = figures(disk, &reports);
            moved = moved.saturating_add(reports.bytes_done());
            if done && outcome == Outcome::Verified {
                match self.look(disk, &reports, &mut result) {
                    Ok(()) => {}
                    Err(Unfinished::Cancelled) => outcome = Outcome::Cancelled,
                    Err(Unfinished::Failed(what)) => result.problem = Some(what),
                }
            }
            if let Some(problem) = &result.problem {
                problems.push(format!("{}: {problem}", result.path.display()));
            }
            results.push(result);
        }
        if done && let Some(rng) = self.work.rng {
            problems.extend(self.entropy_problem(rng));
        }
        if outcome == Outcome::Verified && !problems.is_empty() {
            outcome = Outcome::NotVerified(problems);
        }
        (outcome, results, moved)
    }

    /// Figures of a card, and whether guest and device count the same frames.
    pub(super) fn judge_net(&self, card: &Card, counted: &Totals, finished: bool) -> NetResult {
        let Card { number, mac, pairs, job: net, reports } = card;
        let reports = QueueReports::read(self.area, reports);
        let mut result = NetResult {
            network: net.network,
            mac: *mac,
            queues: *pairs,
            size: net.size,
            reply: net.reply,
            frames: 0,
            per_s: 0.0,
            p50_us: 0.0,
            p99_us: 0.0,
            p999_us: 0.0,
            problem: None,
        };
        if let Some(all) = reports.all() {
            let (sent, received) = match net.traffic {
                Traffic::Send => (net.frames, 0),
                Traffic::Receive => (0, net.frames),
                Traffic::Exchange | Traffic::Mirror => (net.frames, net.frames),
            };
            result.frames = reports.ops().min(counted.transmitted.max(counted.received));
            [result.per_s, _] = reports.rates();
            [result.p50_us, result.p99_us, result.p999_us] = reports.latencies();
            let lost = (counted.transmitted, counted.received) != (sent, received);
            result.problem = all.into_iter().find_map(net_problem).or_else(|| {
                lost.then(|| {
                    format!(
                        "expected {sent} frames sent and {received} received, but the card counted {counted:?}"
                    )
                })
            });
        } else {
            result.problem = Some("the guest's memory holds no report".into());
        }
        result.problem = result
            .problem
            .filter(|_| finished)
            .map(|problem| format!("network card {number}: {problem}{}", self.fault(*number)));
        result
    }

    /// First fault of a device, in brackets.
    fn fault(&self, number: usize) -> String {
        self.counters.fault_of(number).map(|fault| format!(" ({fault})")).unwrap_or_default()
    }

    fn entropy_problem(&self, Entropy { number, bytes }: Entropy) -> Option<String> {
        let drawn = self.area.totals().map_or(0, |totals| totals.entropy_bytes);
        if drawn >= bytes {
            return None;
        }
        let fault = self.fault(number);
        Some(format!("entropy device: the guest drew {drawn} of {bytes} bytes{fault}"))
    }

    /// Compares the image with its expected content.
    fn look(&self, disk: &Disk, reports: &QueueReports, result: &mut DiskResult) -> Result<(), Unfinished> {
        let unfinished = |what: String| Err(Unfinished::Failed(what));
        let Some(reports) = reports.all() else {
            return unfinished("the guest's memory holds no report".into());
        };
        if let Some(problem) = reports.iter().copied().find_map(guest_problem) {
            return unfinished(problem + &self.fault(disk.number));
        }
        let Disk { job, plan, .. } = disk;
        let cancel = &self.progress.cancel;
        match plan.work {
            DiskWork::Hash => {
                let (ours, of_parts) = verify::hash(&job.image, plan.parts().map(|part| part.end), cancel)?;
                result.sha256 = verify::hex(&ours);
                for (part, (report, ours)) in plan.parts().zip(reports.into_iter().zip(&of_parts)) {
                    if report.sha256 == *ours {
                        result.bytes_verified += part.end - part.start;
                    } else if result.problem.is_none() {
                        result.problem = Some(wrong_hash(plan, &part, &report.sha256, ours));
                    }
                }
            }
            DiskWork::WriteTest => {
                let block = u64::from(self.config.block);
                for (part, report) in plan.parts().zip(reports) {
                    let blocks = (part.end - part.start) / block;
                    if report.pass_map_blocks != blocks {
                        let given = report.pass_map_blocks;
                        return unfinished(format!(
                            "the guest's pass map has {given} entries instead of {blocks}"
                        ));
                    }
                    let expected = Expected { seed: self.config.seed, block, part, map: report.pass_map };
                    let found = verify::pattern(&job.image, self.area, &expected, cancel)?;
                    result.bytes_verified += found.verified;
                    result.problem = result.problem.take().or(found.mismatch);
                }
                let (whole, _) = verify::hash(&job.image, [plan.bytes], cancel)?;
                result.sha256 = verify::hex(&whole);
            }
        }
        Ok(())
    }
}

/// The problem of a part, or a whole disk, whose hash is not the host's.
fn wrong_hash(plan: &DiskPlan, part: &Range<u64>, theirs: &[u8; 32], ours: &[u8; 32]) -> String {
    let [theirs, ours] = [theirs, ours].map(verify::hex);
    let of = match plan.queues {
        1 => String::new(),
        _ => format!(" of bytes {} to {}", part.start, part.end),
    };
    format!("the guest's SHA-256{of}, {theirs}, differs from the host's, {ours}")
}

/// Rates and latencies, as the guest reports them.
fn figures(disk: &Disk, reports: &QueueReports) -> DiskResult {
    let [iops, bytes_s] = reports.rates();
    let [p50_us, p99_us, p999_us] = reports.latencies();
    DiskResult {
        path: disk.job.path.clone(),
        job: match disk.plan.work {
            DiskWork::Hash => "hash",
            DiskWork::WriteTest => "write-test",
        },
        bytes: disk.plan.bytes,
        queues: disk.plan.queues,
        sha256: String::new(),
        bytes_verified: 0,
        requests: reports.ops(),
        iops,
        mb_s: bytes_s / 1e6,
        p50_us,
        p99_us,
        p999_us,
        engine: disk.job.engine.clone(),
        problem: None,
    }
}

fn exit_reason(code: u32, last_message: &str) -> String {
    let what = match code {
        exit::PANIC => "the guest panicked".to_owned(),
        exit::BAD_BOOT_INFO => "the guest refuses its boot information".to_owned(),
        code => format!("the guest ended with code {code}"),
    };
    if last_message.is_empty() { what } else { format!("{what}: {last_message}") }
}

/// Problem that the guest reports for a network card's job.
fn net_problem(report: &DiskReport) -> Option<String> {
    match report.error {
        error::MISMATCH => {
            Some(format!("frame {} did not come back as it was sent, or was not due", report.error_detail))
        }
        _ => guest_problem(report),
    }
}

/// Problem that the guest reports for a disk's job.
fn guest_problem(report: &DiskReport) -> Option<String> {
    let (sector, detail) = (report.error_sector, report.error_detail);
    let what = match report.error {
        error::NONE if report.state == state::DONE => return None,
        error::NONE => "the guest did not finish the job".to_owned(),
        error::SETUP => format!("the guest's driver could not be set up (code {detail})"),
        error::IO => format!("the request at sector {sector} ended with status {detail}"),
        error::MISMATCH => format!("sector {sector}: the data read differ from the data written"),
        error::RING => format!("the guest found the queue broken (code {detail})"),
        error::MEMORY => "the guest has too little memory for the job".to_owned(),
        other => format!("the guest reports error {other} (detail {detail}, sector {sector})"),
    };
    Some(what)
}
