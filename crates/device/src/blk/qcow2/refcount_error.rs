//! What is wrong with the refcounts of an image.
use std::io;
use thiserror::Error;

/// The refcounts of a qcow2 image are wrong, so that writing would corrupt it.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum RefcountError {
    /// Reading or updating the tables failed.
    #[error(transparent)]
    Io(#[from] io::Error),
    /// A cluster of the image's own structures has refcount 0.
    #[error("cluster {cluster} is {role}, but has refcount 0; `qemu-img check -r all` repairs it")]
    Free {
        /// Number of the cluster in the file.
        cluster: u64,
        /// Use of the cluster.
        role: ClusterRole,
    },
    /// Two of the image's own structures share a cluster.
    #[error("cluster {cluster} is {role}, but has a second use; `qemu-img check` reports it")]
    Shared {
        /// Number of the cluster in the file.
        cluster: u64,
        /// One use of the cluster.
        role: ClusterRole,
    },
    /// A refcount block is beyond the end of the file.
    #[error(
        "cluster {cluster} is {role}, but lies beyond the end of the file; `qemu-img check -r all` repairs it"
    )]
    Outside {
        /// Number of the cluster in the file.
        cluster: u64,
        /// Use of the cluster.
        role: ClusterRole,
    },
    /// A cluster has more uses than it counts, which nothing but a full check may repair.
    #[error(
        "cluster {cluster} is used {uses} times, but has refcount {count}; `qemu-img check -r all` repairs it"
    )]
    Uses {
        /// Number of the cluster in the file.
        cluster: u64,
        /// Number of entries that name it.
        uses: u64,
        /// Its refcount.
        count: u64,
    },
}

/// Use of a cluster.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
#[non_exhaustive]
pub enum ClusterRole {
    /// Cluster 0.
    Header,
    /// Part of the refcount table.
    RefcountTable,
    /// A refcount block.
    RefcountBlock,
    /// Part of the L1 table.
    L1Table,
    /// An L2 table.
    L2Table,
    /// Data, or a table of an internal snapshot.
    Data,
}

impl std::fmt::Display for ClusterRole {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::Header => "the header",
            Self::RefcountTable => "the refcount table",
            Self::RefcountBlock => "a refcount block",
            Self::L1Table => "the L1 table",
            Self::L2Table => "an L2 table",
            Self::Data => "data",
        })
    }
}
