mod frames;
mod hostile;
mod latencies;
mod legacy;
mod limited;
mod link;
mod pairs;
mod recovered;
mod rig;
mod tap;
mod translated;

use super::*;
use rig::{Card, MAC};

#[test]
fn the_card_describes_itself() {
    let config = NetConfig { mtu: Some(9000), queue_size: 100, ..NetConfig::new(MAC) };
    let net = Net::new(config.clone(), LinkEnd::echo(3).unwrap()).unwrap();
    assert_eq!(net.device_id(), 1);
    assert_eq!(net.queue_sizes(), [64; 7]);
    let offered = F_MAC | F_STATUS | F_MRG_RXBUF | F_MTU | F_CTRL_VQ | F_MQ | net::F_CSUM | net::F_GUEST_CSUM;
    assert_eq!(net.features() & !QueueConfig::FEATURES, offered | feature::VERSION_1 | feature::RING_RESET);
    let mut space = [0xff; 16];
    net.read_config(0, &mut space);
    assert_eq!(space, [2, 0, 0, 0, 0, 1, 1, 0, 3, 0, 0x28, 0x23, 0, 0, 0, 0]);
    net.read_config(u32::MAX, &mut space);
    assert_eq!(space, [0; 16]);

    let single = Net::new(NetConfig { mtu: None, ..config }, LinkEnd::echo(1).unwrap()).unwrap();
    assert_eq!(single.queue_sizes().len(), 2);
    assert_eq!(single.features() & (F_MTU | F_CTRL_VQ | F_MQ), 0);
}

/// User Mode Linux and crosvm make the control queue as large as the others.
#[test]
fn the_control_queue_is_no_smaller_than_the_others() {
    for (queue_size, all, control) in [(1024, 1024, 1024), (256, 256, 256), (2, 2, 64)] {
        let config = NetConfig { queue_size, announce: true, ..NetConfig::new(MAC) };
        let net = Net::new(config, LinkEnd::echo(1).unwrap()).unwrap();
        assert_eq!(net.queue_sizes(), [all, all, control]);
    }
}

#[test]
fn cards_that_cannot_be_are_refused() {
    let make = |config| Net::new(config, LinkEnd::echo(1).unwrap()).map(drop);
    assert_eq!(make(NetConfig::new([0; 6])), Err(NetError::Mac([0; 6])));
    assert_eq!(make(NetConfig::new([3, 0, 0, 0, 0, 1])), Err(NetError::Mac([3, 0, 0, 0, 0, 1])));
    assert_eq!(make(NetConfig { mtu: Some(67), ..NetConfig::new(MAC) }), Err(NetError::Mtu(67)));
    assert_eq!(make(NetConfig { mtu: Some(68), ..NetConfig::new(MAC) }), Ok(()));
    let none = Net::new(NetConfig::new(MAC), LinkEnd::echo(0).unwrap()).map(drop);
    assert_eq!(none, Err(NetError::Pairs(0)));
}

#[test]
fn queues_that_the_card_does_not_have_do_not_start() {
    let mut card = Card::new(LinkEnd::echo(2).unwrap());
    let features = card.features;
    assert!(card.net.start_queue(4, features).is_ok());
    assert!(card.net.start_queue(5, features).is_err());
    assert!(card.net.start_queue(u16::MAX, features).is_err());
}
