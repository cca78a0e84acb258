//! Measures reads or writes: `nbd_rate URL read|write SIZE DEPTH JOBS`.
use paravane_dma::HostSlice;
use paravane_store::nbd::{Nbd, NbdOptions};
use paravane_store::{Direct, Job, Location, Pieces, Store};
use std::collections::VecDeque;
use std::ptr::NonNull;
use std::sync::Arc;
use std::time::Instant;

fn cpu() -> f64 {
    let text = std::fs::read_to_string("/proc/self/stat").unwrap();
    let words: Vec<_> = text.rsplit(')').next().unwrap().split_whitespace().collect();
    (words[11].parse::<f64>().unwrap() + words[12].parse::<f64>().unwrap()) / 100.0
}

fn main() {
    let arguments: Vec<_> = std::env::args().collect();
    let Ok(Location::Nbd(location)) = arguments[1].parse() else { panic!() };
    let writes = arguments[2] == "write";
    let number = |at: usize| arguments[at].parse::<usize>().unwrap();
    let (size, depth, jobs) = (number(3), number(4), number(5));
    let store = Nbd::open(&location, NbdOptions::default(), Arc::new(Direct)).unwrap();
    let mut queue = store.queue(depth as u16).unwrap();
    let mut memory: Vec<Vec<u8>> = (0..depth).map(|_| vec![1; size]).collect();
    let mut pieces: Vec<_> =
        memory.iter_mut().map(|m| HostSlice { ptr: m.as_mut_ptr(), len: size }).collect();
    let first = pieces.as_mut_ptr();
    let blocks = store.size() / size as u64;
    let mut at = 0;
    let mut job = |head: u16| {
        let pieces = Pieces { first: NonNull::new(unsafe { first.add(head as usize) }).unwrap(), count: 1 };
        at = (at + 1) % blocks;
        let offset = at * size as u64;
        if writes { Job::Write { pieces, offset, durable: false } } else { Job::Read { pieces, offset } }
    };
    let (begin, cpu_begin) = (Instant::now(), cpu());
    for head in 0..depth as u16 {
        unsafe { queue.push(head, job(head)) }.unwrap();
    }
    let (mut done, mut started) = (0, depth);
    let mut outcomes = VecDeque::new();
    while done < jobs {
        queue.wait().unwrap();
        queue.reap(&mut outcomes);
        for outcome in outcomes.drain(..) {
            assert_eq!(outcome.result(), size as i32);
            done += 1;
            if started < jobs {
                started += 1;
                unsafe { queue.push(outcome.head(), job(outcome.head())) }.unwrap();
            }
        }
    }
    let time = begin.elapsed().as_secs_f64();
    println!(
        "{:.0} IOPS, {:.2} us CPU a job, {:.2} s",
        jobs as f64 / time,
        (cpu() - cpu_begin) * 1e6 / jobs as f64,
        time
    );
}
