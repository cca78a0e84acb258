//! Compares the second read of an object, from its cache, with reads of a local file.
//!
//!   second_read URL FOLDER FILE
//!
//! FILE has the same bytes, and its pages are in memory. Prints nanoseconds of this thread's CPU
//! time for each read: medians of interleaved rounds.
use paravane_dma::HostSlice;
use paravane_store::{CacheConfig, Direct, Job, Object, ObjectOptions, Pieces, Rest, Store, StoreQueue};
use rustix::time::{ClockId, clock_gettime};
use std::collections::VecDeque;
use std::error::Error;
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::ptr::NonNull;
use std::sync::Arc;

const ROUNDS: usize = 15;
/// Bytes that a round reads at most.
const ROUND_BYTES: u64 = 256 << 20;

fn main() -> Result<(), Box<dyn Error>> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [url, folder, file] = &arguments[..] else { return Err("second_read URL FOLDER FILE".into()) };
    let file = File::open(file)?;
    let config = CacheConfig::new(folder);
    let object = Object::open(&url.parse()?, &ObjectOptions::default(), Some(&config), Arc::new(Direct))?;
    let size = object.size();
    let mut queue = object.queue(1)?;
    let mut memory = vec![0; 1 << 20];
    let mut outcomes = VecDeque::with_capacity(1);
    for at in (0..size).step_by(memory.len()) {
        let len = memory.len().min((size - at) as usize);
        read(&mut *queue, &mut outcomes, &mut memory[..len], at);
        let mut same = vec![0; len];
        file.read_exact_at(&mut same, at)?;
        assert!(same == memory[..len], "the file has other bytes at {at}");
    }
    println!("{:?}", object.status());
    println!("{:>8} {:>8} {:>10} {:>10} {:>6}", "bytes", "order", "file", "object", "ratio");
    for (len, random) in
        [(4096, true), (4096, false), (64 << 10, false), (256 << 10, false), (1 << 20, false)]
    {
        let count = (ROUND_BYTES / len as u64).min(50_000);
        let places: Vec<u64> = (0..count).map(|index| place(index, len as u64, size, random)).collect();
        let (mut of_file, mut of_object) = (Vec::new(), Vec::new());
        for _ in 0..ROUNDS {
            let start = now();
            for at in &places {
                file.read_at(&mut memory[..len], *at)?;
            }
            let middle = now();
            for at in &places {
                read(&mut *queue, &mut outcomes, &mut memory[..len], *at);
            }
            of_file.push((middle - start) / count);
            of_object.push((now() - middle) / count);
        }
        let median = |times: &mut Vec<u64>| {
            times.sort_unstable();
            times[times.len() / 2]
        };
        let (of_file, of_object) = (median(&mut of_file), median(&mut of_object));
        let order = if random { "random" } else { "in order" };
        let ratio = of_object as f64 / of_file as f64;
        println!("{len:>8} {order:>8} {of_file:>10} {of_object:>10} {ratio:>6.2}");
    }
    Ok(())
}

fn place(index: u64, len: u64, size: u64, random: bool) -> u64 {
    let places = (size / len).max(1);
    let index = if random { index.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 20 } else { index };
    index % places * len
}

/// Nanoseconds of CPU time of this thread.
fn now() -> u64 {
    let now = clock_gettime(ClockId::ThreadCPUTime);
    now.tv_sec as u64 * 1_000_000_000 + now.tv_nsec as u64
}

fn read(
    queue: &mut dyn StoreQueue,
    outcomes: &mut VecDeque<paravane_store::Outcome>,
    memory: &mut [u8],
    offset: u64,
) {
    let mut piece = HostSlice { ptr: memory.as_mut_ptr(), len: memory.len() };
    let pieces = Pieces { first: NonNull::from(&mut piece), count: 1 };
    // SAFETY: this function waits for the outcome.
    unsafe { queue.push(0, Job::Read { pieces, offset }).expect("room") };
    queue.submit().expect("a queue");
    while outcomes.is_empty() {
        if queue.rest(false) != Rest::Serve {
            queue.wait().expect("a queue");
        }
        queue.reap(outcomes);
    }
    let outcome = outcomes.pop_front().expect("an outcome");
    assert_eq!(usize::try_from(outcome.result()), Ok(memory.len()));
}
