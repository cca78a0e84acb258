//! The position of a queue: read, and gone on from.
use super::config::QueueConfig;
use super::layout::Layout;
use super::queue::Queue;
use crate::packed::position::Position;
use crate::state::{State, StateError};
use crate::{Area, Order};
use paravane_spec::packed::EVENT_WRAP;

impl QueueConfig {
    /// As [`QueueConfig::activate_as`], at the position of an earlier device side.
    ///
    /// # Errors
    /// As [`QueueConfig::activate_as`]; the state is of another layout, impossible, or contradicts
    /// the ring.
    ///
    /// # Safety
    /// As [`QueueConfig::activate`].
    pub unsafe fn resume<O: Order>(
        self,
        desc: Area,
        driver: Area,
        device: Area,
        state: State,
    ) -> Result<Queue<O>, StateError> {
        // SAFETY: the caller's promise is the same.
        let mut queue = unsafe { self.activate_as(desc, driver, device) }?;
        queue.move_to(state)?;
        Ok(queue)
    }
}

impl<O: Order> Queue<O> {
    /// The position of the queue.
    ///
    /// # Errors
    /// Something is in flight or not published, or the queue has latched.
    pub fn state(&self) -> Result<State, StateError> {
        if let Some(error) = self.error() {
            return Err(StateError::Latched(error));
        }
        match (self.in_flight(), self.unpublished()) {
            (0, false) => Ok(self.position()),
            (0, true) => Err(StateError::Unpublished),
            (in_flight, _) => Err(StateError::InFlight(in_flight)),
        }
    }

    /// The position of a queue that may leave chains in flight to its tracking region.
    ///
    /// [`QueueConfig::resume_tracked`] pops these chains first. Publish before: what is completed
    /// and not published counts as in flight. Without tracking, this is [`Queue::state`].
    ///
    /// # Errors
    /// The queue has latched; or, without tracking, as [`Queue::state`].
    pub fn tracked_state(&self) -> Result<State, StateError> {
        match self.error() {
            None if self.is_tracked() => Ok(self.position()),
            _ => self.state(),
        }
    }

    /// Whether something was completed and not published.
    fn unpublished(&self) -> bool {
        match &self.layout {
            Layout::Split(ring) => ring.next_avail() != ring.published(),
            Layout::Packed(ring) => ring.next_avail() != ring.published(),
        }
    }

    fn position(&self) -> State {
        let size = self.size();
        match &self.layout {
            Layout::Split(ring) => State::Split { avail: ring.next_avail() },
            Layout::Packed(ring) => State::Packed {
                avail: ring.next_avail().to_off_wrap(size),
                used: ring.published().to_off_wrap(size),
            },
        }
    }

    /// Goes to `state`, from the start.
    pub(super) fn move_to(&mut self, state: State) -> Result<(), StateError> {
        let (size, name) = (self.size(), self.layout.name());
        let place = |off_wrap: u16| {
            let outside = StateError::Index { index: off_wrap & !EVENT_WRAP, size };
            Position::from_off_wrap(off_wrap, size).ok_or(outside)
        };
        match (state, &mut self.layout) {
            (State::Split { avail }, Layout::Split(ring)) => ring.move_to(avail, 0),
            (State::Packed { avail, used }, Layout::Packed(ring)) => {
                ring.move_to(place(used)?, place(avail)?, 0)
            }
            (state, _) => Err(StateError::Layout { state: state.layout(), queue: name }),
        }
    }
}
