//! Latencies of an export count completions, across clients and layouts.
use crate::driver::{Driver, Random, Wish};
use crate::raw::{GPA, Machine, Raw};
use crate::rig::{DISK, Rig};
use paravane_device::blk::operation::{DISCARD, FLUSH, READ, WRITE, WRITE_ZEROES};
use paravane_device::latency::{LatencySnapshot, Stage};
use paravane_device::rng::Rng;
use paravane_export::{Endpoint, Export};
use paravane_ring::Segment;
use paravane_vhost::ExportConfig;

/// Number of requests of all operations.
fn count(latencies: &LatencySnapshot) -> u64 {
    latencies.operations.iter().map(|(_, latency)| latency.count).sum()
}

#[test]
fn what_completes_is_recorded_once_across_clients() {
    let rig = Rig::new(2);
    let mut model = vec![0; DISK];
    let mut random = Random::new(4);
    let mut before = 0;
    for (packed, event_idx, depth) in
        [(false, true, 16), (true, true, 1), (true, false, 32), (false, false, 4)]
    {
        let mut driver =
            Driver::connect(&rig.socket(), Wish { packed, event_idx, queues: 2, depth }).unwrap();
        driver.exercise(&mut model, 300, &mut random);
        drop(driver);
        let status = rig.wait_for(|status| !status.connected);
        let latencies = rig.latencies();
        for (queue, latencies) in status.queues.iter().zip(&latencies) {
            assert_eq!(queue.taken, queue.completed);
            assert_eq!(count(latencies), queue.completed);
            let stages: Vec<_> =
                latencies.stages.iter().map(|(stage, times)| (*stage, times.count)).collect();
            let expected = [Stage::Ring, Stage::Host, Stage::Interrupt].map(|stage| (stage, queue.completed));
            assert_eq!(stages, expected);
            let (batch, depth) = (latencies.batch.as_ref().unwrap(), latencies.depth.as_ref().unwrap());
            assert_eq!((batch.sum, batch.count), (queue.taken, depth.count));
            assert!(batch.max <= depth.max && depth.max <= 32, "{batch:?}, {depth:?}");
            // Each request has waited for its parts.
            let whole: u64 = latencies.operations.iter().map(|(_, latency)| latency.sum).sum();
            let parts: u64 = latencies.stages.iter().map(|(_, latency)| latency.sum).sum();
            assert_eq!(whole, parts);
        }
        let sum = latencies.iter().map(count).sum();
        assert_eq!(sum, before + 600);
        before = sum;
    }
    let operations = &rig.latencies()[0].operations;
    let names: Vec<_> = operations.iter().map(|(operation, _)| *operation).collect();
    assert_eq!(names, [READ, WRITE, FLUSH, DISCARD, WRITE_ZEROES]);
    assert!(operations.iter().all(|(_, latency)| latency.max > 0 && latency.quantile(1.0) == latency.max));
}

#[test]
fn an_export_without_latencies_has_none() {
    let folder = tempfile::tempdir().unwrap();
    for on in [true, false] {
        let socket = folder.path().join("s");
        let mut config = ExportConfig::new("rng", Endpoint::Listen(socket.clone()));
        config.latencies = on;
        let export = Export::start(config, Box::new(Rng::new())).unwrap();
        let raw = Raw::connect(&socket);
        let mut machine = Machine::new(0, 64, 1);
        let base = machine.first_base();
        machine.attach(&raw, base, false);
        machine.queue.add(&[], &[Segment { addr: GPA + Machine::slot(0), len: 16 }]).unwrap();
        machine.kick();
        while export.status().queues[0].completed == 0 {
            std::thread::yield_now();
        }
        drop(raw);
        while export.status().connected {
            std::thread::yield_now();
        }
        assert_eq!(count(&export.latencies()[0]), u64::from(on));
        export.stop();
    }
}
