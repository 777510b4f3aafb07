//! `partywall queue …`. With `--json`: `ls` prints `socket`, `queue` and `tasks`, a list of `task` (its reference),
//! `state` (`pending`, `claimed`, `enqueued`, `done` or `dead`), `kind`, `attempts`, `max_attempts`, `age_ms`,
//! `failures` (of the last attempts: `attempt`, `reason`) and `text` (the reason that the last worker that failed the
//! task gave, or null); `retry` prints `retried` and `purge` prints `purged`, lists of references.

use clap::{Args, Subcommand};
use partywall::{Queue, TaskFailure, TaskInfo, TaskRef, TaskStatus};
use serde_json::{Value, json};

use crate::{
    Context, describe,
    failure::Failure,
    output::Output,
    table::Column,
    text::{self, parse_count},
};

/// The arguments of the command.
#[derive(Debug, Args)]
pub(crate) struct Arguments {
    #[command(subcommand)]
    command: QueueCommand,
}

#[derive(Debug, Subcommand)]
enum QueueCommand {
    /// List the tasks of a queue, with the failures of their attempts
    Ls(List),
    /// Make dead letters pending again, all of them or some
    Retry(Chosen),
    /// Drop results that were not taken and dead letters, all of them or some
    Purge(Purge),
}

#[derive(Debug, Args)]
struct List {
    /// The queue
    name: String,
    /// List only tasks in this state
    #[arg(long, value_parser = STATES)]
    state: Option<String>,
    /// List at most this many tasks
    #[arg(long, value_name = "N", value_parser = parse_count, default_value = "100")]
    limit: u64,
}

#[derive(Debug, Args)]
struct Chosen {
    /// The queue
    name: String,
    /// The tasks, as `partywall queue ls` names them [default: all]
    tasks: Vec<TaskRef>,
}

#[derive(Debug, Args)]
struct Purge {
    #[command(flatten)]
    chosen: Chosen,
    /// Drop results only
    #[arg(long, conflicts_with_all = ["tasks", "dead"])]
    results: bool,
    /// Drop dead letters only
    #[arg(long, conflicts_with = "tasks")]
    dead: bool,
}

/// The states of tasks that are listed.
const STATES: [&str; 5] = ["pending", "claimed", "enqueued", "done", "dead"];

/// Runs the command.
pub(crate) fn run(context: &Context, arguments: &Arguments) -> Result<(), Failure> {
    match &arguments.command {
        QueueCommand::Ls(list) => self::list(context, list),
        QueueCommand::Retry(chosen) => {
            let queue = open(context, &chosen.name)?;
            let is_dead = |status| status == TaskStatus::Dead;
            each(context, &queue, &chosen.tasks, ("retried", "dead letter"), is_dead, |task| queue.retry(task))
        }
        QueueCommand::Purge(purge) => {
            let queue = open(context, &purge.chosen.name)?;
            let is_over = |status| match status {
                TaskStatus::Done => !purge.dead,
                TaskStatus::Dead => !purge.results,
                _ => false,
            };
            let what = match (purge.results, purge.dead) {
                (true, _) => "result",
                (_, true) => "dead letter",
                _ => "task",
            };
            each(context, &queue, &purge.chosen.tasks, ("purged", what), is_over, |task| queue.purge(task))
        }
    }
}

fn open(context: &Context, name: &str) -> Result<Queue, Failure> {
    partywall::check_name(name)?;
    Ok(context.options().start(false).connect()?.queue(name).open()?)
}

fn list(context: &Context, list: &List) -> Result<(), Failure> {
    let queue = open(context, &list.name)?;
    let most = usize::try_from(list.limit).unwrap_or(usize::MAX);
    let tasks = queue.tasks(most, |status| list.state.as_ref().is_none_or(|state| state == status.name()));
    let output = context.output();
    output.value(&json!({
        "socket": queue.domain().socket(),
        "queue": queue.name(),
        "tasks": tasks.iter().map(value).collect::<Vec<_>>(),
    }));
    if tasks.is_empty() {
        let what = list.state.as_ref().map_or_else(String::new, |state| format!(" that is {state}"));
        output.note(format!("queue {:?} has no task{what}", queue.name()));
        return Ok(());
    }
    output.rows(&COLUMNS, &tasks);
    note_more(output, &queue, list, tasks.len());
    Ok(())
}

/// Says that there may be more tasks than were listed.
fn note_more(output: Output, queue: &Queue, list: &List, listed: usize) {
    if listed as u64 == list.limit {
        let stats = queue.stats();
        let all = stats.pending + stats.claimed + stats.enqueued + stats.done + stats.dead;
        output.note(format!("{listed} of {} listed; --limit N lists more", text::count(all.into(), "task")));
    }
}

fn value(info: &TaskInfo) -> Value {
    let failures = info.failures.iter();
    let failures = failures.map(|(attempt, reason)| json!({ "attempt": attempt, "reason": reason.to_string() }));
    json!({
        "task": info.task.to_string(),
        "state": info.status.name(),
        "kind": info.kind,
        "attempts": info.attempts,
        "max_attempts": info.max_attempts,
        "age_ms": info.age.as_millis() as u64,
        "failures": failures.collect::<Vec<_>>(),
        "text": (!info.text.is_empty()).then_some(&info.text),
    })
}

type Col = Column<TaskInfo>;

const COLUMNS: [Col; 6] = [
    Col::left("TASK", |info| info.task.to_string().into()),
    Col::left("STATE", |info| info.status.name().into()),
    Col::left("KIND", |info| describe::shorten(&info.kind, describe::SHORT).into()).spare(2),
    Col::right("ATTEMPTS", |info| format!("{} of {}", info.attempts, info.max_attempts).into()),
    Col::right("AGE", |info| text::duration(info.age).into()).spare(1),
    Col::left("LAST FAILURE", |info| info.failures.last().map(|failure| last_failure(info, failure)).into()),
];

fn last_failure(info: &TaskInfo, (attempt, reason): &(u8, TaskFailure)) -> String {
    // The text is that of the last attempt that a worker failed.
    if *reason == TaskFailure::Failed && !info.text.is_empty() {
        format!("{attempt}: {reason}: {}", describe::shorten(&info.text, describe::LONG))
    } else {
        format!("{attempt}: {reason}")
    }
}

/// Calls `act` for the given tasks or, without any, for all whose status satisfies `is_meant`. Prints their number.
fn each(
    context: &Context,
    queue: &Queue,
    tasks: &[TaskRef],
    (done, what): (&str, &str),
    is_meant: impl Fn(TaskStatus) -> bool,
    act: impl Fn(&TaskRef) -> partywall::Result<()>,
) -> Result<(), Failure> {
    let mut named = Vec::new();
    if tasks.is_empty() {
        for TaskInfo { task, .. } in queue.tasks(usize::MAX, is_meant) {
            // Another process may have changed the task since it was listed.
            if act(&task).is_ok() {
                named.push(task.to_string());
            }
        }
    }
    for task in tasks {
        act(task)?;
        named.push(task.to_string());
    }
    let output = context.output();
    output.value(&json!({ done: named }));
    output.line(format!("{done} {} of queue {:?}", text::count(named.len() as u64, what), queue.name()));
    Ok(())
}
