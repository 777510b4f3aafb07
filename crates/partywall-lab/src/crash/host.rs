//! The scenes in host memory, where processes have neither streams nor events.

use super::{
    scenes::{self, How},
    *,
};

/// Plays the observer.
pub(super) fn observe(session: &mut Session) -> Result<(), Failure> {
    let domain = session.domain().clone();
    let mut waiter = session.partner();
    for how in How::ON_HOST {
        let step = server(session, &domain, &mut waiter, how)?;
        session.report(step)?;
    }
    for how in How::ON_HOST {
        let step = scenes::client(session, &domain, None, how)?;
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
    let _without_event: Served = server.ask(Command::Serve { scene: scene.clone() })?;
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
    let intact = has(None, &open, 1)?;
    let kept_intact = has(None, &kept, 1)?;
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

/// The broker dies. No name exists afterwards.
fn broker(session: &mut Session, domain: &Domain, waiter: &mut Peer) -> Result<Step, Failure> {
    let scene = "broker-killed";
    let memory = make(domain, None, &of(scene, OWNED), false)?;
    let line = domain.timeline_writer(&of(scene, LINE))?;
    waiter.ask::<()>(Command::Await { scene: scene.into(), value: 1 })?;
    let killed = Moment::now();
    session.broker().kill();
    let woken: Woken = waiter.hear()?;
    let intact = has(None, &memory, 1)?;
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
