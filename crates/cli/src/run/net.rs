//! `--net NETWORK[,OPTION]...`.
use crate::mac::mac;
use crate::size::Size;
use paravane_vmm::{NetConfig, Network};
use std::str::FromStr;

/// One network card of the command line.
///
/// Without `mac=` its address is assigned by [`configs`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct NetArg {
    pub(crate) config: NetConfig,
    /// The command line has its address.
    pub(crate) has_mac: bool,
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
        let mut net = Self { config: NetConfig::default(), has_mac: false };
        if let Network::TapFds(numbers) = &network {
            net.config.queues = u16::try_from(numbers.len()).map_err(|_| "too many descriptors")?;
        }
        net.config.network = network;
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
        let net = &mut self.config;
        match name {
            "mac" => {
                net.mac = mac(value)?;
                self.has_mac = true;
            }
            "queues" => net.queues = value.parse().map_err(not_a_number)?,
            "mtu" => net.mtu = Some(value.parse().map_err(not_a_number)?),
            "offloads" => net.offloads = switch(value)?,
            "vhost" => net.vhost = switch(value)?,
            "frames" => net.frames = value.parse().map_err(not_a_number)?,
            _ => {
                let Size(size) = value.parse()?;
                let size = u32::try_from(size).map_err(|_| "size exceeds 4 GiB")?;
                match name {
                    "size" => net.size = size,
                    _ => net.reply = Some(size),
                }
            }
        }
        Ok(())
    }
}

/// The network, and its options.
fn network(text: &str) -> Result<(Network, &'static [&'static str]), String> {
    match text.split_once('=') {
        None if text == "echo" => Ok((Network::Echo, &FOR_ECHO)),
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
pub(crate) fn configs(args: &[NetArg]) -> Vec<NetConfig> {
    let mut last = 0;
    let one = |arg: &NetArg| {
        last += 1;
        let mut config = arg.config.clone();
        if !arg.has_mac {
            config.mac[5] = last;
        }
        config
    };
    args.iter().map(one).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn options_come_in_any_order() {
        let net = |text: &str| text.parse::<NetArg>().unwrap().config;
        assert_eq!(net("echo"), NetConfig::default());
        let full = net("echo,size=1k,mac=02:00:00:0a:Ff:01,frames=5,queues=2,reply=2k");
        assert_eq!(full.mac, [2, 0, 0, 10, 255, 1]);
        assert_eq!((full.queues, full.frames, full.size, full.reply()), (2, 5, 1024, 2048));
        let tap = net("tap=tap0,offloads=off,queues=4,mtu=9000");
        assert_eq!((tap.network, tap.queues), (Network::Tap("tap0".into()), 4));
        assert_eq!((tap.mtu, tap.offloads), (Some(9000), false));
        assert!(net("link=a").offloads);
        assert!(!net("tap=tap0").vhost && net("tap=tap0,vhost=on").vhost);
        let fds = net("tap-fd=7:9,mac=02:00:00:0a:ff:01");
        assert_eq!((fds.network, fds.queues), (Network::TapFds(vec![7, 9]), 2));
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
        let macs: Vec<u8> = configs(&args).iter().map(|config| config.mac[5]).collect();
        assert_eq!(macs, [1, 2, 9]);
    }
}
