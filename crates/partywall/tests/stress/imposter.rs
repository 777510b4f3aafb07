//! A false broker: the library returns errors, and does not hang, panic or leak.

use std::{
    os::fd::{AsFd, OwnedFd},
    path::Path,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    thread::JoinHandle,
    time::{Duration, Instant},
};

use partywall::{Domain, Error, Place as At};
use partywall_os::{memfd, socket};
use partywall_shm::members::{self, Members};
use partywall_wire::{
    Answer, BrokerHello, ClaimId, Commit, Event, LeaseId, MemberId, MemberInfo, MemberState, NameInfo, Opened, Reply,
    Request, RequestId, Table, Token, Welcome, frame,
    handshake::{self, Speaker},
    limits::MAX_MESSAGE,
};

use super::{
    place::{Place, commit, say},
    wire::{self, Framed},
    within,
};

/// The row of the member that is lied to.
const ROW: u16 = 9;

/// The kinds of imposters.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Lie {
    HangsUp,
    HangsUpAfterHello,
    Garbage,
    HugeHello,
    NoEvents,
    FiveFds,
    EventsOf(&'static str),
    NoRows,
    RowsOf(&'static str),
    HelloFdsThatNeverCome,
    WrongId,
    GarbageReply,
    HugeReply,
    FdsThatNeverCome,
    UnwantedFds,
    FdsWithoutEnd,
    WrongIdsWithoutEnd,
    SlowBytes,
    Silence,
    AlwaysPending,
    AlwaysDone,
    OpenedWithout,
    OpenedWrong,
    OpenedTooMany,
    ListsWithoutEnd,
    Events,
    EventsFds,
    EventsGarbage,
}

const LIES: [Lie; 34] = [
    Lie::HangsUp,
    Lie::HangsUpAfterHello,
    Lie::Garbage,
    Lie::HugeHello,
    Lie::NoEvents,
    Lie::FiveFds,
    Lie::EventsOf("eventfd"),
    Lie::EventsOf("zero"),
    Lie::EventsOf("pipe"),
    Lie::EventsOf("memfd"),
    Lie::EventsOf("closed"),
    Lie::NoRows,
    Lie::RowsOf("memfd"),
    Lie::RowsOf("none"),
    Lie::RowsOf("zero"),
    Lie::HelloFdsThatNeverCome,
    Lie::WrongId,
    Lie::GarbageReply,
    Lie::HugeReply,
    Lie::FdsThatNeverCome,
    Lie::UnwantedFds,
    Lie::FdsWithoutEnd,
    Lie::WrongIdsWithoutEnd,
    Lie::SlowBytes,
    Lie::Silence,
    Lie::AlwaysPending,
    Lie::AlwaysDone,
    Lie::OpenedWithout,
    Lie::OpenedWrong,
    Lie::OpenedTooMany,
    Lie::ListsWithoutEnd,
    Lie::Events,
    Lie::EventsFds,
    Lie::EventsGarbage,
];

fn memory() -> OwnedFd {
    memfd::frozen("partywall:lie", &[0; 8]).unwrap()
}

/// Serves one connection with false answers until it ends.
fn serve(call: OwnedFd, lie: Lie, done: &AtomicBool) -> Option<()> {
    let mut call = Framed::new(call);
    if lie == Lie::HangsUp {
        return None;
    }
    call.receive()?;
    match lie {
        Lie::HangsUpAfterHello => return None,
        Lie::Garbage => return call.send(&[0x5a; 100], &[]).then_some(()),
        Lie::HugeHello => return call.send(&[0xff, 0xff, 0xff, 0x7f, 0, 0, 0, 0], &[]).then_some(()),
        _ => {}
    }
    let (events, theirs) = socket::pair().unwrap();
    let events = Framed::new(events);
    let token = Token([0; 16]);
    let max_message = 1 << 18;
    let welcome = Welcome { member: MemberId(1), row: ROW, token, uid: 0, resumed: true, max_message };
    let fds = match lie {
        Lie::NoEvents => 0,
        Lie::NoRows => 1,
        Lie::FiveFds | Lie::HelloFdsThatNeverCome => 5,
        _ => 2,
    };
    let hello =
        handshake::encode(&Speaker::new("lie"), &BrokerHello { instance: 1, outcome: Ok(welcome) }, fds).unwrap();
    let theirs = match lie {
        Lie::EventsOf("eventfd") => rustix::event::eventfd(1, rustix::event::EventfdFlags::empty()).unwrap(),
        Lie::EventsOf("zero") => std::fs::File::open("/dev/zero").unwrap().into(),
        Lie::EventsOf("pipe") => rustix::pipe::pipe().unwrap().0,
        Lie::EventsOf("memfd") => memory(),
        Lie::EventsOf(_) => socket::pair().unwrap().1,
        _ => theirs,
    };
    let rows = match lie {
        Lie::RowsOf("memfd") => memory(),
        // Fewer rows than our number. Missing rows are not written.
        Lie::RowsOf("none") => Members::create(0).unwrap(),
        Lie::RowsOf(_) => std::fs::File::open("/dev/zero").unwrap().into(),
        _ => rows(ROW),
    };
    match lie {
        Lie::NoEvents => call.send(&hello, &[]),
        Lie::HelloFdsThatNeverCome => {
            call.send(&hello, &[&theirs]);
            while !done.load(Ordering::Relaxed) && call.send(&[0; 4096], &[]) {}
            return None;
        }
        Lie::FiveFds => call.send(&hello, &[&theirs; 5]),
        Lie::NoRows => call.send(&hello, &[&theirs]),
        _ => call.send(&hello, &[&theirs, &rows]),
    };
    drop(theirs);
    let noise = |ticket: u64, fds: usize| {
        let outcome = Ok(Answer::Opened(opened(1)));
        frame::encode(&Event::Completion { ticket: RequestId(ticket), outcome }, fds, MAX_MESSAGE).unwrap()
    };
    loop {
        let (body, _) = call.receive()?;
        let request: Request = partywall_wire::Frame { body, fds: 0 }.decode().unwrap();
        let id = request.id;
        let reply =
            |answer: Answer, fds: usize| frame::encode(&Reply { id, outcome: Ok(answer) }, fds, MAX_MESSAGE).unwrap();
        let done_reply = reply(Answer::Done, 0);
        let good = match lie {
            Lie::WrongId => {
                let wrong = Reply { id: RequestId(id.0 + 7), outcome: Ok(Answer::Done) };
                call.send(&frame::encode(&wrong, 0, MAX_MESSAGE).unwrap(), &[])
            }
            Lie::GarbageReply => call.send(&[8, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff, 0xff, 0xff, 9, 9, 9, 9], &[]),
            Lie::HugeReply => call.send(&[0xff; 16], &[]),
            Lie::FdsThatNeverCome => {
                call.send(&reply(Answer::Done, 100), &[]);
                while !done.load(Ordering::Relaxed) && call.send(&[0; 4096], &[]) {}
                false
            }
            Lie::UnwantedFds => call.send(&done_reply, &[&memory(), &memory()]),
            Lie::FdsWithoutEnd => {
                let fd = memory();
                while !done.load(Ordering::Relaxed) && call.send(&[100], &[&fd; 200]) {}
                false
            }
            Lie::WrongIdsWithoutEnd => {
                let wrong = Reply { id: RequestId(0), outcome: Ok(Answer::Build { claim: ClaimId(1) }) };
                let wrong = frame::encode(&wrong, 0, MAX_MESSAGE).unwrap().repeat(100);
                while !done.load(Ordering::Relaxed) && call.send(&wrong, &[]) {}
                false
            }
            Lie::SlowBytes => {
                call.send(&[0, 0, 1, 0, 0, 0, 0, 0], &[]);
                while !done.load(Ordering::Relaxed) && call.send(&[0], &[]) {
                    std::thread::sleep(Duration::from_millis(50));
                }
                false
            }
            Lie::Silence => true,
            Lie::AlwaysPending => call.send(&reply(Answer::Pending, 0), &[]),
            Lie::OpenedWithout => call.send(&reply(Answer::Opened(opened(3)), 0), &[]),
            Lie::OpenedWrong => {
                let (a, _b) = socket::pair().unwrap();
                call.send(&reply(Answer::Opened(opened(1)), 1), &[&a])
            }
            Lie::OpenedTooMany => call.send(&reply(Answer::Opened(opened(1)), 3), &[&memory(), &memory(), &memory()]),
            Lie::ListsWithoutEnd => call.send(&endless(&request, id.0), &[]),
            Lie::Events if !matches!(request.call, partywall_wire::Call::Release { .. }) => {
                for ticket in 0..50 {
                    events.send(&noise(ticket, 0), &[]);
                }
                call.send(&done_reply, &[])
            }
            Lie::EventsFds if !matches!(request.call, partywall_wire::Call::Release { .. }) => {
                for ticket in 0..20 {
                    events.send(&noise(ticket, 2), &[&memory(), &memory()]);
                }
                events.send(&noise(id.0, 100), &[&memory()]);
                call.send(&done_reply, &[])
            }
            Lie::EventsGarbage => {
                events.send(&[0xff; 64], &[]);
                call.send(&done_reply, &[])
            }
            _ => call.send(&done_reply, &[]),
        };
        if !good {
            return None;
        }
    }
}

fn opened(chunks: usize) -> Opened {
    let table = Table::Inline(vec![1; 100]);
    let Commit { name, facts, chunks, handles, table, .. } = wire::host("x", false, vec![8; chunks], table);
    Opened { lease: LeaseId(1), name, version: 1, facts, uid: 0, chunks, handles, table, growths: 0 }
}

/// Sends the same page again and again.
fn endless(request: &Request, id: u64) -> Vec<u8> {
    let answer = match request.call {
        partywall_wire::Call::List { .. } => Answer::Names {
            names: vec![NameInfo {
                name: "same".into(),
                latest: None,
                usage: None,
                older: 0,
                older_bytes: 0,
                notice: None,
                lost: false,
            }],
            more: true,
        },
        partywall_wire::Call::Members { .. } => Answer::Members {
            members: vec![MemberInfo {
                member: 1,
                pid: 1,
                uid: 1,
                command: "same".into(),
                state: MemberState::Alive,
                doubt: None,
                mps: None,
                quiet: None,
                timelines: 0,
                permits: Some(0),
                blocks: Some(0),
                tasks: Some(0),
                leases: 0,
                bytes: 0,
                since: 0,
                waits: Vec::new(),
                simulated: false,
            }],
            more: true,
        },
        _ => Answer::Done,
    };
    frame::encode(&Reply { id: RequestId(id), outcome: Ok(answer) }, 0, MAX_MESSAGE).unwrap()
}

/// The role of a process that connects to an imposter.
pub(crate) fn victim() {
    let files = || std::fs::read_dir("/proc/self/fd").unwrap().count();
    let before = files();
    let connected = Domain::options().start(false).connect();
    if let Ok(domain) = connected {
        let mut said = Vec::new();
        let mut note = |what: &str, outcome: Result<(), Error>| said.push(format!("{what}: {outcome:?}"));
        note("ping", domain.ping());
        note("open", domain.open("x", Duration::ZERO).map(drop));
        note("wait", domain.open("x", Duration::from_millis(50)).map(drop));
        note("build", domain.open_or_build("x", Duration::from_millis(50)).map(drop));
        note("names", domain.names().map(drop));
        note("members", domain.members().map(drop));
        note("status", domain.status().map(drop));
        note("inspect", domain.inspect("x").map(drop));
        note("remove", domain.remove("x").map(drop));
        note("commit", commit(&domain, "x", 1, false).map(drop));
        let _ = domain.create("y", At::Host);
        drop(domain);
        said.iter().for_each(|line| say(line.chars().take(150).collect::<String>()));
    } else {
        say(format!("not connected: {connected:?}"));
    }
    assert_eq!(files(), before, "files stay open");
    say("good");
}

fn listen(path: &Path) -> OwnedFd {
    use std::os::unix::fs::DirBuilderExt;
    std::fs::DirBuilder::new().mode(0o700).recursive(true).create(path.parent().unwrap()).unwrap();
    socket::listen(path).unwrap()
}

#[test]
fn any_answer_of_a_false_broker_is_an_error_in_time() {
    let victims: Vec<_> = LIES
        .into_iter()
        .map(|lie| {
            std::thread::spawn(move || {
                let place = Place::empty();
                let listener = listen(&place.socket());
                let done = Arc::new(AtomicBool::new(false));
                let liar = std::thread::spawn({
                    let done = done.clone();
                    move || {
                        let mut servants = Vec::new();
                        while !done.load(Ordering::Relaxed) {
                            let soon = std::time::Instant::now() + Duration::from_millis(20);
                            let _ = socket::wait(listener.as_fd(), socket::Ready::Read, Some(soon));
                            if let Ok(Some(call)) = socket::accept(&listener) {
                                let done = done.clone();
                                servants.push(std::thread::spawn(move || serve(call, lie, &done)));
                            }
                        }
                    }
                });
                let start = std::time::Instant::now();
                let mut victim = place.start("victim");
                within(Duration::from_secs(120), &format!("{lie:?}"), move || {
                    victim.expect("good");
                    assert!(victim.join().success());
                });
                eprintln!("{lie:?}: {:?}", start.elapsed());
                done.store(true, Ordering::Relaxed);
                liar.join().unwrap();
            })
        })
        .collect();
    let failed: Vec<_> =
        LIES.into_iter().zip(victims).filter_map(|(lie, v)| v.join().is_err().then_some(lie)).collect();
    assert!(failed.is_empty(), "{failed:?}");
}

/// Greets a client as the only broker that it knows. Returns its connection and its events socket; `None` once the
/// client has ended. Connections on which the client has stopped waiting for that are passed over.
fn greet(listener: &OwnedFd, client: &JoinHandle<()>) -> Option<(Framed, Framed)> {
    loop {
        let is_over = client.is_finished();
        let soon = Some(Instant::now() + Duration::from_millis(50));
        if !socket::wait(listener.as_fd(), socket::Ready::Read, soon).unwrap() {
            if is_over {
                return None;
            }
            continue;
        }
        let mut call = Framed::new(socket::accept(listener).unwrap().unwrap());
        if call.receive().is_none() {
            continue;
        }
        let (events, theirs) = socket::pair().unwrap();
        let welcome = Welcome {
            member: MemberId(1),
            row: ROW,
            token: Token([0; 16]),
            uid: 0,
            resumed: true,
            max_message: 1 << 18,
        };
        let hello =
            handshake::encode(&Speaker::new("lie"), &BrokerHello { instance: 1, outcome: Ok(welcome) }, 2).unwrap();
        if call.send(&hello, &[&theirs, &rows(ROW)]) {
            return Some((call, Framed::new(events)));
        }
    }
}

/// Returns the rows of a domain, with the time in the row of the member.
fn rows(row: u16) -> OwnedFd {
    let rows = Members::create(16).unwrap();
    Members::map(&rows).unwrap().beat(row, members::now());
    rows
}

fn next_request(call: &mut Framed) -> Request {
    partywall_wire::Frame { body: call.receive().unwrap().0, fds: 0 }.decode().unwrap()
}

/// A broker does not answer a call, and its connection ends before the caller stops waiting, or afterwards. Returns
/// false if the client has left without a good-bye: it waits no more than half a second for a broker that was silent.
fn unanswered_call_is_given_up(ends_before: bool) -> bool {
    let place = Place::empty();
    let listener = listen(&place.socket());
    let path = place.socket();
    let (failed, has_failed) = std::sync::mpsc::channel();
    let client = std::thread::spawn(move || {
        let domain = Domain::options().socket(path).start(false).connect().unwrap();
        failed.send(domain.open("x", Duration::ZERO).map(drop)).unwrap();
        // Its end is the good-bye.
        drop(domain);
    });
    let (mut call, events) = greet(&listener, &client).unwrap();
    let asked = next_request(&mut call);
    assert!(matches!(asked.call, partywall_wire::Call::Open(_)), "{asked:?}");
    let mut first = Some((call, events));
    first.take_if(|_| ends_before);
    // Until then no other connection is greeted.
    assert!(has_failed.recv().unwrap().is_err());
    drop(first);
    let mut given_up = Vec::new();
    let mut is_leaving = false;
    while !is_leaving {
        let Some((mut call, _events)) = greet(&listener, &client) else { return false };
        while let Some((body, _)) = call.receive() {
            let request: Request = partywall_wire::Frame { body, fds: 0 }.decode().unwrap();
            match request.call {
                partywall_wire::Call::GiveUp { request } => given_up.push(request),
                partywall_wire::Call::Bye => is_leaving = true,
                _ => {}
            }
            let reply = Reply { id: request.id, outcome: Ok(Answer::Done) };
            call.send(&frame::encode(&reply, 0, MAX_MESSAGE).unwrap(), &[]);
        }
    }
    client.join().unwrap();
    assert_eq!(given_up, [asked.id]);
    true
}

// Holds 133.
#[test]
fn call_that_was_not_answered_is_given_up_on_the_next_connection() {
    let both = [true, false].map(|ends_before| {
        std::thread::spawn(move || assert!((0..10).any(|_| unanswered_call_is_given_up(ends_before)), "{ends_before}"))
    });
    both.into_iter().for_each(|test| test.join().unwrap());
}
