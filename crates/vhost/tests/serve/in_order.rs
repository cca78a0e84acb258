//! Queues with IN_ORDER: any disk by the library, network only by the program.
use crate::killed::survive;
use crate::migration::moves;
use crate::rig::Disk;
use paravane_spec::feature;

#[test]
fn what_was_in_flight_in_a_split_queue_in_order_is_done_once() {
    survive(&Disk::new(), feature::IN_ORDER | feature::EVENT_IDX, 25, 15);
}

#[test]
fn queues_in_order_move_from_server_to_server() {
    moves(feature::IN_ORDER | feature::EVENT_IDX);
    moves(feature::IN_ORDER | feature::EVENT_IDX | feature::RING_PACKED);
}
