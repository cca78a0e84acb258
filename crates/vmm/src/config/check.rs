//! Checks of a configuration that need no open file.
use super::{Completion, MmioVersion, RunConfig, TransportChoice};
use crate::error::RunError;
use paravane_spec::blk::SECTOR;
use paravane_spec::builtin::{self, FIRST_GSI, IRQ_COUNT, MAX_DEVICES};
use std::time::Duration;

/// Least guest RAM: the heap starts at 8 MiB.
const MIN_MEMORY: u64 = 16 << 20;
/// Most guest RAM: the devices lie in the fourth GiB.
const MAX_MEMORY: u64 = 3 << 30;
/// Most requests in flight: the largest queue that our disks offer.
const MAX_DEPTH: u32 = 256;
/// Most bytes a request.
const MAX_BLOCK: u32 = 16 << 20;
/// Most vCPUs.
const MAX_CPUS: u16 = builtin::MAX_CPUS as u16;
/// Most I/O threads.
pub(crate) const MAX_IO_THREADS: u16 = 64;
/// Longest poll. A longer one keeps a core busy.
pub(crate) const LONGEST_POLL: Duration = Duration::from_millis(10);
/// Most devices: each has a separate line.
const MAX_LINES: usize = IRQ_COUNT - FIRST_GSI as usize;

/// Refuses a configuration.
pub(crate) fn refuse<T>(what: impl Into<String>) -> Result<T, RunError> {
    Err(RunError::Config(what.into()))
}

/// A size in MiB, or in bytes if it is not whole.
pub(crate) fn size(bytes: u64) -> String {
    if bytes.is_multiple_of(1 << 20) { format!("{} MiB", bytes >> 20) } else { format!("{bytes} bytes") }
}

/// Checks the configuration of a machine with this number of devices.
///
/// # Errors
/// The first value out of range, in one line.
pub(crate) fn check(config: &RunConfig, devices: usize) -> Result<(), RunError> {
    let most = MAX_LINES.min(MAX_DEVICES);
    if devices == 0 {
        return refuse("there is nothing to do: give at least one disk, entropy device or network card");
    }
    if devices > most {
        return refuse(format!("{devices} devices: a machine has room for {most}"));
    }
    if config.depth == 0 || config.depth > MAX_DEPTH {
        return refuse(format!("depth of {}: must be 1 to {MAX_DEPTH}", config.depth));
    }
    if config.block == 0 || !u64::from(config.block).is_multiple_of(SECTOR) || config.block > MAX_BLOCK {
        return refuse(format!(
            "block of {} bytes: must be a multiple of {SECTOR}, at most {MAX_BLOCK}",
            config.block
        ));
    }
    if config.read_percent > 100 {
        return refuse(format!("{} percent of reads: must be 0 to 100", config.read_percent));
    }
    if !(1..=MAX_CPUS).contains(&config.cpus) {
        return refuse(format!("{} CPUs: must be 1 to {MAX_CPUS}", config.cpus));
    }
    if config.memory < MIN_MEMORY || config.memory > MAX_MEMORY {
        return refuse(format!(
            "guest memory of {}: must be from {} MiB to {} MiB",
            size(config.memory),
            MIN_MEMORY >> 20,
            MAX_MEMORY >> 20
        ));
    }
    let page: u64 = if config.hugepages { 2 << 20 } else { 4096 };
    if !config.memory.is_multiple_of(page) {
        let (given, page) = (size(config.memory), size(page));
        return refuse(format!("guest memory of {given}: must be a multiple of {page}"));
    }
    if config.moves > 0
        && (config.transport == TransportChoice::Mmio || config.completion == Completion::Poll)
    {
        return refuse("interrupts can be moved on mmio-msi and PCI only, and not by a guest that polls");
    }
    if config.transport == TransportChoice::Pci && config.mmio_version != MmioVersion::V2 {
        return refuse("--mmio-version is for virtio-mmio: use --transport mmio or mmio-msi");
    }
    if let Some(threads) = config.io_threads
        && !(1..=MAX_IO_THREADS).contains(&threads)
    {
        return refuse(format!("{threads} I/O threads: must be 1 to {MAX_IO_THREADS}"));
    }
    if config.longest_poll > LONGEST_POLL {
        let (asked, most) = (config.longest_poll.as_micros(), LONGEST_POLL.as_micros());
        return refuse(format!("polls of {asked} µs: must be at most {most} µs"));
    }
    if config.hang_timeout.is_zero() {
        return refuse("hang timeout of 0: would end every run at once");
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    type Spoil = fn(&mut RunConfig);

    #[test]
    fn the_default_with_one_to_19_devices_is_fine() {
        let check = |devices| check(&RunConfig::default(), devices);
        check(1).unwrap();
        check(19).unwrap();
        assert!(check(0).unwrap_err().to_string().contains("nothing to do"));
        assert!(check(20).unwrap_err().to_string().contains("room for 19"));
    }

    #[test]
    fn each_impossible_configuration_is_refused_by_name() {
        let configurations: [(&str, Spoil); 18] = [
            ("depth of 0", |c| c.depth = 0),
            ("depth of 257", |c| c.depth = 257),
            ("block of 0", |c| c.block = 0),
            ("block of 1000", |c| c.block = 1000),
            ("101 percent", |c| c.read_percent = 101),
            ("0 CPUs: must be 1 to 64", |c| c.cpus = 0),
            ("65 CPUs", |c| c.cpus = 65),
            ("memory of 1 MiB: must be from 16 MiB", |c| c.memory = 1 << 20),
            ("memory of 10485760 MiB: must be from 16 MiB to 3072 MiB", |c| c.memory = 10 << 40),
            ("bytes: must be from 16 MiB to 3072 MiB", |c| c.memory = u64::MAX),
            ("multiple of 4096", |c| c.memory += 512),
            ("memory of 129 MiB: must be a multiple of 2 MiB", |c| {
                (c.memory, c.hugepages) = (129 << 20, true);
            }),
            ("interrupts can be moved on mmio-msi", |c| c.moves = 1),
            ("use --transport mmio or mmio-msi", |c| {
                (c.transport, c.mmio_version) = (TransportChoice::Pci, MmioVersion::V3);
            }),
            ("0 I/O threads", |c| c.io_threads = Some(0)),
            ("65 I/O threads", |c| c.io_threads = Some(65)),
            ("polls of 10001 µs", |c| c.longest_poll = Duration::from_micros(10_001)),
            ("hang timeout", |c| c.hang_timeout = Duration::ZERO),
        ];
        for (what, spoil) in configurations {
            let mut config = RunConfig::default();
            spoil(&mut config);
            let error = check(&config, 1).unwrap_err();
            assert!(error.to_string().contains(what), "{what}: {error}");
            assert_eq!(error.exit_status(), 2);
        }
    }
}
