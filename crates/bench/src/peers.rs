//! Versions of the peers.
use crate::Row;
use crate::kind::{Kind, root};
use serde::{Deserialize, Serialize};
use std::ffi::OsStr;
use std::process::{Command, Stdio};

/// Name and version of a peer.
#[derive(Clone, Debug, Deserialize, PartialEq, Eq, Serialize)]
pub struct PeerVersion {
    /// Name of its subjects, up to the first `/`.
    pub name: String,
    /// Its version, or "unknown".
    pub version: String,
}

/// Versions of the crates that are linked in.
const CRATES: [(&str, &str); 4] = [
    ("vm-memory", "0.18.0"),
    ("virtio-driver", "0.6.1"),
    ("virtio-drivers", "0.13.0"),
    ("virtio-queue", "0.18.0"),
];
/// File that `scripts/ringtest` writes beside the programs.
const RINGTEST: &str = "version";

/// The versions of all peers that have figures in `rows`.
pub(crate) fn versions(rows: &[Row]) -> Vec<PeerVersion> {
    let mut names: Vec<&str> = rows
        .iter()
        .filter(|row| Kind::of(&row.subject) == Kind::Peer)
        .map(|row| root(&row.subject))
        .collect();
    names.sort_unstable();
    names.dedup();
    let version = |name: &str| version(name).unwrap_or_else(|| "unknown".to_owned());
    names.into_iter().map(|name| PeerVersion { name: name.to_owned(), version: version(name) }).collect()
}

fn version(name: &str) -> Option<String> {
    if let Some((_, version)) = CRATES.iter().find(|(known, _)| *known == name) {
        return Some((*version).to_owned());
    }
    match name {
        "qemu-storage-daemon" => number(&first_line("qemu-storage-daemon", "--version")?),
        #[cfg(feature = "peers")]
        crate::blk::spdk::NAME => {
            let program = std::env::var_os(crate::blk::spdk::PROGRAM)?;
            // "SPDK v26.09-pre git sha1 3230130e6a"
            let line = first_line(program, "--version")?;
            Some(line.strip_prefix("SPDK v")?.chars().take(60).collect())
        }
        // dpdk-testpmd does not tell its version.
        #[cfg(feature = "peers")]
        "dpdk-vhost" => {
            let version = number(&first_line("pkg-config", "--modversion=libdpdk")?)?;
            let other = crate::net::testpmd::other_version();
            Some(other.map_or_else(|| version.clone(), |other| format!("{version}; other: {other}")))
        }
        "ringtest" => {
            let folder = std::env::var_os("PARAVANE_RINGTEST").unwrap_or_else(|| "target/ringtest".into());
            let text = std::fs::read_to_string(std::path::Path::new(&folder).join(RINGTEST)).ok()?;
            text.lines().next().map(|line| line.chars().take(60).collect())
        }
        _ => None,
    }
}

/// The first word with a digit at its start.
fn number(line: &str) -> Option<String> {
    line.split_whitespace().find(|word| word.starts_with(|c: char| c.is_ascii_digit())).map(str::to_owned)
}

fn first_line(program: impl AsRef<OsStr>, option: &str) -> Option<String> {
    let mut command = Command::new(program);
    command.args(option.split('=')).stdin(Stdio::null()).stderr(Stdio::null());
    let output = command.output().ok()?;
    String::from_utf8_lossy(&output.stdout).lines().next().map(str::to_owned)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The constants are those of Cargo.lock.
    #[test]
    fn versions_of_crates_are_those_that_are_linked() {
        let lock = concat!(env!("CARGO_MANIFEST_DIR"), "/../../Cargo.lock");
        let Ok(text) = std::fs::read_to_string(lock) else {
            let test = "peers::versions_of_crates_are_those_that_are_linked";
            return paravane_test_support::skip(test, format_args!("no {lock}"));
        };
        for (name, version) in CRATES {
            assert!(
                text.contains(&format!("name = \"{name}\"\nversion = \"{version}\"\n")),
                "{name} {version}"
            );
        }
    }

    #[test]
    fn a_version_is_found_in_a_line() {
        assert_eq!(number("qemu-storage-daemon version 7.2.22 (Debian 1:7)").as_deref(), Some("7.2.22"));
        assert_eq!(number("22.11.11").as_deref(), Some("22.11.11"));
        assert_eq!(number("none"), None);
    }
}
