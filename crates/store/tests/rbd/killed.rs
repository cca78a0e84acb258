//! A process that dies with an image open, and its successor.
use crate::cluster::Cluster;
use crate::disk::{read, write};
use paravane_store::rbd::{Rbd, RbdOptions};
use paravane_store::{Location, Store};
use std::io::{BufRead, BufReader, Write};
use std::process::{Command, Stdio};

const BLOCK: u64 = 4096;

/// Content of a block in a round.
fn content(block: u64, round: u64) -> [u8; BLOCK as usize] {
    let mut bytes = [0; BLOCK as usize];
    for (at, word) in bytes.chunks_exact_mut(8).enumerate() {
        word.copy_from_slice(&((round << 40) | (block << 16) | at as u64).to_le_bytes());
    }
    bytes
}

/// Writes block after block, round after round, and tells of each that was acknowledged.
#[test]
#[ignore = "the process that a_successor_has_all_that_was_acknowledged kills"]
fn child() {
    let Ok(location) = std::env::var("PARAVANE_TEST_IMAGE") else { return };
    let Ok(Location::Rbd(location)) = location.parse() else { panic!("{location}") };
    let store = Rbd::open(&location, &RbdOptions::default()).unwrap_or_else(|error| panic!("{error}"));
    let mut out = std::io::stderr();
    writeln!(out, "owner {}", store.lock_owner().expect("the lock")).unwrap();
    for (round, block) in (0..).flat_map(|round| (0..store.size() / BLOCK).map(move |block| (round, block))) {
        assert_eq!(write(&store, block * BLOCK, &content(block, round)), BLOCK as i32);
        writeln!(out, "done {round} {block}").unwrap();
    }
}

#[test]
fn a_successor_has_all_that_was_acknowledged() {
    let Some(cluster) = Cluster::find("a_successor_has_all_that_was_acknowledged") else { return };
    let _up = cluster.in_use();
    let image = cluster.image("dies", "1M", &[]);
    let mut child = Command::new(std::env::current_exe().expect("this test"))
        .args(["--exact", "killed::child", "--ignored", "--nocapture"])
        .env("PARAVANE_TEST_IMAGE", format!("rbd:{}:conf={}", image.spec(), cluster.conf().display()))
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .spawn()
        .expect("this test");
    let mut lines = BufReader::new(child.stderr.take().expect("a pipe")).lines().map_while(Result::ok);
    let owner = lines.by_ref().find_map(|line| line.strip_prefix("owner ").map(str::to_owned));
    let dead_owner = Some(owner.expect("the child opens the image"));
    let mut acknowledged = Vec::new();
    let mut take = |line: String| {
        let Some((round, block)) = line.strip_prefix("done ").and_then(|line| line.split_once(' ')) else {
            // What was being said when it died.
            return;
        };
        if let (Ok(round), Ok(block)) = (round.parse::<u64>(), block.parse::<usize>()) {
            acknowledged.resize(acknowledged.len().max(block + 1), 0);
            acknowledged[block] = round;
        }
    };
    let many = (1 << 20) / BLOCK as usize * 3 / 2;
    lines.by_ref().take(many).for_each(&mut take);
    child.kill().expect("the child runs");
    child.wait().expect("it ends");
    // All that it has said up to its end.
    lines.for_each(&mut take);

    let store = image.open_with(&RbdOptions { dead_owner, ..RbdOptions::default() }).expect("the image");
    assert_eq!(acknowledged.len() as u64, store.size() / BLOCK);
    let found = |block: usize| read(&store, block as u64 * BLOCK, BLOCK as usize);
    for (block, &round) in acknowledged.iter().enumerate() {
        let bytes = found(block);
        let is = |round| bytes == content(block as u64, round);
        // One more write may have been on its way.
        assert!(is(round) || is(round + 1), "block {block} is not of round {round} or the next");
    }
    // What the successor writes stays.
    assert_eq!(write(&store, 0, &vec![0xbb; 1 << 20]), 1 << 20);
    assert!(read(&store, 0, 1 << 20).iter().all(|&byte| byte == 0xbb));
}
