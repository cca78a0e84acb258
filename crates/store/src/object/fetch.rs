//! The thread that fetches chunks.
use super::answer::Failure;
use super::source::Source;
use std::ops::RangeInclusive;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;
use tokio::runtime::Runtime;

/// The first pause before a request is sent again, and the longest.
const PAUSES: (Duration, Duration) = (Duration::from_millis(100), Duration::from_secs(5));

/// Fetches what is wanted until the source is stopped. At most `parallel` requests at once.
pub(super) fn run(runtime: &Runtime, source: &Arc<Source>, parallel: usize) {
    runtime.block_on(async {
        let active = Arc::new(AtomicUsize::new(0));
        let mut data = Vec::new();
        while !source.stop.load(Ordering::Relaxed) {
            while active.load(Ordering::Relaxed) < parallel
                && let Some(chunk) = source.next()
            {
                if source.serve_from_cache(chunk, &mut data) {
                    // The others have the thread, too.
                    tokio::task::yield_now().await;
                    continue;
                }
                let chunks = source.run(chunk);
                let (source, active) = (source.clone(), active.clone());
                active.fetch_add(1, Ordering::Relaxed);
                tokio::spawn(async move {
                    fetch(&source, chunks).await;
                    active.fetch_sub(1, Ordering::Relaxed);
                    source.wake.notify_one();
                });
            }
            source.wake.notified().await;
        }
    });
}

/// Fetches some chunks, and tries again for as long as it should.
async fn fetch(source: &Source, mut chunks: RangeInclusive<u64>) {
    let mut pause = PAUSES.0;
    loop {
        let before = *chunks.start();
        let Err(failure) = attempt(source, &mut chunks).await else { return };
        if !source.failed(&failure, chunks.clone()) {
            return;
        }
        if *chunks.start() != before {
            pause = PAUSES.0;
        }
        tokio::time::sleep(pause).await;
        pause = (pause * 2).min(PAUSES.1);
    }
}

/// Fetches chunks; those that were delivered leave `chunks`.
async fn attempt(source: &Source, chunks: &mut RangeInclusive<u64>) -> Result<(), Failure> {
    let layout = source.layout;
    let last = *chunks.end();
    let end = layout.start(last) + layout.len(last) as u64;
    let mut body = source.client.get(&source.identity, layout.start(*chunks.start()), end - 1).await?;
    let mut data = Vec::new();
    while let Some(bytes) = body.next().await? {
        let mut bytes = &bytes[..];
        while !bytes.is_empty() {
            let chunk = *chunks.start();
            let wanted = layout.len(chunk) - data.len();
            if wanted == 0 {
                return Err(Failure::Unusable("the server sends more than it was asked for".into()));
            }
            let (now, rest) = bytes.split_at(wanted.min(bytes.len()));
            data.extend_from_slice(now);
            bytes = rest;
            // The last one has to wait for the end of the answer.
            if now.len() == wanted && chunk != last {
                source.deliver(chunk, &data)?;
                data.clear();
                *chunks = chunk + 1..=last;
            }
        }
    }
    if *chunks.start() != last || data.len() != layout.len(last) {
        return Err(Failure::Again("the server sends less than it announces".into()));
    }
    source.deliver(last, &data)
}
