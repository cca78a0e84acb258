//! Texts on disks.
use crate::kinds::kind::{Features, Texts};
use crate::kinds::texts::SERVE_ONE;
use crate::reference::names::Bit;
use paravane_command_line::sections::Sections;
use paravane_spec::blk;

/// Texts on a disk.
pub(super) const TEXTS: Texts = Texts {
    sections: Sections {
        command: "paravane-serve-blk",
        examples: &[
            ("paravane serve blk --image vm.img --socket /run/vm0.sock", "Serve a raw image."),
            (
                "paravane serve blk --blk-file=vm.img --fd=5",
                "Serve a disk on an inherited socket, as management software does.",
            ),
            (
                "paravane serve blk --image top.qcow2 --format qcow2 --backing raw:base.img --socket /run/vm0.sock",
                "Serve a qcow2 image with a backing file.",
            ),
            (
                "paravane serve blk --image /dev/vg0/vm0 --direct --queues 4 --workers 2 --socket /run/vm0.sock",
                "Serve a block device past the page cache, by two threads.",
            ),
        ],
        ..SERVE_ONE
    },
    noun: "a disk",
    table: "A disk. Needs name, image, and one of socket, connect and socket-activation.",
    example: "[[blk]]
name = \"vm0-disk\"
image = \"/var/lib/paravane/vm0.img\"
socket = \"/run/paravane/vm0-disk.sock\"
queues = 4
",
};

pub(super) const FEATURES: Features = Features {
    heading: "disks",
    bits: BITS,
    sometimes: &[],
    remark: "",
    samples: &[&["--image", "IMAGE", "--queues", "2"], &["--image", "IMAGE", "--read-only"]],
};

/// Features of disks.
const BITS: &[Bit] = &[
    ("VIRTIO_BLK_F_SIZE_MAX", blk::F_SIZE_MAX, "Maximum size of a segment."),
    ("VIRTIO_BLK_F_SEG_MAX", blk::F_SEG_MAX, "Maximum number of segments of a request."),
    ("VIRTIO_BLK_F_RO", blk::F_RO, "Read-only disk (--read-only)."),
    ("VIRTIO_BLK_F_BLK_SIZE", blk::F_BLK_SIZE, "Block size."),
    ("VIRTIO_BLK_F_FLUSH", blk::F_FLUSH, "Flush requests."),
    ("VIRTIO_BLK_F_TOPOLOGY", blk::F_TOPOLOGY, "Physical block size and alignment."),
    ("VIRTIO_BLK_F_CONFIG_WCE", blk::F_CONFIG_WCE, "Switch of the write cache."),
    ("VIRTIO_BLK_F_MQ", blk::F_MQ, "Several queues (--queues)."),
    ("VIRTIO_BLK_F_DISCARD", blk::F_DISCARD, "Discard requests; writable disks."),
    ("VIRTIO_BLK_F_WRITE_ZEROES", blk::F_WRITE_ZEROES, "Write-zeroes requests; writable disks."),
];
