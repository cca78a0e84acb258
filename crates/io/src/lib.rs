//! I/O threads: each serves queues when one of their descriptors wakes it.
//!
//! ```text
//!  start:   QueueStart::build -> assign -> QueueSet::start: put_on a thread
//!  move:    take_off one thread -> put_on another
//!  stop:    take_off -> HostQueue::stop, park or leave
//! ```
//! A host keeps the queues of a device in a [`QueueSet`], on the threads of an [`IoPool`].

//! A queue that is moved or stopped keeps its ioeventfd and all that is in flight: kicks and
//! completions that come in between wait in their descriptors, and a queue that is put on a thread
//! is served once without a kick. So no work is lost, and a queue changes hands in no other way.
//!
//! The host (a VMM, a vhost-user back end) says where kicks arrive ([`Kicks`]) and receives what
//! the queue's driver has to know ([`QueueEvents`]).
//!
//! If the code that serves a queue panics, that queue ends ([`QueueEvents::panicked`]), after a wait
//! for what is in flight. The thread serves its other queues on.
//!
//! An I/O thread may block in a [`QueueEvents`] that signals another process. Every wait for the
//! thread then unblocks it ([`IoThread::freed_by`]); in a pool that devices share, somebody watches.
//! It may also block in a page fault on memory of another process, which nothing ends. In a pool that
//! devices share, another thread then goes on with the queues of the other devices, and the device gets a
//! thread of its own for a while.
//!
//! Devices use threads through an [`IoPool`]: one that they share, or one that each has of its own.
//!
//! # Files
//!
//! * `IoThread`, an event loop with adaptive polling; `QueueStart`, the one builder of a live
//!   queue; `HostQueue`, everything that serving a queue takes, which changes hands as one value;
//!   `RestingQueue`, a queue that another owner serves; `Kicks`, where kicks arrive (our notifier,
//!   or another process's eventfd or pipe); `QueueEvents`, the receiver of used buffer
//!   notifications and errors; `QueueSet`, the queues of a device from start to stop;
//!   `QueueBackend`, who serves a queue that is lent (`lent_queue`), and `backend/relay`, its way to
//!   the driver; `InFlightMemory`, what a later process does of the requests in flight; `pool`
//!   (`IoPool`), threads for one device or for many, `places`, the thread that has each queue,
//!   `balance`, which queue to move (pure), `watch`, which moves it and frees blocked threads,
//!   `activity`, which wakes the watcher; `event_loop/lend`, what a thread does while another one
//!   may take its loop, `spares`, the threads that do, `isolation`, devices that get a thread of
//!   their own for it, `moves`, how queues get there; `panic`, a panic as a value.
mod activity;
mod backend;
mod balance;
mod counters;
mod event_loop;
mod host_queue;
mod in_flight;
mod io_thread;
mod isolation;
mod kicks;
mod lent_queue;
mod moves;
mod panic;
mod pipes;
mod places;
mod pool;
mod queue_events;
mod queue_key;
mod queue_set;
mod queue_start;
mod resting;
mod spares;
#[cfg(test)]
mod tests;
mod watch;

pub use backend::{Loan, QueueBackend};
pub use balance::{Load, Move, best_move};
pub use counters::{IoThreadFigures, QueueWork};
pub use event_loop::parts::NotPutOn;
pub use host_queue::HostQueue;
pub use in_flight::{InFlightError, InFlightMemory};
pub use io_thread::{IoThread, TakingOff, Tasks};
pub use kicks::{ForeignKicks, Kicks, is_eventfd};
pub use lent_queue::LendError;
pub use moves::MoveError;
pub use panic::caught;
pub use pipes::{is_ready, outlive_pipes, read_now, write_now};
pub use places::Spread;
pub use pool::{DeviceThreads, IoPool};
pub use queue_events::QueueEvents;
pub use queue_key::QueueKey;
pub use queue_set::{QueuePlace, QueueSet, Retired, StoppingQueues};
pub use queue_start::{QueueStart, QueueStartError};
pub use resting::{RestingQueue, ResumeError};
