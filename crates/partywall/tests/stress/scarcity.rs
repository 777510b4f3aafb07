//! Processes that have run out of a resource.

use std::{io::Read, sync::atomic::AtomicBool, time::Duration};

use partywall::{
    DType, Domain, Error, MemoryLimit, Place as At,
    error::{LimitReached, Unreachable},
    files::Plan,
};
use rustix::process::{Resource, Rlimit};

use super::{
    WATCHDOG, eventually,
    place::{Place, commit, limit_files, say, value},
    within,
};

/// Takes all remaining file descriptors except `spare`.
fn hoard(spare: usize) -> Vec<std::fs::File> {
    let mut files = Vec::new();
    while let Ok(file) = std::fs::File::open("/dev/null") {
        files.push(file);
    }
    files.truncate(files.len().saturating_sub(spare));
    files
}

pub(crate) fn play(words: &[&str]) {
    limit_files(64);
    let domain = Domain::options().start(false).connect().unwrap();
    match words[0] {
        "files" => {
            let scarce = |what: &str, error: Error| {
                assert!(matches!(error, Error::LimitReached(LimitReached::FileDescriptors(_))), "{what}: {error}");
                let advice = error.advice();
                assert!(advice.starts_with("this process has 6") && advice.contains(" files open of 64"), "{advice}");
            };
            for spare in 0..4 {
                let files = hoard(spare);
                if spare < 3 {
                    scarce("opening", domain.open("many", Duration::ZERO).unwrap_err());
                    scarce("waiting", domain.open("many", Duration::from_secs(5)).unwrap_err());
                    scarce("descriptors", domain.descriptors("many", Duration::ZERO).unwrap_err());
                    let builder = domain.create("new", At::Host).chunk_bytes(256);
                    let builder = (0..4).fold(builder, |b, i| b.tensor(&format!("{i}"), DType::U8, &[256]));
                    scarce("allocating", builder.allocate().unwrap_err());
                }
                if spare == 0 {
                    scarce("connecting", Domain::options().start(true).connect().unwrap_err());
                }
                domain.ping().unwrap();
                drop(files);
            }
            let descriptors = domain.descriptors("many", Duration::ZERO).unwrap();
            for spare in 0..3 {
                let files = hoard(spare);
                let mut command = std::process::Command::new("true");
                scarce("duplicates", descriptors.pass_to(&mut command).unwrap_err());
                drop(files);
            }
            drop(descriptors);
            // Messages that must arrive on the events socket.
            let files = hoard(0);
            say("ready");
            scarce("a verdict", domain.open("later", WATCHDOG).unwrap_err());
            drop(files);
            assert_eq!(domain.open("many", Duration::ZERO).unwrap().len(), 3);
            assert_eq!(domain.status().unwrap().leases, 1, "what could not be opened is given back");
            say("good");
            super::place::linger();
        }
        "memory" => {
            let limit = Rlimit { current: Some(256 << 20), maximum: Some(256 << 20) };
            rustix::process::setrlimit(Resource::As, limit).unwrap();
            let builder = domain.create("large", At::Host).tensor("x", DType::U8, &[1 << 30]);
            let mut build = builder.allocate().unwrap();
            let limited = |error: Error| {
                let is_said = matches!(&error, Error::LimitReached(LimitReached::SystemMemory { limit: MemoryLimit::AddressSpace(n), .. }) if *n == 256 << 20);
                assert!(is_said && error.to_string().contains("address space of this process"), "{error:?}");
                assert!(error.advice().contains("ulimit -v"), "{}", error.advice());
            };
            limited(build.as_mut_bytes("x").unwrap_err());
            limited(build.commit().unwrap_err());
            limited(domain.open("huge", Duration::ZERO).unwrap_err());
            assert_eq!(value(&domain.open("x", Duration::ZERO).unwrap()), 5);
            assert_eq!(domain.status().unwrap().leases, 2, "what could not be mapped is given back");
            say("good");
        }
        "sizes" => {
            let file = std::env::temp_dir().join(format!("sizes-{}", std::process::id()));
            let grows = domain.create("grows", At::Host).tensor("x", DType::U8, &[1]).mutable(true).reserve(8 << 20);
            let grows = grows.allocate().unwrap().commit().unwrap();
            let limit = Rlimit { current: Some(1 << 20), maximum: Some(1 << 20) };
            rustix::process::setrlimit(Resource::Fsize, limit).unwrap();
            let limited = |error: Error| {
                assert!(error.to_string().contains("size of this process's files"), "{error}");
                assert!(error.to_string().contains("limited to 1 MiB"), "{error}");
                assert!(error.advice().contains("ulimit -f"), "{}", error.advice());
            };
            limited(domain.create("large", At::Host).tensor("x", DType::U8, &[2 << 20]).allocate().unwrap_err());
            limited(domain.pool("p").blocks(2).block_bytes(1 << 20).place(At::Host).create().unwrap_err());
            limited(domain.topic("t").max_bytes(1 << 20).place(At::Host).create().unwrap_err());
            limited(domain.queue("q").tasks(8).inputs(2, 1 << 20).place(At::Host).create().unwrap_err());
            limited(grows.grow().extend("x", 2 << 20).commit().unwrap_err());
            let cancel = AtomicBool::new(false);
            let huge = domain.open("huge", Duration::ZERO).unwrap();
            let refused = huge.write_to_path(None, &file, false, &|_| (), &cancel).unwrap_err();
            assert!(refused.to_string().contains("file size limit"), "{refused}");
            assert!(refused.advice().contains("ulimit -f"), "{}", refused.advice());
            assert!(!file.exists());
            let refused = Plan::from_reader(std::io::repeat(0).take(2 << 20), u64::MAX).unwrap_err();
            assert!(refused.to_string().contains("file size limit"), "{refused}");
            drop(commit(&domain, "small", 1, false).unwrap());
            say("good");
        }
        other => panic!("{other}"),
    }
}

#[test]
fn client_without_file_descriptors_reports_it_and_recovers() {
    let place = Place::new();
    let domain = place.connect();
    let builder = domain.create("many", At::Host).chunk_bytes(256).kept(true);
    let builder = (0..3).fold(builder, |b, i| b.tensor(&format!("{i}"), DType::U8, &[256]));
    drop(builder.allocate().unwrap().commit().unwrap());
    let mut poor = place.play("poor files");
    std::thread::sleep(Duration::from_millis(100));
    let _later = commit(&domain, "later", 1, false).unwrap();
    within(WATCHDOG, "a poor client", move || poor.expect("good"));
}

#[test]
fn client_without_address_space_for_host_memory_reports_it_and_recovers() {
    let place = Place::new();
    let domain = place.connect();
    let _small = commit(&domain, "x", 5, false).unwrap();
    let huge = domain.create("huge", At::Host).tensor("x", DType::U8, &[1 << 30]).allocate().unwrap();
    let _huge = huge.commit().unwrap();
    let mut poor = place.start("poor memory");
    within(WATCHDOG, "a poor client", move || poor.expect("good"));
}

/// Its runtime does not ignore SIGXFSZ.
// Holds 310.
#[test]
fn host_memory_limit_on_files_is_reported_and_kills_no_client() {
    let place = Place::new();
    let domain = place.connect();
    let huge = domain.create("huge", At::Host).tensor("x", DType::U8, &[2 << 20]).allocate().unwrap();
    let _huge = huge.commit().unwrap();
    let mut poor = place.start("poor sizes");
    within(WATCHDOG, "a poor client", move || poor.expect("good"));
}

#[test]
fn broker_without_file_descriptors_refuses_and_recovers() {
    let mut place = Place::with("files=128 clients=1000 fds=10000");
    let domain = place.connect();
    let before = place.broker().open_files_at_rest();
    let mut members = Vec::new();
    let error = loop {
        match place.try_connect() {
            Ok(member) => members.push(member),
            Err(error) => break error,
        }
    };
    assert!(matches!(error, Error::LimitReached(LimitReached::Broker { .. })), "{error}");
    // Commits of existing members.
    for (i, member) in members.iter().enumerate() {
        match commit(member, &format!("n{i}"), 1, true) {
            Ok(_)
            | Err(
                Error::Unreachable(Unreachable::FileDescriptor { .. })
                | Error::LimitReached(LimitReached::Broker { .. }),
            ) => {}
            Err(error) => panic!("{error}"),
        }
    }
    domain.ping().unwrap();
    drop(members);
    for name in domain.names().unwrap() {
        domain.remove(&name.name).unwrap();
    }
    eventually("the end of all members", || domain.members().unwrap().len() == 1);
    place.broker().await_files(before);
    drop(commit(&place.connect(), "x", 1, false).unwrap());
}
