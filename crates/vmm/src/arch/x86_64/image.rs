//! The built-in guest's flat image, embedded in the program by the build script.
use paravane_spec::builtin::{ABI, IMAGE_BASE, IMAGE_MAGIC, INTERRUPTS, ImageHeader, MAX_CPUS, STACK_TOP};
use zerocopy::FromBytes;

/// What the build script made. Empty where no KVM machine can run it.
static GUEST_IMAGE: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/guest.img"));

/// Exceptions that have a stub.
const EXCEPTIONS: u64 = 32;

/// An image, ready to be loaded at [`IMAGE_BASE`].
#[derive(Clone, Copy, Debug)]
pub(crate) struct Image {
    /// All of it, header included.
    ///
    /// Memory from its end to [`ImageHeader::end`] must be zero.
    pub(crate) bytes: &'static [u8],
    /// Its first bytes, checked.
    pub(crate) header: ImageHeader,
}

/// The image in this build.
///
/// # Errors
/// There is none, or not one of this version. The message is for the operator.
pub(crate) fn builtin() -> Result<Image, String> {
    if GUEST_IMAGE.is_empty() {
        return Err("this build carries no guest image: there is one for x86-64 Linux only".into());
    }
    let header = header(GUEST_IMAGE).ok_or("the guest image in this build has no sound header")?;
    Ok(Image { bytes: GUEST_IMAGE, header })
}

/// Header of an image; `None`: invalid.
///
/// It is invalid if it is missing, of another version, or has addresses outside the image.
fn header(image: &[u8]) -> Option<ImageHeader> {
    let (header, _) = ImageHeader::read_from_prefix(image).ok()?;
    let known = header.magic == IMAGE_MAGIC && header.abi == ABI;
    let code_end = IMAGE_BASE.checked_add(image.len() as u64)?;
    let inside = |first: u64, stubs: u64| {
        let bytes = stubs.checked_mul(u64::from(header.stub_stride));
        let end = bytes.and_then(|bytes| first.checked_add(bytes));
        first >= IMAGE_BASE && end.is_some_and(|end| end <= code_end)
    };
    let counters_end = header.counters_stride.checked_mul(MAX_CPUS as u64);
    let counters_end = counters_end.and_then(|bytes| header.counters.checked_add(bytes));
    let sound = header.stub_stride > 0
        && inside(header.entry, 1)
        && inside(header.exception_stubs, EXCEPTIONS)
        && inside(header.irq_stubs, INTERRUPTS as u64)
        && inside(header.wait_stub, 1)
        && header.end >= code_end
        && header.counters >= IMAGE_BASE
        && counters_end.is_some_and(|end| end <= header.end)
        && header.end < STACK_TOP;
    (known && sound).then_some(header)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    #[cfg(not(miri))]
    fn the_embedded_image_has_a_sound_header_and_is_small() {
        let image = builtin().unwrap();
        assert!(image.bytes.len() < 200 << 10, "{} bytes", image.bytes.len());
        assert_eq!(image.header.magic, IMAGE_MAGIC);
    }

    #[test]
    fn what_is_no_image_has_no_header() {
        assert_eq!(header(&[]), None);
        assert_eq!(header(&[0; 4096]), None);
        assert_eq!(header(&[0xff; 4096]), None);
        assert_eq!(header(b"\x7fELF"), None);
    }

    #[test]
    #[cfg(not(miri))]
    fn an_image_cut_short_or_of_another_version_has_no_header() {
        assert_eq!(header(&GUEST_IMAGE[..size_of::<ImageHeader>()]), None);
        let mut other = GUEST_IMAGE.to_vec();
        other[8] ^= 0xff;
        assert_eq!(header(&other), None);
    }
}
