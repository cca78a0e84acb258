//! The transport of a device, through the platform.
use crate::platform::Platform;
use crate::report::KickPage;
use crate::space::Space;
use alloc::vec::Vec;
use paravane_driver::mmio::{Mmio, Window};
use paravane_driver::pci::{Ecam, Function, Pci};
use paravane_driver::{DriverError, Message, Transport};
use paravane_spec::builtin::{
    BootInfo, DeviceEntry, INTERRUPTS, IRQ_VECTOR_BASE, PCI_ECAM, PCI_WINDOW, job, message_address, transport,
};
use paravane_spec::net::PAIR;
use paravane_spec::pci::{NO_VENDOR, ecam};
use paravane_spec::queue::QueueAddresses;
use paravane_spec::{mmio, mmio_msi};

/// One device.
pub(crate) struct Connection<'p, P> {
    registers: Registers<'p, P>,
    platform: &'p P,
    /// Histogram of kicks, if they are timed.
    kicks: Option<KickPage>,
}

/// The registers of one device, on either transport: a branch an access.
enum Registers<'p, P> {
    Mmio(Mmio<Window<Space<'p, P>>>),
    Pci(Pci<Space<'p, P>>),
}

/// Runs the same for either.
macro_rules! either {
    ($connection:expr, $registers:ident => $what:expr) => {
        match &$connection.registers {
            Registers::Mmio($registers) => $what,
            Registers::Pci($registers) => $what,
        }
    };
    (mut $connection:expr, $registers:ident => $what:expr) => {
        match &mut $connection.registers {
            Registers::Mmio($registers) => $what,
            Registers::Pci($registers) => $what,
        }
    };
}

impl<'p, P: Platform> Connection<'p, P> {
    /// Opens the device of `entry` and sets up its messages.
    ///
    /// Kicks are timed in `kicks`.
    pub(crate) fn open(
        platform: &'p P,
        info: &BootInfo,
        entry: &DeviceEntry,
        kicks: Option<KickPage>,
    ) -> Result<Self, DriverError> {
        Ok(Self { registers: Registers::open(platform, info, entry)?, platform, kicks })
    }
}

impl<'p, P: Platform> Registers<'p, P> {
    fn open(platform: &'p P, info: &BootInfo, entry: &DeviceEntry) -> Result<Self, DriverError> {
        Ok(match info.transport {
            transport::PCI => {
                let mut pci = Pci::open(function(platform, entry.base)?)?;
                let messages = messages(info, entry);
                if let Some(last) = messages.len().checked_sub(1) {
                    pci.use_messages(|number| messages[usize::from(number).min(last)]);
                }
                Self::Pci(pci)
            }
            transport::MMIO_MSI => {
                let mut mmio = Mmio::new(Window::new(Space(platform), entry.base, mmio_msi::WINDOW))?;
                mmio.use_messages(messages(info, entry));
                Self::Mmio(mmio)
            }
            _ => Self::Mmio(Mmio::new(Window::new(Space(platform), entry.base, mmio::WINDOW))?),
        })
    }
}

/// The function whose configuration space is at `base`.
fn function<P: Platform>(platform: &P, base: u64) -> Result<Function<Space<'_, P>>, DriverError> {
    let bus = Ecam::new(Space(platform), PCI_ECAM, PCI_WINDOW);
    let device = base.wrapping_sub(PCI_ECAM) / (ecam::FUNCTION * ecam::FUNCTIONS);
    let function = u8::try_from(device).ok().and_then(|device| bus.function(device));
    function.ok_or(DriverError::Function { vendor: NO_VENDOR, device: NO_VENDOR })
}

/// Messages of the device: for the configuration change, then for its queues.
fn messages(info: &BootInfo, entry: &DeviceEntry) -> Vec<Message> {
    let queues = queues_of_lane(entry);
    let message = |number: u32| Message {
        // The configuration change's goes with those of the first lane.
        address: message_address(lane_cpu(info, entry, number.saturating_sub(1) / queues)),
        data: u32::from(IRQ_VECTOR_BASE).wrapping_add(entry.messages).wrapping_add(number),
    };
    (0..entry.message_count.min(INTERRUPTS as u32)).map(message).collect()
}

/// Queues of the device that one lane works on: two of a card, which are a pair.
pub(crate) fn queues_of_lane(entry: &DeviceEntry) -> u32 {
    match entry.job {
        job::NET_ECHO | job::NET_SEND | job::NET_RECEIVE | job::NET_MIRROR => u32::from(PAIR),
        _ => 1,
    }
}

/// Processor of the work on queue or pair `lane` of a device.
pub(crate) fn lane_cpu(info: &BootInfo, entry: &DeviceEntry, lane: u32) -> u32 {
    // Queues beyond those in use send nothing.
    (entry.cpu + lane.min(entry.queues.saturating_sub(1))) % info.cpus.max(1)
}

impl<P: Platform> Transport for Connection<'_, P> {
    fn device_id(&self) -> u32 {
        either!(self, registers => registers.device_id())
    }
    fn status(&self) -> u32 {
        either!(self, registers => registers.status())
    }
    fn set_status(&self, status: u32) {
        either!(self, registers => registers.set_status(status));
    }
    fn device_features(&self) -> u64 {
        either!(self, registers => registers.device_features())
    }
    fn set_driver_features(&self, accepted: u64) {
        either!(self, registers => registers.set_driver_features(accepted));
    }
    fn wanted_features(&self) -> u64 {
        either!(self, registers => registers.wanted_features())
    }
    fn set_up_interrupts(&mut self, features: u64) -> Result<(), DriverError> {
        either!(mut self, registers => registers.set_up_interrupts(features))
    }
    fn set_message(&self, number: u16, message: Message) -> Result<(), DriverError> {
        either!(self, registers => registers.set_message(number, message))
    }
    fn queue_max(&self, index: u16) -> u32 {
        either!(self, registers => registers.queue_max(index))
    }
    fn queue_enabled(&self, index: u16) -> bool {
        either!(self, registers => registers.queue_enabled(index))
    }
    fn enable_queue(&mut self, index: u16, at: &QueueAddresses) -> Result<(), DriverError> {
        either!(mut self, registers => registers.enable_queue(index, at))
    }
    fn reset_queue(&self, index: u16) {
        either!(self, registers => registers.reset_queue(index));
    }
    fn queue_resetting(&self, index: u16) -> bool {
        either!(self, registers => registers.queue_resetting(index))
    }
    fn notify(&self, index: u16, data: Option<u32>) {
        let before = self.kicks.map(|_| self.platform.now_ns());
        either!(self, registers => registers.notify(index, data));
        if let Some((kicks, before)) = self.kicks.zip(before) {
            kicks.count(self.platform.now_ns().saturating_sub(before));
        }
    }
    fn take_causes(&self) -> u32 {
        either!(self, registers => registers.take_causes())
    }
    fn generation(&self) -> u32 {
        either!(self, registers => registers.generation())
    }
    fn config32(&self, offset: u64) -> u32 {
        either!(self, registers => registers.config32(offset))
    }
    fn config16(&self, offset: u64) -> u16 {
        either!(self, registers => registers.config16(offset))
    }
    fn config8(&self, offset: u64) -> u8 {
        either!(self, registers => registers.config8(offset))
    }
}
