//! Configuration of one queue, and whether it is complete.
//!
//! ```text
//!              size, addresses, kick, enabled (or no protocol features): all set
//!   Stopped -------------------------------------------------------------------------> Live, on an I/O thread
//!      ^                                                                                |       |
//!      |   disabled, GET_VRING_BASE, memory gone, reset: drained, position kept         |       | driver error
//!      |<-------------------------------------------------------------------------------'       v
//!      '<---------------------------------------------------- GET_VRING_BASE, reset --------- Failed
//! ```
//! With GET_VRING_BASE_INFLIGHT a queue is not drained: what is in flight stays in the in-flight
//! region, and is served first when the queue starts again.
//!
//! While a queue is live, only its descriptors and the logging of its ring can change.
use paravane_ring::device::{State, StateError};
use paravane_spec::feature;
use paravane_spec::vhost_user::VringAddr;
use std::os::fd::OwnedFd;

/// Source of a queue's kicks.
#[derive(Debug)]
pub(crate) enum Kick {
    /// A descriptor of the client.
    Fd(OwnedFd),
    /// None: the session kicks the queue periodically.
    Poll,
}

/// Configuration of one queue, as the client sent it.
#[derive(Debug, Default)]
pub(crate) struct Vring {
    /// Number of descriptors; 0 if not set yet.
    pub(crate) size: u16,
    pub(crate) addr: Option<VringAddr>,
    /// Position, as in SET_VRING_BASE.
    pub(crate) base: u32,
    pub(crate) kick: Option<Kick>,
    pub(crate) enabled: bool,
    /// Its part of the session's own in-flight region is not new.
    pub(crate) is_tracked: bool,
}

impl Vring {
    /// Whether the queue has all that it needs to start.
    pub(crate) fn is_complete(&self, needs_enable: bool) -> bool {
        self.size > 0 && self.addr.is_some() && self.kick.is_some() && (self.enabled || !needs_enable)
    }

    /// Position to start from.
    ///
    /// `last_flags` reads the flags of the last descriptor of a packed ring, `used_idx` the used
    /// index of a split ring; `None` if the in-flight region has the position.
    ///
    /// Position 0 of a packed queue is the beginning of an even round. Some drivers also send it
    /// for a new queue, which is at the beginning of round 1 (libblkio and the crate
    /// virtio-driver). The last descriptor decides: in an even round its AVAIL flag is set, because
    /// it was made available in the round before; in a new ring the flag is clear.
    ///
    /// A used position of 0 beside a different available position was not sent at all: DPDK's
    /// virtio-user leaves it out. Only the in-flight region knows of chains in flight, so the two
    /// positions are equal.
    ///
    /// Position 0 of a split queue may mean that the client does not know it: DPDK's virtio-user
    /// sends 0 whenever a server reconnects, and leaves the ring as it is. The queue then continues
    /// from its used index, as in DPDK's vhost: chains that the earlier server took and did not
    /// return are taken again. In a new ring the used index is 0. This trusts the client no
    /// further: the used index is in its own memory, it could have sent that number, and a ring
    /// whose available index does not fit is refused in any case. Any other position that
    /// contradicts the ring is refused. With an in-flight region this position is refused too: the
    /// region records which chains are in flight, so nothing is guessed.
    ///
    /// With IN_ORDER a queue continues from its used position, whatever the available one is: the
    /// chains between the two are in flight, since no later one can have been used. QEMU (11.1) with
    /// `in_order=on` takes some for itself while no server is connected, and never returns them.
    pub(crate) fn position(
        &self,
        features: u64,
        last_flags: impl FnOnce() -> u16,
        used_idx: Option<impl FnOnce() -> u16>,
    ) -> Result<State, StateError> {
        let state = State::from_vring_base(self.base, features)?;
        let in_order = features & feature::IN_ORDER != 0;
        Ok(match (state, used_idx) {
            (State::Split { avail }, Some(used_idx)) if avail == 0 || in_order => {
                State::Split { avail: used_idx() }
            }
            (State::Packed { avail: 0, used: 0 }, _)
                if last_flags() & paravane_spec::packed::DESC_F_AVAIL == 0 =>
            {
                let start = paravane_spec::packed::EVENT_WRAP;
                State::Packed { avail: start, used: start }
            }
            (State::Packed { avail, used: 0 }, _) => State::Packed { avail, used: avail },
            (State::Packed { used, .. }, _) if in_order => State::Packed { avail: used, used },
            (state, _) => state,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use paravane_spec::feature::RING_PACKED;
    use paravane_spec::packed::DESC_F_AVAIL;

    #[test]
    fn a_packed_queue_begins_where_drivers_mean() {
        let at = |base, last_flags| {
            let vring = Vring { base, ..Vring::default() };
            match vring.position(RING_PACKED, || last_flags, Some(|| 9)) {
                Ok(State::Packed { avail, used }) => (avail, used),
                other => panic!("{other:?}"),
            }
        };
        assert_eq!(at(0x8005_8005, 0), (0x8005, 0x8005));
        assert_eq!(at(0x0005_0005, 0), (5, 5), "an even round");
        assert_eq!(at(0, 0), (0x8000, 0x8000), "libblkio, a new ring");
        assert_eq!(at(0, DESC_F_AVAIL), (0, 0), "the beginning of an even round");
        assert_eq!(at(0x8000, 0), (0x8000, 0x8000), "virtio-user, a new ring");
        assert_eq!(at(0x8007, 0), (0x8007, 0x8007), "virtio-user, a ring that has been stopped");
        assert_eq!(at(0x0007_8009, 0), (0x8009, 7), "a contradiction, for the ring to refuse");
    }

    #[test]
    fn a_split_queue_without_a_position_goes_on_from_its_used_index() {
        let at = |base, used_idx: Option<u16>| {
            let vring = Vring { base, ..Vring::default() };
            vring.position(0, || 0, used_idx.map(|idx| move || idx))
        };
        assert_eq!(at(0, Some(0)), Ok(State::Split { avail: 0 }), "a new ring");
        assert_eq!(
            at(0, Some(0xfff0)),
            Ok(State::Split { avail: 0xfff0 }),
            "virtio-user, a server that has come back"
        );
        assert_eq!(at(0, None), Ok(State::Split { avail: 0 }), "with in-flight memory");
        assert_eq!(at(7, Some(3)), Ok(State::Split { avail: 7 }), "a contradiction, for the ring to refuse");
        assert_eq!(at(0x1_0000, Some(3)), Err(StateError::Base(0x1_0000)));
    }

    #[test]
    fn a_queue_in_order_goes_on_from_its_used_position() {
        let at = |base, features| {
            let vring = Vring { base, ..Vring::default() };
            vring.position(features | feature::IN_ORDER, || DESC_F_AVAIL, Some(|| 0x1de))
        };
        let split = Ok(State::Split { avail: 0x1de });
        assert_eq!((at(0x1de, 0), at(0x1df, 0)), (split, split), "QEMU 11.1 has taken a chain");
        let packed = |avail, used| Ok(State::Packed { avail, used });
        assert_eq!(at(0x8007_8009, RING_PACKED), packed(0x8007, 0x8007));
        assert_eq!(at(0x0000_8007, RING_PACKED), packed(0x8007, 0x8007), "virtio-user");
        assert_eq!(at(0, RING_PACKED), packed(0, 0), "the beginning of an even round");
    }
}
