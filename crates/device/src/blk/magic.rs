//! Raw images that begin as an image of another format does.
//!
//! The format of an image is never guessed: a guest can write any beginning. But an image whose
//! format was forgotten is served as a raw disk of wrong content, and the guest's first write to it
//! destroys the image.
use super::Format;
use std::io;
use std::path::Path;

/// Longest beginning in bytes.
const LONGEST: usize = 21;

/// Beginnings of formats.
const BEGINNINGS: [(&[u8], &str); 7] = [
    (b"QFI\xfb", "qcow2"),
    (b"KDMV", "VMDK"),
    (b"# Disk DescriptorFile", "VMDK"),
    (b"vhdxfile", "VHDX"),
    (b"conectix", "VHD"),
    (b"QED\0", "QED"),
    (b"LUKS\xba\xbe", "LUKS"),
];

/// The format whose images begin as this one does.
///
/// `read` fills a part of a buffer from an offset; 0 at the end.
pub(super) fn resembles(
    format: Format,
    read: impl Fn(&mut [u8], u64) -> io::Result<usize>,
) -> Option<&'static str> {
    if format != Format::Raw {
        return None;
    }
    let mut begin = [0; LONGEST];
    let mut done = 0;
    while done < LONGEST {
        match read(&mut begin[done..], done as u64) {
            Ok(0) | Err(_) => break,
            Ok(len) => done += len,
        }
    }
    BEGINNINGS.into_iter().find(|(bytes, _)| begin[..done].starts_with(bytes)).map(|(_, name)| name)
}

/// Warns of a raw image that resembles this format.
pub(super) fn warn(path: &Path, like: &str) {
    let remedy = match like {
        "qcow2" => "if it is one, use --format qcow2: the first write of a guest destroys it",
        "LUKS" => "the guest sees its encrypted bytes",
        _ => "if it is one, make a raw image with `qemu-img convert -O raw`",
    };
    tracing::warn!(path = %path.display(), "the raw image begins like {like}; {remedy}");
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn beginnings_of_other_formats_are_known() {
        let like = |bytes: &[u8]| {
            // One byte at a time: a read may be short.
            let read = |into: &mut [u8], at| {
                let byte = bytes.get(at as usize..).unwrap_or_default().first();
                into.iter_mut().zip(byte).for_each(|(to, from)| *to = *from);
                Ok(usize::from(byte.is_some()))
            };
            assert_eq!(resembles(Format::Qcow2, read), None);
            resembles(Format::Raw, read)
        };
        for (bytes, name) in BEGINNINGS {
            assert_eq!(like(&[bytes, b"more"].concat()), Some(name));
            assert_eq!(like(bytes), Some(name));
            assert_eq!(like(&bytes[..bytes.len() - 1]), None);
        }
        assert_eq!((like(b""), like(&[0; 512])), (None, None));
    }
}
