//! False clients: random bytes, false messages and floods.

use std::{
    os::fd::OwnedFd,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use partywall::{
    Block, DType, Domain, Error, Policy, Pool, TableBuilder, Topic,
    error::{Gone, LimitReached, TopicLimit},
};
use partywall_os::{map::SharedMap, memfd, socket};
use partywall_wire::{Answer, Call, Limit, MemberId, Refusal, RequestId, Resume, Table, Token};
use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, ftruncate, memfd_create};

use super::{
    Dice, WATCHDOG, eventually,
    place::{Place, commit, say},
    rounds,
    wire::{self, Client, encoded, hello, shake_hands},
    within,
};

#[test]
fn random_bytes_and_damaged_messages_hurt_only_their_sender() {
    let mut dice = Dice(17);
    for _ in 0..rounds(1) {
        send_nonsense(&mut dice);
    }
}

fn send_nonsense(dice: &mut Dice) {
    let mut place = Place::new();
    let domain = place.connect();
    let before = place.broker().open_files_at_rest();
    let pidfd = partywall_os::process::own_pidfd().unwrap();
    let mut suspects = 0;
    for round in 0..400 {
        let fds: Vec<OwnedFd> =
            (0..dice.below(4)).map(|_| memfd::frozen("partywall:stress", &[0; 8]).unwrap()).collect();
        let fds: Vec<&OwnedFd> = fds.iter().collect();
        if round % 4 == 0 {
            let call = wire::Framed::new(socket::connect(&place.socket()).unwrap());
            // As an operator, so that the living process leaves no members behind.
            let mut bytes = encoded(&hello(true, None));
            let at = dice.below(bytes.len() as u64) as usize;
            bytes[at] ^= 1 << dice.below(8);
            call.send(&bytes, &[&pidfd]);
            continue;
        }
        let mut client = Client::join(&place.socket());
        let (commit, own) = wire::commit("damaged", false, dice.below(2) == 0);
        let own: Vec<&OwnedFd> = own.iter().collect();
        let mut bytes = client.request(Call::Commit(commit), own.len());
        for _ in 0..1 + dice.below(3) {
            let at = dice.below(bytes.len() as u64) as usize;
            bytes[at] = dice.below(256) as u8;
        }
        bytes.truncate(1 + dice.below(bytes.len() as u64) as usize);
        client.call.send(&bytes, if dice.below(2) == 0 { &own } else { &fds });
        bytes = (0..dice.below(200)).map(|_| dice.below(256) as u8).collect();
        client.call.send(&bytes, &[]);
        suspects += 1;
        if suspects > 10 {
            // A living process may leave only a few members behind without a good-bye.
            let mut again = wire::shake_hands(&place.socket(), Some(client.identity())).unwrap();
            again.last = RequestId(client.last.0 + 1);
            assert_eq!(again.ask(Call::Bye), Ok(Answer::Done));
            suspects -= 1;
        }
    }
    domain.ping().unwrap();
    // All of them belonged to this process, which still runs, so they are suspects.
    let suspects = domain.members().unwrap().len();
    assert!(suspects > 1);
    // A commit whose name was damaged into another valid one is a commit. Nothing else has created a name.
    assert!(domain.names().unwrap().iter().all(|name| name.name.len() <= "damaged".len()));
    place.broker().await_files(before + 2 * suspects + 2);
}

// Holds 160.
#[test]
fn files_of_every_wrong_kind_are_refused() {
    let mut place = Place::new();
    let mut client = Client::join(&place.socket());
    let before = place.broker().open_files_at_rest();
    let (closed, _) = socket::pair().unwrap();
    let (pipe, _write) = rustix::pipe::pipe().unwrap();
    let open = |path: &str| Some(OwnedFd::from(std::fs::File::open(path).unwrap()));
    let wrong = [
        ("an eventfd", Some(rustix::event::eventfd(0, rustix::event::EventfdFlags::CLOEXEC).unwrap())),
        ("zeroes", open("/dev/zero")),
        ("a directory", open("/")),
        ("a file of proc", open("/proc/self/maps")),
        ("a socket whose peer is gone", Some(closed)),
        ("a pipe", Some(pipe)),
        ("a pidfd", Some(partywall_os::process::own_pidfd().unwrap())),
        ("memory that may be written", sealed(MemfdFlags::ALLOW_SEALING, FIXED)),
        (
            "memory that may still be written where it is mapped",
            sealed(MemfdFlags::ALLOW_SEALING, FIXED | SealFlags::FUTURE_WRITE),
        ),
    ];
    let wrong: Vec<_> = wrong.into_iter().chain(files_whose_memory_could_go()).collect();
    for (what, fd) in &wrong {
        let Some(fd) = fd else {
            eprintln!("not tested: {what}");
            continue;
        };
        let call = |table| Call::Commit(wire::host("wrong", true, vec![length(fd)], table));
        let outcome = client.ask_with(call(Table::Inline(Vec::new())), &[fd]).0;
        assert!(matches!(outcome, Err(Refusal::BadFd { index: 0, .. })), "{what}: {outcome:?}");
        let good = memfd::frozen("partywall:stress", &[0; 4096]).unwrap();
        let call = Call::Commit(wire::host("wrong", true, vec![4096], Table::Fd { bytes: length(fd) }));
        let outcome = client.ask_with(call, &[&good, fd]).0;
        assert!(matches!(outcome, Err(Refusal::BadFd { index: 1, .. })), "{what}: {outcome:?}");
        // Sealing the file afterwards has no effect, because no process got it.
        let _ = fcntl_add_seals(fd, FIXED | SealFlags::WRITE);
    }
    assert!(matches!(client.ask(wire::open("wrong", false)), Err(Refusal::NotFound { .. })));
    drop(wrong);
    place.broker().await_files(before);
}

/// Files whose bytes may go away under a process that has mapped them, whether it may write them or not.
fn files_whose_memory_could_go() -> Vec<(&'static str, Option<OwnedFd>)> {
    let tmpfs = tempfile::tempfile_in("/dev/shm").ok().map(|file| file.set_len(4096).map(|()| file).unwrap().into());
    let file = tempfile::tempfile().unwrap();
    file.set_len(4096).unwrap();
    let sealable = MemfdFlags::ALLOW_SEALING;
    vec![
        ("a file", Some(file.into())),
        ("a file of a tmpfs", tmpfs),
        ("memory without seals", sealed(sealable, SealFlags::empty())),
        ("memory that cannot be sealed", sealed(MemfdFlags::empty(), SealFlags::empty())),
        ("memory that may shrink", sealed(sealable, SealFlags::GROW | SealFlags::WRITE)),
        ("memory that may grow", sealed(sealable, SealFlags::SHRINK | SealFlags::WRITE)),
        ("large pages", sealed(sealable | MemfdFlags::HUGETLB, FIXED | SealFlags::WRITE)),
    ]
}

/// Returns `None` where the machine has no such memory.
fn sealed(flags: MemfdFlags, seals: SealFlags) -> Option<OwnedFd> {
    let fd = memfd_create("partywall:stress", MemfdFlags::CLOEXEC | flags).ok()?;
    // Memory in large pages has a length of several of them.
    ftruncate(&fd, if flags.contains(MemfdFlags::HUGETLB) { 2 << 20 } else { 4096 }).ok()?;
    if !seals.is_empty() {
        fcntl_add_seals(&fd, seals).ok()?;
    }
    Some(fd)
}

const FIXED: SealFlags = SealFlags::SHRINK.union(SealFlags::GROW);

/// The length that a liar states, so that nothing but the kind of the file is wrong.
fn length(fd: &OwnedFd) -> u64 {
    memfd::len(fd).unwrap().max(1)
}

// Holds 160.
#[test]
fn growth_by_memory_that_could_go_is_refused() {
    let mut place = Place::new();
    let mut client = Client::join(&place.socket());
    let chunk = memfd::Draft::create("partywall:stress", 4096).unwrap().share().unwrap();
    let (mut commit, _fds) = wire::commit("x", true, false);
    (commit.facts.mutable, commit.facts.reserved) = (true, 1 << 30);
    let Ok(Answer::Committed { lease, .. }) = client.ask_with(Call::Commit(commit), &[&chunk]).0 else {
        panic!("committed")
    };
    let before = place.broker().open_files_at_rest();
    let kind = partywall_wire::Kind::Host;
    let grow = |chunks, table| partywall_wire::Grow { lease, growths: 0, kind, chunks, table, tensors: 1 };
    for (what, fd) in files_whose_memory_could_go() {
        let Some(fd) = fd else {
            eprintln!("not tested: {what}");
            continue;
        };
        let call = Call::Grow(grow(vec![length(&fd)], Table::Inline(Vec::new())));
        let outcome = client.ask_with(call, &[&fd]).0;
        assert!(matches!(outcome, Err(Refusal::BadFd { index: 0, .. })), "{what}: {outcome:?}");
        let call = Call::Grow(grow(vec![4096], Table::Fd { bytes: length(&fd) }));
        let outcome = client.ask_with(call, &[&chunk, &fd]).0;
        assert!(matches!(outcome, Err(Refusal::BadFd { index: 1, .. })), "{what}: {outcome:?}");
    }
    // A table, unlike the memory, may not be written either.
    let outcome = client.ask_with(Call::Grow(grow(vec![4096], Table::Fd { bytes: 4096 })), &[&chunk, &chunk]).0;
    assert!(matches!(outcome, Err(Refusal::BadFd { index: 1, .. })), "{outcome:?}");
    place.broker().await_files(before);
}

#[test]
fn hundreds_of_files_at_once_hurt_only_their_sender() {
    let mut place = Place::new();
    let domain = place.connect();
    let before = place.broker().open_files_at_rest();
    let one = memfd::frozen("partywall:stress", &[0; 8]).unwrap();
    let many = vec![&one; socket::MAX_FDS];
    // With a first message, with a request, and with each byte of a request.
    let call = wire::Framed::new(socket::connect(&place.socket()).unwrap());
    call.send(&encoded(&hello(false, None)), &many);
    let mut client = Client::join(&place.socket());
    assert!(matches!(client.ask_with(Call::Ping, &many).0, Err(Refusal::Invalid { .. })));
    let mut client = Client::join(&place.socket());
    let bytes = client.request(Call::Ping, 5);
    for byte in bytes {
        if !client.call.send(&[byte], &many) {
            break;
        }
    }
    domain.ping().unwrap();
    drop((client, call));
    let outcome = |mut client: Client| {
        client.ask_with(Call::Commit(wire::host("x", false, vec![8; 253], Table::Inline(Vec::new()))), &many).0
    };
    assert!(matches!(outcome(Client::join(&place.socket())), Err(Refusal::Invalid { .. })));
    domain.ping().unwrap();
    let suspects = domain.members().unwrap().len();
    place.broker().await_files(before + 2 * suspects + 2);
}

#[test]
fn member_cannot_resume_as_another() {
    let place = Place::new();
    let victim = Client::join(&place.socket());
    let right = victim.identity();
    let mut dice = Dice(23);
    for _ in 0..rounds(50) {
        let mut token = right.token;
        token.0[dice.below(16) as usize] ^= 1 << dice.below(8);
        let wrong = Resume { token, ..right.clone() };
        assert_eq!(shake_hands(&place.socket(), Some(wrong)).err(), Some(Refusal::CannotResume));
        let wrong = Resume { member: MemberId(dice.below(u64::MAX)), token: Token([0; 16]), instance: right.instance };
        assert_eq!(shake_hands(&place.socket(), Some(wrong)).err(), Some(Refusal::CannotResume));
        let wrong = Resume { instance: dice.below(u64::MAX), ..right.clone() };
        assert_eq!(shake_hands(&place.socket(), Some(wrong)).err(), Some(Refusal::CannotResume));
    }
    drop(victim.events);
    assert!(shake_hands(&place.socket(), Some(right)).is_ok());
}

/// Uses all information about a segment, and every byte of it.
fn touch(domain: &Domain, name: &str) -> bool {
    let _ = domain.inspect(name).map(|info| format!("{info:?}"));
    let Ok(segment) = domain.open(name, Duration::ZERO) else { return false };
    for tensor in segment.tensors() {
        let _ = (tensor.elements(), tensor.is_contiguous(), tensor.strides(), tensor.shape());
        let bytes = tensor.to_vec().unwrap();
        assert_eq!(bytes.len() as u64, tensor.bytes());
        let _ = (tensor.as_slice::<f32>(), tensor.as_bytes().unwrap().iter().map(|b| u64::from(*b)).sum::<u64>());
        let _ = segment.tensor(tensor.name());
    }
    let _ = segment.metadata().count();
    true
}

#[test]
fn lying_tables_are_errors_of_the_opener() {
    let place = Place::new();
    let domain = place.connect();
    let mut client = Client::join(&place.socket());
    let mut builder = TableBuilder::new();
    for (name, shape) in [("a", vec![2, 3]), ("b", vec![64]), ("none", vec![0, 9]), ("ünï", vec![])] {
        builder.add(name, DType::F32, &shape).unwrap();
    }
    builder.set_metadata("format", "pt").unwrap();
    let layout = builder.layout(256, 8).unwrap();
    let fds: Vec<_> =
        layout.chunks.iter().map(|n| memfd::frozen("partywall:lies", &vec![1; *n as usize]).unwrap()).collect();
    let fds: Vec<&OwnedFd> = fds.iter().collect();
    let mut is_believed = |table: Vec<u8>, chunks: Vec<u64>, apart: bool| {
        let mut fds = fds[..chunks.len()].to_vec();
        let mut apart_fd = None;
        let table = if apart {
            let fd = apart_fd.insert(memfd::frozen("partywall:lies", &table).unwrap());
            fds.push(fd);
            Table::Fd { bytes: table.len() as u64 }
        } else {
            Table::Inline(table)
        };
        let committed = client.ask_with(Call::Commit(wire::host("lies", true, chunks, table)), &fds).0;
        let Ok(Answer::Committed { lease, .. }) = committed else { panic!("{committed:?}") };
        let believed = touch(&domain, "lies");
        client.ask(Call::Release { lease }).unwrap();
        believed
    };
    assert!(is_believed(layout.table.clone(), layout.chunks.clone(), false));
    assert!(is_believed(layout.table.clone(), layout.chunks.clone(), true));
    // Fewer chunks than the table states, no chunks, and an invalid table.
    assert!(!is_believed(layout.table.clone(), layout.chunks[..1].to_vec(), false));
    assert!(!is_believed(layout.table.clone(), Vec::new(), false));
    assert!(!is_believed(Vec::new(), layout.chunks.clone(), false));
    assert!(!is_believed(vec![0; 8192], layout.chunks.clone(), true));
    let mut dice = Dice(31);
    let mut believed = 0;
    for at in 0..layout.table.len() {
        for value in [0, 1, 0x7f, 0x80, 0xff] {
            let mut table = layout.table.clone();
            table[at] = value;
            believed += usize::from(is_believed(table, layout.chunks.clone(), at % 16 == 0));
        }
    }
    for _ in 0..rounds(300) {
        let mut table = layout.table.clone();
        for _ in 0..1 + dice.below(4) {
            let at = dice.below(table.len() as u64 - 7) as usize;
            let words = [0, 1, u64::MAX, u64::MAX / 2, 1 << 32, 1 << 62, dice.below(1000)];
            table[at..at + 8].copy_from_slice(&words[dice.below(7) as usize].to_le_bytes());
        }
        believed += usize::from(is_believed(table, layout.chunks.clone(), false));
    }
    eprintln!("{believed} changed tables were believed");
}

#[test]
fn shape_with_a_zero_has_no_elements() {
    let place = Place::new();
    let domain = place.connect();
    let builder = domain.create("x", partywall::Place::Host).tensor("x", DType::U8, &[1 << 40, 1 << 40, 0]);
    let segment = builder.allocate().unwrap().commit().unwrap();
    assert_eq!(segment.tensor("x").unwrap().elements(), 0);
    assert!(segment.tensor("x").unwrap().is_contiguous());
}

/// Checks that round trips are answered while `flood` continues on another thread.
fn pings_go_on_during(place: &Place, flood: impl Fn(&AtomicBool) + Send + Sync + 'static) {
    let domain = place.connect();
    let done = Arc::new(AtomicBool::new(false));
    let thread = std::thread::spawn({
        let done = done.clone();
        move || flood(&done)
    });
    std::thread::sleep(Duration::from_millis(50));
    // Each round trip fails after the timeout of any call.
    for _ in 0..20 {
        domain.ping().unwrap();
        std::thread::sleep(Duration::from_millis(1));
    }
    done.store(true, Ordering::Relaxed);
    thread.join().unwrap();
}

#[test]
fn flooding_client_blocks_no_other() {
    let place = Place::new();
    let socket = place.socket();
    pings_go_on_during(&place, move |done| {
        let mut client = Client::join(&socket);
        let pings: Vec<u8> = (0..5000).flat_map(|_| client.request(Call::Ping, 0)).collect();
        drop(client.events);
        // A send does not wait as long as the broker reads. Nothing reads the broker's answers.
        while !done.load(Ordering::Relaxed) && client.call.send(&pings, &[]) {}
    });
}

#[test]
fn client_that_does_not_read_blocks_no_other() {
    let place = Place::new();
    let domain = place.connect();
    let fd = memfd::frozen("partywall:stress", &[0; 8]).unwrap();
    let mut client = Client::join(&place.socket());
    for i in 0..3000 {
        let commit = wire::host(&format!("name-{i}"), true, vec![8], Table::Inline(Vec::new()));
        client.ask_with(Call::Commit(commit), &[&fd]).0.unwrap();
    }
    drop(domain);
    let socket = place.socket();
    pings_go_on_during(&place, move |done| {
        while !done.load(Ordering::Relaxed) {
            // One process may leave only a few members behind until the broker has read all their requests.
            let Ok(mut client) = wire::shake_hands(&socket, None) else { continue };
            // The most expensive request, as often as possible between two others.
            let questions: Vec<u8> = (0..3000).flat_map(|_| client.request(Call::Status, 0)).collect();
            client.call.send(&questions, &[]);
        }
    });
}

#[test]
fn claims_of_names_without_end_reach_a_limit() {
    let place = Place::with("names=100");
    let mut client = Client::join(&place.socket());
    let refusal = (0..1000).find_map(|i| client.ask(Call::OpenOrBuild { name: wire::called(&format!("n{i}")) }).err());
    assert!(matches!(refusal, Some(Refusal::Limit { limit: Limit::Names, allowed: 100, .. })), "{refusal:?}");
    assert_eq!(client.ask(Call::Bye), Ok(Answer::Done));
    let domain = place.connect();
    drop(commit(&domain, "x", 1, false).unwrap());
    drop(domain.open_or_build("x", Duration::ZERO).unwrap());
}

#[test]
fn frozen_memory_declared_mutable_is_an_error_of_its_writer() {
    let place = Place::new();
    let mut client = Client::join(&place.socket());
    let (mut commit, fds) = wire::commit("x", true, false);
    commit.facts.mutable = true;
    client.ask_with(Call::Commit(commit), &fds.iter().collect::<Vec<_>>()).0.unwrap();
    let domain = place.connect();
    assert!(domain.opener("x").read_write().open().is_err());
    let opened = domain.open("x", Duration::ZERO).unwrap();
    assert_eq!(opened.tensor("x").unwrap().shared::<u32>().unwrap().get(5), 0x0101_0101);
    drop(opened);
    eventually("no lease", || domain.status().unwrap().leases == 1);
}

// Holds 55.
#[test]
fn growth_that_moves_tensors_is_refused_by_readers() {
    let place = Place::new();
    let mut client = Client::join(&place.socket());
    let chunk = || memfd::Draft::create("partywall:stress", 4096).unwrap().share().unwrap();
    let (mut commit, mut fds) = wire::commit("x", true, false);
    (commit.facts.mutable, commit.facts.reserved, fds[0]) = (true, 1 << 20, chunk());
    let Ok(Answer::Committed { lease, .. }) = client.ask_with(Call::Commit(commit), &[&fds[0]]).0 else {
        panic!("committed")
    };
    let domain = place.connect();
    let opened = domain.open("x", Duration::ZERO).unwrap();

    let table = |tensors: &[(&str, u64)]| {
        let mut builder = TableBuilder::new();
        tensors.iter().for_each(|(name, n)| builder.add(name, DType::U32, &[*n]).unwrap());
        Table::Inline(builder.layout(u64::MAX, 1).unwrap().table)
    };
    let lies = [
        table(&[("y", 1), ("x", 1024)]),
        table(&[("x", 1023)]),
        table(&[("x", 3000)]),
        table(&[]),
        Table::Inline(vec![7; 100]),
    ];
    for (growths, table) in lies.into_iter().enumerate() {
        let chunks = vec![4096; usize::from(growths == 0)];
        let growths = growths as u64;
        let fd = chunk();
        let fds = if chunks.is_empty() { vec![] } else { vec![&fd] };
        let kind = partywall_wire::Kind::Host;
        let grow = partywall_wire::Grow { lease, growths, kind, chunks, table, tensors: 1 };
        assert_eq!(client.ask_with(Call::Grow(grow), &fds).0, Ok(Answer::Done));
        let refused = opened.refresh();
        assert!(
            matches!(refused, Err(partywall::Error::InvalidData(partywall::error::InvalidData::Table { .. }))),
            "{growths}: {refused:?}"
        );
        assert_eq!((opened.len(), opened.bytes(), opened.tensor("x").unwrap().elements()), (1, 4096, 1024));
    }
    // In the end the correct table is accepted.
    let kind = partywall_wire::Kind::Host;
    let table = table(&[("x", 2048)]);
    let grow = partywall_wire::Grow { lease, growths: 5, kind, chunks: vec![], table, tensors: 1 };
    assert_eq!(client.ask(Call::Grow(grow)), Ok(Answer::Done));
    assert_eq!(opened.refresh().unwrap(), partywall::Refreshed::Grown);
    assert_eq!(opened.tensor("x").unwrap().shared::<u32>().unwrap().len(), 2048);
}

/// A member writes arbitrary values to the control memory of a pool. Every call of the other members on the pool still
/// ends; the blocks that they hold may be lost.
// Holds 158.
#[test]
fn corrupt_control_memory_of_a_pool_hangs_no_call() {
    let place = Place::new();
    let domain = place.connect();
    let pool = domain.pool("frames").blocks(4).block_bytes(64).place(partywall::Place::Host).create().unwrap();
    let mut hostile = Client::join(&place.socket());
    let (answer, fds) = hostile.ask_with(wire::open("frames", false), &[]);
    assert!(matches!(answer, Ok(Answer::Opened(_))));
    let words = SharedMap::writable(fds.last().unwrap()).unwrap();
    // All words except those that are read only at mapping.
    let words = words.slice::<u64>(64, words.len() / 8 - 8).unwrap();
    let pool = Arc::new(pool);
    let done = Arc::new(AtomicBool::new(false));
    let users = [(); 2].map(|()| {
        let pool = pool.clone();
        let done = done.clone();
        std::thread::spawn(move || {
            while !done.load(Ordering::Relaxed) {
                use_for_a_while(&pool);
            }
        })
    });
    let mut dice = Dice(29);
    for _ in 0..rounds(20_000) {
        let at = if dice.below(2) == 0 { dice.below(36) } else { dice.below(words.len() as u64) } as usize;
        let word = match dice.below(3) {
            0 => dice.below(u64::MAX),
            1 => words.get(at) ^ 1 << dice.below(64),
            _ => dice.below(4) | dice.below(3) << 18,
        };
        words.set(at, word);
    }
    done.store(true, Ordering::Relaxed);
    within(WATCHDOG, "all calls end", move || users.map(|user| user.join().unwrap()));
    // The domain is unchanged.
    let other = domain.pool("others").blocks(1).block_bytes(64).place(partywall::Place::Host).create().unwrap();
    other.alloc(Duration::ZERO).unwrap().release().unwrap();
}

/// Calls all operations of pools, and accepts any result.
fn use_for_a_while(pool: &Pool) {
    for timeout in [Duration::ZERO, Duration::from_micros(200)] {
        pool.stats();
        let mut block = match pool.alloc(timeout) {
            Ok(block) => block,
            Err(Error::Timeout { .. }) => continue,
            Err(error) => panic!("{error}"),
        };
        match block.bytes_mut() {
            Ok(bytes) => bytes.fill(1),
            // Another thread of this process was given the block, too.
            Err(Error::Gone(Gone::HeldBlock { .. })) => {}
            Err(error) => panic!("{error}"),
        }
        match block.offer().and_then(|reference| pool.accept(&reference)).and_then(Block::release) {
            Ok(()) | Err(Error::Gone(Gone::HeldBlock { .. } | Gone::Block { .. })) => {}
            Err(error) => panic!("{error}"),
        }
    }
}

/// The same with the control memory of a topic and of its pool.
#[test]
fn corrupt_control_memory_of_a_topic_hangs_no_call() {
    let place = Place::new();
    let domain = place.connect();
    let options = |name| {
        domain.topic(name).max_bytes(64).place(partywall::Place::Host).depth(4).publishers(2).subscribers(3).held(2)
    };
    let topic = options("frames").create().unwrap();
    let mut hostile = Client::join(&place.socket());
    let (answer, fds) = hostile.ask_with(wire::open("frames", false), &[]);
    assert!(matches!(answer, Ok(Answer::Opened(_))));
    let maps: Vec<_> = fds[fds.len() - 2..].iter().map(|fd| SharedMap::writable(fd).unwrap()).collect();
    // All words except those that are read only at mapping.
    let words: Vec<_> = maps.iter().map(|map| map.slice::<u64>(64, map.len() / 8 - 8).unwrap()).collect();
    let topic = Arc::new(topic);
    let done = Arc::new(AtomicBool::new(false));
    let users = [(); 2].map(|()| {
        let topic = topic.clone();
        let done = done.clone();
        std::thread::spawn(move || {
            while !done.load(Ordering::Relaxed) {
                use_topic_for_a_while(&topic);
            }
        })
    });
    // Other processes join and die, so that the broker recovers; and the broker is asked for its counts.
    let asker = {
        let other = place.connect();
        let done = done.clone();
        std::thread::spawn(move || {
            while !done.load(Ordering::Relaxed) {
                other.inspect("frames").unwrap();
                drop(other.topic("frames").open().unwrap().subscriber(Policy::Block));
            }
        })
    };
    let mut dice = Dice(31);
    for round in 0..rounds(40_000) {
        let words = &words[usize::from(dice.below(4) > 0)];
        let at = if dice.below(2) == 0 { dice.below(120) } else { dice.below(words.len() as u64) } as usize;
        let word = match dice.below(4) {
            0 => dice.below(u64::MAX),
            1 => words.get(at) ^ 1 << dice.below(64),
            2 => dice.below(32) << 16 | dice.below(24),
            _ => dice.below(4) | dice.below(3) << 2 | dice.below(8) << 18,
        };
        words.set(at, word);
        if round % 4000 == 0 {
            place.play("guest").kill();
        }
    }
    done.store(true, Ordering::Relaxed);
    within(WATCHDOG, "all calls end", move || {
        users.into_iter().chain([asker]).for_each(|user| user.join().unwrap());
    });
    // The domain is unchanged.
    let other = options("others").create().unwrap();
    let subscriber = other.subscriber(Policy::Block).unwrap();
    let loan = other.publisher().unwrap().loan(DType::U8, &[4], Duration::ZERO).unwrap();
    loan.filled().publish(Duration::ZERO).unwrap();
    drop(subscriber.recv(Duration::ZERO).unwrap());
}

/// Positions that never occur: entries of laps far ahead, followed by entries of the first lap.
#[test]
fn damaged_ring_ends_calls_of_publishers_and_subscribers() {
    let place = Place::new();
    let domain = place.connect();
    let topic = domain.topic("frames").max_bytes(64).place(partywall::Place::Host).depth(4).create().unwrap();
    let mut hostile = Client::join(&place.socket());
    let (_, fds) = hostile.ask_with(wire::open("frames", false), &[]);
    let map = SharedMap::writable(fds.last().unwrap()).unwrap();
    let words = map.slice::<u64>(0, map.len() / 8).unwrap();
    let tail = 8;
    let entry = |index: usize| 32 + 16 * index;
    let far = |lap: u64| lap << 16;
    let publisher = topic.publisher().unwrap();
    let publish = move || {
        let loan = publisher.loan(DType::U8, &[1], WATCHDOG).unwrap();
        loan.filled().publish(Duration::from_millis(1)).map_err(|unpublished| unpublished.error)
    };
    let subscriber = topic.subscriber(Policy::Latest).unwrap();
    for _ in 0..4 {
        publish().unwrap();
    }
    assert_eq!(subscriber.recv(WATCHDOG).unwrap().position(), 3);
    words.set(entry(0), far(1 << 40));
    within(WATCHDOG, "receiving ends", move || {
        assert!(subscriber.try_recv().unwrap().is_none());
        assert!(matches!(subscriber.recv(Duration::from_millis(1)), Err(Error::Timeout { .. })));
    });
    words.set(entry(0), far(1));
    words.set(entry(3), far(1 << 40));
    words.set(tail, 1 << 50);
    within(WATCHDOG, "publishing ends", move || assert!(matches!(publish(), Err(Error::Timeout { .. }))));
}

/// A reader that makes an array of a sample's type and shape reads only that array.
#[test]
fn sample_with_a_false_shape_has_no_elements() {
    let place = Place::new();
    let domain = place.connect();
    let topic = domain.topic("frames").max_bytes(64).place(partywall::Place::Host).create().unwrap();
    let mut hostile = Client::join(&place.socket());
    let (_, fds) = hostile.ask_with(wire::open("frames", false), &[]);
    let map = SharedMap::writable(fds.last().unwrap()).unwrap();
    let words = map.slice::<u64>(0, map.len() / 8).unwrap();
    let publisher = topic.publisher().unwrap();
    let subscriber = topic.subscriber(Policy::Block).unwrap();
    let stats = topic.stats();
    // The words of the first block, which are the last words. In them the shape begins at byte 64.
    let shape = words.len() - 48 * stats.free as usize + 8;
    for lie in [1 << 60, 65, 7, 8] {
        let loan = publisher.loan(DType::U8, &[8], Duration::ZERO).unwrap();
        loan.filled().publish(Duration::ZERO).unwrap();
        for block in 0..stats.free as usize {
            words.set(shape + 48 * block, lie);
        }
        let sample = subscriber.recv(Duration::ZERO).unwrap();
        let expected = if lie == 8 { 8 } else { 0 };
        assert_eq!((sample.dtype(), sample.shape(), sample.len()), (DType::U8, &[expected][..], expected));
        assert_eq!(sample.bytes().unwrap().len() as u64, expected);
    }
}

/// The role of a process that is killed while it uses that topic.
pub(crate) fn guest() {
    let domain = Domain::options().start(false).connect().unwrap();
    let topic = domain.topic("frames").open().unwrap();
    say("ready");
    loop {
        use_topic_for_a_while(&topic);
    }
}

/// Calls all operations of topics, and accepts any result.
fn use_topic_for_a_while(topic: &Topic) {
    topic.stats();
    let publisher = match topic.publisher() {
        Ok(publisher) => Some(publisher),
        Err(Error::LimitReached(LimitReached::Topic { limit: TopicLimit::Publishers, .. })) => None,
        Err(error) => panic!("{error}"),
    };
    let policies = [Policy::Block, Policy::DropOldest, Policy::Latest];
    let subscribers: Vec<_> = policies.iter().filter_map(|policy| topic.subscriber(*policy).ok()).collect();
    for timeout in [Duration::ZERO, Duration::from_micros(200)] {
        if let Some(publisher) = &publisher
            && let Ok(mut loan) = publisher.loan(DType::U64, &[8], timeout)
        {
            if let Ok(bytes) = loan.bytes_mut() {
                bytes.fill(1);
            }
            loan.header(&[1; 256]).unwrap();
            drop(loan.filled().publish(timeout));
        }
        for subscriber in &subscribers {
            let Ok(sample) = subscriber.recv(timeout) else { continue };
            assert!(sample.header().len() <= 256 && sample.len() <= 64);
            // A reader that reads the stated number of elements reads nothing else.
            let elements = sample.shape().iter().try_fold(1_u64, |all, extent| all.checked_mul(*extent));
            assert_eq!(elements.and_then(|elements| sample.dtype().bytes_for(elements)), Some(sample.len()));
            drop((sample.check(), sample.wait(timeout), sample.as_slice::<u64>().map(<[u64]>::to_vec)));
            subscriber.stats();
        }
    }
}
