//! Virtio over PCI: valid and invalid use of the registers.
mod config_space;
mod msix;
mod registers;
mod rig;
mod root;
