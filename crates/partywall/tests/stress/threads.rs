//! One connection, many threads.

use std::{
    sync::atomic::{AtomicBool, AtomicU64, Ordering},
    time::{Duration, Instant},
};

use partywall::{Error, OpenOrBuild, error::NotFound};

use super::{
    Dice, eventually,
    place::{Place, commit, value},
    rounds,
};

#[test]
fn sixteen_threads_share_a_connection() {
    let place = Place::new();
    let domain = place.connect();
    let calls = AtomicU64::new(0);
    std::thread::scope(|scope| {
        for thread in 0..16_u64 {
            let domain = &domain;
            let calls = &calls;
            scope.spawn(move || {
                let mut dice = Dice(thread);
                for round in 0..rounds(100) {
                    calls.fetch_add(1, Ordering::Relaxed);
                    let name = format!("n{}", dice.below(4));
                    match dice.below(7) {
                        0 | 1 => drop(commit(domain, &name, round as u32, dice.below(2) == 0).unwrap()),
                        2 | 3 => match domain.open(&name, Duration::from_millis(dice.below(3))) {
                            Ok(segment) => drop(value(&segment)),
                            Err(Error::NotFound(NotFound::Name { .. }) | Error::Timeout { .. }) => {}
                            Err(error) => panic!("{error}"),
                        },
                        4 => match domain.open_or_build(&name, Duration::from_millis(2)) {
                            Ok(OpenOrBuild::Build(_) | OpenOrBuild::Opened(_)) | Err(Error::Timeout { .. }) => {}
                            Err(error) => panic!("{error}"),
                        },
                        5 => match domain.open(&name, Duration::ZERO) {
                            Ok(segment) => match segment.wait_withdrawn(Duration::from_micros(200)) {
                                Ok(_) | Err(Error::Timeout { .. }) => {}
                                Err(error) => panic!("{error}"),
                            },
                            Err(Error::NotFound(NotFound::Name { .. })) => {}
                            Err(error) => panic!("{error}"),
                        },
                        _ => drop(domain.remove(&name)),
                    }
                }
            });
        }
    });
    eprintln!("{} calls", calls.into_inner());
    for name in domain.names().unwrap() {
        domain.remove(&name.name).unwrap();
    }
    eventually("the return of all leases", || {
        let status = domain.status().unwrap();
        (status.leases, status.versions, status.fds) == (0, 0, 0)
    });
    assert!(domain.inspect("n0").is_err(), "no claim is left: {:?}", domain.inspect("n0"));
}

/// The timeout of an open and the commit that would end its wait happen at the same moment, again and again.
#[test]
fn opens_timing_out_while_granted_leave_no_lease() {
    let place = Place::new();
    let ours = place.connect();
    let theirs = place.connect();
    let opened = AtomicU64::new(0);
    let gave_up = AtomicU64::new(0);
    let done = AtomicBool::new(false);
    std::thread::scope(|scope| {
        for thread in 0..4_u64 {
            let ours = &ours;
            let opened = &opened;
            let gave_up = &gave_up;
            let done = &done;
            scope.spawn(move || {
                let mut dice = Dice(thread);
                while !done.load(Ordering::Relaxed) {
                    match ours.open("x", Duration::from_micros(1 + dice.below(400))) {
                        Ok(segment) => drop((opened.fetch_add(1, Ordering::Relaxed), value(&segment))),
                        Err(Error::Timeout { .. }) => drop(gave_up.fetch_add(1, Ordering::Relaxed)),
                        Err(error) => panic!("{error}"),
                    }
                    match ours.open_or_build("y", Duration::from_micros(1 + dice.below(400))) {
                        Ok(_) | Err(Error::Timeout { .. }) => {}
                        Err(error) => panic!("{error}"),
                    }
                }
            });
        }
        let end = Instant::now() + Duration::from_millis(rounds(1000) as u64);
        let mut dice = Dice(99);
        while Instant::now() < end {
            std::thread::sleep(Duration::from_micros(dice.below(300)));
            drop(commit(&theirs, "x", 1, false).unwrap());
            drop(commit(&theirs, "y", 1, false).unwrap());
        }
        done.store(true, Ordering::Relaxed);
    });
    eprintln!("{} opened, {} gave up", opened.into_inner(), gave_up.into_inner());
    eventually("the return of all leases", || theirs.status().unwrap().leases == 0);
    // No claim is left either: the next caller builds immediately.
    assert!(matches!(theirs.open_or_build("y", Duration::ZERO), Ok(OpenOrBuild::Build(_))));
}
