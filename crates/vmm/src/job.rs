//! Jobs of the built-in guest, and what the host needs to verify them.
use crate::config::refuse;
use crate::error::RunError;
use std::fs::File;
use std::path::PathBuf;

/// Shortest frame of the echo job: addresses, type and a number.
///
/// Longest: the largest MTU and an Ethernet header.
const FRAMES: std::ops::RangeInclusive<u32> = 22..=65_549;

/// Job of the built-in guest on a device.
#[derive(Debug)]
pub enum Job {
    /// On a disk.
    Disk(DiskJob),
    /// Draws this number of bytes from an entropy source.
    Entropy(u64),
    /// On a network card.
    Net(NetJob),
}

/// Job on a disk.
#[derive(Debug)]
pub struct DiskJob {
    /// Hash or write test.
    pub work: DiskWork,
    /// Name of the image in the report.
    pub path: PathBuf,
    /// The image, which the host reads to verify the job.
    pub image: File,
    /// Host I/O engine, for the report.
    pub engine: String,
}

/// Work on a disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DiskWork {
    /// Reads all of it and computes its SHA-256; never writes.
    Hash,
    /// Writes a pattern, mixes reads and writes, reads back.
    WriteTest,
}

/// Job on a network card.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NetJob {
    /// Network, for the report: "echo", "link" and so on.
    pub network: &'static str,
    /// Direction of the frames.
    pub traffic: Traffic,
    /// Number of frames.
    pub frames: u64,
    /// Size of a frame in bytes, with the Ethernet header.
    pub size: u32,
    /// Size of an answer in bytes.
    pub reply: u32,
}

/// Direction of the frames of a job.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Traffic {
    /// The guest sends frames, and verifies the answers.
    Exchange,
    /// The guest returns the frames that another of its cards sends.
    Mirror,
    /// The guest sends frames that are not answered.
    Send,
    /// The guest receives frames.
    Receive,
}

impl NetJob {
    /// Most pairs of queues of a card.
    pub const MAX_PAIRS: u16 = 8;

    /// Checks the job on a card with this number of queue pairs.
    ///
    /// # Errors
    /// The first value out of range, in one line.
    pub fn check(&self, pairs: u16) -> Result<(), RunError> {
        for size in [self.size, self.reply] {
            if !FRAMES.contains(&size) {
                let (least, most) = (FRAMES.start(), FRAMES.end());
                return refuse(format!("frames of {size} bytes: must be {least} to {most}"));
            }
        }
        if pairs == 0 || pairs > Self::MAX_PAIRS {
            return refuse(format!("{pairs} pairs of queues: must be 1 to {}", Self::MAX_PAIRS));
        }
        if self.frames == 0 {
            return refuse("no frames to send: a network card needs at least 1");
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    type Spoil = fn(&mut NetJob);

    #[test]
    fn each_impossible_job_is_refused_by_name() {
        let good = NetJob { network: "echo", traffic: Traffic::Exchange, frames: 1, size: 64, reply: 64 };
        assert!(good.check(1).is_ok() && good.check(8).is_ok());
        let jobs: [(&str, Spoil, u16); 6] = [
            ("frames of 21 bytes", |job| job.size = 21, 1),
            ("frames of 65550 bytes", |job| job.size = 65_550, 1),
            ("frames of 14 bytes", |job| job.reply = 14, 1),
            ("9 pairs", |_| {}, 9),
            ("0 pairs", |_| {}, 0),
            ("no frames to send", |job| job.frames = 0, 1),
        ];
        for (what, spoil, pairs) in jobs {
            let mut job = good.clone();
            spoil(&mut job);
            let error = job.check(pairs).unwrap_err();
            assert!(error.to_string().contains(what), "{what}: {error}");
            assert_eq!(error.exit_status(), 2);
        }
    }
}
