//! The kernel's vhost-net serves a queue: it moves frames between ring and TAP.
//!
//! ```text
//! start:  open, SET_OWNER, SET_FEATURES, SET_MEM_TABLE -> SET_VRING_{NUM,BASE,ADDR,ERR,CALL,KICK} -> NET_SET_BACKEND tap
//! stop:   NET_SET_BACKEND none (waits for what is in flight) -> GET_VRING_BASE -> closed
//! ```
//! Each queue has its own vhost-net descriptor and kernel thread. This is the only module that
//! names the crate vhost.
use paravane_dma::interop::View;
use paravane_io::{Loan, QueueBackend};
use paravane_spec::{feature, net};
use std::fs::File;
use std::io;
use std::sync::Arc;
use vhost::net::VhostNet as _;
use vhost::vhost_kern::net::Net;
use vhost::{VhostBackend as _, VhostUserMemoryRegionInfo, VringConfigData};

/// Features that change the ring or the header of a frame.
///
/// A back end must know each negotiated one.
const FORMAT: u64 = feature::INDIRECT_DESC
    | feature::EVENT_IDX
    | feature::VERSION_1
    | feature::ACCESS_PLATFORM
    | feature::RING_PACKED
    | feature::IN_ORDER
    | feature::ORDER_PLATFORM
    | net::F_MRG_RXBUF;

/// A queue that the kernel serves.
#[derive(Default)]
pub(crate) struct VhostNet {
    at_work: Option<AtWork>,
}

struct AtWork {
    net: Net<Arc<View>>,
    /// Index of the queue in its vhost-net: 0 receives, 1 transmits.
    index: usize,
}

impl QueueBackend for VhostNet {
    fn name(&self) -> &'static str {
        "vhost-net"
    }

    fn start(&mut self, loan: &mut Loan<'_>) -> io::Result<()> {
        let Some(tap) = loan.handler.as_ref().and_then(|handler| handler.tap()) else {
            // Neither receive nor transmit: a control queue.
            return Err(io::Error::new(io::ErrorKind::NotConnected, "no TAP device is behind the queue"));
        };
        let tap = File::from(tap.try_clone_to_owned()?);
        // A split queue's; the features say so below.
        let base = loan.parked.state().vring_base() as u16;
        let index = usize::from(loan.queue % net::PAIR);
        let net = Net::new(Arc::new(View::lent(loan.memory)?)).map_err(refused("open /dev/vhost-net"))?;
        net.set_owner().map_err(refused("SET_OWNER"))?;
        let offered = net.get_features().map_err(refused("GET_FEATURES"))?;
        // Offered by the kernel, but it needs translations that we do not send.
        let unknown = loan.features & FORMAT & !(offered & !feature::ACCESS_PLATFORM);
        if unknown != 0 {
            let what = format!("the kernel's vhost-net does not know the features {unknown:#x}");
            return Err(io::Error::new(io::ErrorKind::Unsupported, what));
        }
        net.set_features(loan.features & FORMAT).map_err(refused("SET_FEATURES"))?;
        net.set_mem_table(&table(loan)).map_err(refused("SET_MEM_TABLE"))?;
        net.set_vring_num(index, loan.addresses.size).map_err(refused("SET_VRING_NUM"))?;
        net.set_vring_base(index, base).map_err(refused("SET_VRING_BASE"))?;
        net.set_vring_addr(index, &rings(loan)).map_err(refused("SET_VRING_ADDR"))?;
        net.set_vring_err(index, &loan.error.event()).map_err(refused("SET_VRING_ERR"))?;
        net.set_vring_call(index, &loan.call.event()).map_err(refused("SET_VRING_CALL"))?;
        net.set_vring_kick(index, &loan.kick.event()).map_err(refused("SET_VRING_KICK"))?;
        net.set_backend(index, Some(&tap)).map_err(refused("NET_SET_BACKEND"))?;
        // It may have tested the eventfd before it had a back end.
        loan.kick.signal();
        self.at_work = Some(AtWork { net, index });
        Ok(())
    }

    fn stop(&mut self) -> io::Result<u32> {
        let Some(AtWork { net, index }) = self.at_work.take() else {
            return Err(io::Error::other("it is not at work"));
        };
        net.set_backend(index, None).map_err(refused("NET_SET_BACKEND"))?;
        net.get_vring_base(index).map_err(refused("GET_VRING_BASE"))
    }
}

/// Guest memory in this process's address space.
fn table(loan: &Loan<'_>) -> Vec<VhostUserMemoryRegionInfo> {
    let regions = loan.memory.regions().iter().map(|region| VhostUserMemoryRegionInfo {
        guest_phys_addr: region.gpa(),
        memory_size: region.size(),
        userspace_addr: region.host().as_ptr() as u64,
        ..VhostUserMemoryRegionInfo::default()
    });
    regions.collect()
}

/// Addresses of the rings.
///
/// The crate takes guest addresses and translates them itself.
fn rings(loan: &Loan<'_>) -> VringConfigData {
    VringConfigData {
        queue_max_size: loan.addresses.size,
        queue_size: loan.addresses.size,
        desc_table_addr: loan.addresses.desc,
        avail_ring_addr: loan.addresses.driver,
        used_ring_addr: loan.addresses.device,
        ..VringConfigData::default()
    }
}

fn refused(call: &'static str) -> impl Fn(vhost::Error) -> io::Error {
    move |error| io::Error::other(format!("{call}: {error}"))
}
