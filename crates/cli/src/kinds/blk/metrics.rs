//! Metrics of disks.
use crate::serve::metrics::of_kind::{Kind, Metrics};
use crate::serve::report::Device;
use crate::serve::report::stores::{Cache, Store};

pub(super) const METRICS: Metrics = Metrics {
    plain: &[
        ("paravane_blk_size_bytes", "Size of the disk as last checked", Kind::Gauge, |device| device.size),
        (
            "paravane_blk_rejected_requests",
            "Invalid requests, for example beyond the end of the disk",
            Kind::Counter,
            |device| device.rejected_requests,
        ),
        (
            "paravane_blk_size_unknown",
            "Whether the last check of the image size failed (0 or 1)",
            Kind::Gauge,
            |device| device.size.map(|_| device.size_error.is_some().into()),
        ),
        (
            "paravane_blk_image_deleted",
            "Whether the image was deleted while in use (0 or 1)",
            Kind::Gauge,
            |device| device.size.map(|_| device.image_deleted.into()),
        ),
        (
            "paravane_blk_store_up",
            "Whether all servers of the disk's images answer (0 or 1)",
            Kind::Gauge,
            |device| of_stores(device, |stores| stores.iter().all(|store| store.link == "up").into()),
        ),
        (
            "paravane_blk_store_waiting",
            "Requests that wait for a server to connect to or to reply",
            Kind::Gauge,
            |device| of_stores(device, |stores| stores.iter().map(|store| u64::from(store.waiting)).sum()),
        ),
        (
            "paravane_blk_store_reconnects",
            "Connections to servers that were made again",
            Kind::Counter,
            |device| of_stores(device, |stores| stores.iter().map(|store| store.reconnects).sum()),
        ),
        (
            "paravane_blk_cache_hit_bytes",
            "Bytes of chunks that requests found in caches",
            Kind::Counter,
            |device| of_caches(device, |cache| cache.hit_bytes),
        ),
        (
            "paravane_blk_cache_miss_bytes",
            "Bytes of chunks that were fetched for requests",
            Kind::Counter,
            |device| of_caches(device, |cache| cache.miss_bytes),
        ),
        ("paravane_blk_cache_used_bytes", "Bytes that caches hold", Kind::Gauge, |device| {
            of_caches(device, |cache| cache.used_bytes)
        }),
        ("paravane_blk_full", "Whether writes wait for room on the host (0 or 1)", Kind::Gauge, |device| {
            device.full_times.map(|_| device.full.is_some().into())
        }),
        ("paravane_blk_full_requests", "Writes that wait for room on the host", Kind::Gauge, |device| {
            device.full_times.map(|_| device.full.as_ref().map_or(0, |full| full.requests))
        }),
        ("paravane_blk_full_times", "Times that writes began to wait for room", Kind::Counter, |device| {
            device.full_times
        }),
        ("paravane_blk_snapshots", "Snapshots taken while the disk was served", Kind::Counter, |device| {
            device.full_times.map(|_| device.snapshots)
        }),
    ],
    labelled: &[("paravane_blk_errors", "Requests that storage failed", "operation", |device| {
        let errors = device.storage_errors.iter().flat_map(|errors| errors.operations());
        errors.map(|(operation, count)| (operation, count as f64)).collect()
    })],
};

/// A figure of the stores of a disk; `None`: it has none.
fn of_stores(device: &Device, figure: fn(&[Store]) -> u64) -> Option<u64> {
    (!device.stores.is_empty()).then(|| figure(&device.stores))
}

/// Sum of a figure over the caches of a disk; `None`: it has none.
fn of_caches(device: &Device, figure: fn(&Cache) -> u64) -> Option<u64> {
    let mut caches = device.stores.iter().filter_map(|store| store.cache.as_ref()).peekable();
    caches.peek()?;
    Some(caches.map(figure).sum())
}
