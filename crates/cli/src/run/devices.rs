//! The devices of `paravane run`: `--device` as it is, `--disk` and `--net` as short forms.
use super::args::RunArgs;
use super::device_arg::DeviceArg;
use super::disk_arg::DiskArg;
use super::net::{self, Card};
use crate::kinds::kind::Spec;
use crate::kinds::observe::Observe;
use crate::kinds::opening::{Earlier, LinkEnds, OpenContext, Opened};
use crate::kinds::rng::RNG;
use anyhow::{Context, bail};
use paravane_device::Device;
use paravane_device::blk::EngineChoice;
use paravane_vmm::{DiskJob, DiskWork, Job, NamedDevice};
use std::fs::File;
use std::os::fd::AsRawFd;
use std::path::PathBuf;

/// Size of the temporary disk, used without --disk and --net, in bytes.
const TEMPORARY_SIZE: u64 = 64 << 20;
/// Bytes that the built-in guest draws from the entropy source.
const ENTROPY: u64 = 4096;

/// Open devices of a machine, and what has to stay until its guest has ended.
#[derive(Default)]
pub(crate) struct Devices {
    devices: Vec<NamedDevice>,
    observers: Vec<Box<dyn Observe>>,
    links: LinkEnds,
    temporary: Option<File>,
}

impl Devices {
    /// Opens the devices of the command line.
    ///
    /// # Errors
    /// A device cannot be opened, or the guest cannot use it.
    pub(crate) fn open(args: &RunArgs) -> Result<Self, anyhow::Error> {
        let for_linux = args.kernel.is_some();
        // The built-in guest works on each device with all its CPUs; a guest without is refused later.
        let lanes = if for_linux { 1 } else { args.cpus.max(1) };
        let cards = net::cards(&args.net, for_linux, lanes)?;
        let mut all = Self::default();
        for disk in &args.disk {
            // Disks that the run does not write are opened read-only.
            let write = (args.write_test || for_linux) && !disk.read_only;
            let queues = disk.queues.or(Some(lanes));
            all.disk(DiskArg { read_only: !write, queues, ..disk.clone() }, None, args.engine)?;
        }
        if args.disk.is_empty() && cards.is_empty() && !for_linux {
            all.temporary_disk(args.engine, lanes)?;
        }
        let DeviceArg { kind, spec } = DeviceArg::new(&RNG, [])?;
        let (device, _) = all.device(kind, &*spec)?;
        all.devices.push(NamedDevice::new(kind, device).with_job(Job::Entropy(ENTROPY)));
        for (number, Card { spec, vhost, job }) in cards.into_iter().enumerate() {
            let name = format!("net {number}");
            let (device, _) = all.device(&name, &spec)?;
            let device = NamedDevice::new(&name, device).with_vhost_net(vhost);
            all.devices.push(device.with_job(Job::Net(job)));
        }
        for (number, DeviceArg { kind, spec }) in args.device.iter().enumerate() {
            let name = format!("{kind} {number}");
            let (device, _) = all.device(&name, &**spec).with_context(|| format!("--device {kind}"))?;
            all.devices.push(NamedDevice::new(&name, device));
        }
        match all.links.0.keys().next() {
            Some(name) => bail!("link {name:?} joins two cards: only one is given"),
            None => Ok(all),
        }
    }

    /// Takes the devices. The rest has to stay.
    pub(crate) fn take(&mut self) -> Vec<NamedDevice> {
        std::mem::take(&mut self.devices)
    }

    /// Opens a device.
    fn device(
        &mut self,
        name: &str,
        spec: &dyn Spec,
    ) -> Result<(Box<dyn Device>, &dyn Observe), anyhow::Error> {
        let opening = spec.open(name, &OpenContext::default(), &mut self.links, Earlier::default())?;
        let Opened { device, observer, back_end, hold: _ } = opening.opened()?;
        tracing::info!(device = name, back_end, "attached");
        self.observers.push(observer);
        Ok((device, &*self.observers[self.observers.len() - 1]))
    }

    /// Opens a disk, which the report calls `shown`.
    fn disk(
        &mut self,
        disk: DiskArg,
        shown: Option<&str>,
        engine: EngineChoice,
    ) -> Result<(), anyhow::Error> {
        let name = format!("disk {}", self.devices.len());
        let arg = disk.device(engine)?;
        let DiskArg { path, read_only, .. } = disk;
        let (device, observer) = self.device(&name, &*arg.spec)?;
        let snapshots = observer.snapshots().context("internal error: the disk is not open")?;
        let job = DiskJob {
            work: if read_only { DiskWork::Hash } else { DiskWork::WriteTest },
            image: File::open(snapshots.image()).context("cannot open the image twice")?,
            engine: snapshots.engine(),
            path: shown.map_or_else(|| path.into(), PathBuf::from),
        };
        self.devices.push(NamedDevice::new(&name, device).with_job(Job::Disk(job)));
        Ok(())
    }

    /// Opens an unlinked disk image, which disappears with the process.
    fn temporary_disk(&mut self, engine: EngineChoice, queues: u16) -> Result<(), anyhow::Error> {
        let make = || {
            let file = tempfile::tempfile()?;
            file.set_len(TEMPORARY_SIZE)?;
            Ok::<_, std::io::Error>(file)
        };
        let file = make().with_context(|| {
            format!("cannot create a temporary disk in {} (TMPDIR)", std::env::temp_dir().display())
        })?;
        let path = format!("/proc/self/fd/{}", file.as_raw_fd());
        self.temporary = Some(file);
        let disk = DiskArg { path, read_only: false, queues: Some(queues) };
        self.disk(disk, Some("temporary"), engine)
    }
}
