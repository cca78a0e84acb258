//! Texts on network cards.
use crate::kinds::kind::{Features, Texts};
use crate::kinds::texts::SERVE_ONE;
use crate::reference::names::Bit;
use paravane_command_line::sections::Sections;
use paravane_spec::net;

/// Texts on a network card.
pub(super) const TEXTS: Texts = Texts {
    sections: Sections {
        command: "paravane-serve-net",
        examples: &[
            ("paravane serve net --tap tap0 --socket /run/net0.sock", "Serve a card on a TAP device."),
            ("paravane serve net --echo --socket /run/net0.sock", "Serve a card that returns every frame."),
        ],
        files: &[("/dev/net/tun", "TAP devices.")],
        ..SERVE_ONE
    },
    noun: "a network card",
    table: "A network card. Needs name, one of tap, link, echo, sink and source, and one of socket, connect and \
            socket-activation.",
    example: "[[net]]
name = \"vm0-net\"
tap = \"tap0\"
socket = \"/run/paravane/vm0-net.sock\"
",
};

pub(super) const FEATURES: Features = Features {
    heading: "network cards",
    bits: BITS,
    sometimes: &[(TAP, "on TAP devices"), (TAP_BY_KERNEL, "on TAP devices, if the host's kernel has USO")],
    remark: "`--no-offloads` disables checksum and segmentation offloads.",
    samples: &[&["--link", "a", "--queues", "2", "--mtu", "1500"]],
};

/// Features of network cards.
const BITS: &[Bit] = &[
    ("VIRTIO_NET_F_CSUM", net::F_CSUM, "Checksums of transmitted frames are offloaded."),
    ("VIRTIO_NET_F_GUEST_CSUM", net::F_GUEST_CSUM, "Received frames may lack checksums."),
    ("VIRTIO_NET_F_CTRL_GUEST_OFFLOADS", net::F_CTRL_GUEST_OFFLOADS, "Offloads can be changed at run time."),
    ("VIRTIO_NET_F_MTU", net::F_MTU, "MTU (--mtu)."),
    ("VIRTIO_NET_F_MAC", net::F_MAC, "MAC address."),
    ("VIRTIO_NET_F_GUEST_TSO4", net::F_GUEST_TSO4, "Large received TCP segments, IPv4."),
    ("VIRTIO_NET_F_GUEST_TSO6", net::F_GUEST_TSO6, "Large received TCP segments, IPv6."),
    ("VIRTIO_NET_F_GUEST_ECN", net::F_GUEST_ECN, "Large received TCP segments with ECN."),
    ("VIRTIO_NET_F_HOST_TSO4", net::F_HOST_TSO4, "Segmentation of transmitted TCP, IPv4."),
    ("VIRTIO_NET_F_HOST_TSO6", net::F_HOST_TSO6, "Segmentation of transmitted TCP, IPv6."),
    ("VIRTIO_NET_F_HOST_ECN", net::F_HOST_ECN, "Segmentation of transmitted TCP with ECN."),
    ("VIRTIO_NET_F_MRG_RXBUF", net::F_MRG_RXBUF, "Received frames may span buffers."),
    ("VIRTIO_NET_F_STATUS", net::F_STATUS, "Link status."),
    ("VIRTIO_NET_F_CTRL_VQ", net::F_CTRL_VQ, "Control queue."),
    ("VIRTIO_NET_F_GUEST_ANNOUNCE", net::F_GUEST_ANNOUNCE, "The driver announces itself after a migration."),
    ("VIRTIO_NET_F_MQ", net::F_MQ, "Several queue pairs (--queues)."),
    ("VIRTIO_NET_F_GUEST_USO4", net::F_GUEST_USO4, "Large received UDP segments, IPv4."),
    ("VIRTIO_NET_F_GUEST_USO6", net::F_GUEST_USO6, "Large received UDP segments, IPv6."),
    ("VIRTIO_NET_F_HOST_USO", net::F_HOST_USO, "Segmentation of transmitted UDP."),
];

/// Offloads of cards on TAP devices, besides those of all cards.
const TAP: u64 = net::F_HOST_TSO4
    | net::F_HOST_TSO6
    | net::F_HOST_ECN
    | net::F_GUEST_TSO4
    | net::F_GUEST_TSO6
    | net::F_GUEST_ECN;

/// Offloads of cards on TAP devices if the host's kernel has them.
const TAP_BY_KERNEL: u64 = net::F_HOST_USO | net::F_GUEST_USO4 | net::F_GUEST_USO6;
