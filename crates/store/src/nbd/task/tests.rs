//! Plans of requests, and what is done with replies.
use super::*;
use crate::Pieces;
use crate::nbd::reply::ReplyStyle;
use std::ptr::NonNull;

fn export(flags: u16) -> Export {
    let mut export = Export::new(1 << 40, flags, ReplyStyle::Simple);
    export.limit(512, 4096, 8192).unwrap();
    export
}

const ALL: u16 = flag::FLUSH | flag::FUA | flag::TRIM | flag::WRITE_ZEROES | flag::CACHE;

fn pieces(list: &mut [HostSlice]) -> Pieces {
    Pieces { first: NonNull::new(list.as_mut_ptr()).unwrap(), count: list.len() as u32 }
}

/// Sends all requests of a task, each with success. Returns them and the result.
fn requests(tasks: &mut Tasks, index: u32, export: &Export) -> (Vec<(u16, u16, u64, u64)>, i32) {
    let mut list = Vec::new();
    loop {
        match tasks.plan(index, export, false) {
            NextOfTask::Send => {}
            NextOfTask::Ended(result) => return (list, result),
        }
        let request = tasks.get(index).request;
        list.push((request.command, request.flags, request.offset, request.len));
        assert!(tasks.owed(request.cookie).is_none(), "it is not sent yet");
        tasks.sent(index);
        assert!(tasks.owed(request.cookie).is_some() && tasks.owed(request.cookie ^ 1 << 32).is_none());
        if let NextOfTask::Ended(result) = tasks.answered(index, 0, export, false) {
            assert!(tasks.owed(request.cookie).is_none(), "it is answered");
            return (list, result);
        }
    }
}

#[test]
fn a_long_job_is_done_in_parts() {
    let mut memory = vec![0_u8; 20_480];
    let (first, second) = memory.split_at_mut(10_000);
    let mut list = [
        HostSlice { ptr: first.as_mut_ptr(), len: first.len() },
        HostSlice { ptr: second.as_mut_ptr(), len: second.len() },
    ];
    let mut tasks = Tasks::default();
    let index = tasks.add(0, 3, Work::Job(Job::Read { pieces: pieces(&mut list), offset: 512 }));
    let (sent, result) = requests(&mut tasks, index, &export(ALL));
    assert_eq!(sent, [(0, 0, 512, 8192), (0, 0, 8704, 8192), (0, 0, 16896, 4096)]);
    assert_eq!(result, 20_480);
    tasks.remove(index);
    assert_eq!((tasks.count(), tasks.in_flight), (0, 0));
    // The flush behind a durable write.
    let job = Job::Write { pieces: pieces(&mut list), offset: 0, durable: true };
    let index = tasks.add(0, 3, Work::Job(job));
    let (sent, result) = requests(&mut tasks, index, &export(flag::FLUSH));
    assert_eq!(sent.last(), Some(&(CMD_FLUSH, 0, 0, 0)));
    assert_eq!((sent.len(), result), (4, 20_480));
}

#[test]
fn jobs_outside_of_the_export_or_of_blocks_are_not_sent() {
    let mut tasks = Tasks::default();
    let limits = export(ALL);
    for (work, error) in [
        (Job::Discard { offset: 1 << 40, len: 512 }, -libc::EINVAL),
        (Job::Discard { offset: u64::MAX - 511, len: 512 }, -libc::EINVAL),
        (Job::Zeroes { offset: (1 << 40) - 512, len: 1024, unmap: true }, -libc::ENOSPC),
        (Job::Discard { offset: 1, len: 512 }, -libc::EINVAL),
        (Job::Discard { offset: 0, len: 513 }, -libc::EINVAL),
        (Job::Discard { offset: 0, len: 0 }, 0),
    ] {
        let index = tasks.add(0, 0, Work::Job(work));
        assert_eq!(requests(&mut tasks, index, &limits), (vec![], error), "{work:?}");
        tasks.remove(index);
    }
}

#[test]
fn a_lost_connection_keeps_the_order() {
    let mut tasks = Tasks::default();
    let mut to_send = VecDeque::new();
    let list: Vec<u32> = (0..6).map(|head| tasks.add(0, head, Work::Job(Job::Flush))).collect();
    let limits = export(ALL);
    for &index in [list[3], list[1], list[4], list[0]].iter() {
        assert_eq!(tasks.plan(index, &limits, false), NextOfTask::Send);
        tasks.sent(index);
    }
    // This one is sent in part, and is still the first to send.
    tasks.began(list[5]);
    to_send.extend([list[5], list[2]]);
    tasks.answered(list[4], 0, &limits, false);
    tasks.remove(list[4]);
    assert_eq!(tasks.in_flight, 3);
    tasks.unsend(&mut to_send);
    assert_eq!(to_send, [list[3], list[1], list[0], list[5], list[2]]);
    assert_eq!(tasks.in_flight, 0);
    let cookie = tasks.get(list[3]).request.cookie;
    assert!(tasks.owed(cookie).is_none(), "a late reply is not taken");
}

#[test]
fn a_write_with_volatile_parts_begins_again() {
    let mut memory = vec![0_u8; 20_480];
    let mut list = [HostSlice { ptr: memory.as_mut_ptr(), len: memory.len() }];
    let write = Job::Write { pieces: pieces(&mut list), offset: 0, durable: true };
    let zeroes = Job::Zeroes { offset: 0, len: 2 << 30, unmap: false };
    for (job, flags, through, part, again) in [
        (write, flag::FLUSH, false, 8192, 0),
        (write, flag::FLUSH | flag::FUA, false, 8192, 8192),
        (zeroes, flag::FLUSH | flag::WRITE_ZEROES, true, 1 << 30, 0),
        (zeroes, ALL, true, 1 << 30, 1 << 30),
    ] {
        let limits = export(flags);
        let mut tasks = Tasks::default();
        let mut to_send = VecDeque::new();
        let index = tasks.add(0, 0, Work::Job(job));
        let other = tasks.add(0, 1, Work::Job(Job::Flush));
        for index in [index, other] {
            assert_eq!(tasks.plan(index, &limits, through), NextOfTask::Send);
            tasks.sent(index);
        }
        assert_eq!(tasks.answered(index, 0, &limits, through), NextOfTask::Send);
        // The next part is not sent yet.
        to_send.push_back(index);
        tasks.unsend(&mut to_send);
        assert_eq!(to_send, [other, index]);
        assert!(!tasks.get(index).is_untouched(), "{job:?}");
        assert_eq!(tasks.plan(index, &limits, through), NextOfTask::Send);
        let request = tasks.get(index).request;
        assert_eq!((request.offset, request.len), (again, part), "{job:?}");
    }
}

#[test]
fn data_goes_to_the_right_pieces() {
    let mut memory = vec![0_u8; 100];
    let base = memory.as_mut_ptr();
    // SAFETY: inside of the memory.
    let at = |start: usize, len| HostSlice { ptr: unsafe { base.add(start) }, len };
    let mut list = [at(50, 10), at(0, 0), at(0, 5), at(70, 30)];
    let mut tasks = Tasks::default();
    let index = tasks.add(0, 0, Work::Job(Job::Read { pieces: pieces(&mut list), offset: 0 }));
    let mut room = Vec::new();
    tasks.scatter(u64::from(index), 8, &[1, 2, 3, 4, 5, 6, 7, 8, 9, 10], &mut room);
    tasks.zero(u64::from(index), 9, 1, &mut room);
    // More than there is.
    tasks.scatter(u64::from(index), 40, &[9; 20], &mut room);
    let mut expected = vec![0_u8; 100];
    expected[58..60].copy_from_slice(&[1, 0]);
    expected[..5].copy_from_slice(&[3, 4, 5, 6, 7]);
    expected[70..73].copy_from_slice(&[8, 9, 10]);
    expected[95..].fill(9);
    assert_eq!(memory, expected);
    tasks.fail_memory(index.into());
    tasks.scatter(u64::from(index), 0, &[1; 10], &mut room);
    assert_eq!(memory, expected);
}
