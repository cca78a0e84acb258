//! The front end of the crate vhost (Cloud Hypervisor's), request by request.
use crate::driver::Random;
use crate::raw::{GPA, MEMORY, Machine, USER};
use crate::rig::{DISK, Rig};
use paravane_spec::blk::{Config, F_MQ};
use paravane_spec::feature;
use paravane_spec::vhost_user::F_LOG_ALL;
use rustix::fs::{MemfdFlags, ftruncate, memfd_create};
use std::io::{Read, Write};
use std::os::fd::{AsFd, AsRawFd, FromRawFd, IntoRawFd, OwnedFd};
use std::os::unix::net::UnixStream;
use vhost::vhost_user::message::{
    VhostTransferStateDirection, VhostTransferStatePhase, VhostUserConfigFlags, VhostUserHeaderFlag,
    VhostUserInflight, VhostUserProtocolFeatures, VhostUserVirtioFeatures,
};
use vhost::vhost_user::{Frontend, VhostUserFrontend};
use vhost::{VhostBackend, VhostUserDirtyLogRegion, VhostUserMemoryRegionInfo, VringConfigData};
use vmm_sys_util::eventfd::EventFd;
use zerocopy::FromBytes;

fn eventfd(fd: &impl AsFd) -> EventFd {
    let fd = fd.as_fd().try_clone_to_owned().unwrap();
    // SAFETY: the descriptor is a copy of our own, and from here on the event's.
    unsafe { EventFd::from_raw_fd(fd.into_raw_fd()) }
}

#[test]
fn the_crate_vhost_finds_all_that_it_asks_for() {
    let rig = Rig::new(2);
    let mut model = vec![0; DISK];
    let mut random = Random::new(2);
    let mut machine = Machine::new(feature::EVENT_IDX, 64, 8);
    let mut client = Frontend::connect(rig.socket(), 2).unwrap();
    client.set_owner().unwrap();
    let offered = client.get_features().unwrap();
    let own = VhostUserVirtioFeatures::PROTOCOL_FEATURES.bits();
    assert_eq!(offered & own, own);
    client.set_features(offered & (machine.features | own | F_MQ)).unwrap();
    // This client's addresses are not guest-physical.
    let protocol = client.get_protocol_features().unwrap() - VhostUserProtocolFeatures::GPA_ADDRESSES;
    client.set_protocol_features(protocol).unwrap();
    client.set_hdr_flags(VhostUserHeaderFlag::NEED_REPLY);
    assert_eq!(client.get_queue_num().unwrap(), 2);
    assert!(client.get_max_mem_slots().unwrap() >= 8);

    let zeroes = vec![0; size_of::<Config>()];
    let size = zeroes.len() as u32;
    let (_, bytes) = client.get_config(0, size, VhostUserConfigFlags::empty(), &zeroes).unwrap();
    let config = Config::read_from_bytes(&bytes).unwrap();
    assert_eq!((config.capacity, config.num_queues), (DISK as u64 / 512, 2));
    client.set_config(0, VhostUserConfigFlags::empty(), &[1]).unwrap();

    let wanted = VhostUserInflight { num_queues: 2, queue_size: 64, ..VhostUserInflight::default() };
    let (inflight, file) = client.get_inflight_fd(&wanted).unwrap();
    assert!(inflight.mmap_size >= 2 * 64 * 16 && inflight.mmap_size.is_multiple_of(64));
    assert_eq!(file.metadata().unwrap().len(), inflight.mmap_size);
    client.set_inflight_fd(&inflight, file.as_raw_fd()).unwrap();

    let region = VhostUserMemoryRegionInfo {
        guest_phys_addr: GPA,
        memory_size: MEMORY,
        userspace_addr: USER,
        mmap_offset: 0,
        mmap_handle: machine.memory.fd().unwrap().as_raw_fd(),
    };
    client.set_mem_table(&[region]).unwrap();
    let other = memfd_create("other", MemfdFlags::CLOEXEC).unwrap();
    ftruncate(&other, 4096).unwrap();
    let more = VhostUserMemoryRegionInfo {
        guest_phys_addr: 0,
        memory_size: 4096,
        userspace_addr: 4096,
        mmap_offset: 0,
        mmap_handle: other.as_raw_fd(),
    };
    client.add_mem_region(&more).unwrap();
    client.remove_mem_region(&more).unwrap();

    let (ours, theirs) = UnixStream::pair().unwrap();
    client.set_backend_request_fd(&theirs).unwrap();
    drop(theirs);

    let addr = machine.vring_addr();
    let vring = VringConfigData {
        queue_max_size: 256,
        queue_size: 64,
        flags: 0,
        desc_table_addr: addr.desc,
        used_ring_addr: addr.device,
        avail_ring_addr: addr.driver,
        log_addr: None,
    };
    client.set_vring_num(0, 64).unwrap();
    client.set_vring_addr(0, &vring).unwrap();
    client.set_vring_base(0, 0).unwrap();
    client.set_vring_call(0, &eventfd(&machine.call)).unwrap();
    client.set_vring_kick(0, &eventfd(&machine.kick)).unwrap();
    client.set_vring_err(0, &EventFd::new(0).unwrap()).unwrap();
    client.set_vring_enable(0, true).unwrap();
    let mut work = |machine: &mut Machine| {
        machine.fill(DISK, &mut random);
        machine.finish(&mut model);
    };
    work(&mut machine);

    // Disabled, the queue stops; enabled, it continues.
    client.set_vring_enable(0, false).unwrap();
    assert!(!rig.status().queues[0].live);
    client.set_vring_enable(0, true).unwrap();
    work(&mut machine);

    // With a dirty log.
    let log = memfd_create("log", MemfdFlags::CLOEXEC).unwrap();
    let size = (GPA + MEMORY) / 4096 / 8;
    ftruncate(&log, size).unwrap();
    let area = VhostUserDirtyLogRegion { mmap_size: size, mmap_offset: 0, mmap_handle: log.as_raw_fd() };
    client.set_log_base(0, Some(area)).unwrap();
    client.set_log_fd(EventFd::new(0).unwrap().as_raw_fd()).unwrap();
    client.set_features(offered & (machine.features | own | F_MQ | F_LOG_ALL)).unwrap();
    let logged = VringConfigData { flags: 1, log_addr: Some(addr.log), ..vring };
    client.set_vring_addr(0, &logged).unwrap();
    work(&mut machine);

    // The disk reports that it has changed.
    rig.change();
    ours.set_read_timeout(Some(paravane_test_support::patience())).unwrap();
    let mut said = [0; 12];
    (&ours).read_exact(&mut said).unwrap();
    assert_eq!(said, [2, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0]);

    let base = client.get_vring_base(0).unwrap();
    assert_eq!(u64::from(base), machine.done);
    client.set_vring_enable(0, false).unwrap();

    // The device's own state: saved, loaded, and loaded from a different device.
    let phase = VhostTransferStatePhase::STOPPED;
    let transfer = |direction, pipe: OwnedFd| {
        assert!(client.set_device_state_fd(direction, phase, pipe).unwrap().is_none());
    };
    let (mut reader, writer) = std::io::pipe().unwrap();
    transfer(VhostTransferStateDirection::SAVE, writer.into());
    client.check_device_state().unwrap();
    let mut state = Vec::new();
    reader.read_to_end(&mut state).unwrap();
    for (state, good) in [(&state[..], true), (b"something else", false), (b"", false), (&state[..9], false)]
    {
        let (reader, mut writer) = std::io::pipe().unwrap();
        transfer(VhostTransferStateDirection::LOAD, reader.into());
        writer.write_all(state).unwrap();
        drop(writer);
        assert_eq!(client.check_device_state().is_ok(), good, "{state:x?}");
    }
    client.reset_device().unwrap();
    client.reset_owner().unwrap();
    let status = rig.status();
    assert_eq!((status.protocol_errors, status.last_error), (0, None));
    assert!(protocol.contains(VhostUserProtocolFeatures::LOG_SHMFD | VhostUserProtocolFeatures::STATUS));
}
