//! Virtio over PCI: the registers as the specification wants them used, and as it does not.
mod config_space;
mod msix;
mod registers;
mod rig;
mod root;
