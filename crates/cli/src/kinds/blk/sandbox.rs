//! What disks need in the sandbox.
use super::spec::Blk;
use crate::serve::sandbox::paths::{AllowedPaths, ImageAccess};
use paravane_device::blk::Format;
use paravane_store::Location;

/// Allows the images of a disk; with `beside`, what is beside them, too.
pub(super) fn allow(disk: &Blk, allowed: &mut AllowedPaths, beside: bool) {
    let access = match (disk.read_only, disk.format) {
        (true, _) => ImageAccess::Read,
        (false, Format::Raw) => ImageAccess::Write,
        (false, Format::Qcow2) => ImageAccess::Grow,
    };
    let layers = disk.backing.iter().map(|layer| (&layer.location, ImageAccess::Read));
    for (location, access) in std::iter::once((&disk.image, access)).chain(layers) {
        match location {
            Location::Rbd(rbd) => allowed.ceph(rbd.conf.as_deref()),
            location => location.path().into_iter().for_each(|path| allowed.image(path, access, beside)),
        }
    }
}
