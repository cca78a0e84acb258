//! The serial number of a disk, by which a guest knows it.
//!
//! ```text
//!   --serial TEXT, or from the name of the image ------> what the guest is told
//!   what a guest that runs was told before --keep------^      (a take-over, a kept session)
//! ```
//! Without a serial number of the operator's, it is the last part of the image's location: the file
//! name, export, image of Ceph or last part of a key. A name that does not fit, or has other than
//! printable ASCII characters, is cut to 11 of them, a dash and 8 digits of a hash of all of it: so
//! two long names that begin alike differ. The folder is not part of it: an image may be moved.
use super::image::Image;
use paravane_spec::blk::ID_LEN;
use paravane_store::Location;
use paravane_store::lock;
use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::sync::Mutex;

/// Characters of a long name that stay.
const KEPT: usize = 11;

/// ASCII, padded with zeroes (section 5.2.6).
pub(super) type Id = [u8; ID_LEN];

/// The serial number that guests are told.
#[derive(Debug)]
pub(super) struct Serial {
    id: Mutex<Id>,
    /// The operator's.
    is_given: bool,
    /// Without it, that of earlier versions.
    before: Id,
}

impl Serial {
    /// `given`: the operator's.
    pub(super) fn new(image: &Image, given: Option<&str>) -> Self {
        let id = match (given, image.file.source.file()) {
            (Some(given), _) => padded(given.as_bytes()),
            (None, Some(_)) => of_name(file_name(&image.file.path).as_bytes()),
            (None, None) => {
                let location = image.file.source.status().location;
                let name = location.parse().map_or_else(|_| location.clone(), |named: Location| named.name());
                of_name(if name.is_empty() { location.as_bytes() } else { name.as_bytes() })
            }
        };
        let before = padded(file_name(&image.file.path).as_bytes());
        Self { id: Mutex::new(id), is_given: given.is_some(), before }
    }

    pub(super) fn get(&self) -> Id {
        *lock(&self.id)
    }

    /// As text.
    pub(super) fn text(&self) -> String {
        let id = self.get();
        let len = id.iter().position(|byte| *byte == 0).unwrap_or(id.len());
        id[..len].iter().copied().map(char::from).collect()
    }

    /// Goes on with what a guest that runs was told. `None`: by a version that did not note it.
    pub(super) fn keep(&self, told: Option<&[u8]>) {
        let told = match told.map(Id::try_from) {
            Some(Ok(told)) => padded(&told),
            // What another kind of device notes.
            Some(Err(_)) => return,
            None if self.is_given => return,
            None => self.before,
        };
        let new = self.text();
        let is_changed = std::mem::replace(&mut *lock(&self.id), told) != told;
        if is_changed && self.is_given {
            tracing::warn!(
                "the guest was told serial {:?}, which stays; {new:?} at the next start without it",
                self.text()
            );
        }
    }
}

fn file_name(path: &Path) -> &OsStr {
    path.file_name().unwrap_or_default()
}

fn is_printable(byte: u8) -> bool {
    byte.is_ascii_graphic() || byte == b' '
}

/// Cut to its length, with `_` for what is not printable. Zeroes at the end stay.
fn padded(text: &[u8]) -> Id {
    let len = text.iter().rposition(|byte| *byte != 0).map_or(0, |last| last + 1);
    let mut id = [0; ID_LEN];
    for (to, from) in id.iter_mut().zip(&text[..len]) {
        *to = if is_printable(*from) { *from } else { b'_' };
    }
    id
}

/// From a name of any length.
fn of_name(name: &[u8]) -> Id {
    if name.len() <= ID_LEN && name.iter().all(|byte| is_printable(*byte)) {
        return padded(name);
    }
    // FNV-1a, both halves together.
    let hash = name.iter().fold(0xcbf2_9ce4_8422_2325_u64, |hash, byte| {
        (hash ^ u64::from(*byte)).wrapping_mul(0x0000_0100_0000_01b3)
    });
    let digits = format!("-{:08x}", (hash >> 32) as u32 ^ hash as u32);
    padded(&[&name[..KEPT.min(name.len())], digits.as_bytes()].concat())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn text(name: &str) -> String {
        let id = of_name(name.as_bytes());
        String::from_utf8(id.to_vec()).unwrap().trim_end_matches('\0').to_owned()
    }

    #[test]
    fn a_name_that_fits_is_the_serial_number() {
        for name in ["vm0.img", "a b", "twenty-characters-xx"] {
            assert_eq!(text(name), name);
        }
    }

    #[test]
    fn names_that_begin_alike_differ() {
        let [root, data] = ["root", "data"].map(|name| text(&format!("debian-12-genericcloud-{name}.img")));
        // Guests know disks by it: it is the same for ever.
        assert_eq!(root, "debian-12-g-529f858a");
        assert!(root != data && data.starts_with("debian-12-g-") && data.len() == ID_LEN);
        // Characters that are not shown count.
        assert_ne!(text("\u{e4}.img"), text("\u{f6}.img"));
        assert!(text("\u{e4}.img").starts_with("__.img-"));
    }
}
