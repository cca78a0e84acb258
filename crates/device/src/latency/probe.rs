//! A probe, for documentation.

/// A probe, for documentation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Probe {
    /// Name; the provider is `paravane`.
    pub name: &'static str,
    /// When it fires.
    pub when: &'static str,
    /// Names of its arguments, in order; see [`PROBE_ARGUMENTS`](super::PROBE_ARGUMENTS).
    pub arguments: &'static [&'static str],
}
