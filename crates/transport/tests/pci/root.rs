//! Root complex: targets in the window.
use crate::rig::{Rig, config};
use paravane_spec::pci::{DEVICE_BASE, HOST_BRIDGE, VENDOR, class, ecam, header};
use paravane_transport::Transport;
use paravane_transport::pci::Pci;
use paravane_transport::pci::root::{MOST_ENDPOINTS, Root, Target};

fn at(device: u64, function: u64, register: u16) -> u64 {
    (device * ecam::FUNCTIONS + function) * ecam::FUNCTION + u64::from(register)
}

#[test]
fn the_bus_has_a_bridge_and_one_function_a_device() {
    let (root, mut rig) = (Root::new(), Rig::new());
    let mut read = |offset: u64| {
        let mut data = [0; 4];
        root.read(offset, &mut data, |target, data| {
            assert!(target.endpoint < MOST_ENDPOINTS);
            let there = target.endpoint == 1;
            if there {
                rig.pci.read(Pci::CONFIG_SPACE + u64::from(target.register), data, &mut config);
            }
            there
        });
        u32::from_le_bytes(data)
    };
    let [vendor, device] = HOST_BRIDGE;
    assert_eq!(read(at(0, 0, 0)), u32::from(device) << 16 | u32::from(vendor));
    assert_eq!(read(at(0, 0, header::REVISION)) >> 8, class::HOST_BRIDGE);
    assert_eq!(read(at(2, 0, 0)), u32::from(DEVICE_BASE + 2) << 16 | u32::from(VENDOR));
    for nothing in
        [at(1, 0, 0), at(31, 0, 0), at(0, 1, 0), at(2, 1, 0), at(2, 7, 0x40), at(32, 0, 0), u64::MAX - 3]
    {
        assert_eq!(read(nothing), u32::MAX, "{nothing:#x}");
    }
}

#[test]
fn accesses_of_no_width_of_pci_find_nothing() {
    let root = Root::new();
    for (offset, len) in
        [(at(1, 0, 1), 2), (at(1, 0, 2), 4), (at(1, 0, 0), 3), (at(1, 0, 0xffc), 8), (0, 0), (0, 16)]
    {
        let mut data = vec![0; len];
        root.read(offset, &mut data, |_, _| panic!("no endpoint has that"));
        assert!(data.iter().all(|&byte| byte == 0xff));
        assert_eq!(root.write(offset, len), None);
    }
}

#[test]
fn writes_reach_endpoints_only() {
    let root = Root::new();
    assert_eq!(root.write(at(0, 0, header::COMMAND), 2), None);
    assert_eq!(root.write(at(3, 1, header::COMMAND), 2), None);
    let target = Target { endpoint: 2, register: header::COMMAND };
    assert_eq!(root.write(at(3, 0, header::COMMAND), 2), Some(target));
}
