//! Record file: the latest of a series of records, readable after a kill at any time.
//!
//! A file in memory with two slots. A record is written into the slot that does not hold the latest
//! one, so a process that dies while it writes leaves the record before whole:
//!
//! ```text
//!   header  slot 0          slot 1             next write      read
//!           empty           empty              slot 0          no record
//!           sequence 1      empty              slot 1          1
//!           sequence 1      sequence 2         slot 0          2
//!           torn (3)        sequence 2         (killed)        2
//! ```
//!
//! # Format
//!
//! All numbers are little-endian. The file is HEADER bytes, then two slots of SLOT + capacity
//! bytes.
//!
//! | offset | header | | offset in slot | slot |
//! |---|---|---|---|---|
//! | 0 | magic: `PVRECORD` | | 0 | sequence number of the record, from 1 (u64); 0: empty |
//! | 8 | version: 1 (u32) | | 8 | length of the record in bytes (u32) |
//! | 12 | capacity: maximum length of a record (u32) | | 12 | CRC-32 (IEEE) of bytes 0 to 11 and the record (u32) |
//! | 16 | CRC-32 of bytes 0 to 15 (u32) | | 16 | record |
//!
//! No other process may read a file while one writes it: it could find both slots half-written.
//!
//! A file of another version is refused: its slots may be laid out differently. What a record
//! contains is not the business of this file; the record has a version as well.
//!
//! # Trust
//!
//! The file may come from another process. It is read and written by system calls and never mapped,
//! and its length is sealed: no change of it does more harm than a record that does not check.
use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, fcntl_get_seals, fstat, ftruncate, memfd_create};
use std::fs::File;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::FileExt;
use thiserror::Error;

const MAGIC: [u8; 8] = *b"PVRECORD";
const VERSION: u32 = 1;
/// Length of the header of the file.
const HEADER: usize = 20;
/// Length of the header of a slot.
const SLOT: usize = 16;
/// Seals that a record file must have.
const SEALS: SealFlags = SealFlags::SHRINK.union(SealFlags::GROW);

/// Maximum capacity of a record file: 16 MiB.
pub const MAX_RECORD: usize = 16 << 20;

/// Error of a [`RecordFile`].
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum RecordFileError {
    /// Record longer than the file's capacity.
    #[error("record of {len} bytes exceeds the capacity of its file: {capacity}")]
    TooLong {
        /// Length of the record in bytes.
        len: usize,
        /// Maximum length in bytes.
        capacity: usize,
    },
    /// Capacity of 0, or above [`MAX_RECORD`].
    #[error("capacity {0} of a record file is not between 1 and {MAX_RECORD}")]
    Capacity(usize),
    /// File of another kind, without seals or with a damaged header.
    #[error("not a record file: {0}")]
    Invalid(&'static str),
    /// File of an unknown version.
    #[error("record file has version {0}; supported: {VERSION}")]
    Version(u32),
    /// Both slots are damaged.
    #[error("record file is damaged: no record matches its checksum")]
    Damaged,
    /// Failed system call.
    #[error("record file: {0}")]
    Os(#[from] io::Error),
}

/// The latest record of a session, in a file that outlives the process.
///
/// One process uses a file at a time.
#[derive(Debug)]
pub struct RecordFile {
    file: File,
    capacity: usize,
    /// Slot of the latest record.
    current: usize,
    /// Sequence number of the latest record; 0: none.
    sequence: u64,
    /// A slot as it is written. Kept between writes.
    slot: Vec<u8>,
}

/// What a slot holds.
#[derive(Debug)]
enum Content {
    /// Nothing was ever written.
    Empty,
    /// The record does not match its checksum, or its length is impossible.
    Damaged,
    Record {
        sequence: u64,
        record: Vec<u8>,
    },
}

impl RecordFile {
    /// Creates an empty file for records of up to `capacity` bytes.
    ///
    /// Memory is taken for the bytes that are written.
    ///
    /// # Errors
    /// The capacity is out of range, or the kernel refuses.
    pub fn create(capacity: usize) -> Result<Self, RecordFileError> {
        let stored = u32::try_from(capacity).map_err(|_| RecordFileError::Capacity(capacity))?;
        if !(1..=MAX_RECORD).contains(&capacity) {
            return Err(RecordFileError::Capacity(capacity));
        }
        let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
        let fd = memfd_create(c"paravane-record", flags).map_err(io::Error::from)?;
        ftruncate(&fd, file_len(capacity)).map_err(io::Error::from)?;
        fcntl_add_seals(&fd, SEALS).map_err(io::Error::from)?;
        let mut header = [0; HEADER];
        header[..8].copy_from_slice(&MAGIC);
        header[8..12].copy_from_slice(&VERSION.to_le_bytes());
        header[12..16].copy_from_slice(&stored.to_le_bytes());
        let checksum = crc32fast::hash(&header[..16]);
        header[16..].copy_from_slice(&checksum.to_le_bytes());
        let file = File::from(fd);
        file.write_all_at(&header, 0)?;
        Ok(Self { file, capacity, current: 1, sequence: 0, slot: Vec::new() })
    }

    /// Opens a file from another process, and reads its latest record.
    ///
    /// `None`: no record was ever written. Later writes continue the series.
    ///
    /// # Errors
    /// The file is no record file, its version is unknown, or it is damaged.
    pub fn open(fd: OwnedFd) -> Result<(Self, Option<Vec<u8>>), RecordFileError> {
        // Only files in memory have seals: reading one cannot wait for a disk or another process.
        let seals = fcntl_get_seals(&fd).map_err(|_| RecordFileError::Invalid("not a file in memory"))?;
        if !seals.contains(SEALS) {
            return Err(RecordFileError::Invalid("its length is not sealed"));
        }
        let len = fstat(&fd).map_err(io::Error::from)?.st_size;
        let file = File::from(fd);
        let capacity = read_header(&file)?;
        if u64::try_from(len) != Ok(file_len(capacity)) {
            return Err(RecordFileError::Invalid("its length does not fit its capacity"));
        }
        let contents = [read_slot(&file, capacity, 0)?, read_slot(&file, capacity, 1)?];
        let is_damaged = contents.iter().any(|content| matches!(content, Content::Damaged));
        let records = contents.into_iter().enumerate().filter_map(|(slot, content)| match content {
            Content::Record { sequence, record } => Some((sequence, slot, record)),
            Content::Empty | Content::Damaged => None,
        });
        let new = |current, sequence| Self { file, capacity, current, sequence, slot: Vec::new() };
        match records.max_by_key(|(sequence, ..)| *sequence) {
            Some((sequence, slot, record)) => Ok((new(slot, sequence), Some(record))),
            // The first write ever may be torn as well: there is no record to fall back to.
            None if is_damaged => Err(RecordFileError::Damaged),
            None => Ok((new(1, 0), None)),
        }
    }

    /// Makes `record` the latest one.
    ///
    /// After a kill at any time, or an error, the file has this record or the one before it.
    ///
    /// # Errors
    /// The record exceeds the capacity, or the kernel refuses.
    pub fn write(&mut self, record: &[u8]) -> Result<(), RecordFileError> {
        let (len, capacity) = (record.len(), self.capacity);
        let too_long = || RecordFileError::TooLong { len, capacity };
        let stored = u32::try_from(len).ok().filter(|_| len <= capacity).ok_or_else(too_long)?;
        // Only a file with a forged sequence number can run out of them.
        let sequence = self.sequence.checked_add(1).ok_or(RecordFileError::Damaged)?;
        self.slot.clear();
        self.slot.extend_from_slice(&sequence.to_le_bytes());
        self.slot.extend_from_slice(&stored.to_le_bytes());
        let checksum = checksum(&self.slot, record);
        self.slot.extend_from_slice(&checksum.to_le_bytes());
        self.slot.extend_from_slice(record);
        let next = 1 - self.current;
        self.file.write_all_at(&self.slot, slot_at(self.capacity, next))?;
        (self.current, self.sequence) = (next, sequence);
        Ok(())
    }

    /// Maximum length of a record in bytes.
    #[must_use]
    pub fn capacity(&self) -> usize {
        self.capacity
    }
}

impl AsFd for RecordFile {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }
}

/// Length of a file in bytes.
fn file_len(capacity: usize) -> u64 {
    (HEADER + 2 * (SLOT + capacity)) as u64
}

/// Offset of a slot in the file.
fn slot_at(capacity: usize, slot: usize) -> u64 {
    (HEADER + slot * (SLOT + capacity)) as u64
}

/// Checksum of a slot, from its first 12 bytes and its record.
fn checksum(head: &[u8], record: &[u8]) -> u32 {
    let mut hasher = crc32fast::Hasher::new();
    hasher.update(head);
    hasher.update(record);
    hasher.finalize()
}

/// A number at an offset of a header.
fn u32_at(bytes: &[u8], at: usize) -> u32 {
    u32::from_le_bytes(std::array::from_fn(|byte| bytes[at + byte]))
}

/// Checks the header of the file and returns its capacity.
fn read_header(file: &File) -> Result<usize, RecordFileError> {
    let mut header = [0; HEADER];
    match file.read_exact_at(&mut header, 0) {
        Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => {
            return Err(RecordFileError::Invalid("too short"));
        }
        read => read?,
    }
    if header[..8] != MAGIC {
        return Err(RecordFileError::Invalid("wrong magic number"));
    }
    if u32_at(&header, 16) != crc32fast::hash(&header[..16]) {
        return Err(RecordFileError::Invalid("header does not match its checksum"));
    }
    match u32_at(&header, 8) {
        VERSION => {}
        version => return Err(RecordFileError::Version(version)),
    }
    let capacity = u32_at(&header, 12) as usize;
    if (1..=MAX_RECORD).contains(&capacity) { Ok(capacity) } else { Err(RecordFileError::Capacity(capacity)) }
}

/// Reads and checks a slot.
fn read_slot(file: &File, capacity: usize, slot: usize) -> Result<Content, RecordFileError> {
    let at = slot_at(capacity, slot);
    let mut head = [0; SLOT];
    file.read_exact_at(&mut head, at)?;
    if head == [0; SLOT] {
        return Ok(Content::Empty);
    }
    let sequence = u64::from_le_bytes(std::array::from_fn(|byte| head[byte]));
    let len = u32_at(&head, 8) as usize;
    if sequence == 0 || len > capacity {
        return Ok(Content::Damaged);
    }
    let mut record = vec![0; len];
    file.read_exact_at(&mut record, at + SLOT as u64)?;
    let is_whole = u32_at(&head, 12) == checksum(&head[..12], &record);
    Ok(if is_whole { Content::Record { sequence, record } } else { Content::Damaged })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The file as another process gets it.
    fn copy(file: &RecordFile) -> OwnedFd {
        file.file.try_clone().unwrap().into()
    }

    fn read(file: &RecordFile) -> Result<Option<Vec<u8>>, RecordFileError> {
        RecordFile::open(copy(file)).map(|(_, record)| record)
    }

    /// Bytes of the whole file.
    fn bytes(file: &RecordFile) -> Vec<u8> {
        let mut bytes = vec![0; usize::try_from(file_len(file.capacity)).unwrap()];
        file.file.read_exact_at(&mut bytes, 0).unwrap();
        bytes
    }

    /// A file with these bytes.
    fn with(bytes: &[u8], seals: SealFlags) -> OwnedFd {
        let fd = memfd_create(c"forged", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING).unwrap();
        let file = File::from(fd);
        file.write_all_at(bytes, 0).unwrap();
        fcntl_add_seals(&file, seals).unwrap();
        file.into()
    }

    fn open(bytes: &[u8]) -> Result<Option<Vec<u8>>, RecordFileError> {
        RecordFile::open(with(bytes, SEALS)).map(|(_, record)| record)
    }

    #[test]
    fn the_latest_record_is_read() {
        let mut file = RecordFile::create(100).unwrap();
        assert_eq!(read(&file).unwrap(), None);
        for number in 0..=100_u8 {
            let record = vec![number; usize::from(number)];
            file.write(&record).unwrap();
            assert_eq!(read(&file).unwrap(), Some(record));
        }
    }

    #[test]
    fn a_successor_continues_the_series() {
        let mut file = RecordFile::create(8).unwrap();
        for number in 0..20_u8 {
            file.write(&[number]).unwrap();
            let (next, record) = RecordFile::open(copy(&file)).unwrap();
            assert_eq!((next.capacity(), record.as_deref()), (8, Some(&[number][..])));
            file = next;
        }
        assert_eq!(file.sequence, 20);
    }

    #[test]
    fn a_write_cut_off_anywhere_leaves_the_record_before() {
        for earlier in 1..4_u8 {
            let mut file = RecordFile::create(64).unwrap();
            (1..=earlier).for_each(|number| file.write(&[number; 40]).unwrap());
            let before = bytes(&file);
            file.write(&[99; 50]).unwrap();
            let after = bytes(&file);
            let changed: Vec<_> = (0..after.len()).filter(|&at| before[at] != after[at]).collect();
            let (first, last) = (changed[0], changed[changed.len() - 1]);
            for end in first..=last {
                let torn = [&after[..end], &before[end..]].concat();
                assert_eq!(open(&torn).unwrap(), Some(vec![earlier; 40]), "cut off at byte {end}");
            }
            assert_eq!(open(&after).unwrap(), Some(vec![99; 50]));
        }
    }

    #[test]
    fn the_first_write_cut_off_is_damage() {
        let mut file = RecordFile::create(16).unwrap();
        let before = bytes(&file);
        file.write(&[7; 16]).unwrap();
        let after = bytes(&file);
        assert_eq!(open(&before).unwrap(), None);
        for end in HEADER + 1..HEADER + SLOT + 16 {
            let torn = [&after[..end], &before[end..]].concat();
            assert!(matches!(open(&torn), Err(RecordFileError::Damaged)), "cut off at byte {end}");
        }
    }

    #[test]
    fn no_flipped_bit_makes_a_record() {
        let mut file = RecordFile::create(24).unwrap();
        file.write(b"older").unwrap();
        file.write(b"latest").unwrap();
        let good = bytes(&file);
        let (older, latest) = (HEADER, HEADER + SLOT + 24);
        for bit in 0..good.len() * 8 {
            let mut bad = good.clone();
            bad[bit / 8] ^= 1 << (bit % 8);
            match (bit / 8, open(&bad)) {
                (..HEADER, read) => assert!(read.is_err(), "bit {bit}"),
                (at, read) if at >= latest && at < latest + SLOT + b"latest".len() => {
                    assert_eq!(read.unwrap().as_deref(), Some(&b"older"[..]), "bit {bit}");
                }
                (at, read) => {
                    assert_eq!(read.unwrap().as_deref(), Some(&b"latest"[..]), "bit {bit}");
                    assert!(at >= older);
                }
            }
        }
    }

    #[test]
    fn other_files_are_refused() {
        let mut file = RecordFile::create(24).unwrap();
        file.write(b"record").unwrap();
        let good = bytes(&file);
        for len in 0..good.len() {
            open(&good[..len]).unwrap_err();
        }
        open(&[&good[..], &[0]].concat()).unwrap_err();
        for seals in [SealFlags::empty(), SealFlags::SHRINK, SealFlags::GROW] {
            let error = RecordFile::open(with(&good, seals)).unwrap_err();
            assert!(error.to_string().contains("not sealed"), "{error}");
        }
        let (pipe, _writer) = io::pipe().unwrap();
        let error = RecordFile::open(pipe.into()).unwrap_err();
        assert!(error.to_string().contains("not a file in memory"), "{error}");
    }

    /// A file whose header has this version and capacity, and a valid checksum.
    fn forged(version: u32, capacity: u32) -> Vec<u8> {
        let mut bytes = bytes(&RecordFile::create(24).unwrap());
        bytes[8..12].copy_from_slice(&version.to_le_bytes());
        bytes[12..16].copy_from_slice(&capacity.to_le_bytes());
        let checksum = crc32fast::hash(&bytes[..16]);
        bytes[16..20].copy_from_slice(&checksum.to_le_bytes());
        bytes
    }

    #[test]
    fn forged_headers_are_refused() {
        assert_eq!(open(&forged(1, 24)).unwrap(), None);
        assert!(matches!(open(&forged(2, 24)), Err(RecordFileError::Version(2))));
        for capacity in [0, MAX_RECORD as u32 + 1, u32::MAX] {
            assert!(matches!(open(&forged(1, capacity)), Err(RecordFileError::Capacity(_))));
        }
        assert!(matches!(open(&forged(1, 25)), Err(RecordFileError::Invalid(_))));
    }

    #[test]
    fn the_capacity_is_a_bound() {
        assert!(matches!(RecordFile::create(0), Err(RecordFileError::Capacity(0))));
        assert!(matches!(RecordFile::create(MAX_RECORD + 1), Err(RecordFileError::Capacity(_))));
        let mut file = RecordFile::create(4).unwrap();
        file.write(b"four").unwrap();
        assert!(matches!(file.write(b"fives"), Err(RecordFileError::TooLong { len: 5, capacity: 4 })));
        assert_eq!(read(&file).unwrap().as_deref(), Some(&b"four"[..]));
    }

    #[test]
    fn nobody_can_shrink_or_grow_the_file() {
        let file = RecordFile::create(4096).unwrap();
        for len in [0, 4096, 1 << 20] {
            ftruncate(&file.file, len).unwrap_err();
        }
    }

    /// Set in a process that writes records until it is killed.
    const ROLE: &str = "PARAVANE_TEST_RECORD_WRITER";
    const LARGE: usize = 64 << 10;

    /// Writes records, if this process has the role: the number of the record again and again.
    #[test]
    fn a_writer_to_be_killed() {
        if std::env::var_os(ROLE).is_none() {
            return;
        }
        let fd = io::stdin().as_fd().try_clone_to_owned().unwrap();
        let (mut file, record) = RecordFile::open(fd).unwrap();
        let mut number = record.map_or(0, |record| number_of(&record));
        loop {
            number += 1;
            file.write(&number.to_le_bytes().repeat(LARGE / 8)).unwrap();
            // The parent waits for the first one.
            eprintln!();
        }
    }

    fn number_of(record: &[u8]) -> u64 {
        assert_eq!(record.len(), LARGE);
        assert!(record.chunks(8).all(|chunk| chunk == &record[..8]), "a record is torn");
        u64::from_le_bytes(std::array::from_fn(|byte| record[byte]))
    }

    #[test]
    fn killed_writers_leave_whole_records() {
        use std::io::Read;
        use std::process::{Command, Stdio};
        let file = RecordFile::create(LARGE).unwrap();
        let mut random = paravane_test_support::Random::new(1);
        let mut latest = 0;
        for _ in 0..20 {
            let mut writer = Command::new(std::env::current_exe().unwrap())
                .args(["--exact", "record_file::tests::a_writer_to_be_killed", "--nocapture"])
                .env(ROLE, "1")
                .stdin(Stdio::from(copy(&file)))
                .stdout(Stdio::null())
                .stderr(Stdio::piped())
                .spawn()
                .unwrap();
            let mut lines = vec![0; 1 + random.below(8)];
            writer.stderr.as_mut().unwrap().read_exact(&mut lines).unwrap();
            assert!(lines.iter().all(|&byte| byte == b'\n'), "{}", String::from_utf8_lossy(&lines));
            // Anywhere in a later record.
            std::thread::sleep(std::time::Duration::from_micros(random.below(1000) as u64));
            writer.kill().unwrap();
            writer.wait().unwrap();
            let number = number_of(&read(&file).unwrap().unwrap());
            assert!(number >= latest + lines.len() as u64, "{number} after {latest}");
            latest = number;
        }
    }
}
