//! The machine of a run, and its noise.
use crate::machine::load_average;
use paravane_dma::MemInfo;
use serde::{Deserialize, Serialize};
use std::fs;

/// The machine of a run.
#[derive(Clone, Debug, Default, Deserialize, Serialize)]
#[serde(default)]
pub struct Host {
    /// Model of the processor.
    pub cpu: String,
    /// Processors that this process may use.
    pub cpus: usize,
    /// Memory in MiB.
    pub memory_mib: u64,
    /// Whether the processor says that a hypervisor runs it.
    pub virtual_machine: bool,
    /// Release of the kernel.
    pub kernel: String,
    /// Modules of KVM, for example "kvm\_intel"; empty without KVM.
    pub kvm: String,
    /// Frequency governor of the first processor, if it has one.
    pub governor: Option<String>,
    /// Load average over one minute, at the start and at the end.
    pub load: [Option<f64>; 2],
    /// Share of processor time that the hypervisor gave to others, in percent.
    pub steal_percent: Option<f64>,
}

/// Watches the machine during a run.
#[derive(Debug)]
pub(crate) struct HostWatch {
    load: Option<f64>,
    times: Option<Times>,
}

/// Processor time since the machine started, in ticks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Times {
    all: u64,
    stolen: u64,
}

impl HostWatch {
    pub(crate) fn start() -> Self {
        Self { load: load_average(), times: Times::read() }
    }

    /// The machine, with its noise from the start until now.
    pub(crate) fn finish(&self) -> Host {
        let cpuinfo = read("/proc/cpuinfo");
        let field = |name: &str| {
            let line =
                cpuinfo.lines().find(|line| line.split(':').next().is_some_and(|key| key.trim() == name))?;
            Some(line.split_once(':')?.1.trim().to_owned())
        };
        let steal = self.times.zip(Times::read()).and_then(|(from, to)| {
            let all = to.all.checked_sub(from.all).filter(|all| *all > 0)?;
            Some(100.0 * to.stolen.saturating_sub(from.stolen) as f64 / all as f64)
        });
        let governor = read("/sys/devices/system/cpu/cpu0/cpufreq/scaling_governor").trim().to_owned();
        Host {
            cpu: field("model name").unwrap_or_else(|| "unknown".to_owned()),
            cpus: crate::machine::cpus().len(),
            memory_mib: MemInfo::read().get("MemTotal").unwrap_or(0) / 1024,
            virtual_machine: field("flags")
                .is_some_and(|flags| flags.split(' ').any(|flag| flag == "hypervisor")),
            kernel: read("/proc/sys/kernel/osrelease").trim().to_owned(),
            kvm: kvm_modules(),
            governor: Some(governor).filter(|name| !name.is_empty()),
            load: [self.load, load_average()],
            steal_percent: steal,
        }
    }
}

impl Times {
    fn read() -> Option<Self> {
        Self::parse(&read("/proc/stat"))
    }

    /// The first line of /proc/stat; guest time is in user time already.
    fn parse(stat: &str) -> Option<Self> {
        let mut words = stat.lines().next()?.split_whitespace();
        (words.next()? == "cpu").then_some(())?;
        let ticks: Vec<u64> = words.take(8).map_while(|word| word.parse().ok()).collect();
        Some(Self {
            all: ticks.iter().fold(0, |all, part| all.saturating_add(*part)),
            stolen: *ticks.get(7)?,
        })
    }
}

/// The modules below /sys/module that implement KVM on this processor.
fn kvm_modules() -> String {
    if !std::path::Path::new("/dev/kvm").exists() {
        return String::new();
    }
    let mut names: Vec<String> = fs::read_dir("/sys/module")
        .into_iter()
        .flatten()
        .filter_map(|entry| entry.ok()?.file_name().into_string().ok())
        .filter(|name| name.starts_with("kvm_"))
        .collect();
    names.sort();
    if names.is_empty() { "kvm".to_owned() } else { names.join(", ") }
}

fn read(path: &str) -> String {
    fs::read_to_string(path).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn stolen_time_is_the_eighth_number() {
        let times = Times::parse("cpu  1 2 3 4 5 6 7 8 90 100\ncpu0 1").unwrap();
        assert_eq!(times, Times { all: 36, stolen: 8 });
        assert_eq!(Times::parse("cpu 1 2 3"), None);
        assert_eq!(Times::parse(""), None);
    }

    #[test]
    fn this_machine_has_a_processor() {
        let host = HostWatch::start().finish();
        assert!(host.cpus > 0 && host.memory_mib > 0 && !host.kernel.is_empty(), "{host:?}");
    }
}
