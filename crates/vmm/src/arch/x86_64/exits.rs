//! Exits that only this architecture has, or that mean something of its own here.
use crate::machine::bus::Bus;
use crate::machine::console::GuestEnd;
use kvm_ioctls::VcpuExit;

/// Result of an exit.
pub(crate) enum ArchExit {
    /// The guest continues, unless its access ended it.
    Served(Option<GuestEnd>),
    /// A triple fault, which resets a processor.
    Reset,
    /// The guest cannot continue; the reason.
    Failed(String),
}

/// Serves an exit that is no access to memory.
pub(crate) fn exit(exit: VcpuExit<'_>, bus: &Bus) -> ArchExit {
    match exit {
        VcpuExit::IoIn(port, data) => {
            match bus.system() {
                Some(system) => system.read(port, data),
                None => data.fill(0xff),
            }
            ArchExit::Served(None)
        }
        VcpuExit::IoOut(port, data) => {
            ArchExit::Served(bus.system().and_then(|system| system.write(port, data)).map(GuestEnd::Power))
        }
        VcpuExit::IrqWindowOpen => ArchExit::Served(None),
        VcpuExit::Shutdown => ArchExit::Reset,
        VcpuExit::Hlt => ArchExit::Failed("it halted for good".to_owned()),
        other => ArchExit::Failed(format!("unexpected exit {other:?}")),
    }
}
