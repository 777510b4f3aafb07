//! The thread that asks the broker, so that a broker that does not answer never stops the keys.

use std::{
    sync::mpsc::{Receiver, RecvTimeoutError, Sender},
    time::{Duration, Instant},
};

use partywall::{
    Domain, Error, ErrorKind, Result, bytes,
    error::NotFound,
    info::{HolderInfo, ObjectInfo, ObjectKind, QueueHolder, Whom},
};

use super::MOST;
use crate::{
    commands::evict,
    describe,
    failure::Failure,
    snapshot::{Observer, Snapshot},
    text::count,
};

/// A request to the thread.
#[derive(Debug)]
pub(super) enum Ask {
    /// Evict these members of a broker, and kill them if asked.
    Evict { members: Vec<u64>, instance: u64, kill: bool },
    /// Send details of this with each snapshot from now on, or of nothing.
    Details(Option<Target>),
}

/// An object whose details the thread sends.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Target {
    /// The names that a process holds.
    Process(u32),
    /// The processes that hold a name.
    Name(String),
    /// The processes that have a timeline or semaphore open.
    Object(ObjectKind, String),
}

/// A report of the thread.
#[derive(Debug)]
pub(super) enum Report {
    Snapshot(Box<Snapshot>),
    /// No broker answers.
    Lost(Failure),
    /// Details of the target.
    Detail(Target, Vec<String>),
    /// The outcome of an eviction, in a sentence.
    Evicted(String),
}

/// Takes a snapshot of the domain after each interval and serves requests, until the other end is dropped.
pub(super) fn run(mut observer: Observer, every: Duration, asked: &Receiver<Ask>, reports: &Sender<Report>) {
    let mut target = None;
    let mut next = Instant::now() + every;
    loop {
        let report = match asked.recv_timeout(next.saturating_duration_since(Instant::now())) {
            Ok(Ask::Evict { members, instance, kill }) => {
                // What it changed should be seen at once.
                next = Instant::now();
                let evicted = self::evict(&mut observer, &members, instance, kill);
                Report::Evicted(evicted.unwrap_or_else(|error| sentence(&error.into())))
            }
            Ok(Ask::Details(wanted)) => {
                target = wanted;
                let Some(report) = details(&mut observer, target.as_ref()) else { continue };
                report
            }
            Err(RecvTimeoutError::Disconnected) => return,
            Err(RecvTimeoutError::Timeout) => {
                let taken = observer.domain().and_then(|domain| Snapshot::take(domain, MOST));
                next = Instant::now() + every;
                match taken {
                    Ok(snapshot) => {
                        let more = details(&mut observer, target.as_ref());
                        if more.is_some_and(|more| reports.send(more).is_err()) {
                            return;
                        }
                        Report::Snapshot(Box::new(snapshot))
                    }
                    Err(error) => Report::Lost(error.into()),
                }
            }
        };
        if reports.send(report).is_err() {
            return;
        }
    }
}

/// Evicts members. Returns what happened.
fn evict(observer: &mut Observer, members: &[u64], instance: u64, kill: bool) -> Result<String> {
    let domain = observer.domain()?;
    if domain.status()?.instance != instance {
        // Its members have numbers of their own.
        return Ok("nothing was evicted: another broker has started since".into());
    }
    let mut sentences = Vec::new();
    for member in members {
        let evicted = domain.evict(Whom::Member(*member), kill)?;
        sentences.extend(evicted.iter().map(evict::sentence));
        let kept = evicted.iter().filter_map(evict::obstacle);
        sentences.extend(kept.map(|(pid, why)| format!("cannot kill pid {pid}: {why}")));
    }
    Ok(sentences.join("; "))
}

/// Returns a failure and what to do in one sentence.
pub(super) fn sentence(failure: &Failure) -> String {
    match failure.kind {
        ErrorKind::NotFound => failure.message.clone(),
        _ => format!("{}: {}", failure.message, failure.advice),
    }
}

fn details(observer: &mut Observer, target: Option<&Target>) -> Option<Report> {
    let target = target?;
    let lines = observer.domain().and_then(|domain| match target {
        Target::Process(pid) => held_by(domain, *pid),
        Target::Name(name) => holders_of(domain, name),
        Target::Object(kind, name) => users_of(domain, *kind, name),
    });
    let lines = lines.unwrap_or_else(|error| vec![sentence(&error.into())]);
    Some(Report::Detail(target.clone(), lines))
}

/// Returns the MPS daemon of a process, its waits for names and timelines, and what it holds among the largest names.
fn held_by(domain: &Domain, pid: u32) -> Result<Vec<String>> {
    let members = domain.members()?;
    let daemons = describe::mps_daemons(members.iter().filter(|member| member.pid == pid));
    let mut names = domain.names()?;
    names.sort_by_key(|name| std::cmp::Reverse(name.latest.as_ref().map_or(0, |latest| latest.bytes)));
    let mut lines: Vec<_> = daemons.iter().map(describe::mps_line).collect();
    if !daemons.is_empty() {
        lines.push(describe::MPS_PRICE.into());
    }
    let own = members.iter().filter(|member| member.pid == pid);
    lines.extend(own.flat_map(|member| &member.waits).map(|wait| format!("waits for {}", describe::wait(wait))));
    let others = lines.len();
    for name in names.iter().take(MOST).filter(|name| name.latest.is_some()) {
        let info = match domain.inspect(&name.name) {
            Ok(info) => info,
            Err(Error::NotFound(NotFound::Name { .. })) => continue,
            Err(error) => return Err(error),
        };
        let Some(holder) = info.holders.iter().find(|holder| holder.pid == pid) else { continue };
        lines.push(format!("{}{}", describe::name_line(name), share(holder)));
    }
    if lines.len() == others {
        lines.push("it holds no latest version of a name".into());
    }
    if names.len() > MOST {
        lines.push(format!("(only the {MOST} largest of {} names were checked)", names.len()));
    }
    Ok(lines)
}

/// Returns the holders of a name.
fn holders_of(domain: &Domain, name: &str) -> Result<Vec<String>> {
    let info = domain.inspect(name)?;
    let older = info.versions.iter().filter(|version| version.version != info.version.version);
    let older_bytes = older.clone().fold(0_u64, |sum, version| sum.saturating_add(version.bytes));
    let mut lines = vec![
        format!("{}, {}", describe::with_version(name, info.version.version), bytes(info.version.bytes)),
        format!("on {}", describe::place(info.version.place.into())),
    ];
    match older.count() {
        0 => {}
        older => {
            lines.push(format!("{} with {} are still held", count(older as u64, "older version"), bytes(older_bytes)))
        }
    }
    lines.extend(info.builder.map(|pid| format!("pid {pid} builds the next version")));
    lines.push(String::new());
    let queue = |queue: &QueueHolder| format!("held by queue {}", describe::with_version(&queue.name, queue.version));
    lines.extend(info.queues.iter().map(queue));
    lines.extend(info.holders.iter().map(held));
    if info.holders.is_empty() && info.queues.is_empty() {
        lines.push("no process holds it".into());
    }
    Ok(lines)
}

/// Returns the processes that have a timeline or semaphore open.
fn users_of(domain: &Domain, kind: ObjectKind, name: &str) -> Result<Vec<String>> {
    let detail = domain.inspect_object(kind, name)?;
    let mut lines = vec![match &detail.info {
        ObjectInfo::Timeline(timeline) => describe::timeline_line(timeline),
        other => other.name().to_owned(),
    }];
    lines.push(String::new());
    lines.extend(detail.holders.iter().map(|user| match user.permits {
        0 => held(&user.holder),
        permits => format!("{}, {}", held(&user.holder), count(permits.into(), "permit")),
    }));
    if detail.holders.is_empty() {
        lines.push("no process has it open".into());
    }
    Ok(lines)
}

/// Returns a holder in one line.
fn held(holder: &HolderInfo) -> String {
    let who = describe::process(holder.pid, &holder.command, describe::SHORT);
    let unproven = if holder.unproven { ", unproven" } else { "" };
    format!("{who}, {}{}{unproven}", count(holder.leases.into(), "lease"), share(holder))
}

/// Returns the blocks and tasks of a holder.
fn share(holder: &HolderInfo) -> String {
    let all = [(holder.blocks, "block"), (holder.tasks, "task"), (holder.waiting, "waiter")];
    all.iter().filter(|(n, _)| *n > 0).map(|(n, what)| format!(", {}", count((*n).into(), what))).collect()
}
