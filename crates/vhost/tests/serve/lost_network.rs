//! A network that goes away behind a card, and comes back.
use crate::raw::{Machine, Raw};
use crate::rig::wait_for;
use paravane_device::HostSide;
use paravane_device::net::{BackEnd, LinkEnd, Net, NetConfig};
use paravane_export::{Endpoint, Export};
use paravane_spec::net::{Config, S_LINK_UP};
use paravane_spec::vhost_user::{ConfigAccess, request};
use paravane_vhost::ExportConfig;
use std::io;
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};
use zerocopy::IntoBytes;

#[derive(Default)]
struct Network {
    is_gone: AtomicBool,
    was_gone: AtomicBool,
    told: OnceLock<Box<dyn Fn() + Send + Sync>>,
}

/// A link that the test takes away.
struct Removable(LinkEnd, Arc<Network>);

impl BackEnd for Removable {
    type Sender = <LinkEnd as BackEnd>::Sender;
    type Receiver = <LinkEnd as BackEnd>::Receiver;

    fn pairs(&self) -> u16 {
        1
    }

    fn offloads(&self) -> u64 {
        0
    }

    fn accept(&self, features: u64) -> io::Result<()> {
        self.0.accept(features)
    }

    fn use_pairs(&self, pairs: u16) -> io::Result<()> {
        self.0.use_pairs(pairs)
    }

    fn inject(&self, frame: &[u8]) -> io::Result<()> {
        self.0.inject(frame)
    }

    fn look(&self) -> HostSide {
        let is_gone = self.1.is_gone.load(Ordering::SeqCst);
        match (self.1.was_gone.swap(is_gone, Ordering::SeqCst), is_gone) {
            (_, true) => HostSide::Gone("the network is gone".into()),
            (true, false) => HostSide::Returned("the network is back".into()),
            (false, false) => HostSide::Present,
        }
    }

    fn tell_change(&self, told: Box<dyn Fn() + Send + Sync>) {
        assert!(self.1.told.set(told).is_ok());
    }

    fn is_up(&self) -> bool {
        !self.1.was_gone.load(Ordering::SeqCst)
    }

    fn sender(&self, pair: u16) -> io::Result<Self::Sender> {
        self.0.sender(pair)
    }

    fn receiver(&self, pair: u16) -> io::Result<Self::Receiver> {
        self.0.receiver(pair)
    }
}

fn link_is_up(raw: &Raw) -> bool {
    let size = size_of::<Config>() as u32;
    let access = ConfigAccess { offset: 0, size, flags: 0 };
    let reply = raw.ask(request::GET_CONFIG, &[access.as_bytes(), &vec![0; size as usize]].concat());
    let status = &reply[access.as_bytes().len() + 6..][..2];
    u16::from_le_bytes(status.try_into().unwrap()) & S_LINK_UP != 0
}

#[test]
fn a_lost_network_is_named_and_the_link_is_down_until_it_is_back() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("s");
    let network: Arc<Network> = Arc::default();
    let card = Removable(LinkEnd::echo(1).unwrap(), Arc::clone(&network));
    let card = Net::new(NetConfig::new([2, 0, 0, 0, 0, 1]), card).unwrap();
    let export =
        Export::start(ExportConfig::new("card", Endpoint::Listen(path.clone())), Box::new(card)).unwrap();
    let lost = |is_lost: bool| wait_for(|| export.status(), |status| status.host_error.is_some() == is_lost);
    let raw = Raw::connect(&path);
    let mut machine = Machine::new(0, 64, 4);
    machine.attach(&raw, 0, false);
    assert!(link_is_up(&raw));
    let (ours, theirs) = UnixStream::pair().unwrap();
    raw.say(request::SET_BACKEND_REQ_FD, &[0_u8; 0][..], &[theirs.as_fd()]);
    ours.set_read_timeout(Some(paravane_test_support::patience())).unwrap();
    let changed = || {
        let mut said = [0; 12];
        io::Read::read_exact(&mut &ours, &mut said).unwrap();
        assert_eq!(said[0], 2, "CONFIG_CHANGE_MSG");
    };
    for _ in 0..2 {
        network.is_gone.store(true, Ordering::SeqCst);
        (network.told.get().unwrap())();
        assert_eq!(lost(true).host_error.as_deref(), Some("the network is gone"));
        changed();
        assert!(!link_is_up(&raw));
        // Nobody asks for that.
        network.is_gone.store(false, Ordering::SeqCst);
        lost(false);
        changed();
        assert!(link_is_up(&raw));
        assert!(export.status().queues[0].live);
    }
    // Between two sessions a refresh asks.
    drop(raw);
    wait_for(|| export.status(), |status| !status.connected);
    network.is_gone.store(true, Ordering::SeqCst);
    export.refresh();
    lost(true);
    network.is_gone.store(false, Ordering::SeqCst);
    lost(false);
}
