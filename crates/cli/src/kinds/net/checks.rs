//! Checks of what a VMM and the driver of a network card have negotiated.
use crate::doctor::negotiated::Check;
use paravane_spec::net;

pub(super) const CHECKS: &[Check] = &[
    Check {
        name: "receive buffers",
        applies: |_| true,
        has: |it| it.has(net::F_MRG_RXBUF),
        with: "a received frame may span buffers",
        without: "no mergeable receive buffers: each frame takes a buffer of the largest size",
        remedy: "QEMU: mrg_rxbuf=on (its default); else the driver of the guest lacks it",
    },
    Check {
        name: "offloads",
        // Only the kernel behind a TAP device does these.
        applies: |it| it.device.back_end.starts_with("tap "),
        has: |it| it.features & OFFLOADS == OFFLOADS,
        with: "checksums and segmentation are left to the host",
        without: "without some offloads, the guest makes checksums and cuts TCP streams into frames of the MTU",
        remedy: "serve without --no-offloads; QEMU: csum=on,host_tso4=on,host_tso6=on,guest_csum=on,guest_tso4=on \
                 (its defaults)",
    },
];

const OFFLOADS: u64 =
    net::F_CSUM | net::F_HOST_TSO4 | net::F_HOST_TSO6 | net::F_GUEST_CSUM | net::F_GUEST_TSO4;
