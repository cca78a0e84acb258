//! Request traces of a disk, for readers on the control socket.
//!
//! ```text
//!   I/O thread: QueueLatency --RequestRecord--> QueueObserver --> slow log --> log line
//!                                                     |
//!                                                     '--> filter of each reader --> ring of reader and queue
//!                                                                                    |         |
//!                           reader (control thread, every 20 ms) <--- in order of time'    full: dropped, counted
//! ```
//! Each ring has one producer, the thread that serves the queue, and one consumer. The producer
//! never waits and wakes nobody. Without readers and slow log, the queues have no observer.
pub(crate) mod lines;
pub(crate) mod stream;

use super::slow::SlowLog;
use lines::{TraceLine, TraceRequest};
use paravane_device::blk::operation::OPERATIONS;
use paravane_device::latency::{Operation, QueueLatency, RequestObserver, RequestRecord};
use parking_lot::Mutex;
use rtrb::{Consumer, Producer, RingBuffer};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::SystemTime;

/// Records that the rings of one reader have room for together (6 MiB).
const ROOM: usize = 1 << 16;

/// What happens to the requests of one disk when they end.
#[derive(Debug)]
pub(crate) struct RequestTrace {
    queues: Vec<Arc<QueueLatency>>,
    readers: Mutex<Readers>,
    /// The device stops.
    ended: AtomicBool,
}

#[derive(Debug, Default)]
struct Readers {
    /// Number of readers so far.
    count: u64,
    list: Vec<ReaderEnd>,
    slow: Option<SlowLog>,
}

/// One reader as the I/O threads see it.
#[derive(Debug)]
struct ReaderEnd {
    number: u64,
    /// By queue; `None`: the reader does not want this queue.
    outputs: Vec<Option<Arc<Output>>>,
}

/// From one queue to one reader.
#[derive(Debug)]
struct Output {
    filter: Filter,
    /// Locked by the queue's thread only, so it never waits.
    ring: Mutex<Producer<Ended>>,
    dropped: Arc<AtomicU64>,
}

#[derive(Clone, Copy, Debug)]
struct Filter {
    /// In nanoseconds.
    slower_than: u64,
    /// Operations as bits.
    operations: u16,
}

/// A request and when it ended.
#[derive(Clone, Copy, Debug)]
struct Ended {
    queue: u16,
    /// In nanoseconds since 1970.
    at: u64,
    record: RequestRecord,
}

/// Observes one queue. Replaced when readers come and go.
struct QueueObserver {
    queue: u16,
    slow: Option<SlowLog>,
    outputs: Vec<Arc<Output>>,
}

impl RequestObserver for QueueObserver {
    fn ended(&self, record: &RequestRecord) {
        if let Some(slow) = &self.slow {
            slow.check(self.queue, record);
        }
        for output in self.outputs.iter().filter(|output| output.filter.admits(record)) {
            output.push(Ended { queue: self.queue, at: now(), record: *record });
        }
    }
}

impl Filter {
    fn admits(self, record: &RequestRecord) -> bool {
        self.operations & (1 << record.operation.index()) != 0 && record.total() >= self.slower_than
    }
}

impl Output {
    fn push(&self, ended: Ended) {
        let pushed = self.ring.try_lock().is_some_and(|mut ring| ring.push(ended).is_ok());
        if !pushed {
            // Relaxed: a statistic.
            self.dropped.fetch_add(1, Ordering::Relaxed);
        }
    }
}

/// Nanoseconds since 1970.
fn now() -> u64 {
    let since = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
    u64::try_from(since.as_nanos()).unwrap_or(u64::MAX)
}

impl RequestTrace {
    /// For the device with these queues.
    pub(crate) fn new(queues: Vec<Arc<QueueLatency>>, slow: Option<SlowLog>) -> Arc<Self> {
        let trace = Self { queues, readers: Mutex::default(), ended: AtomicBool::new(false) };
        trace.log_slow(slow);
        Arc::new(trace)
    }

    /// Logs slow requests to `slow` from now on.
    pub(crate) fn log_slow(&self, slow: Option<SlowLog>) {
        let mut readers = self.readers.lock();
        readers.slow = slow;
        self.observe(&readers);
    }

    /// Gives each queue the observer that `readers` need.
    fn observe(&self, readers: &Readers) {
        for (queue, latency) in (0..).zip(&self.queues) {
            let of = |reader: &ReaderEnd| reader.outputs.get(usize::from(queue)).cloned().flatten();
            let outputs: Vec<_> = readers.list.iter().filter_map(of).collect();
            let needed = readers.slow.is_some() || !outputs.is_empty();
            let slow = readers.slow.clone();
            let observer = || Arc::new(QueueObserver { queue, slow, outputs }) as Arc<_>;
            latency.observe(needed.then(observer));
        }
    }

    /// Begins a trace.
    ///
    /// # Errors
    /// The request is invalid for this device.
    pub(crate) fn read(self: &Arc<Self>, request: &TraceRequest) -> Result<TraceReader, String> {
        let filter =
            Filter { slower_than: request.slower_than_ns, operations: operations(&request.operations)? };
        if let Some(queue) = request.queue
            && usize::from(queue) >= self.queues.len()
        {
            let (name, count) = (&request.device, self.queues.len());
            return Err(format!("device {name} has no queue {queue}: use 0 to {}", count - 1));
        }
        let wanted = |queue: u16| request.queue.is_none_or(|only| only == queue);
        let count = if request.queue.is_some() { 1 } else { self.queues.len() };
        let dropped = Arc::new(AtomicU64::new(0));
        let mut rings = Vec::new();
        let outputs = (0..).zip(&self.queues).map(|(queue, _)| {
            wanted(queue).then(|| {
                let (producer, consumer) = RingBuffer::new(ROOM / count);
                rings.push(consumer);
                Arc::new(Output { filter, ring: Mutex::new(producer), dropped: dropped.clone() })
            })
        });
        let outputs = outputs.collect();
        let mut readers = self.readers.lock();
        let number = readers.count;
        readers.count += 1;
        readers.list.push(ReaderEnd { number, outputs });
        self.observe(&readers);
        drop(readers);
        Ok(TraceReader { trace: self.clone(), number, rings, dropped })
    }

    /// Ends all traces.
    pub(crate) fn end(&self) {
        // Relaxed: the flag carries no data with it.
        self.ended.store(true, Ordering::Relaxed);
    }

    /// Number of queues.
    pub(crate) fn queues(&self) -> usize {
        self.queues.len()
    }
}

/// Operations as bits; none named: all.
fn operations(names: &[String]) -> Result<u16, String> {
    let mut bits = 0;
    for name in names {
        let Some(operation) = OPERATIONS.iter().find(|operation| operation.name() == name) else {
            let known = OPERATIONS.each_ref().map(Operation::name).join(", ");
            return Err(format!("unknown operation {name:?}: use {known}"));
        };
        bits |= 1 << operation.index();
    }
    Ok(if bits == 0 { u16::MAX } else { bits })
}

/// Reads one trace. The trace ends when this is dropped.
#[derive(Debug)]
pub(crate) struct TraceReader {
    trace: Arc<RequestTrace>,
    number: u64,
    rings: Vec<Consumer<Ended>>,
    dropped: Arc<AtomicU64>,
}

impl TraceReader {
    /// Takes at most `most` requests, in order of their ends. `true`: there may be more.
    pub(crate) fn take(&mut self, most: usize, lines: &mut Vec<TraceLine>) -> bool {
        let each = (most / self.rings.len().max(1)).max(1);
        let mut ended = Vec::new();
        let mut more = false;
        for ring in &mut self.rings {
            let before = ended.len();
            ended.extend(std::iter::from_fn(|| ring.pop().ok()).take(each));
            more |= ended.len() - before == each;
        }
        ended.sort_by_key(|ended| ended.at);
        lines.extend(ended.iter().map(|Ended { queue, at, record }| TraceLine::new(*queue, *at, record)));
        more
    }

    /// Number of requests that found no room so far.
    pub(crate) fn dropped(&self) -> u64 {
        self.dropped.load(Ordering::Relaxed)
    }

    /// Whether the device stops.
    pub(crate) fn has_ended(&self) -> bool {
        self.trace.ended.load(Ordering::Relaxed)
    }
}

impl Drop for TraceReader {
    fn drop(&mut self) {
        let mut readers = self.trace.readers.lock();
        readers.list.retain(|reader| reader.number != self.number);
        self.trace.observe(&readers);
    }
}

#[cfg(test)]
mod tests;
