//! What the host says of its memory.

/// The host's memory, as /proc/meminfo has it.
#[derive(Clone, Debug)]
pub struct MemInfo(String);

impl MemInfo {
    /// Reads it. It has no values where the host does not say.
    #[must_use]
    pub fn read() -> Self {
        Self::from_text(std::fs::read_to_string("/proc/meminfo").unwrap_or_default())
    }

    /// From the text of a /proc/meminfo.
    #[must_use]
    pub fn from_text(text: impl Into<String>) -> Self {
        Self(text.into())
    }

    /// A value by its name: a size in KiB, or a number of pages (`HugePages_Free`).
    #[must_use]
    pub fn get(&self, name: &str) -> Option<u64> {
        let line = self.0.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':'))?;
        line.split_ascii_whitespace().next()?.parse().ok()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_value_is_found_by_its_whole_name() {
        let host =
            MemInfo::from_text("MemTotalX: 1 kB\nMemTotal:      2048 kB\nHugePages_Free:  3\nBad: x\n");
        assert_eq!(["MemTotal", "HugePages_Free"].map(|name| host.get(name)), [Some(2048), Some(3)]);
        assert_eq!(["Mem", "Bad", "None"].map(|name| host.get(name)), [None; 3]);
        assert_eq!(MemInfo::from_text("MemTotal:").get("MemTotal"), None);
    }
}
