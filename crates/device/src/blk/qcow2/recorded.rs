//! What the header of an image says of it, also of one that is not supported. For reports only.
//!
//! Nothing is checked but what reading takes: a disk is opened by [`super::header`].
use super::header::{
    BACKING_FORMAT, BITMAPS, BITMAPS_EXTENSION, CLUSTER_BITS, COMPRESSION_TYPE, CORRUPT, DATA_FILE, DIRTY,
    END, EXTENDED_L2, Header, KNOWN_LEN, MAGIC, MAX_NAME, V2_LEN, V3_LEN, long, word,
};
use paravane_store::Store;
use std::io;
use std::sync::Arc;

/// Compatible feature: refcounts may be written late.
const LAZY_REFCOUNTS: u64 = 1 << 0;

/// What a qcow2 header says. A guest may have written it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Recorded {
    /// Size of the disk in bytes.
    pub size: u64,
    /// Version of the format.
    pub version: u32,
    /// Where things are in the file. `None`: the size of clusters is invalid.
    pub layout: Option<Layout>,
    /// Number of internal snapshots.
    pub snapshots: u32,
    /// Features that the image uses, by name.
    pub features: Vec<String>,
    /// Why Paravane does not open the image.
    pub refused: Option<String>,
}

/// What is found by the size of clusters.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Layout {
    /// Bytes of a cluster.
    pub cluster_size: u64,
    /// Name of the backing file.
    pub backing: Option<String>,
    /// Format of the backing file.
    pub backing_format: Option<String>,
    /// Number of dirty bitmaps.
    pub bitmaps: u32,
}

impl Recorded {
    /// Reads the header. `None`: the magic number is missing.
    pub(crate) fn read(file: &Arc<dyn Store>) -> io::Result<Option<Self>> {
        let mut fixed = [0; KNOWN_LEN];
        let len = file.read_up_to(&mut fixed, 0)?;
        let (word, long) = (|at| word(&fixed, at), |at| long(&fixed, at));
        if len < V2_LEN as usize || word(0) != MAGIC {
            return Ok(None);
        }
        let version = word(4);
        let (incompatible, compatible, autoclear, header_len) = match version {
            0..=2 => (0, 0, 0, V2_LEN),
            _ => (long(72), long(80), long(88), word(100)),
        };
        let layout = match CLUSTER_BITS.contains(&word(20)) {
            true => Some(Layout::read(file, 1 << word(20), header_len, (long(8), word(16)))?),
            false => None,
        };
        let compression = if header_len > V3_LEN { fixed[V3_LEN as usize] } else { 0 };
        let known = [
            (incompatible & DIRTY != 0, "dirty"),
            (incompatible & CORRUPT != 0, "corrupt"),
            (incompatible & DATA_FILE != 0, "data-file"),
            (incompatible & EXTENDED_L2 != 0, "extended-l2"),
            (compatible & LAZY_REFCOUNTS != 0, "lazy-refcounts"),
            (autoclear & BITMAPS != 0, "bitmaps"),
            (word(32) == 1, "encryption-aes"),
            (word(32) == 2, "encryption-luks"),
            (word(32) > 2, "encryption-unknown"),
            (incompatible & COMPRESSION_TYPE != 0 && compression == 1, "compression-zstd"),
            (incompatible & COMPRESSION_TYPE != 0 && compression != 1, "compression-unknown"),
        ];
        let mut features: Vec<_> =
            known.into_iter().filter(|known| known.0).map(|known| known.1.to_owned()).collect();
        let unknown = incompatible & !(DIRTY | CORRUPT | DATA_FILE | EXTENDED_L2 | COMPRESSION_TYPE);
        features.extend(
            (0..u64::BITS).filter(|bit| unknown >> bit & 1 != 0).map(|bit| format!("incompatible-{bit}")),
        );
        Ok(Some(Self {
            size: long(24),
            version,
            layout,
            snapshots: word(60),
            features,
            refused: match Header::read(file) {
                Ok(header) if header.data_file => Some("has an external data file".to_owned()),
                Ok(_) => None,
                Err(error) => Some(error.to_string()),
            },
        }))
    }
}

impl Layout {
    /// Reads header extensions and the backing file's name, at `name` with its length.
    fn read(file: &Arc<dyn Store>, cluster_size: u64, header_len: u32, name: (u64, u32)) -> io::Result<Self> {
        let mut first = vec![0; cluster_size as usize];
        let len = file.read_up_to(&mut first, 0)?;
        first.truncate(len);
        let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
        let (start, name_len) = (usize::try_from(name.0).unwrap_or(usize::MAX), name.1.min(MAX_NAME));
        let backing = match start {
            0 => None,
            start => first.get(start..start.saturating_add(name_len as usize)).map(text),
        };
        let mut found = Self { cluster_size, backing, backing_format: None, bitmaps: 0 };
        let end = if start == 0 { first.len() } else { start.min(first.len()) };
        let mut rest = first.get(header_len as usize..end).unwrap_or_default();
        while let Some((head, behind)) = rest.split_first_chunk::<8>() {
            let (kind, len) = (word(head, 0), word(head, 4) as usize);
            let Some(data) = behind.get(..len).filter(|_| kind != END) else { break };
            match kind {
                BACKING_FORMAT => found.backing_format = Some(text(data)),
                BITMAPS_EXTENSION if len >= 4 => found.bitmaps = word(data, 0),
                _ => {}
            }
            rest = behind.get(len.saturating_add(7) & !7..).unwrap_or_default();
        }
        Ok(found)
    }
}
