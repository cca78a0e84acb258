//! Writes to a file, reads back and compares, until a file with another name appears.
//!
//! ```text
//! verify FILE THREADS STOP
//! ```
//! Each thread has blocks of its own, and one request in flight, past the page cache. A block carries
//! its number and how often it was written. Each block that is read, at once or much later, must be the
//! one that was written last: a write that is lost, done twice or late shows, and so does a read that
//! returns another block. In the end all blocks are read.
//!
//! Prints the number of requests and the longest one. Exits with 1 at the first wrong block or failed
//! request.
use paravane_test_support::Random;
use std::fs::{File, OpenOptions};
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::Path;
use std::time::{Duration, Instant};

/// Bytes of a block; alignment of direct I/O.
const BLOCK: usize = 4096;
/// Blocks of a thread.
const BLOCKS: usize = 256;
/// Maximum number of blocks of a request.
const MOST: usize = 16;
/// Requests between two looks for the file that ends the run.
const LOOK: u64 = 32;

/// One thread's blocks, and what is in them.
struct Writer<'a> {
    file: &'a File,
    /// Index of the first block.
    first: usize,
    /// How often each block was written.
    times: Vec<u64>,
    buffer: &'static mut [u8],
    requests: u64,
    longest: Duration,
}

/// Memory for direct I/O, which is never freed.
fn buffer() -> &'static mut [u8] {
    let memory = vec![0; (MOST + 1) * BLOCK].leak();
    let at = memory.as_ptr().align_offset(BLOCK);
    &mut memory[at..][..MOST * BLOCK]
}

/// Fills a block with its number, and the number of its write.
fn fill(block: &mut [u8], number: u64, times: u64) {
    let mut word = number.wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ times;
    for (index, bytes) in block.chunks_exact_mut(8).enumerate() {
        let value = match index {
            0 => number,
            1 => times,
            _ => {
                word ^= word << 13;
                word ^= word >> 7;
                word ^= word << 17;
                word
            }
        };
        bytes.copy_from_slice(&value.to_le_bytes());
    }
}

impl<'a> Writer<'a> {
    fn new(file: &'a File, thread: usize) -> Self {
        let times = vec![0; BLOCKS];
        Self { file, first: thread * BLOCKS, times, buffer: buffer(), requests: 0, longest: Duration::ZERO }
    }

    fn write(&mut self, at: usize, count: usize) -> Result<(), String> {
        for index in 0..count {
            self.times[at + index] += 1;
            let block = &mut self.buffer[index * BLOCK..][..BLOCK];
            fill(block, (self.first + at + index) as u64, self.times[at + index]);
        }
        let start = Instant::now();
        let offset = ((self.first + at) * BLOCK) as u64;
        let result = self.file.write_all_at(&self.buffer[..count * BLOCK], offset);
        self.done(start);
        result.map_err(|error| format!("cannot write {count} blocks at {}: {error}", self.first + at))
    }

    fn read(&mut self, at: usize, count: usize) -> Result<(), String> {
        self.buffer[..count * BLOCK].fill(0xa5);
        let start = Instant::now();
        let offset = ((self.first + at) * BLOCK) as u64;
        let result = self.file.read_exact_at(&mut self.buffer[..count * BLOCK], offset);
        self.done(start);
        result.map_err(|error| format!("cannot read {count} blocks at {}: {error}", self.first + at))?;
        let mut expected = [0; BLOCK];
        for index in 0..count {
            let (number, times) = ((self.first + at + index) as u64, self.times[at + index]);
            fill(&mut expected, number, times);
            let block = &self.buffer[index * BLOCK..][..BLOCK];
            if block != expected {
                let word = |at: usize| u64::from_le_bytes(std::array::from_fn(|byte| block[at * 8 + byte]));
                return Err(format!(
                    "block {number} of write {times} is block {} of write {}",
                    word(0),
                    word(1)
                ));
            }
        }
        Ok(())
    }

    fn done(&mut self, start: Instant) {
        self.requests += 1;
        self.longest = self.longest.max(start.elapsed());
    }

    fn run(&mut self, stop: &Path) -> Result<(), String> {
        for at in (0..BLOCKS).step_by(MOST) {
            self.write(at, MOST)?;
        }
        println!("CLIENT STORMS");
        let mut random = Random::new(self.first as u64 + 1);
        while !self.requests.is_multiple_of(LOOK) || !stop.exists() {
            let count = 1 + random.below(MOST);
            let at = random.below(BLOCKS - count + 1);
            match random.below(5) {
                0 | 1 => self.write(at, count)?,
                2 => {
                    self.write(at, count)?;
                    self.read(at, count)?;
                }
                _ => self.read(at, count)?,
            }
        }
        for at in (0..BLOCKS).step_by(MOST) {
            self.read(at, MOST)?;
        }
        Ok(())
    }
}

fn main() {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [file, threads, stop] = &arguments[..] else { panic!("usage: verify FILE THREADS STOP") };
    let threads: usize = threads.parse().expect("a number of threads");
    // O_DIRECT of x86 and RISC-V.
    let mut options = OpenOptions::new();
    options.read(true).write(true).create(true).truncate(false).custom_flags(0o40000);
    let file = options.open(file).unwrap_or_else(|error| panic!("{file}: {error}"));
    let results: Vec<_> = std::thread::scope(|scope| {
        let run = |thread| {
            let (file, stop) = (&file, Path::new(stop));
            scope.spawn(move || {
                let mut writer = Writer::new(file, thread);
                let result = writer.run(stop);
                (result, writer.requests, writer.longest)
            })
        };
        let threads: Vec<_> = (0..threads).map(run).collect();
        threads.into_iter().map(|thread| thread.join().expect("no thread panics")).collect()
    });
    let mut failed = false;
    for error in results.iter().filter_map(|(result, ..)| result.as_ref().err()) {
        println!("CLIENT FAILED: {error}");
        failed = true;
    }
    let requests: u64 = results.iter().map(|(_, requests, _)| requests).sum();
    let longest = results.iter().map(|(.., longest)| *longest).max().unwrap_or_default();
    println!("CLIENT VERIFIED {requests} requests, the longest took {} ms.", longest.as_millis());
    std::process::exit(failed.into());
}
