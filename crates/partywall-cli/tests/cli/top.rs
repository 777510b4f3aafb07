//! `partywall top`, as text, as JSON, and in a terminal.

use std::{
    fs::File,
    io::Read,
    process::{Command, Stdio},
    time::Duration,
};

use partywall::{DType, Domain, Place, Policy, Publisher, Subscriber, Topic};
use partywall_harness::{Running, Sandbox, Signal, Terminal, WATCHDOG, device, eventually};
use rustix::{
    pty::{OpenptFlags, grantpt, openpt, ptsname, unlockpt},
    termios::{Winsize, tcsetwinsize},
};
use serde_json::{Value, json};

const LONG: Duration = Duration::from_secs(60);

/// Returns the lines that a terminal shows after this output. Frames are printed as differences, so what a person reads
/// is nowhere in the output as a whole. Knows only the sequences that the live view prints.
fn shown(output: &str) -> String {
    let mut lines: Vec<Vec<char>> = Vec::new();
    let mut row = 0;
    let mut column = 0;
    let mut rest = output.chars();
    while let Some(c) = rest.next() {
        match c {
            '\x1b' => {
                assert_eq!(rest.next(), Some('['), "{output:?}");
                let mut numbers = String::new();
                let last = loop {
                    match rest.next() {
                        Some(c @ '@'..='~') => break c,
                        Some(c) => numbers.push(c),
                        // The rest is still to come.
                        None => break 'm',
                    }
                };
                let mut numbers = numbers.split(';').map(|number| number.parse::<usize>().unwrap_or(1) - 1);
                match last {
                    'H' => {
                        row = numbers.next().unwrap_or(0);
                        column = numbers.next().unwrap_or(0);
                    }
                    'J' => lines.clear(),
                    _ => {}
                }
            }
            '\r' => column = 0,
            '\n' => row += 1,
            c => {
                lines.resize(lines.len().max(row + 1), Vec::new());
                let line = &mut lines[row];
                line.resize(line.len().max(column + 1), ' ');
                line[column] = c;
                column += 1;
            }
        }
    }
    lines.into_iter().map(String::from_iter).collect::<Vec<_>>().join("\n")
}

/// Waits until a person reads this.
fn wait_for(terminal: &Terminal, part: &str) {
    let started = std::time::Instant::now();
    loop {
        let last = shown(&terminal.screen());
        if last.contains(part) {
            return;
        }
        assert!(started.elapsed() < WATCHDOG, "watchdog: {part:?} is not shown:\n{last}");
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// Starts the live view, and waits for its first frame.
fn start(sandbox: &Sandbox) -> Terminal {
    let terminal = Terminal::spawn(sandbox.command(["top", "--every", "0.1"]), 80);
    wait_for(&terminal, "1Names");
    assert!(!terminal.is_cooked(), "keys have to arrive at once, and unseen");
    terminal
}

/// Waits for the end of the live view. Fails unless it has given back the terminal as it was.
fn end(terminal: Terminal, code: i32) -> String {
    eventually("the terminal is as before", || terminal.is_cooked());
    let (ended, screen) = terminal.wait();
    assert_eq!(ended, Some(code), "{screen:?}");
    let at = |part: &str| screen.rfind(part).unwrap_or_else(|| panic!("{part:?} is missing in {screen:?}"));
    assert!(at("\x1b[?1049h") < at("\x1b[?1049l"), "it left the other screen: {screen:?}");
    assert!(at("\x1b[?25l") < at("\x1b[?25h"), "it shows the cursor: {screen:?}");
    screen
}

fn topic(domain: &Domain) -> (Topic, Publisher, Subscriber) {
    let topic = domain.topic("frames").max_bytes(64).depth(4).place(Place::Host).create().unwrap();
    let publisher = topic.publisher().unwrap();
    let subscriber = topic.subscriber(Policy::Latest).unwrap();
    (topic, publisher, subscriber)
}

fn publish(publisher: &Publisher) {
    publisher.loan(DType::U8, &[1], LONG).unwrap().filled().publish(LONG).unwrap();
}

/// A process that holds `name`.
fn holder(sandbox: &Sandbox, name: &str) -> Running {
    sandbox.file("f", [7; 4096]);
    let mut holder = sandbox.spawn(["put", "f", name, "--hold", "--device", device()]);
    assert!(holder.line().contains("holding it"));
    holder
}

#[test]
fn once_prints_every_table_as_text() {
    let sandbox = Sandbox::new();
    let domain = sandbox.domain();
    let (_topic, publisher, _subscriber) = topic(&domain);
    publish(&publisher);
    let _pool = domain.pool("blocks").blocks(3).block_bytes(10).place(Place::Host).create().unwrap();
    let _queue = domain.queue("work").tasks(8).inputs(1, 8).outputs(1, 8).place(Place::Host).create().unwrap();
    let writer = domain.timeline_writer("steps").unwrap();
    writer.signal(7).unwrap();
    let text = sandbox.run(["top", "--once"]).expect(0).text();
    for part in ["domain ", "\nMembers\n", "\nNames\n", "\nTopics\n", "\nQueues\n", "\nBlocks\n", "\nOrdering\n"] {
        assert!(text.contains(part), "{part:?} in {text}");
    }
    assert!(!text.contains('\x1b'), "{text:?}");
    let line =
        |start: &str| text.lines().find(|line| line.starts_with(start)).unwrap_or_else(|| panic!("{start} in {text}"));
    assert!(
        line("frames").contains("topic") && line("frames").contains("lag 1") && line("frames").contains("1 pub, 1 sub")
    );
    assert!(line("steps").contains("timeline") && line("steps").contains(&std::process::id().to_string()), "{text}");
}

// Holds 318.
#[test]
fn json_has_rates_details_and_waits() {
    let sandbox = Sandbox::new();
    let domain = sandbox.domain();
    let topic = domain.topic("frames").max_bytes(64).depth(2).place(Place::Host).create().unwrap();
    let publisher = topic.publisher().unwrap();
    let subscriber = topic.subscriber(Policy::Block).unwrap();
    let mut top = sandbox.spawn(["top", "--json", "--every", "0.1"]);
    let mut next = || serde_json::from_str::<Value>(&top.line()).unwrap();
    let frames = |value: &Value| {
        value["names"].as_array().unwrap().iter().find(|name| name["name"] == "frames").cloned().unwrap()
    };
    eventually("samples have a rate", || {
        publish(&publisher);
        drop(subscriber.recv(LONG).unwrap());
        frames(&next())["rate"].as_f64() > Some(0.0)
    });

    // A full ring, and a subscriber that takes nothing.
    let blocked = std::thread::spawn(move || (0..3).for_each(|_| publish(&publisher)));
    let pid = std::process::id();
    let mut last = Value::Null;
    eventually("the publisher waits for the subscriber", || {
        last = next();
        last["waits"][0]["ms"].is_u64()
    });
    let ms = last["waits"][0]["ms"].clone();
    let wait =
        json!({ "on": "subscriber", "name": "frames", "target": null, "pid": pid, "waits_for": [pid], "ms": ms });
    assert_eq!(last["waits"], json!([wait]), "{last}");
    assert_eq!(frames(&last)["detail"]["subscribers"][0]["lag"], 2, "{last}");
    assert_eq!((&last["left_out"], &last["timelines"]), (&json!(0), &json!([])));
    assert!(last["seconds"].as_f64().unwrap() > 0.0 && last["broker"]["members"].is_array(), "{last}");
    drop(subscriber);
    blocked.join().unwrap();

    let once = sandbox.json(["top", "--once"]);
    assert!(once["names"].is_array(), "{once}");
    top.signal(Signal::TERM);
    top.wait().expect(0);
}

// Holds 318.
#[test]
fn waits_for_blocks_and_permits_name_their_holders() {
    let sandbox = Sandbox::new();
    let [holder, waiter] = [sandbox.domain(), sandbox.domain()];
    let pool = |domain: &Domain| domain.pool("blocks").blocks(1).block_bytes(8).place(Place::Host).open_or_create();
    let [held, wanted] = [&holder, &waiter].map(|domain| pool(domain).unwrap());
    let [open, shut] = [&holder, &waiter].map(|domain| domain.semaphore("gate", 1).unwrap());
    let block = held.alloc(LONG).unwrap();
    let permit = open.acquire(LONG).unwrap();
    let pid = std::process::id();
    let waits = |sandbox: &Sandbox| sandbox.json(["top", "--once"])["waits"].clone();
    assert_eq!(waits(&sandbox), json!([]));
    std::thread::scope(|scope| {
        scope.spawn(|| wanted.alloc(LONG).map(drop).unwrap());
        scope.spawn(|| shut.acquire(LONG).map(drop).unwrap());
        let wait =
            |on, name| json!({ "on": on, "name": name, "target": null, "pid": pid, "waits_for": [pid], "ms": null });
        let expected = json!([wait("block", "blocks"), wait("permit", "gate")]);
        eventually("both wait", || waits(&sandbox) == expected);
        let text = sandbox.run(["top", "--once"]).expect(0).text();
        assert!(text.contains(&format!("{pid}: blocks, {pid}: gate")), "{text}");
        let shown = sandbox.json(["show", "blocks"]);
        let numbers = |key| shown["holders"].as_array().unwrap().iter().map(|held| held[key].as_u64().unwrap()).sum();
        assert_eq!((numbers("blocks"), numbers("waiting")), (1_u64, 1_u64), "{shown}");
        drop((block, permit));
    });
    eventually("no process waits", || waits(&sandbox) == json!([]));
}

// Holds 318.
#[test]
fn waits_for_names_and_timelines_name_their_writers() {
    let sandbox = Sandbox::new();
    let [writer, waiter] = [sandbox.domain(), sandbox.domain()];
    let steps = writer.timeline_writer("steps").unwrap();
    let line = waiter.timeline("steps").unwrap();
    let draft = writer.create("log", Place::Host).tensor("t", DType::U8, &[8]).mutable(true).reserve(1 << 20);
    let log = draft.allocate().unwrap().commit().unwrap();
    let [read, followed] = [(); 2].map(|()| waiter.open("log", LONG).unwrap());
    let pid = std::process::id();
    // The times differ from run to run, and so does the order in which requests arrive.
    let waits = || {
        let mut waits = sandbox.json(["top", "--once"])["waits"].as_array().unwrap().clone();
        for wait in &mut waits {
            assert_eq!(wait["ms"].is_u64(), wait["on"] == "timeline", "{wait}");
            wait["ms"] = Value::Null;
        }
        waits.sort_by_key(|wait| wait["on"].to_string());
        waits
    };
    let wait = |on, name, target, by: &[u32]| {
        let target: Option<u64> = target;
        json!({ "on": on, "name": name, "target": target, "pid": pid, "waits_for": by, "ms": null })
    };
    assert_eq!(waits(), [] as [Value; 0]);
    std::thread::scope(|scope| {
        scope.spawn(|| line.wait(9, LONG).unwrap());
        scope.spawn(|| waiter.open("weights", LONG).map(drop).unwrap());
        scope.spawn(|| read.wait_withdrawn(LONG).map(drop).unwrap());
        scope.spawn(|| followed.wait_growth(LONG).map(drop).unwrap());
        let expected = [
            wait("commit", "weights", None, &[]),
            wait("growth", "log", Some(1), &[pid]),
            wait("timeline", "steps", Some(9), &[pid]),
            wait("withdrawal", "log", Some(1), &[]),
        ];
        eventually("all are listed", || waits() == expected);
        let steps_awaited = format!("{pid}: steps 9 (");
        let text = sandbox.run(["top", "--once"]).expect(0).text();
        assert!(text.contains(&steps_awaited) && text.contains(" +2 "), "{text}");
        let text = sandbox.run(["ps"]).expect(0).text();
        for part in ["a commit: weights", "a withdrawal: log@1", &format!("{pid}: log@1"), &steps_awaited] {
            assert!(text.contains(part), "{part:?} in {text}");
        }
        let top = start(&sandbox);
        wait_for(&top, &steps_awaited);
        top.signal(Signal::TERM);
        end(top, 0);

        steps.signal(9).unwrap();
        let weights = writer.create("weights", Place::Host).tensor("t", DType::U8, &[8]).kept(true);
        drop(weights.allocate().unwrap().commit().unwrap());
        log.grow().spare(4096).commit().unwrap();
        writer.remove("log").unwrap();
    });
    eventually("no process waits", || waits().is_empty());
}

// Holds 316.
#[test]
fn live_view_ends_on_a_key_and_on_signals() {
    let sandbox = Sandbox::new();
    let domain = sandbox.domain();
    let _frames = topic(&domain);
    for key in ["q", "\x03"] {
        let mut top = start(&sandbox);
        wait_for(&top, "frames");
        top.type_in(key);
        end(top, 0);
    }
    for signal in [Signal::TERM, Signal::INT, Signal::HUP] {
        let top = start(&sandbox);
        top.signal(signal);
        end(top, 0);
        // A second signal, as some service managers send it, changes nothing.
        let top = start(&sandbox);
        top.signal(signal);
        top.signal(Signal::TERM);
        end(top, 0);
    }
}

#[test]
fn live_view_evicts_after_a_question() {
    let sandbox = Sandbox::new();
    let holder = holder(&sandbox, "held");
    let pid = holder.pid().to_string();
    let mut top = start(&sandbox);
    wait_for(&top, &pid);
    top.type_in("\te");
    wait_for(&top, "evict pid");
    top.type_in("y");
    wait_for(&top, "nothing was evicted");
    assert_eq!(sandbox.json(["ps"])["members"][0]["state"], "alive");
    top.type_in("eY");
    let ended = holder.wait().expect(5);
    assert!(ended.stderr.contains("was evicted by pid"), "{ended:?}");
    wait_for(&top, "evicted pid");
    top.type_in("q");
    end(top, 0);
}

#[test]
fn live_view_shows_holders_and_follows_the_size() {
    let sandbox = Sandbox::new();
    let holder = holder(&sandbox, "held");
    let mut top = start(&sandbox);
    wait_for(&top, "held");
    top.type_in("\r");
    wait_for(&top, &format!("pid {} (", holder.pid()));
    top.type_in("\x1b");
    top.resize(30, 10);
    wait_for(&top, "too small");
    top.resize(200, 50);
    wait_for(&top, "Enter holders");
    top.type_in("q");
    end(top, 0);
}

// Holds 317.
#[test]
fn live_view_outlives_its_broker() {
    let sandbox = Sandbox::new();
    let holder = holder(&sandbox, "before");
    let mut top = start(&sandbox);
    wait_for(&top, "before");
    holder.kill();
    sandbox.run(["stop", "--force"]).expect(0);
    wait_for(&top, "no broker for");
    let domain = sandbox.domain();
    let _frames = topic(&domain);
    wait_for(&top, "frames");
    top.type_in("q");
    end(top, 0);
}

// Holds 317.
#[test]
fn eviction_confirmed_after_a_new_broker_started_evicts_nobody() {
    let sandbox = Sandbox::new();
    let first = holder(&sandbox, "first");
    let mut top = start(&sandbox);
    wait_for(&top, "first");
    top.type_in("\te");
    wait_for(&top, &format!("evict pid {}", first.pid()));
    first.kill();
    sandbox.run(["stop", "--force"]).expect(0);
    wait_for(&top, "no broker for");
    // Numbers of members begin anew, so this one may have the number of the first.
    let second = holder(&sandbox, "second");
    wait_for(&top, &format!("{}", second.pid()));
    top.type_in("Y");
    wait_for(&top, "nothing was evicted: another broker has started since");
    assert_eq!(sandbox.json(["ps"])["members"][0]["state"], "alive");
    top.type_in("q");
    end(top, 0);
}

// Holds 317.
#[test]
fn stopped_broker_does_not_stop_the_keys() {
    let sandbox = Sandbox::new();
    let broker = sandbox.broker();
    let mut top = start(&sandbox);
    let broker = partywall_harness::pidfd_of(broker);
    partywall_os::process::kill(&broker, Signal::STOP).unwrap();
    wait_for(&top, "has not answered for");
    top.type_in("q");
    end(top, 0);
    partywall_os::process::kill(&broker, Signal::CONT).unwrap();
}

// Holds 316.
#[test]
fn live_view_ends_with_its_terminal() {
    let sandbox = Sandbox::new();
    sandbox.broker();
    let mut ours = File::from(openpt(OpenptFlags::RDWR | OpenptFlags::NOCTTY | OpenptFlags::CLOEXEC).unwrap());
    grantpt(&ours).unwrap();
    unlockpt(&ours).unwrap();
    tcsetwinsize(&ours, Winsize { ws_col: 80, ws_row: 24, ws_xpixel: 0, ws_ypixel: 0 }).unwrap();
    let path = ptsname(&ours, Vec::new()).unwrap();
    let theirs = File::options().read(true).write(true).open(path.to_str().unwrap()).unwrap();
    let stream = || Stdio::from(theirs.try_clone().unwrap());
    let mut command = sandbox.command(["top"]);
    let mut top = command.stdin(stream()).stdout(stream()).stderr(stream()).spawn().unwrap();
    drop((command, theirs));
    let mut screen = Vec::new();
    while !shown(&String::from_utf8_lossy(&screen)).contains("1Names") {
        let mut part = [0; 4096];
        let n = ours.read(&mut part).unwrap();
        screen.extend_from_slice(&part[..n]);
    }
    // It is not the controlling terminal of the process, so no signal comes with its end.
    drop(ours);
    let mut ended = None;
    eventually("it ends", || {
        ended = top.try_wait().unwrap();
        ended.is_some()
    });
    assert_eq!(ended.unwrap().code(), Some(0));
}

// Holds 319.
#[test]
fn hostile_commands_do_not_reach_the_terminal_raw() {
    let sandbox = Sandbox::new();
    let hostile = "evil\x1b]0;owned\x07\u{202e}";
    sandbox.file(hostile, [7; 64]);
    let mut holder = sandbox.spawn(["put", hostile, "held", "--hold", "--device", device()]);
    holder.line();
    let mut top = start(&sandbox);
    wait_for(&top, "evil");
    top.type_in("q");
    let screen = end(top, 0);
    assert!(!screen.contains("\x1b]0;") && !screen.contains('\x07') && !screen.contains('\u{202e}'), "{screen:?}");
    let text = sandbox.run(["top", "--once"]).expect(0).text();
    assert!(text.contains("evil") && !text.contains('\x1b') && !text.contains('\u{202e}'), "{text:?}");
    holder.kill();
}

#[test]
fn what_cannot_be_done_is_an_error_with_advice() {
    let sandbox = Sandbox::new();
    let refused = sandbox.run(["top"]).expect(2);
    assert!(
        refused.stderr.contains("standard output is not a terminal") && refused.stderr.contains("--once"),
        "{refused:?}"
    );

    // Without a broker the terminal stays as it is.
    let (code, screen) = Terminal::spawn(sandbox.command(["top"]), 80).wait();
    assert!(code == Some(4) && screen.contains("partywall serve") && !screen.contains("\x1b[?1049h"), "{screen:?}");
    for arguments in [&["top", "--once"][..], &["top", "--once", "--json"], &["top", "--json"]] {
        sandbox.run(arguments).expect(4);
    }
    sandbox.broker();
    let mut dumb: Command = sandbox.command(["top"]);
    dumb.env("TERM", "dumb");
    let (code, screen) = Terminal::spawn(dumb, 80).wait();
    assert!(code == Some(2) && screen.contains("TERM is dumb"), "{screen:?}");
    for every in ["0", "1e15", "x"] {
        sandbox.run(["top", "--every", every]).expect(2);
    }

    // A stream of objects ends with its broker.
    let mut top = sandbox.spawn(["top", "--json", "--every", "0.1"]);
    top.line();
    sandbox.run(["stop"]).expect(0);
    top.wait().expect(4);
}
