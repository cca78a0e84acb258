//! Metrics of network cards.
use crate::serve::metrics::of_kind::{Kind, Metrics};

pub(super) const METRICS: Metrics = Metrics {
    plain: &[
        ("paravane_net_transmitted_frames", "Frames from the guest", Kind::Counter, |device| {
            Some(device.net.as_ref()?.transmitted_frames)
        }),
        ("paravane_net_transmitted_bytes", "Bytes in frames from the guest", Kind::Counter, |device| {
            Some(device.net.as_ref()?.transmitted_bytes)
        }),
        ("paravane_net_received_frames", "Frames to the guest", Kind::Counter, |device| {
            Some(device.net.as_ref()?.received_frames)
        }),
        ("paravane_net_received_bytes", "Bytes in frames to the guest", Kind::Counter, |device| {
            Some(device.net.as_ref()?.received_bytes)
        }),
        (
            "paravane_net_unusable_buffers",
            "Receive buffers of the guest too short for any frame",
            Kind::Counter,
            |device| Some(device.net.as_ref()?.unusable_buffers),
        ),
    ],
    labelled: &[("paravane_net_dropped_frames", "Frames dropped", "reason", |device| {
        let dropped = device.net.iter().flat_map(|net| {
            [
                ("malformed", net.malformed_frames),
                ("refused", net.refused_frames),
                ("no_room", net.no_room_frames),
            ]
        });
        dropped.map(|(reason, count)| (reason, count as f64)).collect()
    })],
};
