//! Whole runs: the built-in guest against real images, by thread and by KVM.
mod bench_top;
mod devices;
mod linux;
mod processors;
mod scenarios;

use paravane_vmm::AccelChoice;

/// Makes one test a scenario for each accelerator.
macro_rules! both {
    ($($scenario:ident),* $(,)?) => {
        mod thread {
            use super::*;
            $(
                #[test]
                fn $scenario() {
                    scenarios::$scenario(AccelChoice::Thread);
                }
            )*
        }
        mod kvm {
            use super::*;
            $(
                #[test]
                fn $scenario() {
                    if bench_top::kvm(concat!("kvm::", stringify!($scenario))) {
                        scenarios::$scenario(AccelChoice::Kvm);
                    }
                }
            )*
        }
    };
}

both!(
    a_hashed_image_has_the_hosts_digest_and_is_untouched,
    a_read_only_image_is_hashed,
    a_write_test_verifies,
    a_write_test_of_a_part_leaves_the_rest_alone,
    two_disks_at_once,
    polling_needs_no_interrupts,
    the_thread_engine_serves_as_well,
    every_ring_layout_serves_as_well,
    devices_behind_domains_serve_as_well,
    dirty_pages_are_counted,
    the_dirty_log_misses_nothing,
    without_ioeventfds_every_kick_exits,
    queues_without_an_ioeventfd_fall_back_one_by_one,
    queues_are_spread_over_io_threads,
    queues_move_to_the_thread_that_has_less_to_do,
    queues_that_are_polled_serve_as_well,
    a_wired_interrupt_takes_a_status_read_and_an_acknowledgement,
    a_message_takes_no_register_access_at_all,
    messages_of_several_devices_do_not_get_mixed_up,
    notification_addresses_work_without_ioeventfds_and_polled,
    entropy_alone,
    frames_come_back_from_an_echo,
    an_answer_may_be_longer_or_shorter,
    an_echo_peer_answers_from_its_own_thread,
    frames_stream_one_way,
    two_cards_on_a_link,
    the_measured_phase_is_counted_apart,
    several_cards_with_several_queues_beside_a_disk,
    a_crash_ends_the_run,
    a_panic_ends_the_run,
    a_hang_ends_the_run,
    a_cancelled_run_ends_cleanly,
    an_image_is_free_again_after_every_end,
    twenty_write_tests_in_a_row,
    the_footprint_stays_small,
    several_processors_share_the_devices,
    each_processor_has_a_queue_of_each_device,
    queues_are_polled_by_their_processors,
    a_disk_may_have_more_queues_than_blocks_or_messages,
    interrupts_move_between_processors,
    ten_thousand_interrupts_move_by_mmio,
    ten_thousand_interrupts_move_by_pci,
    processors_without_work_are_no_harm,
    a_failure_on_any_processor_ends_the_run,
    a_cancelled_run_stops_all_processors,
);

#[test]
fn impossible_configurations_touch_nothing() {
    scenarios::impossible_configurations_touch_nothing();
}

#[test]
fn automatic_choice_says_why() {
    scenarios::automatic_choice_says_why();
}
