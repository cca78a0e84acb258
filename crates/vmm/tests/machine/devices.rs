//! Machines with their devices, which are opened for each run.
use paravane_device::Device;
use paravane_device::blk::{Blk, BlkConfig, EngineChoice, OpenError};
use paravane_device::net::{BackEnd, Generator, LinkEnd, Net, NetConfig};
use paravane_device::rng::Rng;
use paravane_vmm::{
    DiskJob, DiskWork, Job, NamedDevice, NetJob, Progress, Report, RunConfig, RunError, Traffic, run,
};
use std::collections::HashMap;
use std::ops::{Deref, DerefMut};
use std::path::PathBuf;
use std::time::Instant;

/// A machine that is not running.
#[derive(Clone, Debug, Default)]
pub(crate) struct Machine {
    pub(crate) config: RunConfig,
    pub(crate) disks: Vec<Disk>,
    pub(crate) engine: EngineChoice,
    /// Bytes to draw; 0: there is no entropy source.
    pub(crate) entropy: u64,
    pub(crate) nets: Vec<Card>,
}

#[derive(Clone, Debug)]
pub(crate) struct Disk {
    pub(crate) path: PathBuf,
    pub(crate) read_only: bool,
    pub(crate) queues: u16,
    pub(crate) work: DiskWork,
}

#[derive(Clone, Debug)]
pub(crate) enum Network {
    Echo,
    EchoPeer,
    Sink,
    Source,
    Link(String),
}

#[derive(Clone, Debug)]
pub(crate) struct Card {
    pub(crate) network: Network,
    pub(crate) mac: [u8; 6],
    pub(crate) queues: u16,
    pub(crate) frames: u64,
    pub(crate) size: u32,
    /// Bytes of an answer, if not those of the frame.
    pub(crate) reply: Option<u32>,
}

impl Default for Card {
    fn default() -> Self {
        let mac = [0x52, 0x54, 0, 0, 0, 1];
        Self { network: Network::Echo, mac, queues: 1, frames: 10_000, size: 64, reply: None }
    }
}

impl Deref for Machine {
    type Target = RunConfig;

    fn deref(&self) -> &RunConfig {
        &self.config
    }
}

impl DerefMut for Machine {
    fn deref_mut(&mut self) -> &mut RunConfig {
        &mut self.config
    }
}

impl Machine {
    /// The same with another configuration.
    pub(crate) fn with(mut self, change: impl FnOnce(&mut RunConfig)) -> Self {
        change(&mut self.config);
        self
    }

    /// Runs the built-in guest.
    pub(crate) fn run(&self, progress: &Progress) -> Result<Report, RunError> {
        let devices = self.open().map_err(|error| RunError::Config(error.to_string()))?;
        run(&self.config, devices, progress, Instant::now())
    }

    fn open(&self) -> Result<Vec<NamedDevice>, OpenError> {
        let mut devices = Vec::new();
        for (number, disk) in self.disks.iter().enumerate() {
            let Disk { path, read_only, queues, work } = disk.clone();
            let config = BlkConfig { read_only, queues, engine: self.engine, ..BlkConfig::new(&path) };
            let blk = Blk::open(config)?;
            let job = DiskJob { work, path, image: blk.image().unwrap(), engine: blk.engine() };
            devices.push(NamedDevice::new(&format!("disk {number}"), Box::new(blk)).with_job(Job::Disk(job)));
        }
        if self.entropy > 0 {
            let rng = NamedDevice::new("rng", Box::new(Rng::new()));
            devices.push(rng.with_job(Job::Entropy(self.entropy)));
        }
        let mut far_ends = HashMap::new();
        for (number, net) in self.nets.iter().enumerate() {
            let (device, job) = net.open(&mut far_ends);
            devices.push(NamedDevice::new(&format!("net {number}"), device).with_job(Job::Net(job)));
        }
        Ok(devices)
    }
}

impl Card {
    fn open(&self, far_ends: &mut HashMap<String, LinkEnd>) -> (Box<dyn Device>, NetJob) {
        let &Self { queues, frames, size, .. } = self;
        let reply = self.reply.unwrap_or(size);
        let len = reply as usize;
        let (network, traffic, device) = match &self.network {
            Network::Echo => {
                let echo = match self.reply {
                    Some(_) => LinkEnd::echo_of_len(queues, len),
                    None => LinkEnd::echo(queues),
                };
                ("echo", Traffic::Exchange, self.device(echo.unwrap()))
            }
            Network::EchoPeer => {
                let end = LinkEnd::to_echo_peer(queues, len).unwrap();
                ("echo-peer", Traffic::Exchange, self.device(end))
            }
            Network::Sink => ("sink", Traffic::Send, self.device(Generator::new(queues, 0, len).unwrap())),
            Network::Source => {
                ("source", Traffic::Receive, self.device(Generator::new(queues, frames, len).unwrap()))
            }
            Network::Link(name) => match far_ends.remove(name) {
                Some(far) => ("link", Traffic::Mirror, self.device(far)),
                None => {
                    let (near, far) = LinkEnd::pair(queues).unwrap();
                    far_ends.insert(name.clone(), far);
                    ("link", Traffic::Exchange, self.device(near))
                }
            },
        };
        (device, NetJob { network, traffic, frames, size, reply })
    }

    fn device<B: BackEnd>(&self, back_end: B) -> Box<dyn Device> {
        let longest = self.size.max(self.reply.unwrap_or(0));
        let mtu = (longest > 1500).then(|| u16::try_from(longest).unwrap_or(u16::MAX));
        Box::new(Net::new(NetConfig { mtu, ..NetConfig::new(self.mac) }, back_end).unwrap())
    }
}
