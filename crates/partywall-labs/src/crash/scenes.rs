//! The scenes: a server dies in three ways, a client does, the broker does.

use super::{observer::Observer, *};
use crate::device::{Gate, ends, under_mps};

/// How a process comes to its end.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum How {
    Killed,
    Aborted,
    Faulted,
}

impl How {
    /// The name of a scene.
    fn scene(self, who: &str) -> String {
        match self {
            Self::Killed => format!("{who}-killed"),
            Self::Aborted => format!("{who}-aborted"),
            Self::Faulted => format!("{who}-faulted"),
        }
    }

    fn title(self, who: &str) -> String {
        match self {
            Self::Killed => format!("The {who} is killed (SIGKILL)"),
            Self::Aborted => format!("The {who} calls abort()"),
            Self::Faulted => format!("A kernel of the {who}'s writes to an illegal address"),
        }
    }

    /// Has it come; from when on others can know, and what the process's own next call says if there is one.
    fn come(self, actor: &mut Peer) -> Result<(Moment, Option<String>), Failure> {
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

    /// What others are told of its timelines.
    fn ending(self) -> &'static str {
        if self == Self::Faulted { "OwnerFaulted" } else { "OwnerDied" }
    }
}

/// A server dies: it has memory, a timeline and an event, and others wait for both.
pub(super) fn server(observer: &mut Observer<'_>) -> Result<(), Failure> {
    in_each_way(observer, "server", SERVER, one_server)
}

/// Tells of the same death in each way in which it can come.
fn in_each_way(
    observer: &mut Observer<'_>,
    who: &str,
    why: &str,
    scene: fn(How, Step, &mut Observer<'_>) -> Result<Step, Failure>,
) -> Result<(), Failure> {
    for how in [How::Killed, How::Aborted, How::Faulted] {
        let step = Step::new(&how.scene(who), how.title(who), why);
        let step = if how == How::Faulted && under_mps(&observer.gpu)? {
            step.untried(None, SHARED_FAULT)
        } else {
            scene(how, step, observer)?
        };
        observer.session.tell(step)?;
    }
    Ok(())
}

const SERVER: &str = "Memory belongs to every process that has a reference: the broker has one to what is kept under a name, each \
    reader has one. The broker proves the death by the process's pidfd and the end of its connection, or is told of the \
    fault, and stores a number that ends every wait on the timeline. It can do nothing for an event: only the dead \
    process's own work could have ended that wait.";

fn one_server(how: How, step: Step, observer: &mut Observer<'_>) -> Result<Step, Failure> {
    let scene = how.scene("server");
    let mps = under_mps(&observer.gpu)?;
    let before = free_memory(observer)?;
    let mut server = observer.start()?;
    let Served { event } = server.ask(Command::Serve { scene: scene.clone() })?;
    let open = observer.domain.open(&of(&scene, OWNED), TIMEOUT)?;
    observer.waiter.ask::<()>(Command::Await { scene: scene.clone(), value: 2 })?;
    let blocked = match event {
        Ok(_) if mps => Err(SHARED_EVENT.to_owned()),
        Ok(handle) => {
            let mut actor = observer.start()?;
            actor.ask::<()>(Command::AwaitEvent { handle })?;
            Ok(actor)
        }
        Err(why) => Err(why),
    };

    let (at, own_call) = how.come(&mut server)?;
    let woken: Woken = observer.waiter.hear()?;
    thread::sleep(POLLED.saturating_sub(Moment::now().since(at)));
    let by_event = blocked.and_then(|mut actor| {
        let polled = poll(&mut actor);
        // It may be blocked for ever.
        actor.kill();
        polled
    });
    let intact = has(&observer.gpu, &open, 1)?;
    let kept = observer.domain.open(&of(&scene, KEPT), TIMEOUT)?;
    let kept_intact = has(&observer.gpu, &kept, 1)?;
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
        .value("who waits for its event", event_text(&by_event, &blocked_text))
        .value("memory open since before", intact_text(intact))
        .value("memory under a kept name", intact_text(kept_intact))
        .value("the name that it owned", if owned == "no error" { "still there" } else { &owned });
    step = if is_simulated(observer) {
        step.leaves_open(LEAK)
    } else {
        let label = if how == How::Faulted { "GPU memory, after its end" } else { "GPU memory" };
        let had = partywall::bytes(MUCH);
        step.value(label, format!("{} are taken still; it had {had} under no name", partywall::bytes(taken)))
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
            "its memory is there for those who have it, and a process that waited on its timeline was told",
            format!("not all as expected: {} was awaited", how.ending()),
        ))
}

/// A client dies: it has a lease, and a stream that waits for the server, which is the observer.
pub(super) fn client(observer: &mut Observer<'_>) -> Result<(), Failure> {
    in_each_way(observer, "client", CLIENT, one_client)
}

const CLIENT: &str = "The client has a mapping of its own, which goes with it, and a lease, which the broker takes back \
    when the death is proved; while a process lives whose CUDA is broken, nobody can know what its GPU work still does, \
    and the lease stays. The server notices nothing.";

fn one_client(how: How, step: Step, observer: &mut Observer<'_>) -> Result<Step, Failure> {
    let scene = how.scene("client");
    let mps = under_mps(&observer.gpu)?;
    let name = of(&scene, OWNED);
    let memory = make(&observer.domain, &observer.gpu, &name, false)?;
    let line = observer.domain.timeline_writer(&of(&scene, LINE))?;
    let mut client = observer.start()?;
    let pid = client.pid;
    client.ask::<()>(Command::Use { scene })?;
    let held = holds(observer, &name, pid)?;

    let (mut at, own_call) = how.come(&mut client)?;
    let mut step = step.value("its lease, before", if held { "there" } else { "missing" });
    if let Some(own_call) = own_call {
        thread::sleep(POLLED.saturating_sub(Moment::now().since(at)));
        let still = holds(observer, &name, pid)?;
        step = step
            .value("its process", "lives")
            .value("its own next call", own_call)
            .value(format!("its lease, {} later", millis(POLLED)), if still { "there" } else { "gone" })
            .says(FAULT_ENDS, false);
        at = Moment::now();
        client.end();
    }
    let limit = if mps { POLLED } else { TIMEOUT };
    while holds(observer, &name, pid)? && Moment::now().since(at) < limit {
        thread::sleep(Duration::from_millis(1));
    }
    let gone = !holds(observer, &name, pid)?;
    let after = Moment::now().since(at);
    let since = if how == How::Faulted { "since the end of its process" } else { "since then" };
    step = step.value("its lease", if gone { format!("gone after {} {since}", millis(after)) } else { "there".into() });
    let mut lease = held && gone;
    if mps {
        let freed = observer.domain.free_unproven(Some(pid));
        let still = holds(observer, &name, pid)?;
        lease = held && !gone && freed.is_ok() && !still;
        step = step
            .value("under MPS", "nobody knows that its GPU work is over: what it held is kept, as unproven")
            .value("its lease, after rm --unproven", if still { "there" } else { "gone" });
    }
    let intact = has(&observer.gpu, &memory, 1)?;
    let signal = ending(&line.signal(1));
    let unharmed = intact && signal == "no error";
    Ok(step
        .value("the server's memory", intact_text(intact))
        .value("the server's next signal", signal)
        .says(CLIENT_HARMS, !unharmed)
        .judge(
            lease && unharmed,
            "the server goes on as if nothing had happened",
            if lease { "the server was harmed" } else { "its lease is not what it ought to be" },
        ))
}

/// The broker dies. Nothing that has a name is left afterwards.
pub(super) fn broker(observer: &mut Observer<'_>) -> Result<(), Failure> {
    let scene = "broker-killed";
    let memory = make(&observer.domain, &observer.gpu, &of(scene, OWNED), false)?;
    let shelf = observer.domain.create(&of(scene, KEPT), Place::Gpu(observer.gpu.uuid()));
    // Not mapped by anybody: it is the broker's alone.
    drop(shelf.tensor(TENSOR, DType::U8, &[MUCH]).kept(true).allocate()?.commit()?);
    let line = observer.domain.timeline_writer(&of(scene, LINE))?;
    observer.waiter.ask::<()>(Command::Await { scene: scene.into(), value: 1 })?;

    // An event behind a word that the observer writes when the broker is dead.
    let gate = Gate::new(&observer.gpu)?;
    let stream = Stream::new(observer.gpu.context()).doing("making a stream")?;
    let event = IpcEvent::create(&observer.gpu).and_then(|event| Ok((event.export()?.0.to_vec(), event)));
    let blocked = match event {
        Ok((handle, event)) => {
            gate.hold(stream.as_ref())?;
            event.record(stream.as_ref())?;
            let mut actor = observer.start()?;
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
    let intact = has(&observer.gpu, &memory, 1)?;
    let open = ending(&observer.domain.open(&of(scene, OWNED), Duration::ZERO));
    let signal = ending(&line.signal(1));

    let went_on = woken.stream_at.is_some();
    let step = Step::new(
        scene,
        "The broker is killed (SIGKILL)",
        "Mappings are references of their own, and an event is between two drivers. But nobody is left who would notice a \
         death, so each process ends its own waits on timelines, when nobody answers at the broker's socket any more; and \
         what nobody has mapped is gone with the broker's descriptors.",
    )
    .value("memory that is mapped", intact_text(intact))
    .value("waiter, on the host", format!("{} after {}", woken.host, millis(woken.host_at.since(killed))))
    .value("waiter, on a stream", stream_text(&woken, killed))
    .value("the writer's next signal", signal)
    .value("who waits for an event", event_text(&by_event, "still blocked"))
    .value("opening a name", open);
    let step = if is_simulated(observer) {
        step.leaves_open(OUTLIVES)
    } else {
        let all = partywall::bytes(MUCH);
        step.value("memory that nobody had mapped", format!("{} came back of {all}", partywall::bytes(freed)))
            .says(OUTLIVES, freed < MUCH)
    };
    observer.session.tell(step.says(BROKER_MEMORY, !intact).says(HANGS, !went_on).judge(
        intact && went_on && woken.host == "BrokerGone",
        "what is mapped stays, and nobody is left waiting",
        "not all as expected: BrokerGone was awaited",
    ))
}

/// How a stream is doing that waits for an event.
fn poll(actor: &mut Peer) -> StreamDone {
    actor.ask::<StreamDone>(Command::Poll).map_err(|failure| failure.message())?
}

fn event_text(polled: &StreamDone, blocked: &str) -> String {
    match polled {
        Ok(true) => "went on".into(),
        Ok(false) => blocked.into(),
        Err(why) => why.clone(),
    }
}

fn stream_text(woken: &Woken, since: Moment) -> String {
    match woken.stream_at {
        Some(at) => format!("went on after {}, check: {}", millis(at.since(since)), woken.check),
        None => "still waits".into(),
    }
}

/// Why a fault is not tried under MPS.
const SHARED_FAULT: &str = "under MPS a fault ends CUDA in all clients of the server: run this lab without, by \
    CUDA_MPS_PIPE_DIRECTORY=/nonexistent";

/// Why no process waits for the event of a process that dies under MPS.
const SHARED_EVENT: &str = "not tried: under MPS its CUDA would end with the recorder";

/// Whether free memory says nothing of what other processes have.
fn is_simulated(observer: &Observer<'_>) -> bool {
    observer.gpu.context().driver().is_simulated()
}

/// Whether a process has a lease on a name.
fn holds(observer: &Observer<'_>, name: &str, pid: u32) -> Result<bool, Failure> {
    match observer.domain.inspect(name) {
        Ok(info) => Ok(info.holders.iter().any(|holder| holder.pid == pid)),
        Err(Error::NotFound(NotFound::Name { .. })) => Ok(false),
        Err(error) => Err(error.into()),
    }
}

/// Free memory of the GPU, which others use as well.
fn free_memory(observer: &Observer<'_>) -> Result<u64, Failure> {
    Ok(observer.gpu.context().memory_info().doing("asking for free memory")?.free)
}

fn intact_text(intact: bool) -> &'static str {
    if intact { "readable, every word as written" } else { "not what was written" }
}
