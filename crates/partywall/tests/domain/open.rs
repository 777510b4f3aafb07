//! Opening, waiting, and becoming a builder.

use std::time::Duration;

use partywall::{
    DType, Domain, Ended, Ending, Error, Language, OpenOrBuild, Place,
    error::{Denied, InvalidArgument, Mismatch, NotFound},
    info::Named,
};
use partywall_harness::place;

use super::{
    TIMEOUT,
    world::{World, commit, value},
};

#[test]
fn missing_name_is_reported_with_similar_names() {
    let world = World::new();
    let domain = world.connect();
    let _near = commit(&domain, "models/llama", 1, false);
    match domain.open("models/lama", Duration::ZERO) {
        Err(Error::NotFound(NotFound::Name { near, socket, .. })) => {
            assert_eq!(near, ["models/llama"]);
            assert_eq!(socket, world.socket());
        }
        other => panic!("{other:?}"),
    }
}

// Holds 42.
#[test]
fn recently_ended_name_is_reported_with_its_ending() {
    let world = World::new();
    let ours = world.connect();
    let theirs = world.connect();
    let ended = |result: partywall::Result<partywall::Segment>| match result {
        Err(error @ Error::NotFound(NotFound::Name { .. })) => {
            let text = format!("{error}; {}", error.advice());
            let Error::NotFound(NotFound::Name { ended: Some(ended), .. }) = error else { panic!("{text}") };
            let Ended { version: 1, pid, .. } = *ended else { panic!("{ended:?}") };
            assert_eq!(pid, std::process::id());
            (ended.ending, text)
        }
        other => panic!("{other:?}"),
    };
    drop(commit(&ours, "owned", 1, false));
    let (ending, text) = ended(theirs.open("owned", Duration::ZERO));
    assert_eq!(ending, Ending::Withdrawn);
    let who = format!("owned@1 ended with its owner, pid {} (domain-", std::process::id());
    assert!(text.contains(&who) && text.contains("s ago") && text.contains("kept(true)"), "{text}");
    assert!(matches!(theirs.remove("owned"), Err(Error::NotFound(NotFound::Name { ended: Some(_), .. }))));
    assert!(matches!(theirs.inspect("owned"), Err(Error::NotFound(NotFound::Name { ended: Some(_), .. }))));

    let _segment = commit(&ours, "removed", 1, true);
    theirs.remove("removed").unwrap();
    let (ending, text) = ended(ours.open("removed", Duration::ZERO));
    assert_eq!(ending, Ending::Removed);
    assert!(text.contains("removed@1 was removed by pid"), "{text}");

    drop(ours.pool("pool").blocks(1).block_bytes(1).place(place()).create().unwrap());
    let (ending, text) = ended(theirs.open("pool", Duration::ZERO));
    assert_eq!(ending, Ending::Unused);
    assert!(text.contains("ended with its last user, pid"), "{text}");
    drop(commit(&ours, "owned", 1, false));
    let _again = commit(&ours, "owned", 2, false);
    assert_eq!(value(&theirs.open("owned", Duration::ZERO).unwrap()), 2);
}

// Holds 43.
#[test]
fn objects_of_other_kinds_are_refused_without_a_lease() {
    let world = World::new();
    let domain = world.connect();
    let _pool = domain.pool("pool").blocks(1).block_bytes(1).place(place()).create().unwrap();
    let _topic = domain.topic("topic").max_bytes(1).place(place()).create().unwrap();
    let leases = domain.status().unwrap().leases;
    for (name, kind, call) in [
        ("pool", Named::Pool, r#"Domain::pool("pool").open()"#),
        ("topic", Named::Topic, r#"Domain::topic("topic").open()"#),
    ] {
        let error = domain.open(name, Duration::ZERO).unwrap_err();
        assert!(
            matches!(&error, Error::Mismatch(Mismatch::Object { wanted: Named::Segment, is, .. }) if *is == kind),
            "{error:?}"
        );
        assert_eq!(error.to_string(), format!("{name:?} is a {name}, not a segment"));
        assert!(error.advice().contains(call), "{}", error.advice());
        assert!(matches!(
            domain.open_or_build(name, Duration::ZERO),
            Err(Error::Mismatch(Mismatch::Object { wanted: Named::Segment, .. }))
        ));
    }
    assert_eq!(domain.status().unwrap().leases, leases);

    let _timeline = domain.timeline("line").unwrap();
    let error = domain.open("line", Duration::ZERO).unwrap_err();
    assert!(error.to_string().ends_with("; there is a timeline of that name"), "{error}");
    assert!(error.advice().contains(r#"Domain::timeline("line")"#), "{}", error.advice());
    assert!(error.advice_in(Language::Python).contains(r#"d.timeline("line")"#));
    assert!(error.advice_in(Language::Shell).contains("partywall show line"));
    assert!(domain.topic("line").open().unwrap_err().to_string().contains("a timeline of that name"));
    let error = domain.abandon_timeline("pool").unwrap_err();
    assert!(error.to_string().ends_with("; there is a pool of that name"), "{error}");
}

// Holds 41.
#[test]
fn waiting_open_gets_the_commit_even_if_the_name_is_removed() {
    let world = World::new();
    let ours = world.connect();
    let theirs = world.connect();
    std::thread::scope(|scope| {
        let readers: Vec<_> = (0..4).map(|_| scope.spawn(|| value(&theirs.open("later", TIMEOUT).unwrap()))).collect();
        // Each reader waits in the broker before anything is committed.
        super::world::eventually("waiting", || {
            drop(commit(&ours, "other", 0, false));
            std::thread::sleep(Duration::from_millis(50));
            true
        });
        drop(commit(&ours, "later", 42, false));
        for (n, reader) in readers.into_iter().enumerate() {
            // A reader that the machine kept from asking in time would wait for ever: commit again for it.
            while !reader.is_finished() {
                std::thread::sleep(Duration::from_millis(20));
                drop(commit(&ours, "later", 42, false));
            }
            assert_eq!(reader.join().unwrap(), 42, "reader {n}");
        }
    });
    super::world::eventually("all leases given back", || ours.status().unwrap().leases == 0);
}

#[test]
fn open_times_out_and_leaves_nothing() {
    let world = World::new();
    let domain = world.connect();
    let late = |name: &str| match domain.open(name, Duration::from_millis(30)) {
        Err(error @ Error::Timeout { .. }) => error.to_string(),
        other => panic!("{other:?}"),
    };
    assert_eq!(late("never"), r#"cannot open "never": no process committed it within 30 ms"#);
    drop(commit(&domain, "never", 1, false));
    let again = late("never");
    assert!(again.starts_with(r#"cannot open "never": never@1 ended with its owner, pid "#), "{again}");
    assert!(again.ends_with(" ago, and no process committed it again within 30 ms"), "{again}");
    let timeline = domain.timeline("line").unwrap();
    let missing = r#"cannot open "line": there is a timeline of that name, and no process committed a segment within"#;
    assert!(late("line").starts_with(missing), "{}", late("line"));
    drop(timeline);
    assert_eq!(domain.status().unwrap().leases, 0);
}

// Holds 4.
#[test]
fn versions_are_kept_by_their_readers() {
    let world = World::new();
    let domain = world.connect();
    let first = commit(&domain, "x", 1, true);
    let reader = world.connect().open("x", Duration::ZERO).unwrap();
    drop(first);
    let second = commit(&domain, "x", 2, true);
    assert_eq!((reader.version(), second.version()), (1, 2));
    assert_eq!(value(&domain.open("x", Duration::ZERO).unwrap()), 2);
    assert_eq!(value(&domain.open("x@1", Duration::ZERO).unwrap()), 1);
    assert_eq!(value(&domain.opener("x").version(2).open().unwrap()), 2);
    drop(reader);
    match domain.open("x@1", Duration::ZERO) {
        Err(Error::NotFound(NotFound::Version { version: 1, latest: Some(2), .. })) => {}
        other => panic!("{other:?}"),
    }
    assert!(matches!(domain.open("x@0", Duration::ZERO), Err(Error::InvalidArgument(InvalidArgument::Version { .. }))));
    assert!(matches!(
        domain.open("x@one", Duration::ZERO),
        Err(Error::InvalidArgument(InvalidArgument::Version { .. }))
    ));
}

#[test]
fn removed_segment_stays_with_its_readers() {
    let world = World::new();
    let domain = world.connect();
    drop(commit(&domain, "x", 1, true));
    let reader = world.connect().open("x", Duration::ZERO).unwrap();
    let removed = domain.remove("x").unwrap();
    assert_eq!((removed.version, removed.bytes_kept), (1, reader.bytes()));
    assert_eq!(removed.holders.len(), 1);
    assert_eq!(removed.holders[0].pid, std::process::id());
    assert!(matches!(domain.open("x", Duration::ZERO), Err(Error::NotFound(NotFound::Name { .. }))));
    assert!(matches!(domain.remove("x"), Err(Error::NotFound(NotFound::Name { .. }))));
    assert_eq!(value(&reader), 1);
    reader.wait_withdrawn(TIMEOUT).unwrap();
    drop(reader);
    assert_eq!(domain.status().unwrap().versions, 0);
}

// Holds 6.
#[test]
fn owned_names_end_with_their_segment_and_kept_names_stay() {
    let world = World::new();
    let domain = world.connect();
    drop(commit(&domain, "owned", 1, false));
    drop(commit(&domain, "kept", 2, true));
    assert!(matches!(domain.open("owned", Duration::ZERO), Err(Error::NotFound(NotFound::Name { .. }))));
    drop(domain);
    let domain = world.connect();
    assert_eq!(value(&domain.open("kept", Duration::ZERO).unwrap()), 2);
}

#[test]
fn frozen_memory_is_not_opened_for_writing() {
    let world = World::new();
    let domain = world.connect();
    let _frozen = commit(&domain, "frozen", 1, false);
    assert!(matches!(domain.opener("frozen").read_write().open(), Err(Error::Denied(Denied::ReadOnly { .. }))));
    assert_eq!(domain.status().unwrap().leases, 1);
}

#[test]
fn mutable_host_memory_is_written_in_place() {
    let world = World::new();
    let domain = world.connect();
    let builder = domain.create("shared", Place::Host).tensor("x", DType::U32, &[8]).mutable(true);
    let committed = builder.allocate().unwrap().commit().unwrap();
    let writer = world.connect().opener("shared").read_write().open().unwrap();
    writer.tensor("x").unwrap().shared::<u32>().unwrap().set(3, 7);
    writer.tensor("x").unwrap().write_at(16, &9_u32.to_ne_bytes()).unwrap();
    let seen = committed.tensor("x").unwrap().shared::<u32>().unwrap();
    assert_eq!((seen.get(3), seen.get(4)), (7, 9));
    assert!(committed.tensor("x").unwrap().as_slice::<u32>().is_err(), "no plain slice of shared memory");
    let reader = domain.open("shared", Duration::ZERO).unwrap();
    assert!(matches!(reader.tensor("x").unwrap().write_at(0, &[1]), Err(Error::Denied(Denied::ReadOnly { .. }))));
}

fn expect_claim(domain: &Domain, name: &str) -> partywall::Claim {
    match domain.open_or_build(name, TIMEOUT).unwrap() {
        OpenOrBuild::Build(claim) => claim,
        OpenOrBuild::Opened(segment) => panic!("{segment:?}"),
    }
}

// Holds 5.
#[test]
fn one_caller_builds_and_the_others_open() {
    let world = World::new();
    let builds = std::sync::atomic::AtomicUsize::new(0);
    std::thread::scope(|scope| {
        let all: Vec<_> = (0..8)
            .map(|_| {
                let domain = world.connect();
                let builds = &builds;
                scope.spawn(move || match domain.open_or_build("model", TIMEOUT).unwrap() {
                    OpenOrBuild::Opened(segment) => (value(&segment), segment),
                    OpenOrBuild::Build(claim) => {
                        builds.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
                        let builder = claim.create(place()).tensor("x", DType::U32, &[4]);
                        let mut build = builder.allocate().unwrap();
                        std::thread::sleep(Duration::from_millis(20));
                        build.write("x", &5_u32.to_ne_bytes().repeat(4)).unwrap();
                        let segment = build.commit().unwrap();
                        (value(&segment), segment)
                    }
                })
            })
            .collect();
        let segments: Vec<_> = all.into_iter().map(|thread| thread.join().unwrap()).collect();
        assert!(segments.iter().all(|(value, _)| *value == 5));
    });
    assert_eq!(builds.into_inner(), 1);
}

#[test]
fn dropped_claim_passes_to_exactly_one_waiter() {
    let world = World::new();
    let ours = world.connect();
    let theirs = world.connect();
    let claim = expect_claim(&ours, "model");
    assert_eq!(ours.names().unwrap().len(), 0);
    assert!(matches!(theirs.open_or_build("model", Duration::from_millis(20)), Err(Error::Timeout { .. })));
    std::thread::scope(|scope| {
        let waiter = scope.spawn(|| expect_claim(&theirs, "model"));
        std::thread::sleep(Duration::from_millis(20));
        drop(claim.create(place()).allocate().unwrap());
        let claim = waiter.join().unwrap();
        assert_eq!(claim.name(), "model");
        let segment = claim.create(place()).allocate().unwrap().commit().unwrap();
        assert!(matches!(ours.open_or_build("model", TIMEOUT).unwrap(), OpenOrBuild::Opened(_)));
        drop(segment);
    });
}
