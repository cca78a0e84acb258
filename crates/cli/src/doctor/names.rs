//! Names of all findings, for the reference. They are stable.

/// A name, and the question that the finding answers.
pub(crate) type Name = (&'static str, &'static str);

/// Of `paravane doctor`.
pub(crate) const HOST: &[Name] = &[
    ("kvm", "Can this user create virtual machines?"),
    ("ioeventfd", "Can a kick bypass the VMM?"),
    ("irqfd", "Can an interrupt bypass the VMM?"),
    ("msi", "Can interrupt messages be sent without a route?"),
    ("irq routing", "Can KVM route interrupts?"),
    ("ioeventfd limit", "How many ioeventfds does a VM get?"),
    ("exit cost", "What does an exit of the guest cost?"),
    ("kick cost", "What does a kick by ioeventfd cost?"),
    ("ring 0", "Does the processor run ring 0 natively?"),
    ("vhost-net", "Can the kernel serve network cards (`paravane run`)?"),
    ("tun", "Can TAP devices be opened?"),
    ("transparent hugepages", "Does `paravane run` get large pages without set-up?"),
    ("hugepages", "Are pages reserved for `paravane run --hugepages`?"),
    ("shared hugepages", "Can memory that a VMM shares have huge pages?"),
    ("io_uring", "Can disks use io_uring, and which features does the kernel have?"),
    ("memlock", "How much memory may a process pin?"),
    ("postcopy", "Can guests migrate by postcopy?"),
    ("landlock", "Can the sandbox of `paravane serve` restrict files, ports and signals?"),
    ("nofile", "For how many devices does RLIMIT_NOFILE last?"),
    ("cpu governor", "Do processors slow down when idle?"),
];

/// Of `paravane doctor --config`, besides some of the host.
pub(crate) const DEVICES: &[Name] = &[
    ("configuration", "Do the files, directories and users of the configuration exist?"),
    ("tap", "Does the TAP device of a card exist, with its queues, and may the daemon open it?"),
];

/// Of `paravane doctor --client`.
pub(crate) const CLIENT: &[Name] = &[
    ("connection", "Is a VMM connected, and has its guest's driver started?"),
    ("memory", "Does the daemon see what the guest writes to a ring?"),
    ("notifications", "How many kicks and interrupts does a request take?"),
    ("event index", "Are notifications suppressed (VIRTIO_F_EVENT_IDX)?"),
    ("indirect descriptors", "Does a request take one descriptor (VIRTIO_F_INDIRECT_DESC)?"),
    ("layout", "Split or packed virtqueues (VIRTIO_F_RING_PACKED)?"),
    ("queues", "Does the driver use all queues?"),
    ("threads", "Does every thread of the device serve a queue?"),
    ("queue size", "Do the queues have room for many requests?"),
    ("iommu", "Is memory behind an IOMMU (VIRTIO_F_ACCESS_PLATFORM)?"),
    ("in-flight tracking", "Do requests survive a crash of the daemon (INFLIGHT_SHMFD)?"),
    ("memory slots", "Are memory regions added one by one (CONFIGURE_MEM_SLOTS)?"),
    ("reply-ack", "Does the VMM wait for acknowledgements (REPLY_ACK)?"),
    ("resize", "Does a running guest learn of a new size (CONFIG, BACKEND_REQ)?"),
    ("migration", "Can the guest migrate (LOG_SHMFD)?"),
    ("flush", "Can the guest flush (VIRTIO_BLK_F_FLUSH)?"),
    ("discard", "Does the image shrink when the guest frees blocks (VIRTIO_BLK_F_DISCARD)?"),
    ("receive buffers", "May a received frame span buffers (VIRTIO_NET_F_MRG_RXBUF)?"),
    ("offloads", "Does the guest leave checksums and segmentation to the host?"),
];
