//! Options of network cards.
use crate::kinds::checked::QUEUE_SIZE;
use crate::kinds::limits::LimitArgs;
use crate::mac::mac;
use crate::size::Size;
use clap::{ArgGroup, Args};

/// Serve a network card
///
/// Exactly one of --tap, --link, --echo, --sink and --source selects the network.
#[derive(Clone, Debug, PartialEq, Eq, Args)]
#[command(group = ArgGroup::new("network").args(["tap", "link", "echo", "sink", "source"]).required(true))]
pub(crate) struct NetArgs {
    /// Connect to the TAP device NAME of the host; created if missing (needs CAP_NET_ADMIN)
    #[arg(long, value_name = "NAME")]
    pub(crate) tap: Option<String>,
    /// Connect to the other card of this daemon with the same link NAME (needs --config)
    #[arg(long, value_name = "NAME")]
    pub(crate) link: Option<String>,
    /// Return every frame with source and destination swapped (for measurements)
    #[arg(long)]
    pub(crate) echo: bool,
    /// Discard every frame (for measurements)
    #[arg(long)]
    pub(crate) sink: bool,
    /// Discard every frame and send frames of SIZE bytes at full rate (for measurements)
    #[arg(long, value_name = "SIZE")]
    pub(crate) source: Option<Size>,
    /// MAC address [default: 52:54:00 and a hash of name and socket]
    #[arg(long, value_name = "MAC", value_parser = mac)]
    pub(crate) mac: Option<[u8; 6]>,
    /// Number of queue pairs [default: 1]
    #[arg(long, value_name = "N", default_value_t = 1, hide_default_value = true)]
    pub(crate) queues: u16,
    /// Maximum queue size, a power of two from 2 to 32768 [default: 1024]
    ///
    /// The VMM chooses the size up to this.
    #[arg(long, value_name = "N", default_value_t = QUEUE_SIZE, hide_default_value = true)]
    pub(crate) queue_size: u16,
    /// MTU reported to the guest [default: none]
    #[arg(long, value_name = "BYTES")]
    pub(crate) mtu: Option<u16>,
    /// Disable checksum and segmentation offloads
    #[arg(long)]
    pub(crate) no_offloads: bool,
    #[command(flatten)]
    pub(crate) limit: LimitArgs,
}
