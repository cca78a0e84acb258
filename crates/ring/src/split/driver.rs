//! Driver side of a split queue.
