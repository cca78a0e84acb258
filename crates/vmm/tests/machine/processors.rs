//! Runs with several processors.
use crate::bench_top::{config, go, image};
use crate::devices::{Card, Disk, Machine, Network};
use paravane_test_support::patience;
use paravane_vmm::{AccelChoice, DiskWork, Inject, Outcome, Progress, TransportChoice};
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
    let disk = Disk { path: image.path().to_owned(), read_only: true, work: DiskWork::Hash };
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
