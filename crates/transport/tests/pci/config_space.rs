//! Configuration space: writable bits, BAR, window; a plain model of the masks.
use crate::rig::{LINE, QUEUE_SIZES, RUNNING, Rig, config};
use paravane_spec::pci::common as reg;
use paravane_spec::pci::{
    DEVICE_BASE, REVISION, SUBSYSTEM, VENDOR, bar, cap, capability, class, command, header, msix,
};
use paravane_spec::{device_id, status};
use paravane_transport::pci::Pci;
use paravane_transport::{Effect, Transport};
use proptest::prelude::*;

#[test]
fn identification() {
    let mut rig = Rig::new();
    assert_eq!(rig.config_read(header::VENDOR, 2), VENDOR.into());
    assert_eq!(rig.config_read(header::DEVICE, 2), u64::from(DEVICE_BASE) + u64::from(device_id::BLK));
    assert_eq!(rig.config_read(header::REVISION, 4), u64::from(class::STORAGE << 8 | u32::from(REVISION)));
    assert_eq!(rig.config_read(header::HEADER_TYPE, 1), 0);
    assert_eq!(rig.config_read(header::SUBSYSTEM, 2), SUBSYSTEM.into());
    assert_eq!(rig.config_read(header::INTERRUPT_LINE, 2), 1 << 8 | u64::from(LINE));
}

#[test]
fn every_structure_is_named_once_and_lies_in_the_bar() {
    let mut rig = Rig::new();
    let mut at = rig.config_read(header::CAPABILITIES, 1) as u16;
    let mut seen = Vec::new();
    let mut regions = Vec::new();
    while at != 0 {
        assert!(at >= header::END && at.is_multiple_of(4) && seen.len() < 10);
        let id = rig.config_read(at, 1) as u8;
        let kind = if id == capability::VENDOR { rig.config_read(at + cap::CFG_TYPE, 1) as u8 } else { 0 };
        if matches!(kind, cap::COMMON..=cap::DEVICE) {
            regions.push(rig.region(kind));
        }
        seen.push((id, kind));
        at = rig.config_read(at + 1, 1) as u16;
    }
    seen.sort_unstable();
    let virtio = [1, 2, 3, 4, 5].map(|kind| (capability::VENDOR, kind));
    assert_eq!(seen, [&virtio[..], &[(capability::MSIX, 0)]].concat());
    regions.push((0x3000, 8));
    regions.push((0x8000, 4 * 16));
    regions.sort_unstable();
    assert!(regions.windows(2).all(|pair| pair[0].0 + pair[0].1 <= pair[1].0), "{regions:x?}");
    assert!(regions.iter().all(|(at, len)| at + len <= rig.pci.bar_size()));
}

#[test]
fn the_bar_tells_its_size_and_is_where_it_was_put() {
    let mut rig = Rig::new();
    rig.pci.place(0xe010_0000);
    assert_eq!(rig.pci.window(), None);
    assert_eq!(rig.config_read(header::BAR, 8), 0xe010_0000 | u64::from(bar::WIDTH_64));
    rig.config_write(header::BAR, 4, 0xffff_ffff);
    rig.config_write(header::BAR + 4, 4, 0xffff_ffff);
    let mask = rig.config_read(header::BAR, 8) & !u64::from(bar::FLAGS);
    assert_eq!(mask.wrapping_neg(), rig.pci.bar_size());
    for other in 2..6 {
        rig.config_write(header::BAR + 4 * other, 4, 0xffff_ffff);
        assert_eq!(rig.config_read(header::BAR + 4 * other, 4), 0);
    }
    rig.config_write(header::BAR, 4, 0xe020_0000);
    assert_eq!(rig.config_write(header::BAR + 4, 4, 0), None);
    let on = Effect::Move { window: Some(0xe020_0000) };
    assert_eq!(rig.config_write(header::COMMAND, 2, command::MEMORY.into()), Some(on));
    let moved = Effect::Move { window: Some(0x7_e020_0000) };
    assert_eq!(rig.config_write(header::BAR + 4, 4, 7), Some(moved));
    let off = Effect::Move { window: None };
    assert_eq!(rig.config_write(header::COMMAND, 2, 0), Some(off));
    assert_eq!(rig.pci.violations(), 0);
}

#[test]
fn the_bar_holds_every_notification_address() {
    let rig = Rig::new();
    assert!(rig.pci.bar_size() >= Pci::notification(QUEUE_SIZES.len() as u16));
    assert!(rig.pci.bar_size().is_power_of_two());
}

impl Rig {
    fn aim(&mut self, bar: u8, offset: u32, len: u32) -> u16 {
        let window = self.virtio(cap::PCI);
        self.config_write(window + cap::BAR, 1, bar.into());
        self.config_write(window + cap::OFFSET, 4, offset.into());
        self.config_write(window + cap::LENGTH, 4, len.into());
        window + cap::PCI_CFG_DATA
    }
}

#[test]
fn the_window_starts_a_device_without_its_bar() {
    let mut rig = Rig::negotiated();
    rig.set_up(0, &crate::rig::addresses(256));
    rig.quiet(reg::QUEUE_ENABLE, 2, 1);
    let data = rig.aim(0, reg::DEVICE_STATUS as u32, 1);
    assert!(matches!(rig.config_write(data, 1, RUNNING.into()), Some(Effect::Activate { .. })));
    assert_eq!(rig.config_read(data, 1), RUNNING.into());
    let data = rig.aim(0, Pci::notification(0) as u32, 2);
    assert_eq!(rig.config_write(data, 2, 0), Some(Effect::Notify { queue: 0 }));
    let data = rig.aim(0, 0x2004, 4);
    assert_eq!(rig.config_read(data, 4), 0x0706_0504);
    assert_eq!(rig.config_read(data + 2, 2), 0x0706);
    assert_eq!(rig.pci.violations(), 0);
}

#[test]
fn the_window_reaches_nothing_that_it_must_not() {
    let mut rig = Rig::running();
    for (bar, offset, len) in [
        (1, 0, 1),
        (255, 0, 1),
        (0, 0x14, 0),
        (0, 0x14, 3),
        (0, 0x14, 8),
        (0, 0x16, 4),
        (0, u32::MAX, 1),
        (0, 0x14, u32::MAX),
    ] {
        let data = rig.aim(bar, offset, len);
        let before = rig.pci.violations();
        assert_eq!(rig.config_write(data, 4, 0), None);
        assert_eq!(rig.config_read(data, 4), 0);
        assert_eq!(rig.pci.violations(), before + 2, "{bar} {offset:#x} {len}");
    }
    assert_eq!(rig.status(), RUNNING);
}

/// Bits of a byte that a driver may write, stated independently.
fn writable(rig: &mut Rig, at: u16) -> u8 {
    let control = rig.capability(|[id, ..]| id == capability::MSIX).unwrap() + msix::CONTROL;
    let window = rig.virtio(cap::PCI);
    match at {
        0x04 => 0b110,
        0x05 => 0b100,
        0x12 => 0xfe,
        0x13..=0x17 | 0x3c => 0xff,
        _ if at == control + 1 => 0xc0,
        _ if at == window + cap::BAR => 0xff,
        _ if (window + cap::OFFSET..window + cap::PCI_CFG_DATA + 4).contains(&at) => 0xff,
        _ => 0,
    }
}

proptest! {
    #[test]
    fn writes_change_what_may_be_written_and_nothing_else(
        writes in prop::collection::vec((0..0x1000_u16, 0..4_u32, any::<u64>(), any::<bool>()), 1..100)
    ) {
        let mut rig = Rig::new();
        // A register that may be read any number of times, and that nothing writes.
        rig.aim(0, reg::NUM_QUEUES as u32, 2);
        let data = rig.virtio(cap::PCI) + cap::PCI_CFG_DATA;
        let mut model: Vec<u8> = (0..0x1000).map(|at| rig.config_read(at, 1) as u8).collect();
        for (at, width, value, low) in writes {
            let len = 1 << width;
            let at = (if low { at % 0xc0 } else { at }) & !(len as u16 - 1);
            // Another test covers the window.
            if (at..at + len as u16).any(|at| (data - 12..data + 4).contains(&at)) {
                continue;
            }
            let before = rig.pci.window();
            let effect = rig.config_write(at, len, value);
            for (at, byte) in (at..).zip(&value.to_le_bytes()[..len]) {
                let mask = writable(&mut rig, at);
                let old = &mut model[usize::from(at)];
                *old = *old & !mask | byte & mask;
            }
            for (at, &want) in (0..0x108_u16).zip(&model) {
                prop_assert_eq!(rig.config_read(at, 1) as u8, want, "{:#x}", at);
            }
            let after = rig.pci.window();
            let on = model[4] & 2 != 0;
            let bar = u64::from_le_bytes(model[0x10..0x18].try_into().unwrap()) & !0xf;
            prop_assert_eq!(after, on.then_some(bar));
            prop_assert_eq!(effect, (before != after).then_some(Effect::Move { window: after }));
        }
        prop_assert_eq!(rig.pci.violations(), 0);
    }

    #[test]
    fn any_access_of_any_width_anywhere_is_survived(
        accesses in prop::collection::vec(
            (any::<u64>(), 0..4_u8, any::<bool>(), prop::collection::vec(any::<u8>(), 0..20)), 1..200)
    ) {
        let mut rig = Rig::running();
        for (offset, near, configuration, data) in accesses {
            let offset = match near { 0 => offset, 1 => offset % 0x100, 2 => offset % 0x40, _ => offset % 0x2_0000 };
            let effect = if configuration {
                rig.pci.write(Pci::CONFIG_SPACE + offset % 0x1_0010, &data)
            } else {
                rig.pci.write(offset, &data)
            };
            match effect {
                Some(Effect::Reset) => rig.pci.reset_done(),
                Some(Effect::ResetQueue { queue }) => rig.pci.queue_reset_done(queue),
                _ => {}
            }
            let mut out = vec![0xee; data.len()];
            rig.pci.read(offset, &mut out, &mut config);
            rig.pci.read(Pci::CONFIG_SPACE + offset % 0x1_0010, &mut out, &mut config);
            let legal = status::ACKNOWLEDGE | status::DRIVER | status::FEATURES_OK | status::DRIVER_OK | status::FAILED;
            prop_assert_eq!(rig.status() & !legal, 0);
        }
    }
}
