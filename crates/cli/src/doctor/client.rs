//! What a VMM and the driver of its guest have negotiated, and what that costs.
//!
//! ```text
//!  SOCKET or name --control sockets: reports--> one device --judge--> findings
//! ```
use super::finding::Finding;
use super::negotiated::{Check, Negotiated, QueueUse};
use crate::kinds::{self, Kind};
use crate::serve::report::{Device, Queue};
use crate::serve::status;
use anyhow::anyhow;
use paravane_spec::feature;
use paravane_spec::vhost_user::protocol_feature as protocol;
use std::path::{Path, PathBuf};

/// Queue sizes below these limit the depth of disks and of network cards.
const DISK_QUEUE: u16 = 128;
const CARD_QUEUE: u16 = 256;
/// Kicks of a queue after which its driver has made something available.
const UNSEEN_KICKS: u64 = 2;
/// Descriptors of a request without an indirect table.
const DESCRIPTORS: u16 = 3;

/// The report of the device with this socket or name.
///
/// # Errors
/// No daemon, or more than one, serves such a device.
pub(super) fn find(client: &Path, control: Option<&Path>) -> Result<Device, anyhow::Error> {
    let devices = status::reports(control)?.reports.into_iter().flat_map(|(control, report)| {
        report.devices.into_iter().map(move |device| (control.clone(), device))
    });
    let mut found: Vec<_> = devices.filter(|(_, device)| is_it(device, client)).collect();
    match found.len() {
        1 => Ok(found.remove(0).1),
        0 => Err(anyhow!(
            "{}: no daemon of this user serves it: `paravane status` lists devices",
            client.display()
        )),
        _ => {
            let daemons: Vec<_> = found.iter().map(|(control, _)| control.display().to_string()).collect();
            Err(anyhow!(
                "{}: several daemons serve such a device: add --control with one of {}",
                client.display(),
                daemons.join(", ")
            ))
        }
    }
}

/// Whether `client` is the name or the socket of a device.
fn is_it(device: &Device, client: &Path) -> bool {
    let path = device.endpoint.split_once(' ').map(|(_, path)| Path::new(path));
    let real = |path: &Path| -> Option<PathBuf> { path.canonicalize().ok() };
    Path::new(&device.name) == client
        || path.is_some_and(|path| path == client || (real(path).is_some() && real(path) == real(client)))
}

/// The bits of a field of the report.
fn bits(text: &str) -> u64 {
    u64::from_str_radix(text.trim_start_matches("0x"), 16).unwrap_or(0)
}

/// Explains what was negotiated.
///
/// The first finding is `missing` if no VMM is connected.
pub(super) fn judge(device: &Device) -> Vec<Finding> {
    let (features, accepted) = (bits(&device.features), bits(&device.protocol_features));
    let live: Vec<&Queue> = device.queues.iter().filter(|queue| queue.live).collect();
    if !device.connected {
        let remedy = "start the VMM, and compare its socket with the device's: paravane status";
        return vec![Finding::missing("connection", "no VMM is connected", remedy)];
    }
    if live.is_empty() {
        let found = "a VMM is connected, but the driver of its guest serves no queue yet";
        let remedy = "ask again when the guest has booted; if it has, load its virtio driver";
        return vec![Finding::warn("connection", found, remedy)];
    }
    let negotiated = Negotiated { device, features, protocol: accepted, live };
    let mut findings = negotiated.queues();
    findings.extend(negotiated.run(&DEVICE));
    findings.extend(negotiated.run(negotiated.kind().map_or(&[], |kind| kind.checks)));
    findings
}

/// Features of the ring.
const RING: [Check; 2] = [
    Check {
        name: "event index",
        applies: |_| true,
        has: |it| it.has(feature::EVENT_IDX),
        with: "notifications are suppressed by ring position",
        without: "no event index: expect one kick and one interrupt a request under load",
        remedy: "QEMU: event_idx=on (its default); libvirt: <driver event_idx='on'/>; else the driver of the guest \
                 lacks it",
    },
    Check {
        name: "indirect descriptors",
        applies: |_| true,
        has: |it| it.has(feature::INDIRECT_DESC) || it.queue_use() == QueueUse::Fixed,
        with: "a request can take one descriptor",
        without: "no indirect descriptors: a request takes one descriptor for each of its parts",
        remedy: "QEMU: indirect_desc=on (its default); else use a larger queue, or another driver in the guest",
    },
];

/// Features of the protocol.
const DEVICE: [Check; 3] = [
    Check {
        name: "memory slots",
        applies: |_| true,
        has: |it| it.has_protocol(protocol::CONFIGURE_MEM_SLOTS),
        with: "memory regions are added and removed one by one",
        without: "legacy memory table: at most 8 regions, and each memory hot plug maps all memory again",
        remedy: "use a VMM that has it: a current QEMU negotiates it without an option",
    },
    Check {
        name: "reply-ack",
        applies: |_| true,
        has: |it| it.has_protocol(protocol::REPLY_ACK),
        with: "the VMM waits for acknowledgements",
        without: "no acknowledgements: the VMM goes on while the daemon maps memory, and learns of errors by the end \
                  of the connection",
        remedy: "use a VMM that has it: QEMU negotiates it without an option",
    },
    Check {
        name: "migration",
        applies: |_| true,
        has: |it| it.has_protocol(protocol::LOG_SHMFD),
        with: "the VMM can ask for a dirty log",
        without: "no dirty log: the guest cannot migrate while it runs",
        remedy: "QEMU negotiates it without an option; with other VMMs, shut the guest down to move it",
    },
];

impl Negotiated<'_> {
    /// `None`: a daemon of another version serves it.
    fn kind(&self) -> Option<&'static Kind> {
        kinds::find(&self.device.kind)
    }

    fn queue_use(&self) -> QueueUse {
        self.kind().map_or(QueueUse::Fixed, |kind| kind.queue_use)
    }

    /// The findings of the checks that apply.
    fn run(&self, checks: &'static [Check]) -> impl Iterator<Item = Finding> {
        checks
            .iter()
            .filter(|check| (check.applies)(self))
            .map(|check| Self::either(check.name, (check.has)(self), check.with, check.without, check.remedy))
    }

    /// `ok` with a feature, `warn` without.
    fn either(name: &'static str, has: bool, with: &str, without: &str, remedy: &str) -> Finding {
        match has {
            true => Finding::ok(name, with),
            false => Finding::warn(name, without, remedy),
        }
    }

    fn queues(&self) -> Vec<Finding> {
        let Device { sessions, workers, .. } = self.device;
        // Drivers of firmware take none of them.
        let firmware = !self.has(feature::EVENT_IDX | feature::INDIRECT_DESC | feature::RING_PACKED);
        let early = match firmware {
            true => "; so few features are typical of firmware: ask again when the guest has booted",
            false => "",
        };
        let mut findings = vec![Finding::ok(
            "connection",
            format!("connected, connection {sessions} of this device{early}"),
        )];
        let [kicks, _, completed, interrupts] = self.device.totals();
        findings.extend(self.memory());
        if completed > 0 {
            let each = |count: u64| count as f64 / completed as f64;
            let found = format!(
                "{:.2} kicks and {:.2} interrupts a buffer, {completed} buffers since the device started",
                each(kicks),
                each(interrupts)
            );
            findings.push(Finding::ok("notifications", found));
        }
        findings.extend(self.run(&RING));
        findings.push(Finding::ok(
            "layout",
            match self.has(feature::RING_PACKED) {
                true => "packed virtqueues".to_owned(),
                false => "split virtqueues; packed ones can take less CPU time (QEMU: packed=on)".to_owned(),
            },
        ));
        if self.queue_use() != QueueUse::Fixed {
            findings.push(self.count());
            findings.push(self.size());
        }
        let (threads, live) = (usize::from(*workers), self.live.len());
        if threads > 1 {
            findings.push(Self::either(
                "threads",
                threads <= live,
                &format!("{threads} threads for {live} queues"),
                &format!("{threads} threads for {live} queues: {} idle", threads.saturating_sub(live)),
                "use more queues in the VMM, or fewer --workers",
            ));
        }
        if self.has(feature::ACCESS_PLATFORM) {
            findings.push(Finding::ok(
                "iommu",
                "behind an IOMMU: a missing translation costs a round trip to the VMM".to_owned(),
            ));
        }
        findings
    }

    /// Whether the driver kicks queues whose rings seem to stay empty.
    ///
    /// A receive queue may be kicked for buffers that no frame has used yet. QEMU kicks each queue of a
    /// disk once when it starts.
    fn memory(&self) -> Option<Finding> {
        let kind = self.kind();
        let fills = |queue: &&&Queue| kind.is_none_or(|kind| (kind.takes_at_once)(queue.index));
        let unseen = |queue: &&Queue| queue.taken == 0 && queue.kicks >= UNSEEN_KICKS;
        let Queue { index, kicks, .. } = self.live.iter().filter(fills).find(|queue| unseen(queue))?;
        Some(Finding::warn(
            "memory",
            format!(
                "{kicks} kicks for queue {index}, and its ring stays empty: the guest writes to other memory"
            ),
            "QEMU: share=on for each -object memory-backend-..., also on a memfd; libvirt: <access mode='shared'/>; \
             Cloud Hypervisor: --memory shared=on",
        ))
    }

    /// Queues in use, of those that the device has.
    ///
    /// A card has them in pairs, and a control queue.
    fn count(&self) -> Finding {
        let card = self.queue_use() == QueueUse::Pairs;
        let unit = if card { 2 } else { 1 };
        let offered = self.device.queues.len() / unit;
        let pairs = |queue: &&&Queue| usize::from(queue.index) < offered * unit;
        let used = self.live.iter().filter(pairs).count() / unit;
        let noun = if card { "queue pair" } else { "queue" };
        let vmm = |number: &str| match card {
            true => format!(
                "QEMU: queues={number} of -netdev and mq=on; libvirt: <driver queues='{number}'/>; Cloud Hypervisor: \
                 num_queues, twice that; in the guest: ethtool -L DEVICE combined {number}"
            ),
            false => format!(
                "QEMU: num-queues={number}; libvirt: <driver queues='{number}'/>; Cloud Hypervisor: num_queues={number}"
            ),
        };
        match (used, offered) {
            (..=1, ..=1) => Finding::warn(
                "queues",
                format!("the device has 1 {noun}: all vCPUs of the guest share it"),
                format!("with several vCPUs, serve the device with --queues N, and {}", vmm("N")),
            ),
            (..=1, _) => Finding::warn(
                "queues",
                format!("{used} of {offered} {noun}s: all vCPUs of the guest share it"),
                vmm(&offered.to_string()),
            ),
            _ => Finding::ok("queues", format!("{used} of {offered} {noun}s")),
        }
    }

    fn size(&self) -> Finding {
        let least = self.live.iter().map(|queue| queue.size).min().unwrap_or(0);
        let card = self.queue_use() == QueueUse::Pairs;
        let depth = if self.has(feature::INDIRECT_DESC) || card { least } else { least / DESCRIPTORS };
        let found = format!("{least} descriptors: {depth} requests in flight in a queue");
        let remedy = match card {
            true => {
                "QEMU: rx_queue_size=1024,tx_queue_size=1024; libvirt: <driver rx_queue_size='1024' \
                     tx_queue_size='1024'/>; Cloud Hypervisor: queue_size=1024"
            }
            false => {
                "QEMU: queue-size=256; libvirt: <driver queue_size='256'/>; Cloud Hypervisor: queue_size=256"
            }
        };
        Self::either(
            "queue size",
            least >= if card { CARD_QUEUE } else { DISK_QUEUE },
            &found,
            &found,
            remedy,
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::doctor::finding::Level;
    use paravane_spec::{blk, net};

    const RING: u64 = feature::EVENT_IDX | feature::INDIRECT_DESC | feature::VERSION_1;
    const DISK: u64 = RING | blk::F_FLUSH | blk::F_DISCARD;
    const ALL_PROTOCOL: u64 = protocol::INFLIGHT_SHMFD
        | protocol::CONFIGURE_MEM_SLOTS
        | protocol::REPLY_ACK
        | protocol::CONFIG
        | protocol::BACKEND_REQ
        | protocol::LOG_SHMFD;

    fn device(kind: &str, features: u64, protocol: u64, offered: u16, live: u16) -> Device {
        let queue = |index| Queue {
            index,
            live: index < live,
            size: 256,
            taken: 10,
            completed: 10,
            kicks: 5,
            ..Queue::default()
        };
        Device {
            name: "vm0".into(),
            kind: kind.into(),
            endpoint: "listen /run/vm0.sock".into(),
            workers: 1,
            connected: true,
            features: format!("{features:#x}"),
            protocol_features: format!("{protocol:#x}"),
            queues: (0..offered).map(queue).collect(),
            ..Device::default()
        }
    }

    /// Names of the findings that are not `ok`.
    fn losses(device: &Device) -> Vec<&'static str> {
        let findings = judge(device);
        for finding in &findings {
            assert!(finding.is_documented(), "{finding:?}");
            assert_eq!(finding.remedy.is_empty(), finding.level == Level::Ok, "{finding:?}");
        }
        findings
            .into_iter()
            .filter(|finding| finding.level != Level::Ok)
            .map(|finding| finding.name)
            .collect()
    }

    #[test]
    fn a_client_that_takes_all_loses_nothing() {
        assert_eq!(losses(&device("blk", DISK, ALL_PROTOCOL, 4, 4)), [""; 0]);
        let card = RING | net::F_MRG_RXBUF;
        assert_eq!(losses(&device("net", card, ALL_PROTOCOL, 5, 4)), [""; 0]);
        assert_eq!(losses(&device("rng", RING, ALL_PROTOCOL, 1, 1)), [""; 0]);
    }

    #[test]
    fn each_loss_is_named() {
        let mut poor = device("blk", feature::VERSION_1, 0, 4, 1);
        poor.workers = 2;
        poor.queues.iter_mut().for_each(|queue| queue.size = 64);
        let all = [
            "event index",
            "indirect descriptors",
            "queues",
            "queue size",
            "threads",
            "memory slots",
            "reply-ack",
            "migration",
            "in-flight tracking",
            "resize",
            "flush",
            "discard",
        ];
        assert_eq!(losses(&poor), all);
        let findings = judge(&poor);
        let found = |name| &findings.iter().find(|finding| finding.name == name).unwrap().found;
        assert!(found("event index").starts_with("no event index: expect one kick"));
        assert_eq!(found("queues"), "1 of 4 queues: all vCPUs of the guest share it");
        assert_eq!(found("queue size"), "64 descriptors: 21 requests in flight in a queue");
        assert!(found("notifications").starts_with("0.50 kicks and 0.00 interrupts"));
        let mut card = device("net", RING, ALL_PROTOCOL, 3, 2);
        card.back_end = "tap tap0".into();
        assert_eq!(losses(&card), ["queues", "receive buffers", "offloads"]);
        let read_only = device("blk", RING | blk::F_FLUSH | blk::F_RO, ALL_PROTOCOL, 2, 2);
        assert_eq!(losses(&read_only), [""; 0]);
    }

    #[test]
    fn kicks_of_a_ring_that_stays_empty_are_named() {
        for (kind, queue, kicks, is_named) in [
            ("blk", 0, 2, true),
            ("blk", 0, 1, false),
            ("net", 0, 9, false),
            ("net", 1, 2, true),
            ("rng", 0, 2, true),
        ] {
            let mut device = device(kind, DISK | net::F_MRG_RXBUF, ALL_PROTOCOL, 5, 4);
            (device.queues[queue].taken, device.queues[queue].kicks) = (0, kicks);
            assert_eq!(losses(&device).contains(&"memory"), is_named, "{kind} {queue} {kicks}");
        }
    }

    #[test]
    fn without_a_driver_there_is_one_finding() {
        let away = Device { connected: false, ..device("blk", DISK, ALL_PROTOCOL, 1, 1) };
        assert_eq!((judge(&away).len(), judge(&away)[0].level), (1, Level::Missing));
        let early = device("blk", 0, 0, 1, 0);
        assert_eq!((judge(&early).len(), judge(&early)[0].level), (1, Level::Warn));
    }

    #[test]
    fn a_device_is_known_by_name_and_by_socket() {
        let device = device("blk", 0, 0, 1, 0);
        assert!(is_it(&device, Path::new("vm0")) && is_it(&device, Path::new("/run/vm0.sock")));
        assert!(!is_it(&device, Path::new("vm1")) && !is_it(&device, Path::new("/run/vm1.sock")));
    }
}
