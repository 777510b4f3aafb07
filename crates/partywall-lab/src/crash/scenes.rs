//! The scenes: a server and a client die in three ways, and the broker is killed.

use super::{observer::Observer, *};
use crate::device::{Gate, ends, under_mps};

/// How a process ends.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum How {
    Killed,
    Aborted,
    Faulted,
}

impl How {
    pub(super) const ALL: [Self; 3] = [Self::Killed, Self::Aborted, Self::Faulted];

    /// Those of a process without a GPU.
    pub(super) const ON_HOST: [Self; 2] = [Self::Killed, Self::Aborted];

    /// Returns the name of a scene.
    pub(super) fn scene(self, who: &str) -> String {
        match self {
            Self::Killed => format!("{who}-killed"),
            Self::Aborted => format!("{who}-aborted"),
            Self::Faulted => format!("{who}-faulted"),
        }
    }

    pub(super) fn title(self, who: &str) -> String {
        match self {
            Self::Killed => format!("The {who} is killed (SIGKILL)"),
            Self::Aborted => format!("The {who} calls abort()"),
            Self::Faulted => format!("A kernel of the {who}'s writes to an illegal address"),
        }
    }

    /// Ends a process this way. Returns when others can notice it, and the result of the process's own next call if it
    /// still runs.
    pub(super) fn inflict(self, actor: &mut Peer) -> Result<(Moment, Option<String>), Failure> {
        let now = Moment::now();
        match self {
            Self::Killed => actor.kill(),
            Self::Aborted => {
                actor.say(Command::Abort)?;
                has_ended(actor.pid);
            }
            Self::Faulted => {
                let Faulted { at, own_call } = actor.ask(Command::Fault)?;
                return Ok((at, Some(own_call)));
            }
        }
        Ok((now, None))
    }

    /// Returns how the process's timelines end.
    pub(super) fn ending(self) -> &'static str {
        if self == Self::Faulted { "OwnerFaulted" } else { "OwnerDied" }
    }
}

const SERVER: &str = "Memory lives as long as any process has a reference: the broker has one for each kept name, and \
    each reader has one. The broker proves the death by the process's pidfd and the end of its connection, or is \
    notified of the fault. It then stores a number that ends every wait for the timeline. It cannot end the wait for \
    an event: only the dead process's own work could have done that.";

/// A server dies that has memory, a timeline and an event, while others wait for the timeline and the event.
pub(super) fn server(observer: &mut Observer<'_>, how: How) -> Result<Step, Failure> {
    let scene = how.scene("server");
    let step = Step::new(&scene, how.title("server"), SERVER);
    let mps = under_mps(&observer.gpu)?;
    if mps && how == How::Faulted {
        return Ok(step.untried(&[], SHARED_FAULT));
    }
    let before = free_memory(observer)?;
    let mut server = observer.session.spawn("actor")?;
    let event: Served = server.ask(Command::Serve { scene: scene.clone() })?;
    let open = observer.domain.open(&of(&scene, OWNED), TIMEOUT)?;
    observer.waiter.ask::<()>(Command::Await { scene: scene.clone(), value: 2 })?;
    let blocked = match event {
        Ok(_) if mps => Err(SHARED_EVENT.to_owned()),
        Ok(handle) => {
            let mut actor = observer.session.spawn("actor")?;
            actor.ask::<()>(Command::AwaitEvent { handle })?;
            Ok(actor)
        }
        Err(why) => Err(why),
    };

    let (at, own_call) = how.inflict(&mut server)?;
    let woken: Woken = observer.waiter.hear()?;
    thread::sleep(POLLED.saturating_sub(Moment::now().since(at)));
    let by_event = blocked.and_then(|mut actor| {
        let polled = poll(&mut actor);
        // The wait may never end.
        actor.kill();
        polled
    });
    let intact = has(Some(&observer.gpu), &open, 1)?;
    let kept = observer.domain.open(&of(&scene, KEPT), TIMEOUT)?;
    let kept_intact = has(Some(&observer.gpu), &kept, 1)?;
    let owned = ending(&observer.domain.open(&of(&scene, OWNED), Duration::ZERO));
    if how == How::Faulted {
        server.end();
    }
    let taken = before.saturating_sub(free_memory(observer)?);
    drop(kept);
    observer.domain.remove(&of(&scene, KEPT))?;

    let blocked_text = format!("still blocked after {}, and killed", millis(POLLED));
    let mut step = step;
    if let Some(own_call) = &own_call {
        step = step.value("its process", "lives").value("its own next call", own_call).says(FAULT_ENDS, false);
    }
    step = step
        .value("waiter, on the host", format!("{} after {}", woken.host, millis(woken.host_at.since(at))))
        .value("waiter, on a stream", stream_text(&woken, at))
        .value("process that waits for its event", event_text(&by_event, &blocked_text))
        .value("memory open since before", intact_text(intact))
        .value("memory under a kept name", intact_text(kept_intact))
        .value("the name that it owned", if owned == "no error" { "still there" } else { &owned });
    step = if is_simulated(observer) {
        step.leaves_open(&[LEAK])
    } else {
        let label = if how == How::Faulted { "GPU memory, after its end" } else { "GPU memory" };
        let had = partywall::bytes(MUCH);
        step.value(label, format!("{} still taken; it had {had} without a name", partywall::bytes(taken)))
            .says(LEAK, taken >= MUCH)
    };
    if let Ok(done) = by_event {
        step = step.says(EVENT_WAKES, done);
    }
    let went_on = woken.stream_at.is_some();
    let gone = own_call.is_some() || owned != "no error";
    Ok(step
        .says(MAKER, !(intact && kept_intact))
        .says(HANGS, !went_on)
        .says(VALID, !(went_on && woken.reached < 2))
        .judge(
            woken.host == how.ending() && woken.check == how.ending() && went_on && intact && kept_intact && gone,
            "its memory stays for processes that have it open, and waits for its timeline end with an error",
            format!("not all as expected: {} was expected", how.ending()),
        ))
}

const CLIENT: &str = "The client has its own mapping, which ends with it, and a lease, which the broker takes back \
    when the death is proved. While a process with a broken CUDA context lives, no one can know what its GPU work \
    still does, so the lease stays. The server notices nothing.";

const CLIENT_ON_HOST: &str = "The client has its own mapping, which ends with it, and a lease, which the broker takes \
    back when the death is proved. The server notices nothing.";

/// A client dies that has a lease, and on a GPU a stream that waits for the server. The observer is the server.
pub(super) fn client(session: &Session, domain: &Domain, gpu: Option<&Gpu>, how: How) -> Result<Step, Failure> {
    let scene = how.scene("client");
    let step = Step::new(&scene, how.title("client"), if gpu.is_some() { CLIENT } else { CLIENT_ON_HOST });
    let mps = gpu.map_or(Ok(false), under_mps)?;
    if mps && how == How::Faulted {
        return Ok(step.untried(&[], SHARED_FAULT));
    }
    let name = of(&scene, OWNED);
    let memory = make(domain, gpu, &name, false)?;
    let line = domain.timeline_writer(&of(&scene, LINE))?;
    let mut client = session.spawn("actor")?;
    let pid = client.pid;
    client.ask::<()>(Command::Use { scene })?;
    let held = holds(domain, &name, pid)?;

    let (mut at, own_call) = how.inflict(&mut client)?;
    let mut step = step.value("its lease, before", if held { "there" } else { "missing" });
    if let Some(own_call) = own_call {
        thread::sleep(POLLED.saturating_sub(Moment::now().since(at)));
        let still = holds(domain, &name, pid)?;
        step = step
            .value("its process", "lives")
            .value("its own next call", own_call)
            .value(format!("its lease, {} later", millis(POLLED)), if still { "there" } else { "gone" })
            .says(FAULT_ENDS, false);
        at = Moment::now();
        client.end();
    }
    let limit = if mps { POLLED } else { TIMEOUT };
    let gone = until(limit, Duration::from_millis(1), || Ok(!holds(domain, &name, pid)?))?;
    let after = Moment::now().since(at);
    let since = match how {
        How::Faulted => " since the end of its process",
        _ if gpu.is_some() => " since then",
        _ => "",
    };
    step = step.value("its lease", if gone { format!("gone after {}{since}", millis(after)) } else { "there".into() });
    let mut lease = held && gone;
    if mps {
        let freed = domain.free_unproven(Some(pid));
        let still = holds(domain, &name, pid)?;
        lease = held && !gone && freed.is_ok() && !still;
        step = step
            .value("under MPS", "no proof that its GPU work is over: its lease stays in quarantine (unproven)")
            .value("its lease, after rm --unproven", if still { "there" } else { "gone" });
    }
    let intact = has(gpu, &memory, 1)?;
    let signal = ending(&line.signal(1));
    let unharmed = intact && signal == "no error";
    Ok(step
        .value("the server's memory", intact_text(intact))
        .value("the server's next signal", signal)
        .says(CLIENT_HARMS, !unharmed)
        .judge(
            lease && unharmed,
            "the server is not affected",
            if lease { "the server was harmed" } else { "its lease did not end as expected" },
        ))
}

/// The broker dies. No name exists afterwards.
pub(super) fn broker(observer: &mut Observer<'_>) -> Result<(), Failure> {
    let scene = "broker-killed";
    let memory = make(&observer.domain, Some(&observer.gpu), &of(scene, OWNED), false)?;
    let shelf = observer.domain.create(&of(scene, KEPT), Place::Gpu(observer.gpu.uuid()));
    // No process maps it, so only the broker keeps it.
    drop(shelf.tensor(TENSOR, DType::U8, &[MUCH]).kept(true).allocate()?.commit()?);
    let line = observer.domain.timeline_writer(&of(scene, LINE))?;
    observer.waiter.ask::<()>(Command::Await { scene: scene.into(), value: 1 })?;

    // The event is behind a word that the observer writes when the broker is dead.
    let gate = Gate::new(&observer.gpu)?;
    let stream = Stream::new(observer.gpu.context()).doing("creating a stream")?;
    let event = IpcEvent::create(&observer.gpu).and_then(|event| Ok((event.export()?.0.to_vec(), event)));
    let blocked = match event {
        Ok((handle, event)) => {
            gate.hold(stream.as_ref())?;
            event.record(stream.as_ref())?;
            let mut actor = observer.session.spawn("actor")?;
            actor.ask::<()>(Command::AwaitEvent { handle })?;
            Ok((actor, event))
        }
        Err(error) => Err(error.to_string()),
    };

    let before = free_memory(observer)?;
    let killed = Moment::now();
    observer.session.broker().kill();
    let woken: Woken = observer.waiter.hear()?;
    let freed = free_memory(observer)?.saturating_sub(before);
    gate.open()?;
    ends(stream.as_ref(), TIMEOUT)?;
    let by_event = blocked.and_then(|(mut actor, _event)| {
        let mut polled = Ok(false);
        while polled == Ok(false) && Moment::now().since(killed) < TIMEOUT {
            polled = poll(&mut actor);
        }
        actor.kill();
        polled
    });
    let intact = has(Some(&observer.gpu), &memory, 1)?;
    let open = ending(&observer.domain.open(&of(scene, OWNED), Duration::ZERO));
    let signal = ending(&line.signal(1));

    let went_on = woken.stream_at.is_some();
    let step = Step::new(
        scene,
        "The broker and its supervisor are killed (SIGKILL)",
        "Each mapping is its own reference, and an event needs only the drivers of two processes. Without the broker \
         nothing notices deaths, so each process ends its own waits for timelines when the broker's socket no longer \
         answers. Memory that no process has mapped is gone with the broker's descriptors.",
    )
    .value("memory that is mapped", intact_text(intact))
    .value("waiter, on the host", format!("{} after {}", woken.host, millis(woken.host_at.since(killed))))
    .value("waiter, on a stream", stream_text(&woken, killed))
    .value("the writer's next signal", signal)
    .value("process that waits for an event", event_text(&by_event, "still blocked"))
    .value("opening a name", open);
    let step = if is_simulated(observer) {
        step.leaves_open(&[OUTLIVES])
    } else {
        let all = partywall::bytes(MUCH);
        step.value("memory that no process had mapped", format!("{} of {all} freed", partywall::bytes(freed)))
            .says(OUTLIVES, freed < MUCH)
    };
    observer.session.report(step.says(BROKER_MEMORY, !intact).says(HANGS, !went_on).judge(
        intact && went_on && woken.host == "BrokerGone",
        "mapped memory stays, and all waits ended",
        "not all as expected: BrokerGone was expected",
    ))
}

/// Asks an actor whether its stream still waits for the event.
fn poll(actor: &mut Peer) -> StreamDone {
    actor.ask::<StreamDone>(Command::Poll).map_err(|failure| failure.message)?
}

fn event_text(polled: &StreamDone, blocked: &str) -> String {
    match polled {
        Ok(true) => "continued".into(),
        Ok(false) => blocked.into(),
        Err(why) => why.clone(),
    }
}

fn stream_text(woken: &Woken, since: Moment) -> String {
    match woken.stream_at {
        Some(at) => format!("continued after {}, check: {}", millis(at.since(since)), woken.check),
        None => "still waits".into(),
    }
}

/// The reason why a fault is not tried under MPS.
const SHARED_FAULT: &str = "under MPS a fault ends CUDA in all clients of the server: run this lab without MPS, with \
    CUDA_MPS_PIPE_DIRECTORY=/nonexistent";

/// The reason why no process waits for the event of a dead process under MPS.
const SHARED_EVENT: &str = "not tried: under MPS its CUDA would end with the recorder";

/// Returns whether the driver is simulated. The amount of free memory then ignores other processes.
fn is_simulated(observer: &Observer<'_>) -> bool {
    observer.gpu.context().driver().is_simulated()
}

/// Returns whether a process has a lease on a name.
fn holds(domain: &Domain, name: &str, pid: u32) -> Result<bool, Failure> {
    match domain.inspect(name) {
        Ok(info) => Ok(info.holders.iter().any(|holder| holder.pid == pid)),
        Err(Error::NotFound(NotFound::Name { .. })) => Ok(false),
        Err(error) => Err(error.into()),
    }
}

/// Returns the free memory of the GPU, which other processes use, too.
fn free_memory(observer: &Observer<'_>) -> Result<u64, Failure> {
    Ok(observer.gpu.context().memory_info().doing("asking for free memory")?.free)
}
