// Holds 272.
//! Segments of the simulated GPU that advance in place, or are suspended, with each driver call failed in turn.
#![allow(clippy::unwrap_used, clippy::print_stdout)] // tests, their helpers included

use std::{process::Command, time::Duration};

use partywall::{
    Access, DType, Domain, Drain, Error, Failed, Place, Segment, check_suspended,
    cuda::{Stream, shared_allocations},
    error::{Busy, DeviceFault, InvalidArgument, LimitReached, Mismatch},
    gpu,
};
use partywall_harness::{ROLE, Running, World, simulated_driver};

/// Bytes of a tensor that fills a chunk.
const CHUNK: u64 = 2 << 20;

const TENSORS: [&str; 2] = ["x", "y"];

/// Runs the other processes of the tests. It is no test itself.
#[test]
fn role() {
    let Ok(role) = std::env::var(ROLE) else { return };
    let domain = Domain::options().start(false).connect().unwrap();
    let devices = gpu::devices().unwrap();
    let place = |ordinal: usize| Place::Gpu(devices[ordinal].uuid().unwrap());
    match role.as_str() {
        "advancer" => {
            let (_held, mut open) = versions(&domain, place(0));
            let addresses = addresses(&open);
            let before = calls().len();
            if let Err(error) = advance(&mut open) {
                let scarce = matches!(error, Error::LimitReached(LimitReached::Memory { .. }));
                assert!(scarce || matches!(error, Error::DeviceFault(DeviceFault::Cuda { .. })), "{error}");
                assert_shows(&open, 1);
                advance(&mut open).unwrap();
            }
            println!("\ncalls {}", calls()[before..].join(" "));
            assert_shows(&open, 2);
            assert_eq!(self::addresses(&open), addresses);
            assert!(open.newer(None, Duration::ZERO).unwrap().is_none());
            let former = domain.inspect("w@1").unwrap();
            assert_eq!(former.holders.iter().map(|holder| holder.leases).sum::<u32>(), 1, "that of its committer");
            // Back and forth.
            for round in 0..4 {
                let next = open.newer(Some(1 + round % 2), Duration::ZERO).unwrap().unwrap();
                open.advance(next, Drain::Only(&[])).unwrap();
                assert_shows(&open, 1 + (round % 2) as u8);
            }
            assert_eq!(self::addresses(&open), addresses);
        }
        "loser" => {
            let (_held, mut open) = versions(&domain, place(0));
            let error = advance(&mut open).unwrap_err();
            assert!(matches!(error, Error::DeviceFault(DeviceFault::NotMapped { version: 1, .. })), "{error}");
            assert_eq!(error.anchor(), "not-mapped");
            let text = open.check().unwrap_err().to_string();
            assert_eq!(text, error.to_string());
            assert_eq!(open.tensor("x").unwrap().to_vec().unwrap_err().to_string(), text);
            assert_eq!(open.tensor("y").unwrap().device().unwrap_err().to_string(), text);
            let next = open.newer(None, Duration::ZERO).unwrap().unwrap();
            assert_eq!(open.advance(next, Drain::All(&[])).unwrap_err().to_string(), text);
            drop(open);
            assert_shows(&domain.open("w", Duration::ZERO).unwrap(), 2);
            println!("\nlost {text}");
        }
        "refused" => {
            refuse_other_layouts(&domain, place(0), place(1));
            refuse_streams_of_others(&domain, place(0), place(1));
            println!("\nrefused ");
        }
        "suspender" => suspend_and_resume(&domain, place(0)),
        "unsuspendable" => {
            let (held, mut open) = versions(&domain, place(0));
            let pool = domain.pool("pool").place(place(0)).blocks(1).block_bytes(CHUNK).create().unwrap();
            open.suspend().unwrap();
            let error = check_suspended().unwrap_err();
            assert!(matches!(error, Error::Busy(Busy::StillShared { .. })), "{error}");
            drop(pool);
            // Those of the two committers.
            assert_eq!(shared_allocations(), 4);
            // The lease keeps what has no name any more.
            domain.remove("w").unwrap();
            drop(held);
            open.resume().unwrap();
            assert_shows(&open, 1);
            println!("\nrefused ");
        }
        other => panic!("no role is called {other:?}"),
    }
}

/// Commits two versions of two chunks, and opens the first of them before the second exists.
fn versions(domain: &Domain, place: Place) -> (Vec<Segment>, Segment) {
    let commit = |byte: u8| {
        let builder = domain.create("w", place).chunk_bytes(CHUNK);
        let builder = TENSORS.iter().fold(builder, |builder, name| builder.tensor(name, DType::U8, &[CHUNK]));
        let mut build = builder.allocate().unwrap();
        TENSORS.iter().for_each(|name| build.write(name, &vec![byte; CHUNK as usize]).unwrap());
        build.commit().unwrap()
    };
    let first = commit(1);
    let open = domain.open("w", Duration::ZERO).unwrap();
    assert_shows(&open, 1);
    (vec![first, commit(2)], open)
}

/// Suspends segments of every kind that this process has made or opened, and resumes them.
fn suspend_and_resume(domain: &Domain, place: Place) {
    let mut segments = vec![versions(domain, place).0.swap_remove(0)];
    let mutable = |name: &str, place: Place| domain.create(name, place).mutable(true).tensor("x", DType::U8, &[CHUNK]);
    let of_host = mutable("host", Place::Host).allocate().unwrap().commit().unwrap();
    let grown = |name: &str, place: Place| {
        let grown = mutable(name, place).reserve(8 * CHUNK).allocate().unwrap().commit().unwrap();
        grown.grow().tensor("y", DType::U8, &[CHUNK]).commit().unwrap();
        let open = domain.opener(name).read_write().access(Access::Both).open().unwrap();
        open.tensors().iter().for_each(|tensor| tensor.write_at(CHUNK - 8, &[7; 8]).unwrap());
        open
    };
    let pinned = Place::Pinned(0);
    segments.extend([grown("on-gpu", place), grown("pinned", pinned)]);
    let mut frozen = domain.create("frozen", pinned).tensor("x", DType::U8, &[CHUNK]).allocate().unwrap();
    frozen.write("x", &[7; CHUNK as usize]).unwrap();
    segments.push(frozen.commit().unwrap());
    segments.push(of_host);
    let state = |segment: &Segment| {
        let shown = |tensor: &partywall::Tensor<'_>| {
            let mut bytes = [0; 8];
            tensor.read_at(CHUNK - 8, &mut bytes).unwrap();
            (tensor.device().ok().map(|range| range.device_ptr()), bytes)
        };
        segment.tensors().iter().map(shown).collect::<Vec<_>>()
    };
    let states: Vec<_> = segments.iter().map(state).collect();
    assert!(shared_allocations() > 0);

    let before = calls().len();
    let mut lost = false;
    for segment in &mut segments {
        match segment.suspend() {
            Ok(()) => {}
            Err(error @ Error::DeviceFault(DeviceFault::NotMapped { .. })) => {
                assert_eq!(segment.check().unwrap_err().to_string(), error.to_string());
                lost = true;
            }
            Err(error) => {
                assert!(matches!(error, Error::DeviceFault(DeviceFault::Cuda { .. })), "{error}");
                assert!(!segment.is_suspended());
                segment.suspend().unwrap();
            }
        }
        segment.suspend().or_else(|error| if lost { Ok(()) } else { Err(error) }).unwrap();
    }
    let kept = segments.last().unwrap();
    assert!(!kept.is_suspended(), "host memory stays");
    assert_eq!(state(kept), *states.last().unwrap());
    let mut called = calls().split_off(before);
    if !lost {
        check_suspended().unwrap();
        let error = segments[0].tensor("x").unwrap().to_vec().unwrap_err();
        assert!(matches!(error, Error::DeviceFault(DeviceFault::Suspended { version: 1, .. })), "{error}");
        let error = segments[1].grow().tensor("z", DType::U8, &[1]).commit().unwrap_err();
        assert!(matches!(error, Error::DeviceFault(DeviceFault::Suspended { .. })), "{error}");
    }
    for (segment, state_before) in segments.iter_mut().zip(&states) {
        if matches!(segment.check(), Err(Error::DeviceFault(DeviceFault::NotMapped { .. }))) {
            continue;
        }
        let before = calls().len();
        let resumed = segment.resume();
        called.extend(calls().split_off(before));
        if let Err(error) = resumed {
            assert!(segment.is_suspended() && matches!(error, Error::DeviceFault(_)), "{error}");
            segment.resume().unwrap();
        }
        assert_eq!(state(segment), *state_before, "{segment:?}");
        segment.resume().unwrap();
    }
    println!("\ncalls {}", called.join(" "));
}

fn advance(open: &mut Segment) -> partywall::Result<()> {
    let next = open.newer(None, Duration::ZERO)?.expect("there is a second version");
    Ok(open.advance(next, Drain::All(&[]))?)
}

/// Checks that a segment is a version, and shows that version's bytes at both ends of each chunk.
fn assert_shows(segment: &Segment, version: u8) {
    assert_eq!(segment.version(), u64::from(version));
    for tensor in segment.tensors() {
        for offset in [0, CHUNK - 8] {
            let mut bytes = [0; 8];
            tensor.read_at(offset, &mut bytes).unwrap();
            assert_eq!(bytes, [version; 8], "{} at {offset}", tensor.name());
        }
    }
}

fn addresses(segment: &Segment) -> Vec<u64> {
    segment.tensors().iter().map(|tensor| tensor.device().unwrap().device_ptr()).collect()
}

fn refuse_other_layouts(domain: &Domain, place: Place, other: Place) {
    let commit = |place: Place, tensors: &[(&str, DType, &[u64])], mutable: bool| {
        let builder = domain.create("layout", place).mutable(mutable).kept(true);
        let add = |builder: partywall::Builder, (name, dtype, shape): &(&str, DType, &[u64])| {
            builder.tensor(name, *dtype, shape)
        };
        let build = tensors.iter().fold(builder, add).allocate().unwrap();
        build.commit().unwrap()
    };
    let plain: [(&str, DType, &[u64]); 2] = [("a", DType::F32, &[2, 3]), ("b", DType::U8, &[7])];
    let first = commit(place, &plain, false);
    let mut open = domain.opener("layout").allow_peer(true).open().unwrap();
    let mut refused = |place: Place, tensors: &[(&str, DType, &[u64])]| {
        let _other = commit(place, tensors, false);
        let next = domain.opener("layout").allow_peer(true).open().unwrap();
        match open.advance(next, Drain::All(&[])) {
            Err(Failed { error: Error::Mismatch(Mismatch::Layout { name, version: 1, differences, .. }), value }) => {
                assert_eq!((open.version(), open.len()), (1, 2));
                assert_eq!((name.as_str(), value.name()), ("layout", "layout"));
                assert!(value.version() > 1 && value.check().is_ok(), "the caller keeps it");
                differences.join("; ")
            }
            other => panic!("{other:?}"),
        }
    };
    let [a, b] = plain;
    assert_eq!(
        refused(place, &[("a", DType::I32, &[3, 2]), b]),
        "a: dtype float32 becomes int32; a: shape [2, 3] becomes [3, 2]; a: strides [3, 1] becomes [2, 1]"
    );
    assert_eq!(refused(place, &[a]), "b: missing in the new version");
    assert_eq!(refused(place, &[a, b, ("c", DType::U8, &[1])]), "c: only in the new version");
    assert_eq!(
        refused(place, &[b, a]),
        "a: place 0 in chunk 0 becomes 256 in chunk 0; b: place 256 in chunk 0 becomes 0 in chunk 0"
    );
    let large = refused(place, &[a, b, ("c", DType::U8, &[CHUNK])]);
    assert!(large.starts_with("bytes of chunk 0: 2097152 becomes 4194304; "), "{large}");
    let elsewhere = refused(other, &plain);
    assert!(elsewhere.starts_with(&format!("place: {place} becomes {other}; GPU of this process: ")), "{elsewhere}");
    let _mutable = commit(place, &plain, true);
    let next = open.newer(None, Duration::ZERO).unwrap().unwrap();
    let Failed { error, .. } = open.advance(next, Drain::All(&[])).unwrap_err();
    assert!(matches!(error, Error::Mismatch(Mismatch::Kind { wanted: "frozen GPU", .. })), "{error}");
    // The same version at other addresses: an advance to it changes nothing that is seen.
    let again = domain.opener("layout").version(1).open().unwrap();
    open.advance(again, Drain::All(&[])).unwrap();
    drop(first);
}

fn refuse_streams_of_others(domain: &Domain, place: Place, other: Place) {
    let (_held, mut open) = versions(domain, place);
    let Some(other) = other.gpu() else { unreachable!() };
    let stream = Stream::new(domain.gpu(other).unwrap().context()).unwrap();
    let own = Stream::new(open.gpu().unwrap().context()).unwrap();
    for drain in [Drain::All(&[own.as_ref(), stream.as_ref()]), Drain::Only(&[own.as_ref(), stream.as_ref()])] {
        let next = open.newer(None, Duration::ZERO).unwrap().unwrap();
        let Failed { error, .. } = open.advance(next, drain).unwrap_err();
        assert!(matches!(error, Error::InvalidArgument(InvalidArgument::Range { .. })), "{error}");
        assert_shows(&open, 1);
    }
    let next = open.newer(None, Duration::ZERO).unwrap().unwrap();
    open.advance(next, Drain::Only(&[own.as_ref()])).unwrap();
    assert_shows(&open, 2);
}

/// The numbers of this process's driver calls so far that allocate, map and wait.
fn calls() -> Vec<String> {
    let log = std::fs::read_to_string(std::env::var_os("SIMCUDA_CALLS").unwrap()).unwrap();
    let calls = log.lines().map(|line| line.split(' ').collect::<Vec<_>>());
    let meant = calls.filter(|call| call[2].starts_with("cuMem") || call[2] == "cuCtxSynchronize");
    meant.map(|call| call[1].to_owned()).collect()
}

/// Runs another process to its end in a domain of its own, and returns what it said behind `word`.
fn play(role: &str, word: &str, faults: &str) -> String {
    let world = World::new();
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(["--exact", "role", "--nocapture"]).env(ROLE, role);
    command.env("SIMCUDA_CALLS", world.directory().join("calls")).env("SIMCUDA_DEVICES", "2");
    command.env("PARTYWALL_LIBCUDA", simulated_driver()).env("SIMCUDA_FAULTS", faults);
    command.env("SIMCUDA_APART", "partywall-gpu");
    let output = Running::spawn(command.env("PARTYWALL_SOCKET", world.socket())).wait();
    let text = output.text();
    assert_eq!(output.code, Some(0), "{faults}: {text}\n{}", output.stderr);
    text.lines().find_map(|line| line.strip_prefix(word)).map(|said| said.trim().to_owned()).expect("it has spoken")
}

#[test]
fn each_driver_call_of_an_advance_may_fail_on_the_simulated_gpu() {
    let calls = play("advancer", "calls ", "");
    assert!(calls.split(' ').count() > 20, "{calls}");
    for call in calls.split(' ') {
        play("advancer", "calls ", &format!("*:{call}=2"));
    }
}

#[test]
fn each_driver_call_of_a_suspension_may_fail_on_the_simulated_gpu() {
    let calls = play("suspender", "calls ", "");
    assert!(calls.split(' ').count() > 40, "{calls}");
    for call in calls.split(' ') {
        play("suspender", "calls ", &format!("*:{call}=2"));
    }
}

#[test]
fn memory_of_pools_stays_shared_on_the_simulated_gpu() {
    play("unsuspendable", "refused", "");
}

#[test]
fn version_that_cannot_be_mapped_again_says_so_on_the_simulated_gpu() {
    // The first eight mappings are those of two builds and two opens. The tenth is to replace the second chunk. Then
    // the former memory of that chunk cannot be mapped again, or that of the first chunk.
    for faults in ["cuMemMap:10=2,cuMemMap:11=2", "cuMemMap:10=2,cuMemMap:12=2"] {
        let text = play("loser", "lost ", faults);
        assert!(text.contains("version 1 of \"w\" is not mapped any more") && text.contains("cuMemMap"), "{text}");
    }
}

// Holds 273.
#[test]
fn other_layouts_and_streams_are_refused_on_the_simulated_gpu() {
    play("refused", "refused", "");
}
