//! What identifies a patch series.

/// A patch series on a mailing list.
pub(crate) struct PatchSeries {
    /// First part of the paths of its cases: a short name and the year.
    pub(crate) tag: &'static str,
    /// Subject line of the message with the figures.
    pub(crate) subject: &'static str,
    pub(crate) author: &'static str,
    /// Day of that message.
    pub(crate) posted: &'static str,
    /// Where to find it: the address of an archive, or the message's identifier.
    pub(crate) archive: Option<&'static str>,
}

impl PatchSeries {
    /// One line for the notes below a table.
    pub(crate) fn citation(&self) -> String {
        let Self { tag, subject, author, posted, archive } = self;
        let archive = archive.map(|archive| format!(", {archive}")).unwrap_or_default();
        format!("{tag}: \"{subject}\", {author}, {posted}{archive}.")
    }
}
