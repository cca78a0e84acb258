//! `--net NETWORK[,OPTION]...`: a short form of a card, with a job for the built-in guest.
use crate::kinds::net::spec::{Net, Network};
use crate::mac::mac;
use crate::size::Size;
use anyhow::bail;
use paravane_device::RateLimit;
use paravane_vmm::{NetJob, Traffic};
use std::str::FromStr;

/// One network card of the command line.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct NetArg {
    network: Network,
    /// `None`: [`cards`] assigns one.
    mac: Option<[u8; 6]>,
    /// Pairs of queues; `None`: [`cards`] gives it as many as the guest works on.
    queues: Option<u16>,
    mtu: Option<u16>,
    offloads: bool,
    vhost: bool,
    frames: u64,
    size: u32,
}

/// A card that is not open yet, and what the machine needs beside it.
pub(crate) struct Card {
    pub(crate) spec: Net,
    /// Whether vhost-net serves its queues.
    pub(crate) vhost: bool,
    pub(crate) job: NetJob,
}

/// Options of each kind of network.
const FOR_ECHO: [&str; 5] = ["mac", "queues", "frames", "size", "reply"];
const FOR_TAP: [&str; 5] = ["mac", "queues", "mtu", "offloads", "vhost"];
const FOR_LINK: [&str; 6] = ["mac", "queues", "mtu", "offloads", "frames", "size"];
/// Without `queues`: there is a pair for each descriptor.
const FOR_TAP_FD: [&str; 4] = ["mac", "mtu", "offloads", "vhost"];

impl FromStr for NetArg {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let mut options = text.split(',');
        let (network, known) = network(options.next().unwrap_or_default())?;
        let queues = match &network {
            Network::TapFds(numbers) => {
                Some(u16::try_from(numbers.len()).map_err(|_| "too many descriptors")?)
            }
            _ => None,
        };
        let (frames, size) = (10_000, 64);
        let mut net =
            Self { network, mac: None, queues, mtu: None, offloads: true, vhost: false, frames, size };
        for option in options {
            let (name, value) = option.split_once('=').unwrap_or((option, ""));
            if !known.contains(&name) {
                let known = known.join(", ");
                return Err(format!("unknown option {name:?}: this network has {known}"));
            }
            net.set(name, value).map_err(|error| format!("{name}: {error}"))?;
        }
        Ok(net)
    }
}

impl NetArg {
    fn set(&mut self, name: &str, value: &str) -> Result<(), String> {
        let not_a_number = |_| "not a number in range".to_owned();
        match name {
            "mac" => self.mac = Some(mac(value)?),
            "queues" => self.queues = Some(value.parse().map_err(not_a_number)?),
            "mtu" => self.mtu = Some(value.parse().map_err(not_a_number)?),
            "offloads" => self.offloads = switch(value)?,
            "vhost" => self.vhost = switch(value)?,
            "frames" => self.frames = value.parse().map_err(not_a_number)?,
            _ => {
                let Size(size) = value.parse()?;
                let size = u32::try_from(size).map_err(|_| "size exceeds 4 GiB")?;
                match name {
                    "size" => self.size = size,
                    _ => self.network = Network::Echo(Some(size)),
                }
            }
        }
        Ok(())
    }

    /// Pairs of queues.
    fn pairs(&self) -> u16 {
        self.queues.unwrap_or(1)
    }

    /// Size of an answer in bytes.
    fn reply(&self) -> u32 {
        match self.network {
            Network::Echo(Some(len)) => len,
            _ => self.size,
        }
    }

    fn job(&self, earlier: &[Self]) -> NetJob {
        let network = match self.network {
            Network::Link(_) => "link",
            Network::Tap(_) => "tap",
            Network::TapFds(_) => "tap-fd",
            _ => "echo",
        };
        let mirrors = self.links(earlier).next().is_some();
        let traffic = if mirrors { Traffic::Mirror } else { Traffic::Exchange };
        NetJob { network, traffic, frames: self.frames, size: self.size, reply: self.reply() }
    }

    /// Earlier cards on its link.
    fn links<'a>(&'a self, earlier: &'a [Self]) -> impl Iterator<Item = &'a Self> {
        let is_link = matches!(self.network, Network::Link(_));
        earlier.iter().filter(move |other| is_link && other.network == self.network)
    }

    fn card(&self, mac: [u8; 6], job: NetJob) -> Card {
        // Any frame that the built-in guest is to send is no longer than this allows.
        let longest = self.size.max(self.reply());
        let spec = Net {
            network: self.network.clone(),
            mac: self.mac.unwrap_or(mac),
            queues: self.pairs(),
            queue_size: 256,
            mtu: self.mtu.or_else(|| (longest > 1500).then(|| u16::try_from(longest).unwrap_or(u16::MAX))),
            offloads: self.offloads,
            announce: false,
            limit: RateLimit::default(),
        };
        Card { spec, vhost: self.vhost, job }
    }

    /// Checks it for a guest, and against the earlier cards.
    fn check(&self, for_linux: bool, earlier: &[Self]) -> Result<(), anyhow::Error> {
        match &self.network {
            Network::Tap(_) | Network::TapFds(_) if !for_linux => {
                bail!("TAP devices are for a kernel (--kernel): the built-in guest does not use them")
            }
            Network::Link(name) => {
                for other in self.links(earlier) {
                    self.check_link(name, other, for_linux)?;
                }
            }
            Network::Echo(_) if for_linux => bail!(
                "a Linux guest does not use an echo, echo peer, sink or source; use --net tap=, tap-fd= or link="
            ),
            _ => {}
        }
        Ok(())
    }

    fn check_link(&self, name: &str, other: &Self, for_linux: bool) -> Result<(), anyhow::Error> {
        if !for_linux && (other.frames, other.size) != (self.frames, self.size) {
            bail!("link {name:?}: its cards exchange different frames; give both the same number and size");
        }
        // A card without an MTU has Ethernet's.
        let mtu = |card: &Self| card.mtu.unwrap_or(1500);
        for (one, other, what) in
            [(other.pairs(), self.pairs(), "pairs of queues"), (mtu(other), mtu(self), "bytes of MTU")]
        {
            if one != other {
                bail!("link {name:?} joins cards with {one} and {other} {what}: both must be equal");
            }
        }
        Ok(())
    }
}

/// The network, and its options.
fn network(text: &str) -> Result<(Network, &'static [&'static str]), String> {
    match text.split_once('=') {
        None if text == "echo" => Ok((Network::Echo(None), &FOR_ECHO)),
        Some(("tap" | "link", "")) => Err(format!("{text:?} lacks a name")),
        Some(("tap", name)) => Ok((Network::Tap(name.into()), &FOR_TAP)),
        Some(("link", name)) => Ok((Network::Link(name.into()), &FOR_LINK)),
        Some(("tap-fd", numbers)) => {
            let numbers = numbers.split(':').map(|number| number.parse::<u16>().map(i32::from));
            let numbers = numbers.collect::<Result<_, _>>();
            let numbers = numbers.map_err(|_| "descriptors must be numbers separated by colons")?;
            Ok((Network::TapFds(numbers), &FOR_TAP_FD))
        }
        _ => Err(format!("unknown network {text:?}: use echo, link=NAME, tap=NAME or tap-fd=N")),
    }
}

fn switch(text: &str) -> Result<bool, String> {
    match text {
        "on" => Ok(true),
        "off" => Ok(false),
        _ => Err("use on or off".into()),
    }
}

/// The cards. Those without an address get 52:54:00:00:00:01 and up, by position.
///
/// Those without a number of queue pairs have `pairs`, as far as the built-in guest uses so many.
///
/// # Errors
/// The guest cannot use one of them, or a link does not join two like cards.
pub(crate) fn cards(args: &[NetArg], for_linux: bool, pairs: u16) -> Result<Vec<Card>, anyhow::Error> {
    let mut args = args.to_vec();
    for arg in &mut args {
        arg.queues.get_or_insert(pairs.min(NetJob::MAX_PAIRS));
    }
    let one = |(number, arg): (usize, &NetArg)| {
        let earlier = &args[..number];
        arg.check(for_linux, earlier)?;
        let job = arg.job(earlier);
        job.check(arg.pairs())?;
        Ok(arg.card([0x52, 0x54, 0, 0, 0, (number + 1) as u8], job))
    };
    args.iter().enumerate().map(one).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn options_come_in_any_order() {
        let net = |text: &str| text.parse::<NetArg>().unwrap();
        let echo = net("echo");
        assert_eq!((echo.queues, echo.frames, echo.size, echo.reply()), (None, 10_000, 64, 64));
        let full = net("echo,size=1k,mac=02:00:00:0a:Ff:01,frames=5,queues=2,reply=2k");
        assert_eq!(full.mac, Some([2, 0, 0, 10, 255, 1]));
        assert_eq!((full.pairs(), full.frames, full.size, full.reply()), (2, 5, 1024, 2048));
        let tap = net("tap=tap0,offloads=off,queues=4,mtu=9000");
        assert_eq!((tap.network, tap.queues), (Network::Tap("tap0".into()), Some(4)));
        assert_eq!((tap.mtu, tap.offloads), (Some(9000), false));
        assert!(net("link=a").offloads);
        assert!(!net("tap=tap0").vhost && net("tap=tap0,vhost=on").vhost);
        let fds = net("tap-fd=7:9,mac=02:00:00:0a:ff:01");
        assert_eq!((fds.network, fds.queues), (Network::TapFds(vec![7, 9]), Some(2)));
    }

    #[test]
    fn nonsense_is_refused() {
        for text in [
            "",
            "tap",
            "tap=",
            "link=,mtu=1500",
            "tap-fd=",
            "tap-fd=-1",
            "tap-fd=3:",
            "tap-fd=3,queues=2",
            "tap=tap0,size=64",
            "tap=tap0,offloads=yes",
            "tap=tap0,vhost",
            "link=a,vhost=on",
            "tap=tap0,mtu=70000",
            "echo=1",
            "echo,mtu=1500",
            "echo,",
            "echo,mac",
            "echo,mac=1:2:3:4:5:6",
            "echo,mac=02:00:00:00:00",
            "echo,mac=02:00:00:00:00:00:00",
            "echo,mac=+2:00:00:00:00:00:00",
            "echo,queues=-1",
            "echo,size=5G",
            "echo,reply=5G",
            "echo,speed=1",
        ] {
            assert!(text.parse::<NetArg>().is_err(), "{text:?} was taken");
        }
    }

    #[test]
    fn cards_without_an_address_get_different_ones() {
        let args: Vec<NetArg> =
            ["echo", "echo", "echo,mac=02:00:00:00:00:09"].iter().map(|text| text.parse().unwrap()).collect();
        let macs: Vec<u8> = cards(&args, false, 1).unwrap().iter().map(|card| card.spec.mac[5]).collect();
        assert_eq!(macs, [1, 2, 9]);
    }

    fn checked(texts: &[&str], for_linux: bool) -> Result<Vec<Traffic>, String> {
        let args: Vec<NetArg> = texts.iter().map(|text| text.parse().unwrap()).collect();
        let cards = cards(&args, for_linux, 1).map_err(|error| error.to_string())?;
        Ok(cards.iter().map(|card| card.job.traffic).collect())
    }

    #[test]
    fn a_card_has_a_pair_for_each_cpu_that_the_guest_uses() {
        let args: Vec<NetArg> = ["echo", "echo,queues=2"].map(|text| text.parse().unwrap()).into();
        for (cpus, pairs) in [(1, [1, 2]), (4, [4, 2]), (64, [8, 2])] {
            let cards = cards(&args, false, cpus).unwrap();
            assert_eq!(cards.iter().map(|card| card.spec.queues).collect::<Vec<_>>(), pairs);
        }
    }

    #[test]
    fn links_join_two_cards_each() {
        use Traffic::{Exchange, Mirror};
        let five = ["link=a", "link=b,queues=2", "link=b,queues=2", "echo", "link=a"];
        assert_eq!(checked(&five, false).unwrap(), [Exchange, Exchange, Mirror, Exchange, Mirror]);
        let refused = |texts: &[&str], for_linux| checked(texts, for_linux).unwrap_err();
        assert!(refused(&["link=a", "link=a,queues=2"], true).contains("1 and 2 pairs"));
        assert!(refused(&["link=a,mtu=9000", "link=a"], true).contains("9000 and 1500 bytes of MTU"));
        assert!(refused(&["link=a", "link=a,size=100"], false).contains("different frames"));
        assert!(checked(&["link=a", "link=a,size=100"], true).is_ok());
    }

    #[test]
    fn each_guest_has_networks_of_its_own() {
        assert!(checked(&["tap=tap0"], true).is_ok());
        assert!(checked(&["tap=tap0"], false).unwrap_err().contains("for a kernel"));
        assert!(checked(&["echo"], true).unwrap_err().contains("does not use an echo"));
        assert!(checked(&["echo,queues=9"], false).unwrap_err().contains("9 pairs"));
    }
}
