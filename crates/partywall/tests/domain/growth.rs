//! Mutable versions that become longer, with readers that follow and readers that do not.

use std::{io::Read, time::Duration};

use partywall::{
    DType, Domain, Error, Limit, NoGrowth, Place, Refreshed, Segment, SharedSlice,
    error::{Denied, InvalidArgument, LimitReached},
};

use super::{
    TIMEOUT,
    world::{World, commit, eventually},
};

/// Elements of one row of the tensor `rows`.
const ROW: u64 = 256;

/// The roles of the other processes.
#[allow(clippy::print_stdout)] // it is how they talk to the test
pub(crate) fn play(role: &str) {
    let domain = Domain::options().start(false).connect().unwrap();
    match role {
        "grower" => {
            let log = log(&domain, "log", 3, 1 << 30);
            println!("ready");
            // Until it is killed, at whatever step.
            for rows in 4.. {
                log.grow().extend("rows", rows).spare((rows % 5) << 12).commit().unwrap();
                write(&log, rows - 1);
                println!("rows {rows}");
                if rows == 100 {
                    let _ = std::io::stdin().read(&mut [0]);
                }
            }
        }
        "follower" => {
            println!("ready");
            // Waits for the commit, and so usually opens the version before any growth.
            let log = domain.open("log", TIMEOUT).unwrap();
            let first = rows(&log);
            let opened = first.len();
            while (rows(&log).len() as u64) < 100 * ROW {
                assert_eq!(log.wait_growth(TIMEOUT).unwrap(), Refreshed::Grown);
                // Existing bytes stay where they are while the version grows.
                assert_eq!((first.len(), first.get(0)), (opened, 1));
            }
            println!("followed");
            let _ = std::io::stdin().read(&mut [0]);
        }
        other => panic!("no role is called {other:?}"),
    }
}

/// Commits a kept `rows` of as many rows, each written with its number from 1 on.
fn log(domain: &Domain, name: &str, rows: u64, reserve: u64) -> Segment {
    let builder = domain.create(name, Place::Host).tensor("rows", DType::U32, &[rows, ROW]).kept(true);
    let log = builder.mutable(true).reserve(reserve).allocate().unwrap().commit().unwrap();
    (0..rows).for_each(|row| write(&log, row));
    log
}

fn write(log: &Segment, row: u64) {
    let number = (row as u32 + 1).to_ne_bytes().repeat(ROW as usize);
    log.tensor("rows").unwrap().write_at(row * ROW * 4, &number).unwrap();
}

fn rows(log: &Segment) -> SharedSlice<'_, u32> {
    log.tensor("rows").unwrap().shared().unwrap()
}

fn assert_rows(log: &Segment, count: u64) {
    let values = rows(log);
    assert_eq!(values.len() as u64, count * ROW);
    assert!((0..count * ROW).all(|i| u64::from(values.get(i as usize)) == i / ROW + 1));
}

fn cannot_grow(result: partywall::Result<impl Sized>) -> NoGrowth {
    match result {
        Err(Error::Denied(Denied::Growth { why, .. })) => why,
        Err(other) => panic!("{other}"),
        Ok(_) => panic!("it has grown"),
    }
}

// Holds 7.
#[test]
fn segment_grows_in_place_and_readers_refresh() {
    let world = World::new();
    let ours = world.connect();
    let theirs = world.connect();
    let log = log(&ours, "log", 3, 1 << 20);
    let reader = theirs.open("log", Duration::ZERO).unwrap();
    let old = rows(&reader);
    let bytes = reader.bytes();
    assert_eq!(
        (log.reserved(), reader.reserved(), reader.refresh().unwrap()),
        (1 << 20, 1 << 20, Refreshed::Unchanged)
    );

    // 3 rows are within a page, 30 are not.
    log.grow().extend("rows", 30).tensor("end", DType::U8, &[5]).commit().unwrap();
    (3..30).for_each(|row| write(&log, row));
    assert_rows(&log, 30);
    assert_eq!((reader.len(), reader.bytes(), rows(&reader).len()), (1, bytes, old.len()));

    assert_eq!(reader.refresh().unwrap(), Refreshed::Grown);
    assert_rows(&reader, 30);
    assert_eq!((reader.len(), reader.version(), reader.bytes()), (2, 1, log.bytes()));
    assert_eq!((old.len() as u64, old.get(0)), (3 * ROW, 1), "what was borrowed before stays as it was");
    log.tensor("rows").unwrap().write_at(0, &9_u32.to_ne_bytes()).unwrap();
    assert_eq!((old.get(0), rows(&reader).get(0)), (9, 9), "and is the same memory");
    assert_eq!(reader.refresh().unwrap(), Refreshed::Unchanged);
    assert_eq!(theirs.open("log", Duration::ZERO).unwrap().tensor("end").unwrap().bytes(), 5);
    let info = theirs.inspect("log").unwrap();
    assert_eq!((info.version.growths, info.version.reserved, info.chunks.len()), (1, 1 << 20, 2));
    assert_eq!(info.table.find("end").unwrap().offset(), 30 * ROW * 4);
}

#[test]
fn segment_without_tensors_can_grow() {
    let world = World::new();
    let domain = world.connect();
    let segment =
        domain.create("x", Place::Host).mutable(true).metadata("k", "v").allocate().unwrap().commit().unwrap();
    let reader = domain.open("x", Duration::ZERO).unwrap();
    segment.grow().tensor("a", DType::U8, &[100_000]).commit().unwrap();
    assert_eq!(reader.refresh().unwrap(), Refreshed::Grown);
    assert_eq!(reader.tensor("a").unwrap().to_vec().unwrap(), vec![0; 100_000]);
    assert_eq!(reader.metadata().collect::<Vec<_>>(), [("k", "v")]);
}

// Holds 52.
#[test]
fn reader_without_room_keeps_the_old_length() {
    let world = World::new();
    let domain = world.connect();
    let log = log(&domain, "log", 3, 1 << 20);
    let reader = domain.opener("log").reserve(0).open().unwrap();
    assert_eq!(reader.reserved(), reader.bytes());
    log.grow().extend("rows", 30).commit().unwrap();
    (3..30).for_each(|row| write(&log, row));
    let expected = Refreshed::DoesNotFit { bytes: log.bytes(), reserved: reader.bytes() };
    assert_eq!((reader.refresh().unwrap(), reader.wait_growth(TIMEOUT).unwrap()), (expected, expected));
    assert_rows(&reader, 3);
    assert_rows(&domain.opener("log").reserve(0).open().unwrap(), 30);
}

#[test]
fn growth_into_spare_room_needs_no_memory() {
    let world = World::new();
    let domain = world.connect();
    let log = log(&domain, "log", 3, 1 << 20);
    log.grow().spare(64 * 1024).commit().unwrap();
    let fds = domain.status().unwrap().fds;
    let bytes = log.bytes();
    log.grow().extend("rows", 20).commit().unwrap();
    (3..20).for_each(|row| write(&log, row));
    assert_eq!((domain.status().unwrap().fds, log.bytes()), (fds, bytes));
    assert_rows(&domain.open("log", Duration::ZERO).unwrap(), 20);
}

// Holds 56.
#[test]
fn waiters_for_a_growth_get_it_and_its_end() {
    let world = World::new();
    let ours = world.connect();
    let theirs = world.connect();
    let log = log(&ours, "log", 3, 1 << 20);
    let reader = theirs.open("log", Duration::ZERO).unwrap();
    assert!(matches!(reader.wait_growth(Duration::ZERO), Err(Error::Timeout { .. })));
    std::thread::scope(|scope| {
        let waiter = scope.spawn(|| reader.wait_growth(TIMEOUT).unwrap());
        log.grow().extend("rows", 4).commit().unwrap();
        assert_eq!(waiter.join().unwrap(), Refreshed::Grown);
        let waiter = scope.spawn(|| cannot_grow(reader.wait_growth(TIMEOUT)));
        drop(log);
        assert_eq!(waiter.join().unwrap(), NoGrowth::CommitterGone);
    });
    assert_eq!(rows(&reader).len() as u64, 4 * ROW);
}

// Holds 53.
#[test]
fn refused_growths_of_host_memory_leave_the_segment_as_it_was() {
    let world = World::with(|config| config.limits.bytes = 1 << 20);
    let ours = world.connect();
    let theirs = world.connect();
    let log = log(&ours, "log", 3, 2 << 20);
    let before = ours.status().unwrap();
    let frozen = commit(&ours, "frozen", 1, false);
    assert_eq!(cannot_grow(frozen.grow().tensor("a", DType::U8, &[1]).commit()), NoGrowth::Fixed);
    assert_eq!(cannot_grow(frozen.wait_growth(TIMEOUT)), NoGrowth::Fixed);
    assert_eq!(frozen.refresh().unwrap(), Refreshed::Unchanged);
    drop(frozen);
    let writer = theirs.opener("log").read_write().open().unwrap();
    assert_eq!(cannot_grow(writer.grow().extend("rows", 30).commit()), NoGrowth::NotCommitter);
    drop(writer);

    let grow = |change: fn(partywall::Growth<'_>) -> partywall::Growth<'_>| change(log.grow()).commit();
    let reserved = cannot_grow(grow(|g| g.spare(2 << 20)));
    assert!(matches!(reserved, NoGrowth::Reserved { reserved: 0x20_0000, needed } if needed > 2 << 20));
    let bytes = grow(|g| g.spare(1 << 20));
    assert!(matches!(bytes, Err(Error::LimitReached(LimitReached::Broker { limit: Limit::Bytes, .. }))), "{bytes:?}");
    assert!(matches!(grow(|g| g.extend("rows", 2)), Err(Error::InvalidArgument(InvalidArgument::Table { .. }))));
    assert!(matches!(grow(|g| g.extend("row", 9)), Err(Error::InvalidArgument(InvalidArgument::Table { .. }))));
    assert!(matches!(
        grow(|g| g.tensor("rows", DType::U8, &[1])),
        Err(Error::InvalidArgument(InvalidArgument::Table { .. }))
    ));
    assert_eq!(ours.status().unwrap(), before);
    assert_rows(&log, 3);
    grow(|g| g.extend("rows", 30)).unwrap();
    (3..30).for_each(|row| write(&log, row));
    assert_rows(&theirs.open("log", Duration::ZERO).unwrap(), 30);
}

#[test]
fn chunks_of_a_version_are_limited() {
    let world = World::new();
    let domain = world.connect();
    let log = log(&domain, "log", 4, 1 << 20);
    let page = log.bytes();
    let reader = domain.open("log", Duration::ZERO).unwrap();
    for n in 2..=128 {
        log.grow().extend("rows", n * page / ROW / 4).commit().unwrap();
    }
    let full = log.grow().extend("rows", 129 * page / ROW / 4).commit();
    assert!(
        matches!(
            full,
            Err(Error::LimitReached(LimitReached::Broker { limit: Limit::Chunks, allowed: 128, needed: 129, .. }))
        ),
        "{full:?}"
    );
    assert_eq!(reader.refresh().unwrap(), Refreshed::Grown, "all at once");
    assert_eq!((reader.bytes(), log.bytes()), (128 * page, 128 * page));
    (4..128 * page / ROW / 4).for_each(|row| write(&log, row));
    assert_rows(&reader, 128 * page / ROW / 4);
    assert_rows(&domain.open("log", Duration::ZERO).unwrap(), 128 * page / ROW / 4);
}

#[test]
fn large_tables_grow_too() {
    let world = World::new();
    let domain = world.connect();
    let segment = domain.create("x", Place::Host).mutable(true).allocate().unwrap().commit().unwrap();
    let reader = domain.open("x", Duration::ZERO).unwrap();
    let fds = domain.status().unwrap().fds;
    for part in 0..3 {
        let mut growth = segment.grow();
        for i in 0..1000 {
            growth = growth.tensor(&format!("part.{part}.tensor.{i}"), DType::U8, &[1]);
        }
        growth.commit().unwrap();
    }
    assert_eq!(domain.status().unwrap().fds, fds + 3 + 1, "one a chunk, and one for the table of all");
    assert_eq!((reader.refresh().unwrap(), reader.len()), (Refreshed::Grown, 3000));
}

#[test]
fn growers_in_several_threads_take_turns() {
    let world = World::new();
    let domain = world.connect();
    let segment = domain.create("x", Place::Host).mutable(true).allocate().unwrap().commit().unwrap();
    std::thread::scope(|scope| {
        for thread in 0..4 {
            let segment = &segment;
            scope.spawn(move || {
                for i in 0..8 {
                    segment.grow().tensor(&format!("{thread}.{i}"), DType::U8, &[5000]).commit().unwrap();
                }
            });
        }
    });
    let reader = domain.open("x", Duration::ZERO).unwrap();
    assert_eq!((reader.len(), domain.inspect("x").unwrap().version.growths), (32, 32));
}

#[test]
fn reader_follows_a_grower_in_another_process() {
    let world = World::new();
    let mut follower = world.play("follower");
    let mut grower = world.play("grower");
    follower.expect("followed");
    grower.expect("rows 100");
}

// Holds 54.
#[test]
fn killed_grower_leaves_the_old_or_the_new_length() {
    let world = World::new();
    let domain = world.connect();
    let mut lengths = std::collections::BTreeSet::new();
    for round in 0..12_u64 {
        let mut grower = world.play("grower");
        let reader = domain.open("log", TIMEOUT).unwrap();
        let said = 4 + round * 3;
        grower.expect(&format!("rows {said}"));
        // The moment differs from round to round, so that the grower is killed in different steps.
        for _ in 0..round * 40 {
            std::hint::black_box(domain.inspect("log").unwrap());
        }
        grower.kill();
        eventually("the proof of death", || domain.members().unwrap().iter().all(|m| m.pid != grower.pid()));

        let whole = domain.open("log", Duration::ZERO).unwrap();
        let count = rows(&whole).len() as u64 / ROW;
        assert!(count >= said, "{count} rows, {said} were said");
        // On a slow machine the reader may have opened the version only after the growths.
        let behind = (rows(&reader).len() as u64) < count * ROW;
        assert_eq!(reader.refresh().unwrap(), if behind { Refreshed::Grown } else { Refreshed::Unchanged });
        assert_eq!((rows(&reader).len() as u64, reader.bytes()), (count * ROW, whole.bytes()));
        // All but the last row were written before the next one came.
        let values = rows(&reader);
        assert!((0..(count - 1) * ROW).all(|i| u64::from(values.get(i as usize)) == i / ROW + 1));
        assert_eq!(cannot_grow(reader.wait_growth(TIMEOUT)), NoGrowth::CommitterGone);
        lengths.insert(count);
        drop((values, whole));
        domain.remove("log").unwrap();
    }
    assert!(lengths.len() > 1);
    eventually("no memory left", || domain.status().unwrap().fds == 0);
}
