//! The record file of a holder, whose writer is killed.
use paravane_export::record_file::RecordFile;
use paravane_test_support::Random;
use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, memfd_create};
use std::fs::File;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::FileExt;

/// Name of this kind.
pub(super) const NAME: &str = "record-file";

/// Largest record in bytes.
const CAPACITY: usize = 20_000;

fn bytes(file: &RecordFile) -> Result<Vec<u8>, String> {
    let file = File::from(file.as_fd().try_clone_to_owned().map_err(|error| error.to_string())?);
    let mut bytes = vec![0; file.metadata().map_err(|error| error.to_string())?.len() as usize];
    file.read_exact_at(&mut bytes, 0).map_err(|error| error.to_string())?;
    Ok(bytes)
}

/// A file of these bytes, as the holder has it.
fn file(bytes: &[u8]) -> Result<OwnedFd, String> {
    let make = || {
        let fd = memfd_create(c"record", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)?;
        let file = File::from(fd);
        file.write_all_at(bytes, 0)?;
        fcntl_add_seals(&file, SealFlags::SHRINK | SealFlags::GROW)?;
        Ok(file.into())
    };
    make().map_err(|error: std::io::Error| error.to_string())
}

/// Writes records, and is killed in the middle of one, time after time. Returns the number of kills.
///
/// # Errors
/// What is wrong, after how many kills.
pub(super) fn run(random: &mut Random, kills: usize) -> Result<usize, (usize, String)> {
    let mut writer = RecordFile::create(CAPACITY).map_err(|error| (0, error.to_string()))?;
    let mut latest = None;
    for kill in 0..kills {
        let next = |writer: &mut RecordFile, random: &mut Random| {
            let record: Vec<u8> = (0..random.below(CAPACITY + 1)).map(|_| random.u64() as u8).collect();
            writer.write(&record).map_err(|error| error.to_string()).map(|()| record)
        };
        let mut step = || {
            // The first record has none before it, which is damage.
            for _ in 0..usize::from(latest.is_none()) + random.below(4) {
                latest = Some(next(&mut writer, random)?);
            }
            let before = bytes(&writer)?;
            let new = next(&mut writer, random)?;
            let mut crashed = bytes(&writer)?;
            // The kernel copies in order. Where it stops is not promised.
            let end = random.below(crashed.len() + 1);
            crashed[end..].copy_from_slice(&before[end..]);
            let (successor, record) = RecordFile::open(file(&crashed)?).map_err(|error| error.to_string())?;
            if record != latest && record.as_ref() != Some(&new) {
                return Err(format!("the record is neither old nor new: cut at {end}"));
            }
            (writer, latest) = (successor, record);
            Ok(())
        };
        step().map_err(|what| (kill, what))?;
    }
    Ok(kills)
}
