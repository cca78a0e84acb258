//! Network cards with their back ends, from their configuration.
use crate::config::{NetConfig, Network};
use crate::error::RunError;
use paravane_device::Device;
use paravane_device::net::{BackEnd, Counters, Generator, LinkEnd, Net, NetConfig as CardConfig, Tap};
use std::collections::HashMap;
use std::sync::Arc;

/// A network card.
pub(crate) struct Card {
    /// The device.
    pub(crate) device: Box<dyn Device>,
    /// Counters of its frames.
    pub(crate) counters: Arc<Counters>,
}

/// Links with one card so far, by name: the far end, and that card's configuration.
type FarEnds<'a> = HashMap<&'a str, (LinkEnd, &'a NetConfig)>;

/// Makes all cards, in order.
///
/// # Errors
/// A back end cannot be opened, or a link does not join two like cards.
pub(crate) fn cards(configs: &[NetConfig]) -> Result<Vec<Card>, RunError> {
    let mut far_ends = FarEnds::new();
    let cards = configs.iter().map(|config| connect(config, &mut far_ends)).collect::<Result<_, _>>()?;
    match far_ends.keys().next() {
        Some(name) => Err(RunError::Config(format!("link {name:?} joins two cards: only one is given"))),
        None => Ok(cards),
    }
}

fn connect<'a>(config: &'a NetConfig, far_ends: &mut FarEnds<'a>) -> Result<Card, RunError> {
    let reply = config.reply() as usize;
    match &config.network {
        Network::Echo => {
            let end = match config.reply {
                None => LinkEnd::echo(config.queues),
                Some(len) => LinkEnd::echo_of_len(config.queues, len as usize),
            };
            card(config, end.map_err(no_link)?)
        }
        Network::EchoPeer => card(config, LinkEnd::to_echo_peer(config.queues, reply).map_err(no_link)?),
        Network::Sink => card(config, Generator::new(config.queues, 0, reply).map_err(no_link)?),
        Network::Source => {
            card(config, Generator::new(config.queues, config.frames, reply).map_err(no_link)?)
        }
        Network::Tap(name) => card(config, Tap::open(name, config.queues)?),
        Network::TapFds(numbers) => card(config, Tap::inherited(numbers)?),
        Network::Link(name) => {
            let end = match far_ends.remove(name.as_str()) {
                Some((end, other)) => {
                    let refuse = |one, other, what| {
                        let error = format!(
                            "link {name:?} joins cards with {one} and {other} {what}: both must be equal"
                        );
                        Err(RunError::Config(error))
                    };
                    if other.queues != config.queues {
                        return refuse(other.queues, config.queues, "pairs of queues");
                    }
                    // A card without an MTU has Ethernet's.
                    let [one, two] = [other, config].map(|card| card.mtu.unwrap_or(1500));
                    if one != two {
                        return refuse(one, two, "bytes of MTU");
                    }
                    end
                }
                None => {
                    let (near, far) = LinkEnd::pair(config.queues).map_err(no_link)?;
                    far_ends.insert(name, (far, config));
                    near
                }
            };
            card(config, end)
        }
    }
}

fn no_link(source: std::io::Error) -> RunError {
    RunError::Os { what: "make a link", source }
}

fn card<B: BackEnd>(config: &NetConfig, back_end: B) -> Result<Card, RunError> {
    // Any frame that the built-in guest is to send is no longer than this allows.
    let longest = config.size.max(config.reply());
    let mtu = config.mtu.or_else(|| (longest > 1500).then(|| u16::try_from(longest).unwrap_or(u16::MAX)));
    let card_config = CardConfig { mtu, offloads: config.offloads, ..CardConfig::new(config.mac) };
    let card = Net::new(card_config, back_end).map_err(|error| RunError::Config(error.to_string()))?;
    Ok(Card { counters: card.counters(), device: Box::new(card) })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn link(name: &str, queues: u16) -> NetConfig {
        NetConfig { network: Network::Link(name.into()), queues, ..NetConfig::default() }
    }

    fn refused(configs: &[NetConfig]) -> String {
        cards(configs).map(|cards| cards.len()).unwrap_err().to_string()
    }

    #[test]
    fn links_join_two_cards_each() {
        let joined = cards(&[link("a", 1), link("b", 2), link("b", 2), NetConfig::default(), link("a", 1)]);
        let queues: Vec<usize> = joined.unwrap().iter().map(|card| card.device.queue_sizes().len()).collect();
        assert_eq!(queues, [2, 5, 5, 2, 2]);
        assert!(refused(&[link("a", 1)]).contains("only one is given"));
        assert!(refused(&[link("a", 1), link("a", 1), link("a", 1)]).contains("only one is given"));
        assert!(refused(&[link("a", 1), link("a", 2)]).contains("1 and 2 pairs"));
        let large = NetConfig { mtu: Some(9000), ..link("a", 1) };
        assert!(refused(&[large, link("a", 1)]).contains("9000 and 1500 bytes of MTU"));
    }

    #[test]
    fn what_is_no_tap_device_is_refused() {
        let net = |network| [NetConfig { network, ..NetConfig::default() }];
        let name = refused(&net(Network::Tap("a/b".into())));
        assert!(name.contains("invalid interface name"), "{name}");
        let file = tempfile::tempfile().unwrap();
        let number = std::os::fd::AsRawFd::as_raw_fd(&file);
        let other = refused(&net(Network::TapFds(vec![number])));
        assert!(other.contains("not a TAP device"), "{other}");
        let nothing = refused(&net(Network::TapFds(vec![-1])));
        assert!(nothing.contains("descriptor -1"), "{nothing}");
    }

    #[test]
    fn offloads_are_offered_unless_they_are_switched_off() {
        use paravane_spec::net::F_CSUM;
        for offloads in [false, true] {
            let cards = cards(&[NetConfig { offloads, ..NetConfig::default() }]).unwrap();
            assert_eq!(cards[0].device.features() & F_CSUM != 0, offloads);
        }
    }
}
