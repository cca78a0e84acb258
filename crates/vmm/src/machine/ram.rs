//! Guest RAM: the kind of its pages, their allocation, and what the host gave.
use super::footprint;
use crate::config::{RunConfig, size};
use crate::error::RunError;
use crate::report::MemoryFigures;
use paravane_dma::{Backing, MemInfo, Memory, MemoryError, Region, RegionConfig};
use rustix::process::{Resource, getrlimit};
use std::io::{self, ErrorKind};
use std::sync::Arc;

/// Makes the machine's RAM.
///
/// It is private memory with transparent huge pages, unless another process serves queues in it.
///
/// # Errors
/// The host does not have so much, or not of that kind.
pub(crate) fn ram(config: &RunConfig) -> Result<(Arc<Region>, Memory), RunError> {
    if let Some(refusal) = refusal(config, &MemInfo::read()) {
        return Err(RunError::Config(refusal));
    }
    let backing = match &config.server {
        _ if config.hugepages => Backing::HugePages,
        Some(_) => Backing::Pages,
        None => Backing::Private,
    };
    let region = Region::new(RegionConfig { gpa: 0, size: config.memory, backing, writable: true });
    let region = region.map_err(|error| unmapped(config.memory, error, getrlimit(Resource::As).current))?;
    if config.prefault {
        region.populate().map_err(|source| unallocated(config.memory, &source))?;
    }
    let memory = Memory::new(vec![Arc::clone(&region)])?;
    Ok((region, memory))
}

/// Says what to do if the host maps no `bytes` of memory; `limit` is this process's, in bytes.
fn unmapped(bytes: u64, error: MemoryError, limit: Option<u64>) -> RunError {
    match error {
        MemoryError::Os { what: "map", source, .. } if source.kind() == ErrorKind::OutOfMemory => {
            let advice = match limit {
                Some(limit) => format!("raise this process's limit of {} (ulimit -v)", size(limit)),
                None => "let the host promise more than it has (sysctl vm.overcommit_memory=0)".to_owned(),
            };
            let bytes = size(bytes);
            RunError::Config(format!(
                "cannot map guest memory of {bytes}: {source}; lower --memory, or {advice}"
            ))
        }
        other => other.into(),
    }
}

/// Says what to do if the host cannot allocate `bytes` of memory now.
fn unallocated(bytes: u64, source: &io::Error) -> RunError {
    let advice = match source.kind() {
        ErrorKind::InvalidInput => "drop --prefault, which needs Linux 5.14",
        _ => "lower --memory, or drop --prefault",
    };
    RunError::Config(format!("cannot allocate guest memory of {}: {source}; {advice}", size(bytes)))
}

/// Why the host cannot give the memory; `None`: it may be able to.
fn refusal(config: &RunConfig, host: &MemInfo) -> Option<String> {
    if config.hugepages {
        // Of another pool, which says so itself.
        return None;
    }
    let (name, what) = if config.prefault { ("MemAvailable", "available") } else { ("MemTotal", "in all") };
    let has = host.get(name)?;
    let wanted = config.memory >> 10;
    (wanted > has).then(|| {
        let (wanted, has) = (size(config.memory), has >> 10);
        let advice = if config.prefault { ", or drop --prefault" } else { "" };
        format!("guest memory of {wanted}: the host has {has} MiB {what}; lower --memory{advice}")
    })
}

/// What the host gave the guest until now.
pub(crate) fn figures(region: &Region) -> MemoryFigures {
    let (resident, huge) = footprint::guest_memory(region);
    MemoryFigures { bytes: region.size(), is_shared: region.fd().is_some(), resident, huge }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_that_the_host_lacks_is_refused() {
        let text = "MemTotal:         102400 kB\nMemFree:            1024 kB\nMemAvailable:      51200 kB\n";
        let host = &MemInfo::from_text(text);
        let config = |mib: u64, prefault, hugepages| RunConfig {
            memory: mib << 20,
            prefault,
            hugepages,
            ..RunConfig::default()
        };
        assert_eq!(refusal(&config(100, false, false), host), None);
        assert_eq!(refusal(&config(50, true, false), host), None);
        assert_eq!(refusal(&config(500, true, true), host), None);
        assert_eq!(refusal(&config(500, true, false), &MemInfo::from_text("")), None);
        let most = refusal(&config(101, false, false), host).unwrap();
        assert_eq!(most, "guest memory of 101 MiB: the host has 100 MiB in all; lower --memory");
        let now = refusal(&config(51, true, false), host).unwrap();
        assert!(
            now.contains("has 50 MiB available") && now.ends_with("lower --memory, or drop --prefault"),
            "{now}"
        );
    }

    #[test]
    fn memory_that_the_host_does_not_map_or_allocate_is_refused_with_a_remedy() {
        let refused = |errno| MemoryError::Os {
            what: "map",
            size: 1 << 30,
            source: io::Error::from_raw_os_error(errno),
        };
        let told = |limit| unmapped(1 << 30, refused(libc::ENOMEM), limit);
        for (limit, remedy) in
            [(Some(512 << 20), "limit of 512 MiB (ulimit -v)"), (None, "overcommit_memory=0")]
        {
            let (error, text) = (told(limit), told(limit).to_string());
            assert!(text.contains("guest memory of 1024 MiB") && text.contains(remedy), "{text}");
            assert_eq!(error.exit_status(), 2);
        }
        assert!(matches!(unmapped(1 << 30, refused(libc::EPERM), None), RunError::Memory(_)));
        for (errno, remedy) in [(libc::ENOMEM, "lower --memory, or drop"), (libc::EINVAL, "needs Linux 5.14")]
        {
            let text = unallocated(1 << 30, &io::Error::from_raw_os_error(errno)).to_string();
            assert!(text.contains("1024 MiB") && text.contains(remedy), "{text}");
        }
    }

    #[test]
    fn prefault_takes_all_pages_in_any_kind_of_memory() {
        let config = RunConfig { memory: 16 << 20, prefault: true, ..RunConfig::default() };
        let (region, _memory) = ram(&config).unwrap();
        let MemoryFigures { bytes, is_shared, resident, huge } = figures(&region);
        assert_eq!((bytes, is_shared, resident), (16 << 20, false, 16 << 20));
        assert!(huge <= resident && huge.is_multiple_of(2 << 20), "{huge}");
        let lazy = RunConfig { prefault: false, ..config };
        let (region, _memory) = ram(&lazy).unwrap();
        assert_eq!(figures(&region).resident, 0);
    }
}
