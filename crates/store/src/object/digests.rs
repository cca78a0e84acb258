//! Digests of chunks that the operator has named.
use super::error::ObjectError;
use crate::cache::Layout;
use sha2::{Digest, Sha256};
use std::io::{BufRead, BufReader, Read};
use std::path::Path;

/// Longest line, in bytes.
const LONGEST_LINE: u64 = 4096;

/// SHA-256 of each chunk of an object.
#[derive(Debug)]
pub(crate) struct Digests(Vec<[u8; 32]>);

/// Reads a file with a digest in hexadecimal at the start of each line.
///
/// # Errors
/// It cannot be read, or is malformed.
pub(crate) fn read(path: &Path) -> Result<Digests, ObjectError> {
    let wrong = |why: String| ObjectError::File { path: path.into(), why };
    let file = std::fs::File::open(path).map_err(|error| wrong(error.to_string()))?;
    let mut file = BufReader::new(file);
    let mut digests = Vec::new();
    let mut line = String::new();
    for number in 1.. {
        line.clear();
        let len = file.by_ref().take(LONGEST_LINE).read_line(&mut line);
        if len.map_err(|error| wrong(error.to_string()))? == 0 {
            break;
        }
        let digest = line.split_whitespace().next().and_then(digest);
        digests.push(digest.ok_or_else(|| {
            wrong(format!("line {number} does not begin with a SHA-256 of 64 hexadecimal digits"))
        })?);
    }
    Ok(Digests(digests))
}

impl Digests {
    /// Checks that there is one for each chunk.
    ///
    /// # Errors
    /// There are more or fewer: they are of another object, or of chunks of another size.
    pub(super) fn check(&self, layout: Layout) -> Result<(), String> {
        let (digests, chunks) = (self.0.len(), layout.count());
        if digests as u64 == chunks {
            return Ok(());
        }
        Err(format!(
            "has {digests} digests; the object has {chunks} chunks of {} bytes",
            layout.chunk_bytes()
        ))
    }

    /// Whether the data of a chunk has its digest.
    pub(super) fn holds(&self, chunk: u64, data: &[u8]) -> bool {
        self.0.get(chunk as usize).is_some_and(|digest| Sha256::digest(data)[..] == digest[..])
    }

    /// A digest of all of them.
    pub(super) fn digest(&self) -> [u8; 32] {
        Sha256::digest(self.0.as_flattened()).into()
    }
}

fn digest(hex: &str) -> Option<[u8; 32]> {
    let mut digest = [0; 32];
    if hex.len() != 64 || !hex.bytes().all(|byte| byte.is_ascii_hexdigit()) {
        return None;
    }
    for (index, byte) in digest.iter_mut().enumerate() {
        *byte = u8::from_str_radix(&hex[index * 2..index * 2 + 2], 16).ok()?;
    }
    Some(digest)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(text: &str) -> Result<Digests, String> {
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), text).unwrap();
        let path = file.path().display().to_string();
        super::read(file.path()).map_err(|error| error.to_string().replace(&path, "FILE"))
    }

    #[test]
    fn digests_as_sha256sum_prints_them() {
        // SHA-256 of "abc", of FIPS 180-2.
        let abc = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad";
        let digests = read(&format!("{abc}  -\n{}  x\n", abc.to_uppercase())).unwrap();
        assert!(digests.holds(0, b"abc") && digests.holds(1, b"abc"));
        assert!(!digests.holds(0, b"abd") && !digests.holds(2, b"abc"));
        let lines = |count| format!("{abc}\n").repeat(count);
        let check = |count| read(&lines(count)).unwrap().check(Layout::new(8000, 4096).unwrap());
        assert_eq!(check(1).unwrap_err(), "has 1 digests; the object has 2 chunks of 4096 bytes");
        assert!(check(2).is_ok() && check(3).unwrap_err().contains("has 3 digests"));
        assert!(read(&format!("{abc}\n{}x\n", &abc[1..])).unwrap_err().contains("line 2 "));
        assert!(read(&"a".repeat(9000)).unwrap_err().contains("line 1 "));
    }
}
