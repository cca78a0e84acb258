//! Compressed clusters: raw deflate, read only. A write to one moves it to a cluster of its own.
use super::entry::corrupt;
use super::io::Io;
use miniz_oxide::inflate::core::inflate_flags::TINFL_FLAG_USING_NON_WRAPPING_OUTPUT_BUF;
use miniz_oxide::inflate::core::{DecompressorOxide, decompress};
use paravane_store::lock;
use std::io;
use std::sync::Mutex;

/// The cluster that was read last, since readers go on where they were.
#[derive(Debug, Default)]
pub(super) struct Inflated(Mutex<Option<(u64, Vec<u8>)>>);

impl Inflated {
    /// Fills `into` from a cluster, from `within` on.
    ///
    /// `data`: where its compressed data is, in bytes of the file.
    pub(super) fn read(
        &self,
        io: &Io,
        data: (u64, u64),
        cluster: u64,
        into: &mut [u8],
        within: usize,
    ) -> io::Result<()> {
        let copy = |whole: &[u8], into: &mut [u8]| match whole.get(within..within + into.len()) {
            Some(part) => into.copy_from_slice(part),
            None => into.fill(0),
        };
        let lock = || lock(&self.0);
        if let Some((at, whole)) = &*lock()
            && *at == data.0
        {
            copy(whole, into);
            return Ok(());
        }
        // At most two clusters and a sector: `Entry::decode`.
        let mut packed = vec![0; data.1 as usize];
        io.read(&mut packed, data.0)?;
        let whole = inflate(&packed, cluster)?;
        copy(&whole, into);
        *lock() = Some((data.0, whole));
        Ok(())
    }
}

/// Inflates exactly a cluster. What follows the data is ignored.
fn inflate(packed: &[u8], cluster: u64) -> io::Result<Vec<u8>> {
    let mut whole = vec![0; cluster as usize];
    let mut state = Box::<DecompressorOxide>::default();
    let (_, _, len) = decompress(&mut state, packed, &mut whole, 0, TINFL_FLAG_USING_NON_WRAPPING_OUTPUT_BUF);
    match len == whole.len() {
        true => Ok(whole),
        false => Err(corrupt("compressed data is damaged")),
    }
}
