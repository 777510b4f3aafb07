//! `partywall status`. With `--json`: `pid` (of the worker, which serves), `supervisor` (the pid of the process that
//! restarts the worker if it dies; null if that is dead, or if there is none), `uid` (its user), `restarts` (a number),
//! `version`, `instance` (in hexadecimal), `domain`, `socket`, `log` (a path or null), `simulated` (whether its members
//! run on the simulated CUDA driver), `started_at_ms` (since 1970), `uptime_seconds`, `names`, `versions`, `timelines`,
//! `semaphores`, `leases`, `fds` (numbers), `unproven` (what is in quarantine: `members`, `bytes`), `deaths` (of
//! members since the start: `all`, and `unproven`, whose work on GPUs may have continued), `members` (a list of
//! members, as in [`describe`], without this process), `bytes` (a list of `place`, `bytes`), `largest` (a list of
//! `name`, `place`, `bytes`), `limits` (an object: `bytes`, `names`, `fds`, `clients`, `pinned_bytes` on each NUMA
//! node, `message`, `waits`, `waits_per_member`, `leases`, `leases_per_member`, `timelines`, `semaphores`), `users` (a
//! list of `uid`, `members`, `names`, `fds`, `bytes`, `leases`, `timelines`, `semaphores`, `waits`, `seats` (its
//! connections that are no members, without this one), `pinned` (a list of `place`, `bytes`), and `limits`, an object
//! of the same without `uid` and `pinned`, and with `pinned_bytes` on each NUMA node; for others than the broker's user
//! only its own).

use partywall::{
    Limit, Place, bytes,
    info::{MemberInfo, StatusInfo, UserInfo},
};
use serde_json::{Map, Value, json};

use crate::{
    Context,
    columns::member,
    describe,
    failure::Failure,
    output::Output,
    text::{self, count},
};

/// Runs the command.
pub(crate) fn run(context: &Context) -> Result<(), Failure> {
    let options = context.options().start(false).operator(true);
    let location = options.location()?;
    let domain = options.connect()?;
    let status = domain.status()?;
    let members = domain.members()?;
    let output = context.output();
    output.value(&value(&status, &members, &location));
    if output.is_json() {
        return Ok(());
    }
    broker(output, &status, &location);
    output.line("");
    held(output, &status);
    users(output, &status);
    people(output, &members);
    Ok(())
}

/// Returns what the command prints with `--json`.
pub(crate) fn value(status: &StatusInfo, members: &[MemberInfo], location: &partywall::Location) -> Value {
    let largest = status
        .largest
        .iter()
        .map(|(name, at, bytes)| json!({ "name": name, "place": describe::place((*at).into()), "bytes": bytes }));
    let limits = status.limits.iter().map(|(limit, value)| (describe::limit(*limit).to_owned(), json!(value)));
    json!({
        "pid": status.pid,
        "supervisor": status.supervisor,
        "uid": status.uid,
        "restarts": status.restarts,
        "version": status.version,
        "instance": format!("{:016x}", status.instance),
        "domain": location.domain,
        "socket": location.socket,
        "log": status.log,
        "simulated": status.simulated,
        "started_at_ms": status.started_at,
        "uptime_seconds": text::since(status.started_at).as_secs(),
        "names": status.names,
        "versions": status.versions,
        "timelines": status.timelines,
        "semaphores": status.semaphores,
        "leases": status.leases,
        "deaths": { "all": status.deaths, "unproven": status.unproven_deaths },
        "unproven": { "members": status.unproven, "bytes": status.unproven_bytes },
        "fds": status.fds,
        "members": members,
        "bytes": describe::ledger(status),
        "largest": largest.collect::<Vec<_>>(),
        "limits": limits.collect::<Map<_, _>>(),
        "users": status.users.iter().map(|one| user(status, one)).collect::<Vec<_>>(),
    })
}

/// Returns how many seats a user has.
fn seats(status: &StatusInfo, uid: u32) -> u64 {
    let [own, others] = status.seats;
    if uid == status.uid { own } else { others }
}

fn user(status: &StatusInfo, user: &UserInfo) -> Value {
    let UserInfo {
        uid,
        members,
        names,
        fds,
        bytes,
        leases,
        timelines,
        semaphores,
        waits,
        pinned,
        seats: taken,
        limits,
    } = user;
    // The broker's own user has no limits beside those of the domain.
    let limit = |most: u64| if most == u64::MAX { Value::Null } else { json!(most) };
    let pinned =
        pinned.iter().map(|(node, bytes)| json!({ "place": describe::place(Place::Pinned(*node)), "bytes": bytes }));
    json!({
        "uid": uid, "members": members, "names": names, "fds": fds, "bytes": bytes, "leases": leases,
        "timelines": timelines, "semaphores": semaphores, "waits": waits, "seats": taken,
        "pinned": pinned.collect::<Vec<_>>(),
        "limits": {
            "members": limit(limits.members), "names": limit(limits.names), "fds": limit(limits.fds),
            "bytes": limit(limits.bytes), "leases": limit(limits.leases), "timelines": limit(limits.timelines),
            "semaphores": limit(limits.semaphores), "waits": limit(limits.waits), "pinned_bytes": limit(limits.pinned),
            "seats": seats(status, *uid),
        },
    })
}

/// Prints what each user has, if there are several or if this one is not the broker's.
fn users(output: Output, status: &StatusInfo) {
    if status.users.iter().all(|user| user.uid == status.uid) {
        return;
    }
    for user in &status.users {
        let limits = user.limits;
        let of = |held: String, most: u64, limit: String| match most {
            u64::MAX => held,
            _ => format!("{held} of {limit}"),
        };
        let number = |held: u64, what: &str, most: u64| of(count(held, what), most, most.to_string());
        let held = [
            number(user.members, "member", limits.members),
            number(user.names, "name", limits.names),
            number(user.fds, "file descriptor", limits.fds),
            of(bytes(user.bytes), limits.bytes, bytes(limits.bytes)),
            number(user.leases, "lease", limits.leases),
            number(user.timelines, "timeline", limits.timelines),
            number(user.semaphores, "semaphore", limits.semaphores),
            number(user.waits, "waiting request", limits.waits),
            format!("{} of {}", count(user.seats, "seat"), seats(status, user.uid)),
        ];
        let on_node = |(node, held): &(u32, u64)| {
            let held = of(bytes(*held), limits.pinned, bytes(limits.pinned));
            format!("{held} on {}", describe::place(Place::Pinned(*node)))
        };
        let held: Vec<_> = held.into_iter().chain(user.pinned.iter().map(on_node)).collect();
        output.line(format!("user     {}: {}", user.uid, held.join(", ")));
    }
}

fn broker(output: Output, status: &StatusInfo, location: &partywall::Location) {
    let fact = |what: &str, value: String| output.line(format!("{what:<8} {value}"));
    let supervisor = match (status.supervisor, status.restarts) {
        (None, _) => "without a supervisor: it will not be restarted if it dies".to_owned(),
        (Some(pid), 0) => format!("supervised by pid {pid}"),
        (Some(pid), restarts) => format!("restarted {} by its supervisor, pid {pid}", count(restarts, "time")),
    };
    fact("broker", format!("pid {}, partywall {}; {supervisor}", status.pid, status.version));
    fact("domain", location.domain.clone());
    fact("socket", location.socket.display().to_string());
    fact("log", status.log.clone().unwrap_or_else(|| "none".into()));
    let up = text::duration(text::since(status.started_at));
    fact("up", format!("{up}, since {}", text::moment(status.started_at)));
    if status.simulated {
        fact("driver", "simulated: nothing here is on a GPU".into());
    }
    let limits = status.limits.iter().map(|(limit, value)| match limit {
        Limit::Bytes | Limit::Pinned(_) | Limit::Message => format!("{} {}", describe::limit(*limit), bytes(*value)),
        _ => format!("{} {value}", describe::limit(*limit)),
    });
    fact("limits", limits.collect::<Vec<_>>().join(", "));
}

fn held(output: Output, status: &StatusInfo) {
    let held = [
        count(status.names, "name"),
        count(status.versions, "version"),
        count(status.timelines, "timeline"),
        count(status.semaphores, "semaphore"),
        count(status.leases, "lease"),
        count(status.fds, "file descriptor"),
    ];
    output.line(format!("holds    {}", held.join(", ")));
    if status.unproven > 0 {
        let dead = count(status.unproven, "dead member");
        let held = bytes(status.unproven_bytes);
        output.line(format!("unproven {held} of {dead}: their GPU work may still run (`partywall ps`)"));
    }
    if status.bytes.is_empty() {
        output.line("bytes    none");
    }
    for (place, held) in &status.bytes {
        let place = Place::from(*place);
        let note = match place {
            // The broker has no CUDA context, and only processes with one are listed there.
            Place::Gpu(_) => " (nvidia-smi shows no process for them)",
            Place::Pinned(_) => " (they are resident memory of no process until its CPU maps them)",
            Place::Host => "",
        };
        let held = describe::held(status, place, *held);
        output.line(format!("bytes    {held} on {}{note}", describe::place(place)));
    }
    for (name, place, held) in &status.largest {
        output.line(format!("largest  {name}: {} on {}", bytes(*held), describe::place((*place).into())));
    }
}

fn people(output: Output, members: &[MemberInfo]) {
    if members.is_empty() {
        return output.line("members  none");
    }
    output.section(&count(members.len() as u64, "member"), member::STATUS, members);
}
