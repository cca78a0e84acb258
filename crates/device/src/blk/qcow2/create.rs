//! Makes empty qcow2 images.
//!
//! ```text
//!   header | refcount table | refcount blocks | L1 table
//! ```
//! The header is written last, when all else is durable: until then there is no image.
use super::super::Format;
use super::counts::set_count;
use super::header::{BACKING_FORMAT, END, KNOWN_LEN, MAGIC};
use super::io::Io;
use paravane_spec::blk::SECTOR;
use paravane_store::Store;
use std::io;
use std::sync::Arc;

/// An empty qcow2 image that is to be made.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NewQcow2 {
    /// Size of the disk in bytes.
    pub size: u64,
    /// Bytes of a cluster: a power of two from 512 bytes to 2 MiB.
    pub cluster_size: u32,
    /// What the header says of the backing file. It is not opened.
    pub backing: Option<BackingName>,
}

/// The backing file, as the header of an image has it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BackingName {
    /// Path or URL. QEMU takes a relative path from the image's folder. At most 1023 bytes.
    pub name: String,
    /// Format of the backing file.
    pub format: Format,
}

/// log2 of the bits of a refcount.
const ORDER: u32 = 4;

/// Where the tables of a new image are, in clusters.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Plan {
    cluster: u64,
    /// Clusters of the refcount table, which begins at cluster 1.
    table: u64,
    blocks: u64,
    l1: u64,
    l1_entries: u64,
}

impl Plan {
    fn new(new: &NewQcow2) -> Self {
        let cluster = u64::from(new.cluster_size);
        let l1_entries = new.size.div_ceil(cluster * (cluster / 8));
        let l1 = (l1_entries * 8).div_ceil(cluster).max(1);
        let mut plan = Self { cluster, table: 1, blocks: 1, l1, l1_entries };
        loop {
            let blocks = plan.clusters().div_ceil(plan.per_block());
            let table = (blocks * 8).div_ceil(cluster);
            if blocks <= plan.blocks && table <= plan.table {
                return plan;
            }
            (plan.blocks, plan.table) = (blocks.max(plan.blocks), table.max(plan.table));
        }
    }

    fn per_block(&self) -> u64 {
        (self.cluster * 8) >> ORDER
    }

    fn first_block(&self) -> u64 {
        1 + self.table
    }

    fn first_l1(&self) -> u64 {
        self.first_block() + self.blocks
    }

    /// Clusters of all structures.
    fn clusters(&self) -> u64 {
        self.first_l1() + self.l1
    }
}

/// Writes the tables of an empty image to `source`, and makes them durable.
pub(crate) fn create(source: &Arc<dyn Store>, new: &NewQcow2) -> io::Result<()> {
    let plan = Plan::new(new);
    let header = header(&plan, new)?;
    let io = Io::new(source.clone())?;
    let cluster = plan.cluster;
    if io.size()? > 0 {
        // What was there must not become the header of these tables.
        io.zero(0, cluster.min(io.size()?), true)?;
        io.sync()?;
    }
    io.grow(plan.clusters() * cluster)?;
    io.zero(cluster, (plan.clusters() - 1) * cluster, true)?;
    let table: Vec<u8> =
        (0..plan.blocks).flat_map(|number| ((plan.first_block() + number) * cluster).to_be_bytes()).collect();
    io.write(&table, cluster)?;
    for number in 0..plan.blocks {
        let mut block = vec![0; cluster as usize];
        let used = (plan.clusters() - number * plan.per_block()).min(plan.per_block());
        (0..used as usize).for_each(|cluster| set_count(&mut block, ORDER, cluster, 1));
        io.write(&block, (plan.first_block() + number) * cluster)?;
    }
    // The name of the backing file may be there. The first sector makes it an image.
    let (first, rest) = header.split_at(header.len().min(SECTOR as usize));
    io.write(rest, SECTOR)?;
    io.sync()?;
    io.write(first, 0)?;
    io.sync()
}

/// The header of version 3, with its extensions and the name of the backing file.
fn header(plan: &Plan, new: &NewQcow2) -> io::Result<Vec<u8>> {
    let mut header = vec![0; KNOWN_LEN];
    let mut put = |at: usize, bytes: &[u8]| header[at..at + bytes.len()].copy_from_slice(bytes);
    put(0, &MAGIC.to_be_bytes());
    put(4, &3_u32.to_be_bytes());
    put(20, &plan.cluster.ilog2().to_be_bytes());
    put(24, &new.size.to_be_bytes());
    put(36, &(plan.l1_entries as u32).to_be_bytes());
    put(40, &(plan.first_l1() * plan.cluster).to_be_bytes());
    put(48, &plan.cluster.to_be_bytes());
    put(56, &(plan.table as u32).to_be_bytes());
    put(96, &ORDER.to_be_bytes());
    put(100, &(KNOWN_LEN as u32).to_be_bytes());
    if let Some(backing) = &new.backing {
        let format = backing.format.name().as_bytes();
        header.extend(BACKING_FORMAT.to_be_bytes());
        header.extend((format.len() as u32).to_be_bytes());
        header.extend(format);
        header.resize(header.len().next_multiple_of(8), 0);
    }
    header.extend(END.to_be_bytes());
    header.extend([0; 4]);
    if let Some(backing) = &new.backing {
        let (at, name) = (header.len() as u64, backing.name.as_bytes());
        header[8..16].copy_from_slice(&at.to_be_bytes());
        header[16..20].copy_from_slice(&(name.len() as u32).to_be_bytes());
        header.extend(name);
    }
    match header.len() as u64 <= plan.cluster {
        true => Ok(header),
        false => Err(io::Error::new(
            io::ErrorKind::InvalidInput,
            "the name of the backing file does not fit into a cluster; use larger clusters",
        )),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tables_count_themselves() {
        for cluster_size in (9..=21).map(|bits| 1 << bits) {
            for size in [512, 1 << 20, 1 << 30, 1 << 37] {
                let plan = Plan::new(&NewQcow2 { size, cluster_size, backing: None });
                assert!(plan.blocks * plan.per_block() >= plan.clusters(), "{plan:?}");
                assert!(plan.table * plan.cluster >= plan.blocks * 8, "{plan:?}");
                assert!(plan.l1_entries * plan.cluster * plan.cluster / 8 >= size, "{plan:?}");
            }
        }
    }
}
