//! A validated network card.
use super::args::NetArgs;
use crate::kinds::checked::{self, MAX_QUEUES, OptionError};
use crate::kinds::endpoint::EndpointArgs;
use crate::mac;
use paravane_device::RateLimit;

#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Net {
    pub(crate) network: Network,
    pub(crate) mac: [u8; 6],
    /// Number of queue pairs.
    pub(crate) queues: u16,
    pub(crate) queue_size: u16,
    pub(crate) mtu: Option<u16>,
    pub(crate) offloads: bool,
    /// Offer that the driver announces itself after a migration.
    pub(crate) announce: bool,
    /// Limit of each direction.
    pub(crate) limit: RateLimit,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Network {
    Tap(String),
    /// A TAP device by inherited descriptors, one for each queue pair. Only in a microVM.
    #[cfg_attr(not(feature = "run"), expect(dead_code, reason = "only in a microVM"))]
    TapFds(Vec<i32>),
    Link(String),
    /// With answers of this length in bytes; `None`: as long as the frame.
    Echo(Option<u32>),
    Sink,
    /// Frame length in bytes.
    Source(u32),
}

impl Net {
    pub(super) fn new(args: &NetArgs, name: &str, endpoint: &EndpointArgs) -> Result<Self, OptionError> {
        let network = match args {
            NetArgs { tap: Some(name), .. } => Network::Tap(name.clone()),
            NetArgs { link: Some(name), .. } => Network::Link(name.clone()),
            NetArgs { source: Some(size), .. } => {
                let most = paravane_spec::net::MAX_FRAME;
                let len = u32::try_from(size.0).ok().filter(|len| (22..=most as u32).contains(len));
                Network::Source(
                    len.ok_or(("source", format!("{} bytes is out of range: use 22 to {most}", size.0)))?,
                )
            }
            NetArgs { sink: true, .. } => Network::Sink,
            _ => Network::Echo(None),
        };
        let mac = args.mac.unwrap_or_else(|| address(name, endpoint));
        if mac == [0; 6] || mac[0] & 1 != 0 {
            let mac = mac::text(&mac);
            return Err(("mac", format!("invalid MAC address {mac}: all zeroes or multicast")));
        }
        if let Some(mtu) = args.mtu
            && mtu < 68
        {
            return Err(("mtu", format!("{mtu} bytes is out of range: use 68 to 65535")));
        }
        Ok(Self {
            network,
            mac,
            // Two queues for each pair, and a control queue.
            queues: checked::within("queues", args.queues, (MAX_QUEUES - 1) / 2)?,
            queue_size: checked::queue_size(args.queue_size, 2)?,
            mtu: args.mtu,
            offloads: !args.no_offloads,
            announce: true,
            limit: args.limit.check()?,
        })
    }
}

/// A MAC address derived from name and socket, so that it stays the same (FNV-1a).
fn address(name: &str, endpoint: &EndpointArgs) -> [u8; 6] {
    let path = endpoint.socket.as_ref().or(endpoint.connect.as_ref());
    let path = path.map_or(&[][..], |path| path.as_os_str().as_encoded_bytes());
    let hash =
        name.bytes().chain([0]).chain(path.iter().copied()).fold(0xcbf2_9ce4_8422_2325_u64, |hash, byte| {
            (hash ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01b3)
        });
    let [a, b, c, ..] = hash.to_be_bytes();
    [0x52, 0x54, 0, a, b, c]
}
