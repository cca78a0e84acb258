//! Runs with several processors.
use crate::bench_top::{config, digest, go, image};
use crate::devices::{Card, Disk, Machine, Network};
use paravane_test_support::patience;
use paravane_vmm::{
    AccelChoice, Completion, DiskWork, Inject, Outcome, Progress, RingLayout, TransportChoice,
};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};
use tempfile::NamedTempFile;

const CPUS: u16 = 4;

/// Three disks and a pair of cards, of which one serves the other, on four processors.
fn machine(accel: AccelChoice, images: &[NamedTempFile; 3]) -> Machine {
    let disk = |image: &NamedTempFile| Disk {
        path: image.path().to_owned(),
        read_only: false,
        queues: 1,
        work: DiskWork::WriteTest,
    };
    let card = |last| Card {
        network: Network::Link("a".into()),
        mac: [2, 0, 0, 0, 0, last],
        frames: 200,
        ..Card::default()
    };
    let mut machine = Machine {
        config: config(accel).config,
        disks: images.iter().map(disk).collect(),
        entropy: 1000,
        nets: vec![card(1), card(2)],
        ..Machine::default()
    };
    (machine.cpus, machine.depth) = (CPUS, 4);
    machine
}

fn images() -> [NamedTempFile; 3] {
    [2048, 1024, 512].map(image)
}

pub(crate) fn several_processors_share_the_devices(accel: AccelChoice) {
    let images = images();
    for transport in [TransportChoice::Mmio, TransportChoice::MmioMsi, TransportChoice::Pci] {
        let report = go(machine(accel, &images).with(|config| config.transport = transport));
        assert_eq!(report.outcome, Outcome::Verified, "{transport:?}");
        assert_eq!(report.entropy_bytes, 1000);
        assert!(report.disks.iter().all(|disk| disk.bytes_verified > 0));
        assert_eq!(report.nets.iter().map(|net| net.frames).collect::<Vec<_>>(), [200, 200]);
        assert_eq!(report.cpus.len(), usize::from(CPUS));
        assert_eq!(report.cpus.iter().map(|cpu| cpu.exits).sum::<u64>(), report.exits);
        assert!(report.cpus.iter().all(|cpu| cpu.cpu_s > 0.0), "{:?}", report.cpus);
        // A host before Linux 5.14 does not count. Of each CPU, KVM counts all that come here.
        let counted = report.cpus.iter().filter_map(|cpu| cpu.kvm_exits.map(|exits| (exits, cpu.exits)));
        let counted: Vec<_> = counted.collect();
        assert!(counted.iter().all(|(kvm, here)| kvm >= here), "{:?}", report.cpus);
        assert_eq!(report.kvm_exits.unwrap_or(0), counted.iter().map(|(kvm, _)| kvm).sum::<u64>());
        assert!(report.boot_exits.unwrap() <= report.exits && report.boot_kvm_exits <= report.kvm_exits);
        if accel == AccelChoice::Thread {
            assert_eq!((report.kvm_exits, report.boot_kvm_exits), (None, None));
        }
    }
}

/// A disk that is written, one that is hashed, an echo and a link, with a queue or pair for each CPU.
fn lanes(accel: AccelChoice, images: &[NamedTempFile; 2], cpus: u16) -> Machine {
    let disk = |image: &NamedTempFile, work| Disk {
        path: image.path().to_owned(),
        read_only: work == DiskWork::Hash,
        queues: cpus,
        work,
    };
    let card = |last, network| Card {
        network,
        mac: [2, 0, 0, 0, 0, last],
        queues: cpus,
        // Not the same number for each pair.
        frames: 301,
        ..Card::default()
    };
    let link = || Network::Link("a".into());
    let mut machine = Machine {
        config: config(accel).config,
        disks: vec![disk(&images[0], DiskWork::WriteTest), disk(&images[1], DiskWork::Hash)],
        nets: vec![card(1, Network::Echo), card(2, link()), card(3, link())],
        ..Machine::default()
    };
    (machine.cpus, machine.depth) = (cpus, 4);
    machine
}

pub(crate) fn each_processor_has_a_queue_of_each_device(accel: AccelChoice) {
    // Parts that are not equal, and a last request that is short.
    let images = [image(2048 + 8), image(2048 + 3)];
    let before = digest(images[1].path());
    for cpus in [1, 2, 4] {
        for transport in [TransportChoice::Mmio, TransportChoice::MmioMsi, TransportChoice::Pci] {
            let report = go(lanes(accel, &images, cpus).with(|config| config.transport = transport));
            assert_eq!(report.outcome, Outcome::Verified, "{transport:?} {cpus}");
            assert_eq!(report.disks[0].bytes_verified, (2048 + 8) * 512);
            assert_eq!((&report.disks[1].sha256, report.disks[1].bytes_verified), (&before, 2051 * 512));
            assert!(report.disks.iter().all(|disk| disk.queues == u32::from(cpus)));
            assert!(report.nets.iter().all(|net| (net.frames, net.queues) == (301, cpus)));
            for device in 0..2_usize {
                let queues = report.queues.iter().filter(|queue| queue.device == device);
                let cpu_of: Vec<_> = queues.map(|queue| queue.cpu).collect();
                let expected = |queue| Some((device as u32 + queue) % u32::from(cpus));
                assert_eq!(cpu_of, (0..cpus.into()).map(expected).collect::<Vec<_>>());
            }
            if transport == TransportChoice::Mmio {
                assert_eq!(report.messages, 0);
            } else {
                assert_eq!(report.messages, report.interrupts);
            }
        }
    }
}

pub(crate) fn queues_are_polled_by_their_processors(accel: AccelChoice) {
    let images = [image(2048), image(2048)];
    for ring in [RingLayout::Split, RingLayout::Packed] {
        let report = go(lanes(accel, &images, 2).with(|config| {
            (config.completion, config.ring, config.in_order) = (Completion::Poll, ring, true);
            config.iommu = true;
        }));
        assert_eq!(report.outcome, Outcome::Verified, "{ring:?}");
    }
}

pub(crate) fn a_disk_may_have_more_queues_than_blocks_or_messages(accel: AccelChoice) {
    let images = [image(24), image(1)];
    let mut machine = lanes(accel, &images, 2).with(|config| config.transport = TransportChoice::MmioMsi);
    machine.disks.iter_mut().for_each(|disk| disk.queues = 64);
    machine.nets.iter_mut().for_each(|net| net.queues = 8);
    let report = go(machine);
    assert_eq!(report.outcome, Outcome::Verified);
    assert_eq!(report.disks.iter().map(|disk| disk.queues).collect::<Vec<_>>(), [3, 1]);
    assert_eq!(report.nets[0].queues, 8);
}

/// Moves by all queues together, in one run.
const MOVES: u32 = 10_000;

/// All queues of two disks and an echo move their messages, until there were [`MOVES`].
fn move_many(accel: AccelChoice, transport: TransportChoice, moves: u32) {
    let images = [image(1024), image(1024)];
    let mut machine = lanes(accel, &images, CPUS);
    machine.nets.clear();
    machine.disks[1].work = DiskWork::WriteTest;
    machine.disks[1].read_only = false;
    machine.transport = transport;
    machine.moves = moves / (2 * u32::from(CPUS));
    let report = go(machine);
    assert_eq!(report.outcome, Outcome::Verified, "{transport:?}");
    assert_eq!(report.moves, u64::from(moves));
    assert_eq!(report.messages, report.interrupts);
}

pub(crate) fn ten_thousand_interrupts_move_by_mmio(accel: AccelChoice) {
    move_many(accel, TransportChoice::MmioMsi, MOVES);
}

pub(crate) fn ten_thousand_interrupts_move_by_pci(accel: AccelChoice) {
    move_many(accel, TransportChoice::Pci, MOVES);
}

pub(crate) fn interrupts_move_between_processors(accel: AccelChoice) {
    let images = images();
    for transport in [TransportChoice::MmioMsi, TransportChoice::Pci] {
        let mut machine = machine(accel, &images);
        (machine.transport, machine.moves) = (transport, 50);
        machine.duration = Duration::from_millis(500);
        machine.nets[1] = Card { mac: [2, 0, 0, 0, 0, 3], frames: 500, ..Card::default() };
        machine.nets.remove(0);
        let report = go(machine);
        assert_eq!(report.outcome, Outcome::Verified, "{transport:?}");
        assert!(report.moves > 20, "{} moves", report.moves);
        assert_eq!(report.messages, report.interrupts);
    }
}

pub(crate) fn processors_without_work_are_no_harm(accel: AccelChoice) {
    let image = image(512);
    let disk = Disk { path: image.path().to_owned(), read_only: true, queues: 1, work: DiskWork::Hash };
    let mut machine = Machine { config: config(accel).config, disks: vec![disk], ..Machine::default() };
    machine.cpus = CPUS;
    let report = go(machine);
    assert_eq!(report.outcome, Outcome::Verified);
}

pub(crate) fn a_failure_on_any_processor_ends_the_run(accel: AccelChoice) {
    let images = images();
    for (inject, part) in [
        (Inject::Crash, "undefined instruction"),
        (Inject::Panic, "panicked"),
        (Inject::Hang, "no progress for"),
    ] {
        let mut machine = machine(accel, &images).with(|config| config.inject = inject);
        if inject == Inject::Hang {
            machine.hang_timeout = Duration::from_millis(700);
        }
        // One processor hangs. The work of the others, which go on, has an end.
        machine.duration = Duration::from_millis(50);
        let Outcome::GuestFailed(failure) = go(machine).outcome else { panic!("{inject:?}") };
        assert!(failure.reason.contains(part), "{}", failure.reason);
        if accel == AccelChoice::Kvm && inject == Inject::Hang {
            let heads = failure.registers.iter().filter(|line| line.starts_with("CPU ")).count();
            assert_eq!(heads, usize::from(CPUS), "{:?}", failure.registers);
        }
    }
}

pub(crate) fn a_cancelled_run_stops_all_processors(accel: AccelChoice) {
    let images = images();
    let mut machine = machine(accel, &images);
    machine.duration = Duration::from_secs(24 * 3600);
    let progress = Arc::new(Progress::default());
    let thread = {
        let progress = Arc::clone(&progress);
        std::thread::spawn(move || machine.run(&progress).unwrap())
    };
    let start = Instant::now();
    while progress.bytes_done.load(Ordering::Relaxed) <= 1 << 20 {
        assert!(start.elapsed() < patience(), "no progress is shown");
        std::thread::sleep(Duration::from_millis(5));
    }
    progress.cancel.store(true, Ordering::Relaxed);
    assert_eq!(thread.join().unwrap().outcome, Outcome::Cancelled);
}
