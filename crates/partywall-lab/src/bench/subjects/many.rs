//! Requests to a broker with many names and many members, its restart, and its replacement.

use std::{process::Stdio, thread, time::Duration};

use partywall::{DType, Domain, Limit, Place, info::MemberState};
use partywall_measure::{Case, Comparison, Failure, Plan, Sampler, Unit, timed};

use partywall_os::process;
use rustix::process::Signal;

use crate::{
    bench::{
        Bench, clocked, microseconds,
        peer::{self, Order},
        placement::Placement,
    },
    broker::Broker,
    peer::Peer,
};

/// The number of processes that the members are divided among.
const PROCESSES: usize = 8;

/// File descriptors that the broker holds for a pool, a topic and a queue.
const FDS_OF_THREE: usize = 9;

/// File descriptors and members that the broker may hold besides those counted here.
const RESERVE: u64 = 32;

pub(super) fn run(bench: &Bench<'_>, broker: &Broker) -> Result<(), Failure> {
    let _placed = Placement::OneProcessor.apply(&[broker.pid()])?;
    names(bench, broker)?;
    objects(bench, broker)?;
    members(bench, broker)?;
    restarts(bench, broker)
}

fn names(bench: &Bench<'_>, broker: &Broker) -> Result<(), Failure> {
    let domain = &broker.connect()?;
    let wanted = bench.fewer(10_000);
    let count = within(bench, domain, Limit::Fds, wanted)?;
    let case = |what: &str, unit| Placement::OneProcessor.of(Case::new(what, unit).parameter("names", count));
    let name = |index: usize| format!("experiments/run-{index:05}/weights");

    let mut made = 0;
    let commit: Sampler<'_> = Box::new(|| {
        let builder = domain.create(&name(made), Place::Host).kept(true);
        made += 1;
        let build = builder.tensor("data", DType::F32, &[1024]).allocate()?;
        Ok(microseconds(clocked(|| build.commit())?.0))
    });
    let each_once = Plan::new(count).warm_up(0);
    bench.run(Comparison::new(case("commit, from none to all names", Unit::Microseconds), commit), each_once)?;

    let mut next = 0;
    let open: Sampler<'_> = Box::new(|| {
        next = (next + 7919) % count;
        let name = name(next);
        Ok(microseconds(clocked(|| domain.opener(&name).open())?.0))
    });
    let plan = bench.plan(10_000);
    bench.run(Comparison::new(case("open one", Unit::Microseconds), open), plan)?;

    let list: Sampler<'_> = Box::new(|| {
        let (elapsed, listed) = clocked(|| domain.names())?;
        match listed.len() {
            all if all == count => Ok(crate::bench::milliseconds(elapsed)),
            other => Err(format!("{other} names listed instead of {count}").into()),
        }
    });
    let plan = bench.plan(100);
    bench.run(Comparison::new(case("list all", Unit::Milliseconds), list), plan)?;

    let page =
        Comparison::new(case("a page of metrics, its process included", Unit::Milliseconds), metrics(broker, &[]));
    let plan = bench.plan(100);
    bench.run(page, plan)?;

    let mut removed = 0;
    let remove = timed(Unit::Microseconds, || {
        removed += 1;
        Ok(domain.remove(&name(removed - 1)).map(drop)?)
    });
    bench.run(Comparison::new(case("remove, from all names to none", Unit::Microseconds), remove), each_once)
}

/// Measures pages of metrics. For each pool, topic and queue that has series of its own, the broker reads control
/// memory.
fn objects(bench: &Bench<'_>, broker: &Broker) -> Result<(), Failure> {
    let domain = &broker.connect()?;
    let wanted = bench.fewer(1_000);
    let each = within(bench, domain, Limit::Fds, wanted * FDS_OF_THREE)? / FDS_OF_THREE;
    for index in 0..each {
        drop(
            domain
                .pool(&format!("pools/{index:05}"))
                .blocks(4)
                .block_bytes(4096)
                .place(Place::Host)
                .kept(true)
                .create()?,
        );
        let topic = domain.topic(&format!("topics/{index:05}")).dtype(DType::F32).shape(&[1024]).place(Place::Host);
        drop(topic.kept(true).create()?);
        let queue = domain.queue(&format!("queues/{index:05}")).tasks(16).inputs(4, 4096).outputs(4, 4096);
        drop(queue.place(Place::Host).kept(true).create()?);
    }
    let case = |what: &str| {
        let case = Case::new(what, Unit::Milliseconds).parameter("pools, topics and queues, of each", each);
        Placement::OneProcessor.of(case)
    };
    let plan = bench.plan(100);
    let page = Comparison::new(case("a page of metrics, its process included"), metrics(broker, &[]));
    bench.run(page, plan)?;
    let all = ["--max-names", &(3 * each).to_string()];
    let plan = bench.plan(100);
    bench.run(Comparison::new(case("a page with series for all of them"), metrics(broker, &all)), plan)?;
    for kind in ["pools", "topics", "queues"] {
        for index in 0..each {
            domain.remove(&format!("{kind}/{index:05}"))?;
        }
    }
    Ok(())
}

/// Returns a sampler of the milliseconds that `partywall metrics` takes.
fn metrics<'a>(broker: &'a Broker, options: &'a [&'a str]) -> Sampler<'a> {
    Box::new(move || {
        let (elapsed, printed) = clocked(|| Ok::<_, Failure>(broker.command("metrics")?.args(options).output()?))?;
        let page = String::from_utf8_lossy(&printed.stdout);
        match printed.status.success() && page.contains("\npartywall_names_left_out ") {
            true => Ok(crate::bench::milliseconds(elapsed)),
            false => Err(format!("no page of metrics: {}", String::from_utf8_lossy(&printed.stderr)).into()),
        }
    })
}

fn members(bench: &Bench<'_>, broker: &Broker) -> Result<(), Failure> {
    let domain = broker.connect()?;
    let wanted = bench.fewer(1_000);
    let count = within(bench, &domain, Limit::Clients, wanted)? / PROCESSES * PROCESSES;
    let case = |what: &str, unit| Placement::OneProcessor.of(Case::new(what, unit).parameter("members", count));

    let mut crowd = Crowd(Vec::new());
    // The processes connect one after the other, so that no connection waits for another.
    let mut joined = Vec::new();
    for _ in 0..PROCESSES {
        joined.extend(crowd.join(bench, broker, count / PROCESSES)?);
    }
    let mut joined = joined.into_iter();
    let connect: Sampler<'_> = Box::new(move || joined.next().ok_or_else(|| "a member is missing".into()));
    let each_once = Plan::new(count).warm_up(0);
    bench.run(Comparison::new(case("connect, from none to all members", Unit::Microseconds), connect), each_once)?;

    let ping = timed(Unit::Microseconds, || Ok(domain.ping()?));
    let plan = bench.plan(10_000);
    bench.run(Comparison::new(case("round trip of one", Unit::Microseconds), ping), plan)?;

    let list: Sampler<'_> = Box::new(|| {
        let (elapsed, listed) = clocked(|| domain.members())?;
        if listed.len() <= count {
            return Err(format!("{} members listed instead of {count} and this one", listed.len()).into());
        }
        Ok(crate::bench::milliseconds(elapsed))
    });
    let plan = bench.plan(100);
    bench.run(Comparison::new(case("list all", Unit::Milliseconds), list), plan)
}

/// Measures how long the broker is away after it was killed, and how long calls wait while another program replaces it,
/// with many names and many members, all of which resume.
fn restarts(bench: &Bench<'_>, broker: &Broker) -> Result<(), Failure> {
    let domain = broker.connect()?;
    let wanted = bench.fewer(10_000);
    let names = within(bench, &domain, Limit::Fds, wanted)?;
    for index in 0..names {
        let builder = domain.create(&format!("kept/{index:05}"), Place::Host).kept(true);
        drop(builder.tensor("data", DType::U8, &[1]).allocate()?.commit()?);
    }
    let wanted = bench.fewer(1_000);
    let members = within(bench, &domain, Limit::Clients, wanted)? / PROCESSES * PROCESSES;
    let mut crowd = Crowd(Vec::new());
    for _ in 0..PROCESSES {
        crowd.join(bench, broker, members / PROCESSES)?;
    }
    let away: Sampler<'_> = Box::new(|| {
        let before = domain.status()?;
        let worker = process::pidfd(before.pid)?;
        let (elapsed, after) = clocked(|| {
            process::kill(&worker, Signal::KILL)?;
            Ok::<_, Failure>(domain.status()?)
        })?;
        if after.pid == before.pid || after.names != before.names || after.instance != before.instance {
            return Err("the broker was not restarted with what it had".into());
        }
        await_members(&domain)?;
        Ok(crate::bench::milliseconds(elapsed))
    });
    let case = |what: &str| Case::new(what, Unit::Milliseconds).parameter("names", names).parameter("members", members);
    let plan = bench.plan(20);
    let killed = Comparison::new(case("killed, until the next call is answered"), away);
    bench.run(killed, plan)?;

    let longest: Sampler<'_> = Box::new(|| {
        let before = domain.status()?;
        let mut replacing = broker.command("serve")?.arg("--replace").stdout(Stdio::null()).spawn()?;
        let mut longest = Duration::ZERO;
        let ended = loop {
            // Asked before the call: the last one is made when the other program serves.
            let ended = replacing.try_wait()?;
            longest = longest.max(clocked(|| domain.ping())?.0);
            if let Some(ended) = ended {
                break ended;
            }
        };
        let after = domain.status()?;
        if !ended.success() || after.pid == before.pid || after.names != before.names {
            return Err(format!("the broker was not replaced ({ended})").into());
        }
        await_members(&domain)?;
        Ok(crate::bench::milliseconds(longest))
    });
    let plan = bench.plan(20);
    let replaced = Comparison::new(case("replaced, longest of the calls meanwhile"), longest);
    bench.run(replaced, plan)
}

/// Waits until all members have resumed.
fn await_members(domain: &Domain) -> Result<(), Failure> {
    while domain.members()?.iter().any(|member| member.state != MemberState::Alive) {
        thread::sleep(Duration::from_millis(1));
    }
    Ok(())
}

/// Returns the wanted number, or the largest that the broker's limit allows.
fn within(bench: &Bench<'_>, domain: &Domain, limit: Limit, wanted: usize) -> Result<usize, Failure> {
    let status = domain.status()?;
    let allowed = status.limits.iter().find(|(which, _)| *which == limit).map_or(u64::MAX, |(_, bound)| *bound);
    let count = wanted.min(usize::try_from(allowed.saturating_sub(RESERVE))?);
    if count < wanted {
        bench.note(format!("many: {count} instead of {wanted}, because of the broker's limit {limit:?} here"));
    }
    Ok(count)
}

/// Processes that each have many members. Dropping this ends them.
struct Crowd(Vec<Peer>);

impl Crowd {
    /// Starts a process with `count` members, and returns the microseconds that each took to connect.
    fn join(&mut self, bench: &Bench<'_>, broker: &Broker, count: usize) -> Result<Vec<f64>, Failure> {
        let mut peer = bench.start(broker, peer::ROLE)?;
        let joined = peer.ask(Order::Connect { socket: broker.socket().to_owned(), count })?;
        self.0.push(peer);
        Ok(joined)
    }
}
