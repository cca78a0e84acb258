//! Limits on resources that VMMs take from this process.
use super::args::DaemonArgs;
use anyhow::{Error, bail};
use paravane_dma::MappingLimits;

/// Limits on memory that VMMs share: options, else defaults from the host.
///
/// # Errors
/// An option is invalid.
pub(crate) fn mapping(daemon: &DaemonArgs) -> Result<MappingLimits, Error> {
    apply(daemon, MappingLimits::of_host())
}

fn apply(daemon: &DaemonArgs, host: MappingLimits) -> Result<MappingLimits, Error> {
    let max_memory = daemon.max_memory.map_or(host.max_memory, |size| size.0);
    // A lower total lowers the default for one VMM.
    let max_client_memory =
        daemon.max_client_memory.map_or(host.max_client_memory.min(max_memory), |size| size.0);
    let max_mappings = daemon.max_mappings.unwrap_or(host.max_mappings);
    if max_client_memory == 0 {
        bail!("--max-client-memory: 0 would refuse every VMM");
    }
    if max_client_memory > max_memory {
        bail!(
            "--max-client-memory: {max_client_memory} bytes exceed --max-memory ({max_memory} bytes): raise --max-memory"
        );
    }
    if !(1..=MappingLimits::MOST_MAPPINGS).contains(&max_mappings) {
        bail!("--max-mappings: {max_mappings} is out of range: use 1 to {}", MappingLimits::MOST_MAPPINGS);
    }
    let any_file = daemon.any_memory_file;
    Ok(MappingLimits { max_client_memory, max_memory, max_mappings, any_file, ..host })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::size::Size;

    const HOST: MappingLimits = MappingLimits {
        max_client_memory: 100,
        max_memory: 1000,
        max_mappings: 10,
        max_tables: 7,
        any_file: false,
    };

    fn with(client: Option<u64>, all: Option<u64>, mappings: Option<u64>) -> Result<MappingLimits, Error> {
        let daemon = DaemonArgs {
            max_client_memory: client.map(Size),
            max_memory: all.map(Size),
            max_mappings: mappings,
            ..DaemonArgs::default()
        };
        apply(&daemon, HOST)
    }

    #[test]
    fn defaults_are_the_hosts() {
        assert_eq!(with(None, None, None).unwrap(), HOST);
        let limits = with(Some(200), Some(2000), Some(20)).unwrap();
        assert_eq!((limits.max_client_memory, limits.max_memory, limits.max_mappings), (200, 2000, 20));
        let limits = with(None, Some(50), None).unwrap();
        assert_eq!((limits.max_client_memory, limits.max_memory), (50, 50));
    }

    #[test]
    fn invalid_limits_are_refused() {
        for (limits, option) in [
            (with(Some(0), None, None), "--max-client-memory"),
            (with(None, Some(0), None), "--max-client-memory"),
            (with(Some(2000), None, None), "raise --max-memory"),
            (with(None, None, Some(0)), "--max-mappings"),
            (with(None, None, Some(1 << 40)), "--max-mappings"),
        ] {
            let error = limits.unwrap_err().to_string();
            assert!(error.contains(option), "{error}");
        }
    }
}
