//! Frame of a record, and the sections in it.
use super::error::HandoverError;
use crc32fast::hash as checksum;
use std::ops::RangeInclusive;

/// Tags of sections that belong to a session. A reader skips those that it does not know.
pub const SECTION_TAGS: RangeInclusive<u32> = 3..=8;
/// Set in the tags of sections that a reader must know.
///
/// 1 and from 4 on are those of sessions; 2 and 3 are those of exports.
pub const REQUIRED: u32 = 1 << 30;

pub(super) const MAGIC: [u8; 8] = *b"PRVHAND\n";
pub(super) const VERSION: u32 = 1;
/// Magic number, version, and length of the whole record.
pub(super) const HEADER: usize = 8 + 4 + 4;
pub(super) const CHECKSUM: usize = 4;
/// Tag, number of descriptors, and length of the value.
pub(super) const SECTION: usize = 4 + 4 + 4;
/// Largest record in bytes. The translations of an IOMMU are up to 3 MiB.
pub(super) const MAX_RECORD: usize = 16 << 20;

/// Checks the frame of a record, and returns its sections.
pub(super) fn body(record: &[u8]) -> Result<&[u8], HandoverError> {
    if record.get(..8) != Some(&MAGIC) {
        return Err(HandoverError::Record("no magic number"));
    }
    let number = |bytes: Option<&[u8]>| -> Result<u32, HandoverError> {
        let bytes =
            bytes.and_then(|bytes| bytes.try_into().ok()).ok_or(HandoverError::Record("too short"))?;
        Ok(u32::from_le_bytes(bytes))
    };
    match number(record.get(8..12))? {
        VERSION => {}
        other => return Err(HandoverError::Version(other)),
    }
    if record.len() > MAX_RECORD {
        return Err(HandoverError::TooLarge);
    }
    if number(record.get(12..HEADER))? as usize != record.len() || record.len() < HEADER + CHECKSUM {
        return Err(HandoverError::Record("wrong length"));
    }
    let (summed, sum) = record.split_at(record.len() - CHECKSUM);
    if number(Some(sum))? != checksum(summed) {
        return Err(HandoverError::Record("wrong checksum"));
    }
    Ok(&summed[HEADER..])
}

/// The sections of a record that are its session's, with their tags.
///
/// # Errors
/// The record is damaged, invalid or of another version.
pub(super) fn session_sections(record: &[u8]) -> Result<Vec<(u32, &[u8])>, HandoverError> {
    let (mut rest, mut sections) = (body(record)?, Vec::new());
    while let Some(SectionBytes { tag, value, .. }) = next_section(&mut rest)? {
        if SECTION_TAGS.contains(&tag) {
            sections.push((tag, value));
        }
    }
    Ok(sections)
}

/// A section with the number of its descriptors.
pub(super) struct SectionBytes<'a> {
    pub(super) tag: u32,
    pub(super) fds: usize,
    pub(super) value: &'a [u8],
}

/// Takes a section off the front.
pub(super) fn next_section<'a>(rest: &mut &'a [u8]) -> Result<Option<SectionBytes<'a>>, HandoverError> {
    if rest.is_empty() {
        return Ok(None);
    }
    let short = || HandoverError::Record("a section is cut off");
    let (head, behind) = rest.split_first_chunk::<SECTION>().ok_or_else(short)?;
    let word = |at: usize| u32::from_le_bytes([head[at], head[at + 1], head[at + 2], head[at + 3]]);
    let (value, behind) = behind.split_at_checked(word(8) as usize).ok_or_else(short)?;
    *rest = behind;
    Ok(Some(SectionBytes { tag: word(0), fds: word(4) as usize, value }))
}

/// Takes the value of a section that may be there once.
///
/// # Errors
/// It is there already.
pub fn once<T>(place: &mut Option<T>, value: T) -> Result<(), HandoverError> {
    match place.replace(value) {
        None => Ok(()),
        Some(_) => Err(HandoverError::Record("a section that may be there once only is repeated")),
    }
}
