//! Orders to the task of an export, from its owner and its threads.
//!
//! ```text
//!   owner, I/O threads, device: give --> set of orders --one waker--> task: a step carries them out
//! ```
//! An order that is given again before it is carried out counts once. So there is room for each order
//! whoever gives them, and the task decides which comes first.
use crate::protocol_threads::Waker;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU16, Ordering};

/// What the task is to do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Order {
    /// End. Stays given.
    Stop,
    /// With [`Order::Stop`]: leave what is kept to a later process. Stays given.
    Leave,
    /// End: a thread has panicked. Stays given.
    Fail,
    /// End, and leave the state to another export. Stays given.
    HandOver,
    /// With [`Order::HandOver`]: the other export is in this process, and what is kept stays. Stays given.
    Exchange,
    /// Disconnect the client, which has blocked an I/O thread that other devices use.
    Disconnect,
    /// Have the device read its host-side configuration again.
    Refresh,
    /// Tell the client that the configuration space changed.
    TellConfig,
    /// Record what the driver has changed by a command.
    Record,
    /// Try the keeper.
    Keep,
    /// Look at the host's side of the device.
    Look,
}

/// Set of orders, and the waker of the task that carries them out.
#[derive(Debug, Default)]
pub(super) struct Orders {
    given: AtomicU16,
    waker: OnceLock<Waker>,
}

impl Orders {
    /// Orders for a task that is not there yet.
    pub(super) fn new(first: Order) -> Self {
        Self { given: AtomicU16::new(bit(first)), waker: OnceLock::new() }
    }

    /// Sets the waker, and wakes the task for the orders so far.
    pub(super) fn serve(&self, waker: Waker) {
        let _ = self.waker.set(waker);
        self.wake();
    }

    /// Has the task run a step.
    pub(super) fn wake(&self) {
        // Before the task is there, it has its first step before it.
        if let Some(waker) = self.waker.get() {
            waker.wake();
        }
    }

    /// Gives orders, all at once, and wakes the task.
    pub(super) fn give(&self, orders: &[Order]) {
        self.give_to_self(orders);
        self.wake();
    }

    /// Gives orders. Only the task may call it: it looks before it waits.
    pub(super) fn give_to_self(&self, orders: &[Order]) {
        let bits = orders.iter().fold(0, |bits, order| bits | bit(*order));
        // Release: who sees an order sees what was done before it was given.
        self.given.fetch_or(bits, Ordering::Release);
    }

    /// Whether an order is given.
    pub(super) fn has(&self, order: Order) -> bool {
        // Acquire: see `give_to_self`.
        self.given.load(Ordering::Acquire) & bit(order) != 0
    }

    /// Takes an order back. Returns whether it was given.
    pub(super) fn take(&self, order: Order) -> bool {
        // Most orders are not given in most steps.
        // Acquire: see `give_to_self`.
        self.has(order) && self.given.fetch_and(!bit(order), Ordering::Acquire) & bit(order) != 0
    }
}

fn bit(order: Order) -> u16 {
    1 << order as u16
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_order_is_carried_out_once_however_often_it_is_given() {
        let orders = Orders::new(Order::Keep);
        orders.give(&[Order::Refresh, Order::Look]);
        orders.give(&[Order::Refresh]);
        for order in [Order::Keep, Order::Refresh, Order::Look] {
            assert!(orders.has(order) && orders.take(order), "{order:?}");
            assert!(!orders.has(order) && !orders.take(order), "{order:?}");
        }
        assert!(!orders.has(Order::Stop));
    }

    #[test]
    fn no_order_is_lost_between_threads() {
        let orders = Orders::default();
        std::thread::scope(|scope| {
            for order in [Order::Refresh, Order::TellConfig, Order::Record, Order::Disconnect] {
                scope.spawn({
                    let orders = &orders;
                    move || {
                        for _ in 0..10_000 {
                            orders.give(&[order]);
                            assert!(orders.take(order));
                        }
                    }
                });
            }
        });
        assert_eq!(orders.given.load(Ordering::Relaxed), 0);
    }
}
