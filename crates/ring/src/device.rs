//! The device side of a queue, of either layout.
//!
//! ```text
//!   QueueConfig --activate--------> Queue --state--> State
//!               --resume(State)-->
//!               --resume_tracked->
//! ```
mod config;
pub(crate) mod layout;
mod queue;
mod resume;
mod tracked;

pub use crate::batch::{Batch, Chain, Iter, MAX_CHAIN};
pub use crate::state::{State, StateError};
pub use crate::table_memory::TableMemory;
pub use crate::tracking::tracking_bytes;
pub use crate::translation::{Fetched, TranslationCheck};
pub use config::{AreaRequest, QueueConfig};
pub use queue::Queue;
