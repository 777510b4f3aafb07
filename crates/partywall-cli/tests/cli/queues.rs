//! Queues as a user of the command sees them: `ls`, `show`, `queue ls`, `queue retry`, `queue purge`.

use std::time::Duration;

use partywall::{DType, Domain, Place, Queue, Task};
use partywall_harness::Sandbox;
use serde_json::{Value, json};

const SECOND: Duration = Duration::from_secs(1);

fn create(domain: &Domain) -> Queue {
    domain
        .queue("work")
        .tasks(8)
        .inputs(4, 100)
        .outputs(2, 1000)
        .lease(60 * SECOND)
        .place(Place::Host)
        .create()
        .unwrap()
}

/// Puts a result, two dead letters and a pending task into a queue.
fn fill(queue: &Queue) {
    let submit = |task: Task| queue.submit(task, SECOND).unwrap();
    submit(Task::new("sqrt").output(8).input(queue.inputs().alloc(SECOND).unwrap()));
    queue.claim(SECOND).unwrap().complete().unwrap();
    for reason in ["no such kind", ""] {
        submit(Task::new("cube").max_attempts(1));
        match reason {
            "" => drop(queue.claim(SECOND).unwrap()),
            reason => queue.claim(SECOND).unwrap().fail(reason).unwrap(),
        }
    }
    submit(Task::new("sqrt").input(queue.inputs().alloc(SECOND).unwrap()));
}

#[test]
fn queue_is_named_among_the_holders_of_a_segment() {
    let sandbox = Sandbox::new();
    let domain = sandbox.domain();
    let queue = create(&domain);
    let segment =
        domain.create("weights", Place::Host).tensor("x", DType::U8, &[1000]).allocate().unwrap().commit().unwrap();
    let weights = queue.attach(&segment).unwrap();
    queue.submit(Task::new("sum").part(weights.part(..10).unwrap()), SECOND).unwrap();

    let show = sandbox.json(["show", "weights"]);
    assert_eq!(show["queues"], json!([{ "name": "work", "version": 1, "attachment": 0 }]));
    assert_eq!((&show["leases"], show["holders"].as_array().unwrap().len()), (&json!(2), 1));
    let text = sandbox.run(["show", "weights"]).expect(0).text();
    assert!(text.contains("held by    queue work@1\n"), "{text}");
    let attached = json!([{ "name": "weights", "version": 1, "bytes": 1000, "attachment": 0, "tasks": 1 }]);
    assert_eq!(sandbox.json(["show", "work"])["detail"]["attached"], attached);
    let text = sandbox.run(["show", "work"]).expect(0).text();
    let (_, table) = text.split_once("attached segments\n").unwrap();
    assert!(table.lines().nth(1).unwrap().contains("weights@1"), "{text}");

    drop(segment);
    let text = sandbox.run(["show", "weights@1"]).expect(0).text();
    assert!(text.contains("queue work@1") && !text.contains("nobody"), "{text}");
    let again =
        domain.create("weights", Place::Host).tensor("x", DType::U8, &[1000]).allocate().unwrap().commit().unwrap();
    queue.attach(&again).unwrap();
    drop(again.leave_name());
    let text = sandbox.run(["rm", "weights"]).expect(0).text();
    assert!(text.contains("stay until queue work@1 ends or detaches it"), "{text}");
}

#[test]
fn queues_are_listed_and_shown() {
    let sandbox = Sandbox::new();
    let domain = sandbox.domain();
    let queue = create(&domain);
    fill(&queue);

    let shape = json!({
        "kind": "queue", "blocks": 4, "block_bytes": 100, "tasks": 8, "outputs": 2, "output_bytes": 1000, "lease_ms": 60_000,
    });
    let tasks = json!({
        "pending": 1, "claimed": 0, "enqueued": 0, "done": 1, "dead": 2, "ending": 0, "free": 4, "completed": 1,
        "returned": 2,
    });
    let name = &sandbox.json(["ls"])["names"][0];
    assert_eq!((&name["latest"]["control"], &name["usage"]), (&shape, &json!({ "free": 3, "tasks": tasks })));
    let text = sandbox.run(["ls"]).expect(0).text();
    let lines: Vec<_> = text.lines().map(|line| line.split_whitespace().collect::<Vec<_>>()).collect();
    assert_eq!(lines[0][..9], ["QUEUE", "KIND", "PLACE", "PENDING", "RUNNING", "DONE", "DEAD", "FREE", "COMPLETED"]);
    assert_eq!(lines[1][..9], ["work", "host", "host", "1", "0", "1", "2", "4", "1"], "{text}");

    let show = sandbox.json(["show", "work"]);
    assert_eq!(
        (&show["control"], &show["detail"]["tasks"], &show["detail"]["audit"]),
        (&shape, &tasks, &json!("clean"))
    );
    assert_eq!(show["detail"]["outputs"], json!({ "free": 1, "held": 0, "in_results": 1 }));
    let text = sandbox.run(["show", "work"]).expect(0).text();
    for part in [
        "1 pending, 1 with a result that was not taken, 2 dead letters; room for 4 more",
        "1 result; 2 attempts without one",
        "60000 ms for an attempt",
        "4 blocks of 100 bytes: 3 free, 1 with tasks",
        "2 blocks of 1000 bytes: 1 free, 1 with tasks",
        "audit",
        "shared: goes with",
    ] {
        assert!(text.contains(part), "{part:?} is missing: {text}");
    }
    sandbox.run(["rm", "work"]).expect(0);
    assert_eq!(queue.stats().pending, 1, "a process that has it open goes on");
}

#[test]
fn workers_are_shown_with_their_tasks_and_blocks() {
    let sandbox = Sandbox::new();
    let domain = sandbox.domain();
    let queue = create(&domain);
    let worker = sandbox.domain();
    let others = worker.queue("work").open().unwrap();
    for _ in 0..2 {
        queue.submit(Task::new("sqrt").output(8), SECOND).unwrap();
    }
    let claims = others.claim_all(2, SECOND).unwrap();

    let mut tasks: Vec<_> = sandbox.json(["show", "work"])["holders"]
        .as_array()
        .unwrap()
        .iter()
        .map(|holder| (holder["blocks"].as_u64().unwrap(), holder["tasks"].as_u64().unwrap()))
        .collect();
    tasks.sort_unstable();
    assert_eq!(tasks, [(0, 0), (2, 2)], "the worker has the output of each attempt");
    let text = sandbox.run(["show", "work"]).expect(0).text();
    assert!(
        text.lines().any(|line| line.split_whitespace().eq(["PID", "LEASES", "BLOCKS", "WAITING", "TASKS", "COMMAND"])),
        "{text}"
    );
    let mut held: Vec<_> = sandbox.json(["ps"])["members"]
        .as_array()
        .unwrap()
        .iter()
        .map(|member| ["blocks", "tasks"].map(|what| member[what].as_u64().unwrap()))
        .collect();
    held.sort_unstable();
    assert_eq!(held, [[0, 0], [2, 2]]);
    let text = sandbox.run(["ps"]).expect(0).text();
    assert!(text.lines().next().unwrap().contains("TASKS"), "{text}");
    drop(claims);
}

#[test]
fn tasks_are_listed_retried_and_purged() {
    let sandbox = Sandbox::new();
    let domain = sandbox.domain();
    let queue = create(&domain);
    fill(&queue);

    let list = |arguments: &[&str]| sandbox.json(["queue", "ls", "work"].iter().chain(arguments))["tasks"].clone();
    let states = |tasks: &Value| tasks.as_array().unwrap().iter().map(|task| task["state"].clone()).collect::<Vec<_>>();
    assert_eq!(states(&list(&[])), ["done", "dead", "dead", "pending"]);
    assert_eq!(states(&list(&["--limit", "1"])), ["done"]);
    let limited = sandbox.run(["queue", "ls", "work", "--limit", "1"]).expect(0).stderr;
    assert!(limited.contains("1 of 4 tasks listed; --limit N lists more"), "{limited}");
    let dead = list(&["--state", "dead"]);
    let first = &dead[0];
    assert_eq!(
        (&first["kind"], &first["attempts"], &first["text"]),
        (&json!("cube"), &json!(1), &json!("no such kind"))
    );
    assert_eq!(first["failures"], json!([{ "attempt": 1, "reason": "its worker failed it" }]));
    assert_eq!((&dead[1]["failures"][0]["reason"], &dead[1]["text"]), (&json!("its worker gave it up"), &Value::Null));
    let text = sandbox.run(["queue", "ls", "work"]).expect(0).text();
    assert!(text.contains("1: its worker failed it: no such kind"), "{text}");

    // First one task, then all that are left.
    let task = first["task"].as_str().unwrap();
    assert_eq!(sandbox.json(["queue", "retry", "work", task]), json!({ "retried": [task] }));
    let refused = sandbox.run(["queue", "retry", "work", task]).expect(5).stderr;
    assert!(refused.contains("is pending, not a dead letter"), "{refused}");
    let text = sandbox.run(["queue", "retry", "work"]).expect(0).text();
    assert!(text.contains("retried 1 dead letter of queue \"work\""), "{text}");
    assert_eq!(states(&list(&[])), ["done", "pending", "pending", "pending"]);
    assert_eq!(sandbox.json(["queue", "purge", "work", "--dead"]), json!({ "purged": [] }));
    assert_eq!(sandbox.json(["queue", "purge", "work"])["purged"].as_array().unwrap().len(), 1);
    assert_eq!((queue.stats().done, queue.stats().pending), (0, 3), "pending tasks stay");
}

#[test]
fn text_of_a_task_steers_no_terminal_and_forges_no_row() {
    let sandbox = Sandbox::new();
    let domain = sandbox.domain();
    let queue = create(&domain);
    queue.submit(Task::new("k\u{1b}[2J\nwork@1#9.9  done").max_attempts(2), SECOND).unwrap();
    queue.claim(SECOND).unwrap().fail("\u{7}\r\nwork@1#8.8  dead\u{202e}").unwrap();
    let text = sandbox.run(["queue", "ls", "work"]).expect(0).text();
    assert_eq!(text.lines().count(), 2, "{text:?}");
    assert!(!text.contains(|c: char| c.is_control() && c != '\n' || c == '\u{202e}'), "{text:?}");
    // The text is not that of the last failure.
    drop(queue.claim(SECOND).unwrap());
    let text = sandbox.run(["queue", "ls", "work"]).expect(0).text();
    assert!(text.trim_end().ends_with("2: its worker gave it up"), "{text:?}");
}

#[test]
fn show_says_that_unread_results_block_a_queue() {
    let sandbox = Sandbox::new();
    let domain = sandbox.domain();
    let queue = create(&domain);
    let advice = "take them, or drop them with `partywall queue purge work --results`";
    for blocked in [false, true] {
        queue.submit(Task::new("sqrt").output(8), SECOND).unwrap();
        queue.claim(SECOND).unwrap().complete().unwrap();
        let text = sandbox.run(["show", "work"]).expect(0).text();
        assert_eq!(text.contains(advice), blocked, "{text}");
    }
    sandbox.run(["queue", "purge", "work", "--results"]).expect(0);
    let text = sandbox.run(["show", "work"]).expect(0).text();
    assert!(!text.contains(advice), "{text}");
}

#[test]
fn bad_arguments_are_refused_with_a_reason() {
    let sandbox = Sandbox::new();
    let domain = sandbox.domain();
    let _queue = create(&domain);
    let _pool = domain.pool("frames").blocks(1).block_bytes(1).place(Place::Host).create().unwrap();
    for (arguments, code, reason) in [
        (&["queue", "ls", "nothing"][..], 3, "nothing"),
        (&["queue", "ls", "frames"], 2, "\"frames\" is a pool"),
        (&["queue", "retry", "work", "others@1#0.1"], 2, "a task of another queue"),
        (&["queue", "retry", "work", "0"], 2, "NAME@VERSION#PLACE.GENERATION"),
        (&["queue", "purge", "work", "work@1#0.1"], 3, "is gone"),
        (&["queue", "purge", "work", "--dead", "--results"], 2, "cannot be used with"),
        (&["queue", "ls", "work", "--state", "lost"], 2, "pending, claimed, enqueued, done, dead"),
    ] {
        let text = sandbox.run(arguments).expect(code).stderr;
        assert!(text.contains(reason), "{arguments:?}: {text}");
    }
    let text = sandbox.run(["queue", "ls", "work"]).expect(0).stderr;
    assert!(text.contains("has no task"), "{text}");
}
