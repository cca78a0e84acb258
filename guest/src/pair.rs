//! A pair of a card's queues, as the work on it needs it.
use crate::failure::{set_up, wrong};
use crate::report::Failure;
use crate::worker::Interrupts;
use alloc::vec::Vec;
use paravane_driver::net::{NetDevice, NetOptions, QueuePair};
use paravane_driver::{DriverError, Message, Pool, Transport};

/// A pair of a card's queues; the first one has the card, and takes its interrupts.
pub(crate) struct CardPair<T> {
    pub(crate) queues: QueuePair<T>,
    pub(crate) mac: Option<[u8; 6]>,
    card: Option<NetDevice<T>>,
    /// The answer to the question for pairs has not come yet.
    asking: bool,
}

impl<T: Transport> CardPair<T> {
    /// Sets a card up, and asks it to use all pairs that it has been given.
    ///
    /// # Errors
    /// The driver refuses.
    pub(crate) fn open(transport: T, options: NetOptions, pool: &mut Pool) -> Result<Vec<Self>, Failure> {
        let (mut card, pairs) = NetDevice::new(transport, options, pool).map_err(set_up)?;
        let (mac, asking) = (card.mac(), pairs.len() > 1);
        if asking {
            card.ask_for_pairs(card.pairs_set_up())?;
        }
        let mut card = Some(card);
        let one = |queues| {
            let card = card.take();
            Self { queues, mac, asking: asking && card.is_some(), card }
        };
        Ok(pairs.into_iter().map(one).collect())
    }

    /// Whether all pairs of the card are in use, as far as this one asks.
    pub(crate) fn is_up(&self) -> bool {
        !self.asking
    }

    /// Takes the answer to the question for pairs. Says whether the pair can be used.
    ///
    /// # Errors
    /// The card does not use them, or the control queue is broken.
    pub(crate) fn comes_up(&mut self) -> Result<bool, Failure> {
        if let Some(card) = self.card.as_mut().filter(|_| self.asking) {
            match card.answer()? {
                None => return Ok(false),
                Some(true) => self.asking = false,
                Some(false) => return Err(wrong(0, "the card refused to use its queue pairs")),
            }
        }
        Ok(true)
    }
}

impl<T: Transport> Interrupts for CardPair<T> {
    /// Polls for the answer of the control queue, which needs no interrupt.
    fn enable_interrupts(&mut self) -> bool {
        self.queues.enable_interrupts() || self.asking
    }
    fn disable_interrupts(&mut self) {
        self.queues.disable_interrupts();
    }
    fn interrupt(&mut self) -> Result<u32, DriverError> {
        self.card.as_mut().map_or(Ok(0), NetDevice::interrupt)
    }
    fn set_message(&self, number: u16, message: Message) -> Result<(), DriverError> {
        self.queues.device().set_message(number, message)
    }
}
