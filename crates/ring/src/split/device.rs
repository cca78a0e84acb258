//! Device side of a split queue.
