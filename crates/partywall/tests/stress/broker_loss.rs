//! Kills or stops the broker while members need it.

use std::{
    collections::BTreeSet,
    process::Command,
    sync::Arc,
    time::{Duration, Instant},
};

use partywall::{Domain, Error, TimelineEnding, error::Unreachable};
use partywall_harness::{cut_connections, write_script};

use super::{
    Dice, eventually,
    place::{Actor, Place, commit, linger, say, value},
    rounds, within,
};

/// Longer than two broker timeouts of the library: one for the call, one for the drops after it.
const TIMEOUT: Duration = Duration::from_secs(35);

fn is_loss(error: &Error) -> bool {
    matches!(error, Error::Unreachable(Unreachable::Gone { .. } | Unreachable::NoAnswer { .. }))
}

/// Uses a domain until the broker is lost. Returns the outcome.
pub(crate) fn load() {
    let domain = Domain::options().start(false).connect().unwrap();
    let kept = commit(&domain, "held", 42, true).unwrap();
    say("ready");
    std::thread::scope(|scope| {
        for thread in 0..4_u32 {
            let domain = &domain;
            scope.spawn(move || {
                let error = loop {
                    let round = match thread {
                        0 => commit(domain, "churned", 1, true).map(drop),
                        1 => domain.open("held", Duration::from_millis(1)).map(drop),
                        2 => match domain.open("never", Duration::from_micros(300)) {
                            Err(Error::Timeout { .. }) => Ok(()),
                            other => other.map(drop),
                        },
                        _ => domain.open_or_build("held", Duration::from_secs(1)).map(drop),
                    };
                    if let Err(error) = round {
                        break error;
                    }
                };
                assert!(is_loss(&error), "{error}");
            });
        }
    });
    assert_eq!(value(&kept), 42, "mapped memory stays");
    let start = Instant::now();
    drop((kept, domain));
    say(format!("lost {}", start.elapsed().as_millis()));
}

#[test]
fn every_call_ends_when_the_broker_is_killed_at_any_moment() {
    let mut dice = Dice(11);
    for _ in 0..rounds(6) {
        let mut place = Place::new();
        let mut loads: Vec<Actor> = (0..2).map(|_| place.play("load")).collect();
        std::thread::sleep(Duration::from_micros(dice.below(30_000)));
        place.broker().kill();
        for mut load in loads.drain(..) {
            within(TIMEOUT, "the end of a client", move || {
                load.expect("lost");
                assert!(load.join().success());
            });
        }
        // The socket of the dead broker is replaced.
        place.start_broker("");
        place.connect().ping().unwrap();
    }
}

#[test]
fn dropping_everything_right_after_the_broker_died_ends() {
    for _ in 0..rounds(30) {
        let mut place = Place::new();
        let domain = place.connect();
        let segment = commit(&domain, "x", 1, false).unwrap();
        place.broker().kill();
        within(TIMEOUT, "dropping", move || drop((segment, domain)));
    }
}

// Holds 243.
#[test]
fn every_call_ends_when_the_broker_is_stopped() {
    let mut place = Place::new();
    let domain = Arc::new(place.connect());
    let segment = commit(&domain, "x", 1, true).unwrap();
    place.broker().stop();
    let threads: Vec<_> = (0..8)
        .map(|i| {
            let domain = domain.clone();
            std::thread::spawn(move || {
                let error = match i % 4 {
                    0 => domain.ping().unwrap_err(),
                    1 => domain.open("x", Duration::from_millis(10)).unwrap_err(),
                    2 => commit(&domain, "y", 1, true).unwrap_err(),
                    _ => domain.open_or_build("z", Duration::from_millis(10)).unwrap_err(),
                };
                assert!(is_loss(&error), "{error}");
            })
        })
        .collect();
    let waiting = Instant::now();
    within(TIMEOUT, "calls", move || threads.into_iter().for_each(|thread| thread.join().unwrap()));
    eprintln!("eight calls ended after {:?}", waiting.elapsed());
    assert_eq!(value(&segment), 1);

    // The broker continues, and so do its members. Leases that it granted to callers that had timed out are given back.
    place.broker().resume();
    eventually("an answer", || domain.ping().is_ok());
    drop(segment);
    eventually("the return of all leases", || domain.status().unwrap().leases == 0);
    assert_eq!(value(&domain.open("x", Duration::ZERO).unwrap()), 1);
    drop(domain.open_or_build("z", Duration::from_secs(20)).unwrap());
}

#[test]
fn calls_end_although_nothing_fits_into_the_socket_of_a_stopped_broker() {
    let mut place = Place::new();
    let domain = place.connect();
    place.broker().stop();
    let large = "m".repeat(16_000);
    // Each request is sent and not answered until the socket is full. Then sending ends the connection.
    let threads: Vec<_> = (0..4)
        .map(|_| {
            let domain = domain.clone();
            let large = large.clone();
            std::thread::spawn(move || {
                let start = Instant::now();
                while start.elapsed() < Duration::from_secs(1) {
                    let name = format!("{}@{}", &large[..200], 1);
                    assert!(is_loss(&domain.open(&name, Duration::ZERO).unwrap_err()));
                }
            })
        })
        .collect();
    within(TIMEOUT, "calls", move || threads.into_iter().for_each(|thread| thread.join().unwrap()));
    within(TIMEOUT, "dropping", move || drop(domain));
}

/// Follows a timeline, and loses its connection whenever the broker is stopped.
pub(crate) fn follower() {
    let proceed = || assert_ne!(std::io::stdin().read_line(&mut String::new()).unwrap(), 0);
    let domain = Domain::options().start(false).connect().unwrap();
    let timeline = domain.timeline("steps").unwrap();
    say("ready");
    proceed();
    cut_connections();
    let cut = Instant::now();
    // Longer than a broker has for an answer.
    while cut.elapsed() < Duration::from_secs(13) {
        let error = domain.ping().unwrap_err();
        assert!(matches!(error, Error::Unreachable(Unreachable::NoAnswer { .. })), "{error}");
    }
    say("unanswered");
    timeline.wait(1, TIMEOUT).unwrap();
    say("reached");
    eventually("an answer", || domain.ping().is_ok());
    say("back");
    proceed();
    cut_connections();
    say("cut");
    timeline.wait(2, TIMEOUT).unwrap_err();
    assert_eq!(timeline.ending(), Some(TimelineEnding::BrokerGone));
    say("ended");
}

// Holds 11, 102.
#[test]
fn stopped_broker_ends_no_timeline_and_killed_one_does() {
    let mut place = Place::new();
    let domain = place.connect();
    let writer = domain.timeline_writer("steps").unwrap();
    let mut follower = place.play("follower");
    place.broker().stop();
    follower.proceed();
    follower.expect("unanswered");
    assert_eq!(writer.timeline().ending(), None);
    writer.signal(1).unwrap();
    follower.expect("reached");
    place.broker().resume();
    follower.expect("back");

    place.broker().stop();
    follower.proceed();
    follower.expect("cut");
    place.broker().kill();
    follower.expect("ended");
    assert!(follower.join().success());
}

#[test]
fn connecting_to_a_stopped_broker_ends_although_its_backlog_is_full() {
    let mut place = Place::new();
    place.broker().stop();
    let mut waiting = Vec::new();
    let socket = place.socket();
    // More connections than the backlog holds, each without waiting, as far as possible.
    for _ in 0..1100 {
        let address = rustix::net::SocketAddrUnix::new(&socket).unwrap();
        let flags = rustix::net::SocketFlags::CLOEXEC | rustix::net::SocketFlags::NONBLOCK;
        let client =
            rustix::net::socket_with(rustix::net::AddressFamily::UNIX, rustix::net::SocketType::STREAM, flags, None)
                .unwrap();
        if rustix::net::connect(&client, &address).is_err() {
            break;
        }
        waiting.push(client);
    }
    let result = within(TIMEOUT, "connecting", move || {
        Domain::options().socket(socket).start(false).connect().map(|_| ()).unwrap_err()
    });
    assert!(matches!(result, Error::Unreachable(Unreachable::NoAnswer { .. })), "{result}");
}

#[test]
fn members_learn_immediately_that_their_broker_was_replaced() {
    let mut place = Place::new();
    let mut member = place.play("load");
    member.stop();
    place.broker().kill();
    place.start_broker("");
    member.resume();
    // Less than the ten seconds for which a lost connection is renewed.
    within(Duration::from_secs(8), "the end of a client", move || {
        member.expect("lost");
        assert!(member.join().success());
    });
}

/// Returns the path of the program, which has to be built before.
fn program() -> std::path::PathBuf {
    let beside = std::env::current_exe().unwrap().parent().unwrap().parent().unwrap().join("partywall");
    let program = std::env::var_os("PARTYWALL_BIN").map(Into::into).unwrap_or(beside);
    assert!(program.exists(), "build it first: cargo build -p partywall-cli");
    program
}

/// Connects, starting a broker if none runs, and prints which broker it got.
pub(crate) fn starter(words: &[&str]) {
    let rounds: u32 = words[0].parse().unwrap();
    say("ready");
    for _ in 0..rounds {
        let mut line = String::new();
        std::io::stdin().read_line(&mut line).unwrap();
        let domain = Domain::options().connect().unwrap();
        let status = domain.status().unwrap();
        say(format!("got {} {}", status.pid, status.instance));
        // The connection stays until all processes have reported, because the broker must not exit earlier.
        std::io::stdin().read_line(&mut line).unwrap();
        drop(domain);
        say("left");
    }
    linger();
}

#[test]
fn many_starters_at_once_get_one_broker() {
    let program = program();
    let place = Place::empty();
    let many = 20;
    let mut actors: Vec<Actor> = (0..many)
        .map(|_| {
            place.start_with("starter 3", |command| {
                command.env("PARTYWALL_BIN", &program).env("XDG_STATE_HOME", place.directory());
            })
        })
        .collect();
    actors.iter_mut().for_each(|actor| drop(actor.expect("ready")));
    for _ in 0..3 {
        actors.iter_mut().for_each(Actor::proceed);
        let got: Vec<String> = actors.iter_mut().map(|actor| actor.expect("got ")).collect();
        assert!(got.iter().all(|one| *one == got[0]), "{got:?}");
        actors.iter_mut().for_each(Actor::proceed);
        actors.iter_mut().for_each(|actor| drop(actor.expect("left")));
        let domain = place.connect();
        domain.stop_broker(true).unwrap();
    }
}

#[test]
fn connecting_never_fails_against_the_idle_exit() {
    let program = program();
    let place = Place::empty();
    // The broker exits as soon as it may, repeatedly, while other processes look for one.
    let wrapper = place.directory().join("partywall");
    let script = format!("#!/bin/sh\nexec {} \"$@\" --idle-exit 0.01\n", program.display());
    write_script(&wrapper, &script);
    assert!(Command::new(&wrapper).arg("--version").output().is_ok());
    let many = 6;
    let each = rounds(8);
    let mut actors: Vec<Actor> = (0..many)
        .map(|_| {
            place.start_with(&format!("starter {each}"), |command| {
                command.env("PARTYWALL_BIN", &wrapper).env("XDG_STATE_HOME", place.directory());
            })
        })
        .collect();
    actors.iter_mut().for_each(|actor| drop(actor.expect("ready")));
    let mut dice = Dice(5);
    let mut brokers = std::collections::BTreeSet::new();
    for _ in 0..each {
        for actor in &mut actors {
            std::thread::sleep(Duration::from_micros(dice.below(8000)));
            actor.proceed();
        }
        for actor in &mut actors {
            brokers.insert(actor.expect("got "));
            actor.proceed();
        }
        actors.iter_mut().for_each(|actor| drop(actor.expect("left")));
        std::thread::sleep(Duration::from_micros(dice.below(20_000)));
    }
    eprintln!("{} brokers came and went", brokers.len());
    eventually("the last one has left", || !place.socket().exists());
}

/// Returns the pids of the processes that serve at `socket`, whether they can be reached or not: a supervisor and a
/// worker for each broker.
fn brokers_at(socket: &std::path::Path) -> Vec<i32> {
    let socket = socket.as_os_str().as_encoded_bytes();
    let processes = std::fs::read_dir("/proc").unwrap().flatten();
    let serves = |pid: &i32| {
        let line = std::fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
        line.split(|byte| *byte == 0).any(|word| word == b"serve") && line.split(|byte| *byte == 0).any(|w| w == socket)
    };
    processes.filter_map(|entry| entry.file_name().to_str()?.parse().ok()).filter(serves).collect()
}

#[test]
fn starter_killed_at_any_moment_leaves_at_most_one_broker() {
    let program = program();
    let mut dice = Dice(41);
    let place = Place::empty();
    let start = || {
        let mut actor = place.start_with("starter 1", |command| {
            command.env("PARTYWALL_BIN", &program).env("XDG_STATE_HOME", place.directory());
        });
        actor.expect("ready");
        actor
    };
    for _ in 0..rounds(10) {
        let mut actors: Vec<Actor> = (0..4).map(|_| start()).collect();
        actors.iter_mut().for_each(Actor::proceed);
        // All but the last are killed while one of them starts a broker and the others wait for it.
        for victim in &mut actors[..3] {
            std::thread::sleep(Duration::from_micros(dice.below(6000)));
            victim.kill();
        }
        actors[3].expect("got ");
        eventually("one broker", || brokers_at(&place.socket()).len() == 2);
        let domain = place.connect();
        let status = domain.status().unwrap();
        let pids = [status.supervisor.unwrap(), status.pid];
        let found: BTreeSet<_> = brokers_at(&place.socket()).into_iter().collect();
        assert_eq!(found, pids.map(|pid| pid as i32).into());
        drop(actors);
        // The next round replaces the socket of a killed broker.
        for pid in pids {
            let pidfd = partywall_os::process::pidfd(pid).unwrap();
            partywall_os::process::kill(&pidfd, rustix::process::Signal::KILL).unwrap();
        }
        eventually("its end", || brokers_at(&place.socket()).is_empty());
    }
}
