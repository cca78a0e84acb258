//! The split layout (section 2.7): sizes, shared by both sides.
mod device;
mod driver;
