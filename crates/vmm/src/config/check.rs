//! Checks of a configuration that need no open file.
use super::{DiskConfig, Job, NetConfig, Network, RunConfig};
use crate::error::RunError;
use paravane_spec::blk::SECTOR;
use paravane_spec::builtin::{FIRST_GSI, IRQ_COUNT, MAX_DEVICES};
use std::time::Duration;

/// Least guest RAM: the heap starts at 8 MiB.
const MIN_MEMORY: u64 = 16 << 20;
/// Most guest RAM: the devices lie in the fourth GiB.
const MAX_MEMORY: u64 = 3 << 30;
/// Most requests in flight: the largest queue that our disks offer.
const MAX_DEPTH: u32 = 256;
/// Most bytes a request.
const MAX_BLOCK: u32 = 16 << 20;
/// Most network cards: the guest has private memory for the frames of 4.
const MAX_NETS: usize = 4;
/// Most pairs of queues of a card.
const MAX_PAIRS: u16 = 8;
/// Shortest frame of the echo job: addresses, type and a number.
///
/// Longest: the largest MTU and an Ethernet header.
const FRAMES: std::ops::RangeInclusive<u32> = 22..=65_549;
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

/// Checks what needs no look at a disk.
///
/// # Errors
/// The first value out of range, in one line.
pub(crate) fn check(config: &RunConfig) -> Result<(), RunError> {
    let devices = config.disks.len() + usize::from(config.entropy > 0) + config.nets.len();
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
    if config.memory < MIN_MEMORY || config.memory > MAX_MEMORY {
        return refuse(format!(
            "guest memory of {} bytes: must be from {} MiB to {} MiB",
            config.memory,
            MIN_MEMORY >> 20,
            MAX_MEMORY >> 20
        ));
    }
    let page: u64 = if config.hugepages { 2 << 20 } else { 4096 };
    if !config.memory.is_multiple_of(page) {
        return refuse(format!("guest memory of {} bytes: must be a multiple of {page}", config.memory));
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
    for disk in &config.disks {
        check_disk(disk)?;
    }
    if config.nets.len() > MAX_NETS {
        return refuse(format!(
            "{} network cards: the built-in guest drives at most {MAX_NETS}",
            config.nets.len()
        ));
    }
    config.nets.iter().try_for_each(check_net)
}

/// Checks that the built-in guest has a job for each card.
///
/// # Errors
/// The first card without a job, in one line.
pub(crate) fn check_jobs(nets: &[NetConfig]) -> Result<(), RunError> {
    for (number, net) in nets.iter().enumerate() {
        match &net.network {
            Network::Echo | Network::EchoPeer | Network::Sink | Network::Source => {}
            Network::Tap(_) | Network::TapFds(_) => {
                return refuse(
                    "TAP devices are for a kernel (--kernel): the built-in guest does not use them",
                );
            }
            Network::Link(_) if net.reply.is_some() => {
                return refuse("reply size: a link's far card always answers with as many bytes as it gets");
            }
            Network::Link(name) => {
                let differs = |before: &NetConfig| (before.frames, before.size) != (net.frames, net.size);
                if nets[..number].iter().any(|before| before.network == net.network && differs(before)) {
                    return refuse(format!(
                        "link {name:?}: its cards exchange different frames; give both the same number and size"
                    ));
                }
            }
        }
    }
    Ok(())
}

fn check_net(net: &NetConfig) -> Result<(), RunError> {
    for size in [net.size, net.reply()] {
        if !FRAMES.contains(&size) {
            let (least, most) = (FRAMES.start(), FRAMES.end());
            return refuse(format!("frames of {size} bytes: must be {least} to {most}"));
        }
    }
    if net.queues == 0 || net.queues > MAX_PAIRS {
        return refuse(format!("{} pairs of queues: must be 1 to {MAX_PAIRS}", net.queues));
    }
    if net.frames == 0 {
        return refuse("no frames to send: a network card needs at least 1");
    }
    Ok(())
}

fn check_disk(disk: &DiskConfig) -> Result<(), RunError> {
    if disk.read_only && disk.job == Job::WriteTest {
        return refuse(format!("{}: a write test needs a disk that is not read-only", disk.path.display()));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    type Spoil = fn(&mut RunConfig);

    fn config(jobs: &[Job]) -> RunConfig {
        let disk = |&job| DiskConfig { path: "a.img".into(), read_only: false, job };
        RunConfig { disks: jobs.iter().map(disk).collect(), ..RunConfig::default() }
    }

    #[test]
    fn the_default_with_one_disk_is_fine() {
        check(&config(&[Job::Hash])).unwrap();
    }

    #[test]
    fn each_impossible_configuration_is_refused_by_name() {
        let configurations: [(&str, Spoil); 20] = [
            ("nothing to do", |c| {
                c.disks.clear();
                c.entropy = 0;
            }),
            ("room for 19", |c| c.disks = vec![c.disks[0].clone(); 19]),
            ("depth of 0", |c| c.depth = 0),
            ("depth of 257", |c| c.depth = 257),
            ("block of 0", |c| c.block = 0),
            ("block of 1000", |c| c.block = 1000),
            ("101 percent", |c| c.read_percent = 101),
            ("from 16 MiB", |c| c.memory = 1 << 20),
            ("multiple of 4096", |c| c.memory += 512),
            ("0 I/O threads", |c| c.io_threads = Some(0)),
            ("65 I/O threads", |c| c.io_threads = Some(65)),
            ("polls of 10001 µs", |c| c.longest_poll = Duration::from_micros(10_001)),
            ("hang timeout", |c| c.hang_timeout = Duration::ZERO),
            ("frames of 21 bytes", |c| c.nets = vec![NetConfig { size: 21, ..NetConfig::default() }]),
            ("frames of 65550 bytes", |c| c.nets = vec![NetConfig { size: 65_550, ..NetConfig::default() }]),
            ("frames of 14 bytes", |c| c.nets = vec![NetConfig { reply: Some(14), ..NetConfig::default() }]),
            ("9 pairs", |c| c.nets = vec![NetConfig { queues: 9, ..NetConfig::default() }]),
            ("no frames to send", |c| c.nets = vec![NetConfig { frames: 0, ..NetConfig::default() }]),
            ("5 network cards", |c| c.nets = vec![NetConfig::default(); 5]),
            ("read-only", |c| {
                c.disks[0].read_only = true;
                c.disks[0].job = Job::WriteTest;
            }),
        ];
        for (what, spoil) in configurations {
            let mut config = config(&[Job::Hash]);
            spoil(&mut config);
            let error = check(&config).unwrap_err();
            assert!(error.to_string().contains(what), "{what}: {error}");
            assert_eq!(error.exit_status(), 2);
        }
    }
}
