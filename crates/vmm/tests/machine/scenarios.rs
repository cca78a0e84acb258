//! What runs must do, with KVM and with a thread.
use crate::bench_top::{config, digest, go, image, skipped, with_disk};
use crate::devices::{Card, Disk, Machine, Network};
pub(crate) use crate::processors::*;
use paravane_device::blk::EngineChoice;
use paravane_test_support::patience;
use paravane_vmm::{
    AccelChoice, Completion, DirtyLogging, DiskWork, ExitFigures, Inject, IoThreadFigures, KickPath,
    MsiDelivery, Outcome, Progress, QueueResult, Report, RingLayout, TransportChoice,
};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

fn accel_name(accel: AccelChoice) -> &'static str {
    if accel == AccelChoice::Kvm { "kvm" } else { "thread" }
}

/// Sane figures of a run that went well, over plain mmio.
fn assert_verified(report: &Report, accel: AccelChoice) {
    assert_verified_over(TransportChoice::Mmio, report, accel);
}

fn assert_verified_over(transport: TransportChoice, report: &Report, accel: AccelChoice) {
    assert_eq!(report.outcome, Outcome::Verified);
    assert_eq!(report.accel, accel_name(accel));
    assert_eq!(report.transport, transport.name());
    assert!(report.kicks > 0 && report.exits > 0);
    let ExitFigures { notify, interrupt_status, interrupt_acknowledge, other } = report.exits_by_kind;
    assert_eq!(notify + interrupt_status + interrupt_acknowledge + other, report.exits);
    assert_eq!(notify, report.exit_kicks);
    assert!(report.boot_ms > 0.0 && report.wall_s > 0.0 && report.host_cpu_s > 0.0);
    for disk in &report.disks {
        assert_eq!(disk.problem, None);
        assert!(disk.iops > 0.0 && disk.mb_s > 0.0, "{disk:?}");
        assert!(0.0 < disk.p50_us && disk.p50_us <= disk.p99_us && disk.p99_us <= disk.p999_us, "{disk:?}");
    }
}

pub(crate) fn a_hashed_image_has_the_hosts_digest_and_is_untouched(accel: AccelChoice) {
    // Not a multiple of the request size, so that the last request is a short one.
    let image = image(8 * 2048 + 3);
    let before = digest(image.path());
    let report = go(with_disk(accel, image.path(), DiskWork::Hash));
    assert_verified(&report, accel);
    assert_eq!(report.disks[0].sha256, before);
    assert_eq!(report.disks[0].bytes_verified, (8 * 2048 + 3) * 512);
    assert_eq!(report.disks[0].job, "hash");
    assert_eq!(digest(image.path()), before);
    assert_eq!(report.entropy_bytes, 256);
}

pub(crate) fn a_read_only_image_is_hashed(accel: AccelChoice) {
    let image = image(2048);
    let before = digest(image.path());
    let mut permissions = image.as_file().metadata().unwrap().permissions();
    permissions.set_readonly(true);
    image.as_file().set_permissions(permissions).unwrap();
    let mut config = with_disk(accel, image.path(), DiskWork::Hash);
    config.disks[0].read_only = true;
    let report = go(config);
    assert_verified(&report, accel);
    assert_eq!(report.disks[0].sha256, before);
}

pub(crate) fn a_write_test_verifies(accel: AccelChoice) {
    let image = image(4 * 2048);
    let before = digest(image.path());
    let report = go(with_disk(accel, image.path(), DiskWork::WriteTest));
    assert_verified(&report, accel);
    assert!(report.interrupts > 0);
    let disk = &report.disks[0];
    assert_eq!(disk.bytes_verified, 4 << 20);
    assert_eq!(disk.job, "write-test");
    assert_ne!(disk.sha256, before);
    assert_eq!(disk.sha256, digest(image.path()));
    assert!(report.mb_per_cpu_s > 0.0);
}

pub(crate) fn a_write_test_of_a_part_leaves_the_rest_alone(accel: AccelChoice) {
    let image = image(2 * 2048 + 1);
    let before = std::fs::read(image.path()).unwrap();
    let mut config = with_disk(accel, image.path(), DiskWork::WriteTest);
    config.span = (1 << 20) + 100;
    config.block = 1536;
    config.depth = 7;
    let report = go(config);
    assert_verified(&report, accel);
    let span = ((1 << 20) + 100) / 1536 * 1536;
    assert_eq!(report.disks[0].bytes_verified, span as u64);
    let after = std::fs::read(image.path()).unwrap();
    assert!(before[span..] == after[span..]);
    assert!(before[..512] != after[..512]);
}

pub(crate) fn two_disks_at_once(accel: AccelChoice) {
    let (written, read) = (image(4 * 2048), image(4 * 2048));
    let before = digest(read.path());
    let mut config = with_disk(accel, written.path(), DiskWork::WriteTest);
    config.disks.push(Disk {
        path: read.path().to_owned(),
        read_only: true,
        queues: 1,
        work: DiskWork::Hash,
    });
    let report = go(config);
    assert_verified(&report, accel);
    assert_eq!(report.disks.len(), 2);
    assert_eq!(report.disks[0].bytes_verified, 4 << 20);
    assert_eq!(report.disks[1].sha256, before);
}

pub(crate) fn polling_needs_no_interrupts(accel: AccelChoice) {
    let image = image(4 * 2048);
    let mut config = with_disk(accel, image.path(), DiskWork::WriteTest);
    config.completion = Completion::Poll;
    let report = go(config);
    assert_verified(&report, accel);
    // Suppression is a hint: an interrupt or two may come before the driver has said that it wants
    // none.
    assert!(report.interrupts <= 4, "{}", report.interrupts);
}

pub(crate) fn the_thread_engine_serves_as_well(accel: AccelChoice) {
    let image = image(4 * 2048);
    let mut config = with_disk(accel, image.path(), DiskWork::WriteTest);
    config.engine = EngineChoice::Threads;
    let report = go(config);
    assert_verified(&report, accel);
    assert!(report.disks[0].engine.starts_with("threads"), "{}", report.disks[0].engine);
}

pub(crate) fn every_ring_layout_serves_as_well(accel: AccelChoice) {
    let image = image(4 * 2048);
    for (ring, in_order, name) in [
        (RingLayout::Split, true, "split, in order"),
        (RingLayout::Packed, false, "packed"),
        (RingLayout::Packed, true, "packed, in order"),
    ] {
        for completion in [Completion::Interrupt, Completion::Poll] {
            let mut config = with_disk(accel, image.path(), DiskWork::WriteTest);
            (config.ring, config.in_order, config.completion) = (ring, in_order, completion);
            config.entropy = 4096;
            let report = go(config);
            assert_verified(&report, accel);
            assert_eq!((report.ring, report.entropy_bytes), (name, 4096));
        }
    }
}

pub(crate) fn devices_behind_domains_serve_as_well(accel: AccelChoice) {
    let image = image(4 * 2048);
    for ring in [RingLayout::Split, RingLayout::Packed] {
        let mut config = with_disk(accel, image.path(), DiskWork::WriteTest);
        (config.ring, config.iommu, config.entropy) = (ring, true, 4096);
        let report = go(config);
        assert_verified(&report, accel);
        assert!(report.iommu);
        assert_eq!(report.entropy_bytes, 4096);
    }
}

pub(crate) fn dirty_pages_are_counted(accel: AccelChoice) {
    let image = image(4 * 2048);
    let mut config = with_disk(accel, image.path(), DiskWork::WriteTest);
    config.dirty_log = DirtyLogging::Rate;
    let report = go(config);
    assert_verified(&report, accel);
    let dirty = report.dirty.expect("figures");
    assert!(dirty.harvests > 0 && dirty.pages_per_s > 0.0, "{dirty:?}");
    // Each buffer of the disk, at least, and the ring.
    assert!(dirty.device_pages > 16, "{dirty:?}");
    assert_eq!(dirty.vcpu_pages.is_some(), accel == AccelChoice::Kvm);
    assert_eq!(dirty.verified, None);
}

pub(crate) fn the_dirty_log_misses_nothing(accel: AccelChoice) {
    let image = image(4 * 2048);
    for (ring, iommu) in [(RingLayout::Split, false), (RingLayout::Packed, true)] {
        let mut config = with_disk(accel, image.path(), DiskWork::WriteTest);
        (config.ring, config.iommu) = (ring, iommu);
        config.duration = Duration::from_millis(500);
        config.dirty_log = DirtyLogging::Verify;
        if accel == AccelChoice::Thread {
            // The guest's own writes are in no log; see the device crate's tests for the devices'.
            let error = config.run(&Progress::default()).unwrap_err();
            assert_eq!(error.exit_status(), 2, "{error}");
            continue;
        }
        let report = go(config);
        assert_verified(&report, accel);
        let dirty = report.dirty.expect("figures");
        assert_eq!(dirty.verified, Some(true), "{dirty:?}");
        assert!(dirty.harvests > 3 && dirty.vcpu_pages > Some(0), "{dirty:?}");
    }
}

pub(crate) fn without_ioeventfds_every_kick_exits(accel: AccelChoice) {
    let image = image(4 * 2048);
    let mut config = with_disk(accel, image.path(), DiskWork::WriteTest);
    let report = go(config.clone());
    assert_verified(&report, accel);
    assert_eq!(report.exit_kicks, 0);
    config.ioeventfd = false;
    let report = go(config);
    assert_verified(&report, accel);
    assert_eq!(report.exit_kicks, report.kicks);
    assert!(report.exits > report.kicks);
}

pub(crate) fn a_wired_interrupt_takes_a_status_read_and_an_acknowledgement(accel: AccelChoice) {
    let image = image(4 * 2048);
    let report = go(with_disk(accel, image.path(), DiskWork::WriteTest));
    assert_verified(&report, accel);
    let ExitFigures { interrupt_status, interrupt_acknowledge, .. } = report.exits_by_kind;
    assert!(interrupt_acknowledge > 0 && interrupt_status >= interrupt_acknowledge);
    // An edge that comes while the last one is looked after, and whose cause was acknowledged with
    // it, finds nothing.
    assert!(interrupt_acknowledge <= report.interrupts);
    assert_eq!(report.messages, 0);
}

/// Transports with messages and a notification address for every queue.
const BY_MESSAGES: [TransportChoice; 2] = [TransportChoice::MmioMsi, TransportChoice::Pci];

pub(crate) fn a_message_takes_no_register_access_at_all(accel: AccelChoice) {
    let image = image(4 * 2048);
    let layouts = [
        (RingLayout::Split, false, false, MsiDelivery::Signal),
        (RingLayout::Packed, true, false, MsiDelivery::Irqfd),
        (RingLayout::Packed, false, true, MsiDelivery::Signal),
    ];
    let each = BY_MESSAGES.iter().flat_map(|&transport| layouts.map(|layout| (transport, layout)));
    for (transport, (ring, in_order, iommu, delivery)) in each {
        let mut config = with_disk(accel, image.path(), DiskWork::WriteTest);
        (config.transport, config.msi_delivery) = (transport, delivery);
        (config.ring, config.in_order, config.iommu, config.entropy) = (ring, in_order, iommu, 4096);
        let report = go(config);
        assert_verified_over(transport, &report, accel);
        assert_eq!(report.entropy_bytes, 4096);
        assert!(report.messages > 0);
        assert_eq!(report.messages, report.interrupts);
        let ExitFigures { notify, interrupt_status, interrupt_acknowledge, .. } = report.exits_by_kind;
        assert_eq!((notify, interrupt_status, interrupt_acknowledge), (0, 0, 0));
    }
}

pub(crate) fn messages_of_several_devices_do_not_get_mixed_up(accel: AccelChoice) {
    let (first, second, third) = (image(4 * 2048), image(2 * 2048 + 5), image(2048));
    for transport in BY_MESSAGES {
        let mut config = with_disk(accel, first.path(), DiskWork::WriteTest);
        // Each message has its route.
        (config.transport, config.msi_delivery) = (transport, MsiDelivery::Irqfd);
        for image in [&second, &third] {
            config.disks.push(Disk {
                path: image.path().to_owned(),
                read_only: false,
                queues: 1,
                work: DiskWork::Hash,
            });
        }
        let report = go(config);
        assert_verified_over(transport, &report, accel);
        assert_eq!(report.disks[1].sha256, digest(second.path()));
        assert_eq!(report.disks[2].sha256, digest(third.path()));
    }
}

pub(crate) fn notification_addresses_work_without_ioeventfds_and_polled(accel: AccelChoice) {
    let image = image(2 * 2048);
    let completions = [Completion::Interrupt, Completion::Poll];
    let each =
        BY_MESSAGES.iter().flat_map(|&transport| completions.map(|completion| (transport, completion)));
    for (transport, completion) in each {
        let mut config = with_disk(accel, image.path(), DiskWork::WriteTest);
        config.transport = transport;
        (config.ioeventfd, config.completion) = (false, completion);
        let report = go(config);
        assert_verified_over(transport, &report, accel);
        assert_eq!(report.exits_by_kind.notify, report.kicks);
    }
}

/// A disk, and a card with several pairs of queues.
fn with_many_queues(accel: AccelChoice, image: &Path) -> Machine {
    let net = Card { queues: 3, frames: 300, ..Card::default() };
    Machine { nets: vec![net], ..with_disk(accel, image, DiskWork::Hash) }
}

/// Device and index of the queues for which `condition` holds.
fn queues_with(report: &Report, condition: impl Fn(&QueueResult) -> bool) -> Vec<(usize, u16)> {
    let those = report.queues.iter().filter(|queue| condition(queue));
    those.map(|queue| (queue.device, queue.queue)).collect()
}

pub(crate) fn queues_without_an_ioeventfd_fall_back_one_by_one(accel: AccelChoice) {
    let image = image(2048);
    for transport in [TransportChoice::Mmio, TransportChoice::MmioMsi, TransportChoice::Pci] {
        // The disk's queue, the entropy device's, the card's three pairs and its control queue,
        // started in this order.
        for (max, given) in [(0, 0), (1, 1), (5, 5), (1000, 9)] {
            let config = with_many_queues(accel, image.path());
            let report =
                go(config.with(|config| (config.transport, config.max_ioeventfds) = (transport, Some(max))));
            assert_verified_over(transport, &report, accel);
            assert_eq!(report.queues.len(), 9);
            let refused = queues_with(&report, |queue| queue.kicks_by == KickPath::Refused);
            assert_eq!(refused, queues_with(&report, |_| true)[given..], "{transport:?}, {max}");
            // Only queues without an ioeventfd exit.
            let exits = queues_with(&report, |queue| queue.exit_kicks > 0);
            assert!(exits.iter().all(|queue| refused.contains(queue)), "{transport:?}, {max}: {exits:?}");
            assert_eq!(report.queues.iter().map(|queue| queue.exit_kicks).sum::<u64>(), report.exit_kicks);
            assert_eq!(report.exit_kicks > 0, given < 9);
        }
    }
}

pub(crate) fn queues_are_spread_over_io_threads(accel: AccelChoice) {
    let image = image(2048);
    for threads in [1, 3, 4] {
        let report =
            go(with_many_queues(accel, image.path()).with(|config| config.io_threads = Some(threads)));
        assert_verified(&report, accel);
        assert_eq!(report.io_threads.len(), usize::from(threads));
        for queue in &report.queues {
            assert_eq!(queue.io_thread, (queue.device + usize::from(queue.queue)) % usize::from(threads));
        }
    }
    let report = go(with_many_queues(accel, image.path()));
    assert_verified(&report, accel);
    let of_the_card: Vec<_> = report.queues.iter().filter(|queue| queue.device == 2).collect();
    assert!(of_the_card.iter().all(|queue| queue.io_thread == of_the_card[0].io_thread), "{of_the_card:?}");
}

pub(crate) fn queues_move_to_the_thread_that_has_less_to_do(accel: AccelChoice) {
    if std::thread::available_parallelism().map_or(1, usize::from) < 2 {
        return skipped(
            "queues_move_to_the_thread_that_has_less_to_do",
            "there is only one CPU, and one I/O thread",
        );
    }
    // The entropy device has the first thread and soon nothing to do, the card's eight queues are
    // all on the second.
    for transport in [TransportChoice::Mmio, TransportChoice::Pci] {
        // However fast the machine is, one of these takes long enough for a move.
        let moved = [8_000, 80_000, 800_000].into_iter().any(|frames| {
            let net = Card { queues: 4, frames, ..Card::default() };
            let mut config = Machine { nets: vec![net], ..config(accel) };
            (config.transport, config.rebalance, config.depth) = (transport, true, 2);
            let report = go(config);
            assert_verified_over(transport, &report, accel);
            report.queues.iter().any(|queue| queue.moves > 0)
        });
        assert!(moved, "{transport:?}");
    }
}

pub(crate) fn queues_that_are_polled_serve_as_well(accel: AccelChoice) {
    let image = image(2048);
    let polls = |thread: &IoThreadFigures| thread.fruitful_polls + thread.fruitless_polls;
    for (transport, ring, engine) in [
        (TransportChoice::Mmio, RingLayout::Packed, EngineChoice::Auto),
        (TransportChoice::MmioMsi, RingLayout::Split, EngineChoice::Threads),
        (TransportChoice::Pci, RingLayout::Split, EngineChoice::Auto),
    ] {
        let longest_poll = Duration::from_millis(10);
        // Whether anything is polled at all is a matter of time: on a busy host work may never come
        // soon enough.
        let polled = (0..10).any(|_| {
            let mut many = Machine { engine, ..with_many_queues(accel, image.path()) };
            (many.transport, many.ring, many.io_threads) = (transport, ring, Some(2));
            many.longest_poll = longest_poll;
            let report = go(many);
            assert_verified_over(transport, &report, accel);
            report.io_threads.iter().map(polls).sum::<u64>() > 0
        });
        assert!(polled, "{transport:?}");
        let mut config = with_disk(accel, image.path(), DiskWork::WriteTest);
        (config.span, config.engine) = (1 << 19, engine);
        (config.transport, config.ring, config.longest_poll) = (transport, ring, longest_poll);
        let report = go(config);
        assert_verified_over(transport, &report, accel);
    }
    let report = go(with_many_queues(accel, image.path()));
    assert!(report.io_threads.iter().all(|thread| thread.turns > 0 && polls(thread) == 0), "off by default");
}

/// A machine with network cards and nothing else.
fn with_nets(accel: AccelChoice, nets: &[Card]) -> Machine {
    Machine { nets: nets.to_vec(), entropy: 0, ..config(accel) }
}

pub(crate) fn frames_come_back_from_an_echo(accel: AccelChoice) {
    for transport in [TransportChoice::Mmio, TransportChoice::MmioMsi, TransportChoice::Pci] {
        for (size, frames, ring) in
            [(22, 300, RingLayout::Split), (1514, 200, RingLayout::Packed), (65_549, 40, RingLayout::Split)]
        {
            let net = Card { size, frames, ..Card::default() };
            let report =
                go(with_nets(accel, &[net]).with(|c| (c.transport, c.ring, c.depth) = (transport, ring, 4)));
            assert_verified_over(transport, &report, accel);
            let net = &report.nets[0];
            assert_eq!((net.frames, net.problem.clone()), (frames, None));
            assert!(net.per_s > 0.0 && 0.0 < net.p50_us && net.p50_us <= net.p999_us, "{net:?}");
        }
    }
}

pub(crate) fn the_measured_phase_is_counted_apart(accel: AccelChoice) {
    let net = Card { frames: 300, ..Card::default() };
    let report = go(with_nets(accel, &[net]).with(|config| config.depth = 1));
    assert_verified(&report, accel);
    let phase = report.measured.unwrap();
    // One that is back before the guest sleeps takes no interrupt, and that a frame has gone is no
    // news.
    assert!(phase.interrupts <= 300 && phase.cpu_s > 0.0, "{phase:?}");
    assert!((1..=700).contains(&phase.kicks), "{phase:?}");
    assert!(0.0 < phase.wall_s && phase.wall_s < report.wall_s, "{phase:?}");
    assert!(phase.kvm_exits <= report.kvm_exits && phase.kvm_exits != Some(0), "{phase:?}");
    assert!(
        phase.exits.total() < report.exits - 20,
        "set-up is no part of it: {phase:?} of {}",
        report.exits
    );
    let image = image(2048);
    let report = go(with_disk(accel, image.path(), DiskWork::WriteTest));
    assert_verified(&report, accel);
    let phase = report.measured.unwrap();
    assert!(report.disks[0].requests > 0 && phase.kicks > 0, "{phase:?}");
    assert!(phase.kicks < report.kicks, "filling and reading back are no part of it: {phase:?}");
}

pub(crate) fn an_answer_may_be_longer_or_shorter(accel: AccelChoice) {
    for (size, reply) in [(46, 1038), (1038, 46)] {
        let net = Card { size, reply: Some(reply), frames: 100, ..Card::default() };
        let report = go(with_nets(accel, &[net]).with(|config| config.depth = 1));
        assert_verified(&report, accel);
        let net = &report.nets[0];
        assert_eq!((net.frames, net.size, net.reply, net.problem.clone()), (100, size, reply, None));
    }
}

pub(crate) fn two_cards_on_a_link(accel: AccelChoice) {
    for (transport, queues, size) in
        [(TransportChoice::Mmio, 1, 64), (TransportChoice::MmioMsi, 2, 9000), (TransportChoice::Pci, 1, 1514)]
    {
        let card = |last| Card {
            network: Network::Link("a".into()),
            mac: [2, 0, 0, 0, 0, last],
            queues,
            size,
            frames: 300,
            ..Card::default()
        };
        let nets = [card(1), card(2)];
        let report = go(with_nets(accel, &nets).with(|c| (c.transport, c.depth) = (transport, 4)));
        assert_verified_over(transport, &report, accel);
        for (result, net) in report.nets.iter().zip(&nets) {
            assert_eq!((result.network, result.mac, result.frames), ("link", net.mac, 300));
        }
        assert!(report.nets[0].per_s > 0.0);
    }
}

pub(crate) fn an_echo_peer_answers_from_its_own_thread(accel: AccelChoice) {
    for (size, reply, depth, queues) in [(98, 1090, 1, 1), (1514, 60, 16, 3)] {
        let network = Network::EchoPeer;
        let net = Card { network, size, reply: Some(reply), frames: 300, queues, ..Card::default() };
        let report = go(with_nets(accel, &[net]).with(|c| (c.depth, c.time_kicks) = (depth, true)));
        assert_verified(&report, accel);
        assert_eq!((report.nets[0].frames, report.nets[0].problem.clone()), (300, None));
        let stops = report.kick_stops.unwrap();
        // Those at the end may be left in a descriptor.
        assert!(stops.count >= report.kicks && stops.mean_ns > 0.0 && stops.median_ns > 0.0, "{stops:?}");
    }
}

pub(crate) fn frames_stream_one_way(accel: AccelChoice) {
    for network in [Network::Sink, Network::Source] {
        for (size, frames, ring) in [(22, 3000, RingLayout::Split), (65_536, 300, RingLayout::Packed)] {
            let net = Card { network: network.clone(), size, frames, ..Card::default() };
            let report = go(with_nets(accel, &[net]).with(|c| (c.ring, c.depth) = (ring, 32)));
            assert_verified(&report, accel);
            assert_eq!((report.nets[0].frames, report.nets[0].problem.clone()), (frames, None));
            assert!(report.nets[0].per_s > 0.0 && report.measured.is_some());
            assert_eq!(report.kick_stops, None);
        }
    }
}

pub(crate) fn several_cards_with_several_queues_beside_a_disk(accel: AccelChoice) {
    let image = image(2048);
    let card =
        |queues, last| Card { mac: [2, 0, 0, 0, 0, last], queues, frames: 300, size: 200, ..Card::default() };
    let nets = vec![card(1, 1), card(3, 2)];
    for iommu in [false, true] {
        let config = with_disk(accel, image.path(), DiskWork::Hash);
        let config = Machine { nets: nets.clone(), ..config };
        let report = go(config.with(|config| config.iommu = iommu));
        assert_verified(&report, accel);
        assert_eq!(report.nets.iter().map(|net| net.frames).collect::<Vec<_>>(), [300, 300]);
    }
}

pub(crate) fn entropy_alone(accel: AccelChoice) {
    let mut config = config(accel);
    config.entropy = 10_000;
    let report = go(config);
    assert_verified(&report, accel);
    assert_eq!(report.entropy_bytes, 10_000);
    assert!(report.disks.is_empty());
}

fn failing(accel: AccelChoice, inject: Inject) -> (String, Vec<String>) {
    let image = image(2048);
    let mut config = with_disk(accel, image.path(), DiskWork::WriteTest);
    config.inject = inject;
    // On a busy host a guest makes no progress for a while before it crashes.
    if inject == Inject::Hang {
        config.hang_timeout = Duration::from_millis(700);
    }
    let report = go(config);
    let Outcome::GuestFailed(failure) = report.outcome else { panic!("{:?}", report.outcome) };
    assert_eq!(report.disks[0].bytes_verified, 0);
    (failure.reason, failure.registers)
}

fn assert_registers(accel: AccelChoice, registers: &[String]) {
    assert_eq!(registers.is_empty(), accel == AccelChoice::Thread);
    if accel == AccelChoice::Kvm {
        let all = registers.join(" ");
        for name in ["rip=0x", "rsp=0x", "rflags=0x", "rax=0x", "r15=0x", "cs=0x", "cr2=0x"] {
            assert!(all.contains(name), "{name} is not in {all}");
        }
    }
}

pub(crate) fn a_crash_ends_the_run(accel: AccelChoice) {
    let (reason, registers) = failing(accel, Inject::Crash);
    assert!(reason.contains("undefined instruction"), "{reason}");
    assert_registers(accel, &registers);
    if accel == AccelChoice::Kvm {
        assert!(registers[0].starts_with("interrupted: rip=0x"), "{}", registers[0]);
    }
}

pub(crate) fn a_panic_ends_the_run(accel: AccelChoice) {
    let (reason, registers) = failing(accel, Inject::Panic);
    assert!(reason.contains("panicked"), "{reason}");
    assert_registers(accel, &registers);
}

pub(crate) fn a_hang_ends_the_run(accel: AccelChoice) {
    let (reason, registers) = failing(accel, Inject::Hang);
    assert!(reason.contains("no progress for 0.7 s"), "{reason}");
    assert_registers(accel, &registers);
}

pub(crate) fn a_cancelled_run_ends_cleanly(accel: AccelChoice) {
    let image = image(4 * 2048);
    let mut config = with_disk(accel, image.path(), DiskWork::WriteTest);
    config.duration = Duration::from_secs(24 * 3600);
    let progress = Arc::new(Progress::default());
    let thread = {
        let progress = Arc::clone(&progress);
        std::thread::spawn(move || config.run(&progress).unwrap())
    };
    let start = Instant::now();
    while progress.bytes_done.load(Ordering::Relaxed) <= 4 << 20 {
        assert!(start.elapsed() < patience(), "no progress is shown");
        std::thread::sleep(Duration::from_millis(5));
    }
    assert!(progress.bytes_total.load(Ordering::Relaxed) >= 8 << 20);
    progress.cancel.store(true, Ordering::Relaxed);
    let report = thread.join().unwrap();
    assert_eq!(report.outcome, Outcome::Cancelled);
    // The report so far.
    assert!(report.disks[0].iops > 0.0 && report.kicks > 0);
    assert!(report.disks[0].sha256.is_empty());
}

pub(crate) fn an_image_is_free_again_after_every_end(accel: AccelChoice) {
    let image = image(2048);
    for inject in [Inject::None, Inject::Crash, Inject::Hang, Inject::None] {
        let mut config = with_disk(accel, image.path(), DiskWork::WriteTest);
        config.inject = inject;
        if inject == Inject::Hang {
            config.hang_timeout = Duration::from_millis(500);
        }
        let report = go(config);
        assert_eq!(report.outcome == Outcome::Verified, inject == Inject::None, "{:?}", report.outcome);
    }
}

pub(crate) fn twenty_write_tests_in_a_row(accel: AccelChoice) {
    let image = image(2048);
    for seed in 0..20 {
        let mut config = with_disk(accel, image.path(), DiskWork::WriteTest);
        config.duration = Duration::from_millis(20);
        config.seed = seed;
        config.depth = 1 << (seed % 6);
        let report = go(config);
        assert_eq!(report.outcome, Outcome::Verified, "seed {seed}");
        assert_eq!(report.disks[0].bytes_verified, 1 << 20);
    }
}

pub(crate) fn the_footprint_stays_small(accel: AccelChoice) {
    let image = image(2048);
    let report = go(with_disk(accel, image.path(), DiskWork::Hash));
    assert_verified(&report, accel);
    // Other tests run in this process at the same time, so this is no more than a sanity check.
    assert!(report.resident_overhead > 100 << 10, "{}", report.resident_overhead);
}

fn refused(config: Machine, status: u8, what: &str) {
    let error = config.run(&Progress::default()).unwrap_err();
    assert!(error.to_string().contains(what), "{error}");
    assert_eq!(error.exit_status(), status, "{error}");
}

pub(crate) fn impossible_configurations_touch_nothing() {
    let image = image(2048);
    let before = digest(image.path());
    let good = with_disk(AccelChoice::Thread, image.path(), DiskWork::WriteTest);

    let mut config = good.clone();
    config.disks[0].path = "/nonexistent/a.img".into();
    refused(config, 2, "/nonexistent/a.img");
    let mut config = good.clone();
    config.disks.push(Disk { path: "/".into(), read_only: false, queues: 1, work: DiskWork::Hash });
    refused(config, 2, "directory");
    let mut config = good.clone();
    config.disks[0].read_only = true;
    refused(config, 2, "read-only");
    let mut config = good.clone();
    config.disks.clear();
    config.entropy = 0;
    refused(config, 2, "nothing to do");
    let mut config = good.clone();
    config.nets = vec![Card::default(); 5];
    refused(config, 2, "5 network cards");
    let mut config = good.clone();
    config.disks.push(config.disks[0].clone());
    refused(config, 2, "in use");
    let mut config = good.clone();
    config.block = 1 << 20;
    config.depth = 256;
    refused(config, 2, "too little");
    let mut config = good.clone();
    config.depth = 0;
    refused(config, 2, "depth");
    if !Path::new("/dev/kvm").exists() {
        let mut config = good;
        config.accel = AccelChoice::Kvm;
        refused(config, 2, "KVM");
    }
    assert_eq!(digest(image.path()), before);
}

pub(crate) fn automatic_choice_says_why() {
    let report = go(config(AccelChoice::Auto));
    assert_verified(&report, if report.accel == "kvm" { AccelChoice::Kvm } else { AccelChoice::Thread });
    assert!(!report.accel_reason.is_empty());
    let report = go(config(AccelChoice::Thread));
    assert_eq!(report.accel_reason, "asked for with --accel thread");
}
