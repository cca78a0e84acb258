//! The header of a qcow2 image: its tables, and a check of its features.
//!
//! Every header is checked before anything else is read, including those of backing files, and a
//! refused image is not changed. Fields are those of docs/interop/qcow2.rst of QEMU.
use paravane_store::Store;
use std::fmt;
use std::io;
use std::sync::Arc;
use thiserror::Error;

/// The header of a qcow2 image is refused. The image has not been changed.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum HeaderError {
    /// The file cannot be read.
    #[error(transparent)]
    Io(#[from] io::Error),
    /// The magic number is missing, or the file ends before it.
    #[error("is not a qcow2 image; check its format with `qemu-img info`")]
    NotQcow2,
    /// `version` is neither 2 nor 3.
    #[error("has qcow2 version {0}; versions 2 and 3 are supported")]
    Version(u32),
    /// `crypt_method`: 1 is AES, 2 is LUKS.
    #[error("is encrypted ({}), which is not supported; `qemu-img convert` makes a plain copy", CryptMethod(*.0))]
    Encrypted(u32),
    /// Header extension for LUKS in an image with `crypt_method` 0.
    #[error("has a header extension for LUKS, but is not marked as encrypted; the image is corrupt")]
    CryptoHeader,
    /// Incompatible feature bit 1.
    #[error("is marked corrupt; `qemu-img check -r all` repairs it")]
    Corrupt,
    /// Other incompatible feature bits.
    #[error("needs {0}, which is not supported; `qemu-img convert -O qcow2` makes a copy without")]
    Features(Features),
    /// `compression_type` without its feature bit.
    #[error("has compression type {0} without its feature bit; the image is corrupt")]
    CompressionType(u8),
    /// `cluster_bits` is not from 9 to 21.
    #[error("has clusters of 2^{0} bytes; 2^9 to 2^21 are supported")]
    ClusterBits(u32),
    /// `refcount_order` is more than 6.
    #[error("has refcounts of 2^{0} bits; up to 2^6 are supported")]
    RefcountOrder(u32),
    /// `header_length` is less than 104, no multiple of 8, or more than a cluster.
    #[error("has a header of {0} bytes, which is less than 104, not a multiple of 8, or more than a cluster")]
    HeaderLength(u32),
    /// A header extension ends outside of the first cluster.
    #[error("has a header extension that does not fit into the first cluster")]
    Extension,
    /// The name of the backing file is too long, or lies outside of the first cluster.
    #[error("has a backing file name that is longer than 1023 bytes or does not fit into the first cluster")]
    BackingName,
    /// `size` is more than tables of a supported size can map.
    #[error("has a size of {0} bytes, more than an L1 table of 32 MiB can map")]
    Size(u64),
    /// A table is not aligned to clusters, larger than 32 MiB, or too far away.
    #[error("has {0} that is not aligned to clusters, larger than 32 MiB or beyond 2^56 bytes")]
    Table(&'static str),
}

/// Shows an encryption method by its name.
struct CryptMethod(u32);

impl fmt::Display for CryptMethod {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            1 => f.write_str("AES"),
            2 => f.write_str("LUKS"),
            other => write!(f, "method {other}"),
        }
    }
}

/// Incompatible feature bits that are not supported; displayed by name.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Features(pub u64);

impl fmt::Display for Features {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (number, bit) in (0..u64::BITS).filter(|bit| self.0 >> bit & 1 != 0).enumerate() {
            if number > 0 {
                f.write_str(" and ")?;
            }
            match 1 << bit {
                COMPRESSION_TYPE => f.write_str("a compression type other than zlib")?,
                EXTENDED_L2 => f.write_str("extended L2 entries")?,
                _ => write!(f, "the unknown incompatible feature {bit}")?,
            }
        }
        Ok(())
    }
}

pub(super) const MAGIC: u32 = u32::from_be_bytes(*b"QFI\xfb");
/// Header sizes: version 2, fixed fields of version 3, all known fields.
pub(super) const V2_LEN: u32 = 72;
pub(super) const V3_LEN: u32 = 104;
pub(super) const KNOWN_LEN: usize = 112;
/// Incompatible features.
pub(super) const DIRTY: u64 = 1 << 0;
pub(super) const CORRUPT: u64 = 1 << 1;
pub(super) const DATA_FILE: u64 = 1 << 2;
pub(super) const COMPRESSION_TYPE: u64 = 1 << 3;
pub(super) const EXTENDED_L2: u64 = 1 << 4;
/// Autoclear features.
pub(super) const BITMAPS: u64 = 1 << 0;
/// Header extensions.
pub(super) const END: u32 = 0;
const CRYPTO_HEADER: u32 = 0x0537_be77;
pub(super) const BACKING_FORMAT: u32 = 0xe279_2aca;
pub(super) const BITMAPS_EXTENSION: u32 = 0x2385_2875;
const FEATURE_NAMES: u32 = 0x6803_f857;
/// Most entries of a table, as in QEMU, and limit of its offset.
///
/// For the L1 table and the refcount table.
pub(super) const MAX_ENTRIES: u64 = 4 << 20;
pub(super) const MAX_OFFSET: u64 = 1 << 56;
/// Longest name of a backing file in bytes.
pub(super) const MAX_NAME: u32 = 1023;
pub(super) const CLUSTER_BITS: std::ops::RangeInclusive<u32> = 9..=21;

/// A supported header.
#[derive(Clone, Debug)]
pub(super) struct Header {
    pub(super) version: u32,
    /// Size of the disk in bytes.
    pub(super) size: u64,
    /// Name of the backing file, if there is one.
    pub(super) backing: Option<String>,
    /// log2 of the bytes of a cluster.
    pub(super) cluster_bits: u32,
    /// log2 of the bits of a refcount.
    pub(super) refcount_order: u32,
    /// Offset and entries of the active L1 table.
    pub(super) l1_table: (u64, u64),
    /// Offset and entries of the refcount table.
    pub(super) refcount_table: (u64, u64),
    /// The data is in an external file.
    pub(super) data_file: bool,
    /// Incompatible features.
    pub(super) incompatible: u64,
    /// Features that a writer must clear if it does not know them.
    pub(super) autoclear: u64,
    /// Offset and number of internal snapshots.
    pub(super) snapshots: (u64, u32),
    /// A header extension may own clusters that no table names.
    pub(super) has_other_owners: bool,
}

impl Header {
    /// Reads and checks the header of an image.
    ///
    /// # Errors
    /// See [`HeaderError`].
    pub(super) fn read(file: &Arc<dyn Store>) -> Result<Self, HeaderError> {
        let mut fixed = [0; KNOWN_LEN];
        let len = file.read_up_to(&mut fixed, 0)?;
        let (word, long) = (|at| word(&fixed, at), |at| long(&fixed, at));
        if len < V2_LEN as usize || word(0) != MAGIC {
            return Err(HeaderError::NotQcow2);
        }
        let (cluster_bits, crypt_method) = (word(20), word(32));
        let (incompatible, autoclear, refcount_order, length, min_length) = match word(4) {
            2 => (0, 0, 4, V2_LEN, V2_LEN),
            3 => (long(72), long(88), word(96), word(100), V3_LEN),
            other => return Err(HeaderError::Version(other)),
        };
        if crypt_method != 0 {
            return Err(HeaderError::Encrypted(crypt_method));
        }
        if incompatible & CORRUPT != 0 {
            return Err(HeaderError::Corrupt);
        }
        let known = DATA_FILE | DIRTY;
        if incompatible & !known != 0 {
            return Err(HeaderError::Features(Features(incompatible & !known)));
        }
        if !CLUSTER_BITS.contains(&cluster_bits) {
            return Err(HeaderError::ClusterBits(cluster_bits));
        }
        if refcount_order > 6 {
            return Err(HeaderError::RefcountOrder(refcount_order));
        }
        let cluster = 1_u64 << cluster_bits;
        if length < min_length || length % 8 != 0 || u64::from(length) > cluster {
            return Err(HeaderError::HeaderLength(length));
        }
        if length > V3_LEN && fixed[V3_LEN as usize] != 0 {
            return Err(HeaderError::CompressionType(fixed[V3_LEN as usize]));
        }
        let size = long(24);
        // An L2 table fills a cluster with entries of 8 bytes, each of which maps a cluster.
        if size.div_ceil(cluster * cluster / 8) > MAX_ENTRIES {
            return Err(HeaderError::Size(size));
        }
        let table = |name, offset, entries| match offset {
            offset if offset % cluster == 0 && offset < MAX_OFFSET && entries <= MAX_ENTRIES => {
                Ok((offset, entries))
            }
            _ => Err(HeaderError::Table(name)),
        };
        let l1_table = table("an L1 table", long(40), word(36).into())?;
        let refcount_table = table("a refcount table", long(48), u64::from(word(56)) << cluster_bits >> 3)?;
        let has_other_owners = check_extensions(file, (length.into(), long(8)), cluster, autoclear)?;
        Ok(Self {
            version: word(4),
            size,
            backing: backing_name(file, long(8), word(16), cluster)?,
            cluster_bits,
            refcount_order,
            l1_table,
            refcount_table,
            data_file: incompatible & DATA_FILE != 0,
            incompatible,
            autoclear,
            snapshots: (long(64), word(60)),
            has_other_owners,
        })
    }

    /// Bytes of a cluster.
    pub(super) fn cluster(&self) -> u64 {
        1 << self.cluster_bits
    }

    /// Whether refcounts may be wrong: the last writer has not closed the image.
    pub(super) fn is_dirty(&self) -> bool {
        self.incompatible & DIRTY != 0
    }

    /// Whether the image has valid dirty bitmaps.
    pub(super) fn has_bitmaps(&self) -> bool {
        self.autoclear & BITMAPS != 0
    }
}

/// The name of the backing file, at `offset` with `len` bytes; 0: there is none.
fn backing_name(
    file: &Arc<dyn Store>,
    offset: u64,
    len: u32,
    cluster: u64,
) -> Result<Option<String>, HeaderError> {
    if offset == 0 || len == 0 {
        return Ok(None);
    }
    if len > MAX_NAME || offset.checked_add(len.into()).is_none_or(|end| end > cluster) {
        return Err(HeaderError::BackingName);
    }
    let mut name = vec![0; len as usize];
    file.read_up_to(&mut name, offset)?;
    Ok(Some(String::from_utf8_lossy(&name).into_owned()))
}

/// Checks for header extensions that must not be ignored.
///
/// From `start` to the backing file's name or the cluster's end.
///
/// The format allows unknown ones to be ignored. Returns whether one may own clusters.
fn check_extensions(
    file: &Arc<dyn Store>,
    (start, backing_name): (u64, u64),
    cluster: u64,
    autoclear: u64,
) -> Result<bool, HeaderError> {
    // At most 2 MiB. Bytes beyond the end of the file are zeroes, which is the end mark.
    let mut first = vec![0; cluster as usize];
    file.read_up_to(&mut first, 0)?;
    let end = if backing_name == 0 { cluster } else { backing_name.min(cluster) } as usize;
    let (mut at, mut has_owners) = (start as usize, false);
    while let Some((head, _)) = first.get(at..end).and_then(<[u8]>::split_first_chunk::<8>) {
        let (kind, len) = (word(head, 0), word(head, 4));
        match kind {
            END => break,
            CRYPTO_HEADER => return Err(HeaderError::CryptoHeader),
            BACKING_FORMAT | FEATURE_NAMES => {}
            // Whoever has cleared the feature has given the bitmaps up.
            BITMAPS_EXTENSION if autoclear & BITMAPS == 0 => {}
            _ => has_owners = true,
        }
        // At most 2^32 + 7 beyond what lies in the first cluster.
        let next = (at + 8).saturating_add((len as usize).saturating_add(7) & !7);
        if (at + 8).saturating_add(len as usize) > cluster as usize {
            return Err(HeaderError::Extension);
        }
        at = next;
    }
    Ok(has_owners)
}

/// A number in the order of the network; `at` and three bytes behind it exist.
pub(super) fn word(bytes: &[u8], at: usize) -> u32 {
    u32::from_be_bytes(std::array::from_fn(|n| bytes[at + n]))
}

pub(super) fn long(bytes: &[u8], at: usize) -> u64 {
    u64::from(word(bytes, at)) << 32 | u64::from(word(bytes, at + 4))
}
