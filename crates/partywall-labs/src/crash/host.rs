//! The scenes in host memory, where processes have neither streams nor events.

use rustix::process::{DumpableBehavior, set_dumpable_behavior};

use super::{
    scenes::{How, holds},
    *,
};

/// Plays the waiter or an actor.
pub(super) fn act(session: &mut Session) -> Result<(), Failure> {
    let domain = session.domain().clone();
    // Kept until the process ends normally.
    let mut keep: Vec<Box<dyn Any>> = Vec::new();
    while let Some(command) = session.parent().next()? {
        match command {
            Command::Serve { scene } => {
                for (name, kept) in [(KEPT, true), (OWNED, false)] {
                    keep.push(Box::new(make(&domain, &of(&scene, name), kept)?));
                }
                let writer = domain.timeline_writer(&of(&scene, LINE))?;
                writer.signal(1)?;
                keep.push(Box::new(writer));
                session.parent().say(())?;
            }
            Command::Await { scene, value } => wait(session, &domain, &scene, value)?,
            Command::Use { scene } => {
                keep.push(Box::new(domain.open(&of(&scene, OWNED), TIMEOUT)?));
                session.parent().say(())?;
            }
            Command::Abort => {
                // Without a core file the process ends immediately and releases what it holds.
                let _ = set_dumpable_behavior(DumpableBehavior::NotDumpable);
                std::process::abort();
            }
            _ => return Err(unexpected("a process in host memory got a command for a GPU")),
        }
    }
    Ok(())
}

/// Waits on the host, and reports how the wait ended.
fn wait(session: &mut Session, domain: &Domain, scene: &str, value: u64) -> Result<(), Failure> {
    let timeline = domain.timeline(&of(scene, LINE))?;
    session.parent().say(())?;
    let began = Moment::now();
    let host = timeline.wait(value, TIMEOUT);
    let host_at = Moment::now();
    let woken = Woken {
        host: ending(&host),
        host_at,
        stream_at: None,
        check: ending(&timeline.check()),
        reached: timeline.value(),
    };
    let step = Step::new(
        &format!("woken-{scene}"),
        format!("Waiting for {value}: {scene}"),
        "The end of a wait does not make the data valid: the wait returns an error.",
    )
    .value("the wait", format!("{}, after {}", woken.host, millis(host_at.since(began))))
    .value("signalled value", woken.reached.to_string())
    .judge(
        host.is_err() && woken.host != "Timeout",
        "the wait ended with an error",
        "the wait did not end as expected",
    );
    session.report(step)?;
    session.parent().say(woken)
}

/// Plays the observer.
pub(super) fn observe(session: &mut Session) -> Result<(), Failure> {
    let domain = session.domain().clone();
    let mut waiter = session.partner();
    for how in [How::Killed, How::Aborted] {
        let step = server(session, &domain, &mut waiter, how)?;
        session.report(step)?;
    }
    for how in [How::Killed, How::Aborted] {
        let step = client(session, &domain, how)?;
        session.report(step)?;
    }
    // Last, because no name exists any more after it.
    let step = broker(session, &domain, &mut waiter)?;
    session.report(step)?;
    session.report(streams())?;
    waiter.end();
    Ok(())
}

/// A server dies that has memory and a timeline, while another process waits for the timeline.
fn server(session: &Session, domain: &Domain, waiter: &mut Peer, how: How) -> Result<Step, Failure> {
    let scene = how.scene("server");
    let mut server = session.spawn("actor")?;
    server.ask::<()>(Command::Serve { scene: scene.clone() })?;
    let open = domain.open(&of(&scene, OWNED), TIMEOUT)?;
    waiter.ask::<()>(Command::Await { scene: scene.clone(), value: 2 })?;
    let (at, _) = how.inflict(&mut server)?;
    let woken: Woken = waiter.hear()?;
    let deadline = Instant::now() + TIMEOUT;
    let owned = loop {
        match domain.open(&of(&scene, OWNED), Duration::ZERO) {
            Ok(_) if Instant::now() < deadline => thread::sleep(Duration::from_millis(1)),
            answer => break ending(&answer),
        }
    };
    let kept = domain.open(&of(&scene, KEPT), TIMEOUT)?;
    let intact = is_whole(&open)?;
    let kept_intact = is_whole(&kept)?;
    drop(kept);
    domain.remove(&of(&scene, KEPT))?;
    let step = Step::new(
        &scene,
        how.title("server"),
        "Memory lives as long as any process has a reference: the broker has one for each kept name, and each reader \
         has one. The broker proves the death by the process's pidfd and the end of its connection. It then stores a \
         number that ends every wait for the timeline.",
    );
    Ok(step
        .value("waiter", format!("{} after {}", woken.host, millis(woken.host_at.since(at))))
        .value("memory open since before", intact_text(intact))
        .value("memory under a kept name", intact_text(kept_intact))
        .value("the name that it owned", if owned == "no error" { "still there" } else { &owned })
        .says(MAKER, !(intact && kept_intact))
        .says(HANGS, woken.host == "Timeout")
        .judge(
            woken.host == how.ending() && intact && kept_intact && owned != "no error",
            "its memory stays for processes that have it open, and waits for its timeline end with an error",
            format!("not all as expected: {} was expected", how.ending()),
        ))
}

/// A client dies that has a lease. The observer is the server.
fn client(session: &Session, domain: &Domain, how: How) -> Result<Step, Failure> {
    let scene = how.scene("client");
    let name = of(&scene, OWNED);
    let memory = make(domain, &name, false)?;
    let line = domain.timeline_writer(&of(&scene, LINE))?;
    let mut client = session.spawn("actor")?;
    let pid = client.pid;
    client.ask::<()>(Command::Use { scene: scene.clone() })?;
    let held = holds(domain, &name, pid)?;
    let (at, _) = how.inflict(&mut client)?;
    while holds(domain, &name, pid)? && Moment::now().since(at) < TIMEOUT {
        thread::sleep(Duration::from_millis(1));
    }
    let gone = !holds(domain, &name, pid)?;
    let after = Moment::now().since(at);
    let intact = is_whole(&memory)?;
    let signal = ending(&line.signal(1));
    let unharmed = intact && signal == "no error";
    let step = Step::new(
        &scene,
        how.title("client"),
        "The client has its own mapping, which ends with it, and a lease, which the broker takes back when the death \
         is proved. The server notices nothing.",
    );
    Ok(step
        .value("its lease, before", if held { "there" } else { "missing" })
        .value("its lease", if gone { format!("gone after {}", millis(after)) } else { "there".into() })
        .value("the server's memory", intact_text(intact))
        .value("the server's next signal", signal)
        .says(CLIENT_HARMS, !unharmed)
        .judge(
            held && gone && unharmed,
            "the server is not affected",
            if unharmed { "its lease did not end as expected" } else { "the server was harmed" },
        ))
}

/// The broker dies. No name exists afterwards.
fn broker(session: &mut Session, domain: &Domain, waiter: &mut Peer) -> Result<Step, Failure> {
    let scene = "broker-killed";
    let memory = make(domain, &of(scene, OWNED), false)?;
    let line = domain.timeline_writer(&of(scene, LINE))?;
    waiter.ask::<()>(Command::Await { scene: scene.into(), value: 1 })?;
    let killed = Moment::now();
    session.broker().kill();
    let woken: Woken = waiter.hear()?;
    let intact = is_whole(&memory)?;
    let open = ending(&domain.open(&of(scene, OWNED), Duration::ZERO));
    let signal = ending(&line.signal(1));
    Ok(Step::new(
        scene,
        "The broker and its supervisor are killed (SIGKILL)",
        "Each mapping is its own reference. Without the broker nothing notices deaths, so each process ends its own \
         waits for timelines when the broker's socket no longer answers.",
    )
    .value("memory that is mapped", intact_text(intact))
    .value("waiter", format!("{} after {}", woken.host, millis(woken.host_at.since(killed))))
    .value("the writer's next signal", signal)
    .value("opening a name", open)
    .says(BROKER_MEMORY, !intact)
    .says(HANGS, woken.host == "Timeout")
    .judge(
        intact && woken.host == "BrokerGone",
        "mapped memory stays, and the wait ended",
        "not all as expected: BrokerGone was expected",
    ))
}

/// Names what only a GPU shows.
fn streams() -> Step {
    let step = Step::new(
        "streams",
        "Streams, events, faults, and the memory of a GPU",
        "In host memory no stream waits for a dead process, no kernel faults, and nothing is allocated from a driver.",
    );
    step.untried(&[LEAK, EVENT_WAKES, VALID, FAULT_ENDS, OUTLIVES, TRAVELS], device::NEEDS_A_GPU)
}

/// Creates a named segment that contains the pattern.
fn make(domain: &Domain, name: &str, kept: bool) -> Result<Segment, Failure> {
    let builder = domain.create(name, Place::Host).tensor(TENSOR, DType::U32, &[ELEMENTS]).kept(kept);
    let mut build = builder.allocate()?;
    let bytes: Vec<u8> = (0..ELEMENTS as u32).flat_map(u32::to_le_bytes).collect();
    build.write(TENSOR, &bytes)?;
    Ok(build.commit()?)
}

/// Returns whether a segment contains the pattern.
fn is_whole(segment: &Segment) -> Result<bool, Failure> {
    let tensor = segment.tensor(TENSOR)?;
    Ok(tensor.as_slice::<u32>()?.iter().zip(0..).all(|(word, number)| *word == number))
}
