// Holds 9.
//! Kills clients between any two bytes that they send. (`partywall lab chaos` kills them at any moment.)

use std::{collections::BTreeSet, time::Duration};

use partywall_os::process;
use partywall_wire::{Answer, Call, LeaseId};

use super::{
    eventually,
    place::{Place, say},
    rounds,
    wire::{self, Framed, encoded, greeted, hello},
};

/// The messages of the session that is interrupted.
const MESSAGES: usize = 8;

/// The indexes of the messages that commit the kept and the owned name.
const KEPT: usize = 1;

/// Sends the session up to `bytes` bytes of message `last`, then waits to be killed.
pub(crate) fn fragment(words: &[&str]) {
    let (last, bytes): (usize, usize) = (words[0].parse().unwrap(), words[1].parse().unwrap());
    // All names have the same length, so that all sessions have.
    let id = format!("{last}-{bytes:04}");
    let path = std::env::var("PARTYWALL_SOCKET").unwrap();
    let call = Framed::new(partywall_os::socket::connect(path.as_ref()).unwrap());
    let cut = |message: usize, encoded: &[u8], fds: &[&std::os::fd::OwnedFd], call: &Framed| {
        if message == last {
            let bytes = bytes.min(encoded.len());
            assert!(bytes == 0 || call.send(&encoded[..bytes], fds));
            say(format!("ready {}", encoded.len()));
            let us = process::own_pidfd().unwrap();
            process::kill(&us, rustix::process::Signal::KILL).unwrap();
        }
        assert!(call.send(encoded, fds));
    };
    let pidfd = process::own_pidfd().unwrap();
    cut(0, &encoded(&hello(false, None)), &[&pidfd], &call);
    let mut client = greeted(call).unwrap();
    let mut lease = LeaseId(0);
    for message in 1..MESSAGES {
        let (call, fds) = match message {
            KEPT => {
                let (commit, fds) = wire::commit(&format!("kept-{id}"), true, true);
                (Call::Commit(commit), fds)
            }
            2 => {
                let (commit, fds) = wire::commit(&format!("owned-{id}"), false, false);
                (Call::Commit(commit), fds)
            }
            3 => (wire::open(&format!("kept-{id}"), false), Vec::new()),
            4 => (Call::OpenOrBuild { name: wire::called(&format!("build-{id}")) }, Vec::new()),
            5 => (wire::open(&format!("never-{id}"), true), Vec::new()),
            6 => (Call::Release { lease }, Vec::new()),
            _ => (Call::Bye, Vec::new()),
        };
        let encoded = client.request(call, fds.len());
        cut(message, &encoded, &fds.iter().collect::<Vec<_>>(), &client.call);
        if let Answer::Opened(opened) = client.answer().0.unwrap() {
            lease = opened.lease;
        }
    }
}

/// Every message takes effect as a whole or not at all. Effects before the kill stay or end according to their kinds,
/// and nothing else is left.
#[test]
fn client_killed_between_any_two_bytes_leaves_a_whole_message_or_none() {
    let mut place = Place::new();
    let domain = place.connect();
    let before = place.broker().open_files_at_rest();
    let lengths: Vec<usize> = (0..MESSAGES)
        .map(|message| {
            let mut actor = place.start(&format!("fragment {message} 0"));
            actor.expect("ready ").parse().unwrap()
        })
        .collect();
    // With PARTYWALL_STRESS every byte, otherwise the ends, the head and some bytes in between.
    let step = 40_usize.div_ceil(rounds(1));
    let mut cuts = Vec::new();
    for (message, length) in lengths.iter().enumerate() {
        let some: BTreeSet<usize> = (0..*length).step_by(step).chain([1, 7, 8, 9, length - 1, *length]).collect();
        cuts.extend(some.into_iter().filter(|bytes| bytes <= length).map(|bytes| (message, bytes)));
    }
    let mut expected: BTreeSet<String> = (KEPT + 1..MESSAGES).map(|message| format!("kept-{message}-0000")).collect();
    for some in cuts.chunks(4) {
        let actors: Vec<_> =
            some.iter().map(|(message, bytes)| place.start(&format!("fragment {message} {bytes}"))).collect();
        for mut actor in actors {
            actor.expect("ready");
            actor.join();
        }
        for (message, bytes) in some {
            if *message > KEPT || (*message == KEPT && *bytes == lengths[KEPT]) {
                expected.insert(format!("kept-{message}-{bytes:04}"));
            }
        }
        domain.ping().unwrap();
    }
    eventually("the end of all that died", || domain.members().unwrap().len() == 1);
    let names: BTreeSet<String> = domain.names().unwrap().into_iter().map(|name| name.name).collect();
    assert_eq!(names, expected);
    let status = domain.status().unwrap();
    assert_eq!((status.leases, status.versions), (0, names.len() as u64));
    for name in &names {
        drop(domain.open(name, Duration::ZERO).unwrap());
        domain.remove(name).unwrap();
    }
    place.broker().await_files(before);
    eprintln!("{} clients were killed", cuts.len() + MESSAGES);
}
