//! Objects that another process still uses.

use std::time::Duration;

use partywall_wire::MemberState;

use super::{
    ErrorKind, Help,
    text::{counted, seconds, subscriber_text},
};

/// Another process still uses the object. Trying again later may succeed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Busy {
    /// The timeline has another writer, in this or another process.
    #[error("timeline {name:?} has a writer, pid {pid}")]
    Writer {
        /// The timeline.
        name: String,
        /// The writer.
        pid: u32,
    },
    /// A sample was not published in time, because a blocking subscriber does not consume samples.
    #[error("topic {topic:?} is full: {} has not consumed the oldest sample for {}", subscriber_text(*pid, *state), seconds(*after))]
    TopicFull {
        /// The topic.
        topic: String,
        /// The subscriber's process, if it is known. Unknown for a call without a timeout, which does not ask the
        /// broker.
        pid: Option<u32>,
        /// The state of that process.
        state: Option<MemberState>,
        /// The time for which the publisher has waited.
        after: Duration,
    },
    /// The sample is not complete yet: a stream of its publisher still writes it.
    #[error("sample {position} of topic {topic:?} is not complete yet")]
    NotReady {
        /// The topic.
        topic: String,
        /// The position of the sample in the topic.
        position: u64,
    },
    /// The queue has no slot for another task: all slots have a task, or a result that was not taken.
    #[error("queue {queue:?} is full: it has room for {tasks} tasks{}", occupied(*results, *outputs_full, *kept))]
    QueueFull {
        /// The queue.
        queue: String,
        /// How many tasks it has room for.
        tasks: u32,
        /// How many of its slots hold results that were not taken.
        results: u32,
        /// Whether results occupy output blocks and no output block is free. Workers then cannot claim tasks that have
        /// an output, so that only taking or purging results makes room.
        outputs_full: bool,
        /// How many of its slots views of tasks keep that this process has ended. They are arrays of such tasks in
        /// Python, and [`TaskMemory`](crate::TaskMemory) in Rust.
        kept: u32,
    },
    /// There are tasks, but no output block is free.
    #[error("queue {queue:?} has no free output block: {}", without_output(*outputs, *results, *kept))]
    OutputsFull {
        /// The queue.
        queue: String,
        /// How many output blocks it has.
        outputs: u32,
        /// The number of results that were not taken.
        results: u32,
        /// How many blocks views of tasks keep that this process has ended. They are arrays of such tasks in Python,
        /// and [`TaskMemory`](crate::TaskMemory) in Rust.
        kept: u32,
    },
    /// There is no task, and none can come: views of tasks that this process has ended keep all slots, or all input
    /// blocks.
    #[error("queue {queue:?} has no free {kept}: {}", kept_all(*tasks))]
    TasksKept {
        /// The queue.
        queue: String,
        /// What the views keep: `slot` or `input block`.
        kept: &'static str,
        /// How many tasks they belong to.
        tasks: u32,
    },
    /// A worker has the task.
    #[error("task {task} is running: a worker has its attempt {attempt}")]
    TaskRunning {
        /// The reference of the task.
        task: String,
        /// The number of the attempt, from 1.
        attempt: u8,
    },
    /// The task is not in the state that the call needs.
    #[error("task {task} is {status}, not {wanted}")]
    TaskState {
        /// The reference of the task.
        task: String,
        /// Its state, as returned by [`TaskStatus::name`](crate::TaskStatus::name).
        status: &'static str,
        /// The states that the call needs.
        wanted: &'static str,
    },
    /// The submitter's stream has not completed the inputs of the task yet.
    #[error("the inputs of task {task} are not complete yet")]
    InputsNotReady {
        /// The reference of the task.
        task: String,
    },
    /// The segment cannot be detached from the queue: tasks name it that are not over, or that are dead letters.
    #[error("queue {queue:?} needs segment {segment}: {} it, {first} among them", names(*tasks))]
    AttachmentInUse {
        /// The queue.
        queue: String,
        /// The segment, with its version.
        segment: String,
        /// How many tasks name it.
        tasks: u32,
        /// The reference of one of them.
        first: String,
    },
    /// The name is being withdrawn, and its readers have a deadline that cannot be changed.
    #[error("{name:?} is being withdrawn by pid {pid}, which began {} ago", seconds(*ago))]
    Withdrawing {
        /// The name.
        name: String,
        /// The process that withdrew it.
        pid: u32,
        /// How long ago.
        ago: Duration,
    },
    /// The process was to hold no memory of a GPU and no pinned memory that it can share, and holds some.
    #[error("this process still holds {} that it can share with other processes, on a GPU or pinned", counted(*allocations as u64, "allocation"))]
    StillShared {
        /// How many: see [`shared_allocations`](partywall_cuda::shared_allocations).
        allocations: usize,
    },
    /// The broker was to stop without force, but has names or members.
    #[error("the broker still has {} and {}", counted(*names, "name"), counted(*members, "member"))]
    BrokerInUse {
        /// Names.
        names: u64,
        /// Members other than the caller.
        members: u64,
    },
}

impl Busy {
    /// Returns what is reported about the error beside its message.
    pub(super) fn help(&self) -> Help {
        match self {
            Self::Writer { pid, .. } => ErrorKind::Refused.help("writer-exists", "WriterExists", "one writer at a time: use another name, close that writer, or end its waits with `partywall abandon NAME`").about(*pid),
            Self::TopicFull { topic, pid, .. } => ErrorKind::Refused.help("topic-full", "TopicFull", match pid {
                Some(pid) => format!("wait for it, or detach it with `partywall evict {pid}`; a subscriber that may miss samples never blocks publishers"),
                None => format!("`partywall show {topic}` names the subscriber; `partywall evict PID` detaches it; a subscriber that may miss samples never blocks publishers"),
            }).about(*pid),
            Self::NotReady { .. } => ErrorKind::CheckFailed.help("not-ready", "NotReady", "wait() for it on the host, or order a stream behind it with device_on()"),
            Self::QueueFull { queue, results, kept, .. } => ErrorKind::Refused.help("queue-full", "QueueFull", match (results, kept) {
                (0, 0) => format!("start workers, or wait longer; `partywall show {queue}` says where the tasks are; a queue made with more tasks has more room"),
                (0, _) => "delete arrays of tasks that have ended (`del`), start workers, or wait longer".to_owned(),
                (_, _) => format!("take results, or drop them with `partywall queue purge {queue} --results`; a queue made with more tasks and outputs has more room"),
            }),
            Self::OutputsFull { queue, outputs, results, kept } => ErrorKind::Refused.help("outputs-full", "OutputsFull", match (results, kept) {
                (_, kept) if kept >= outputs => DELETE_ARRAYS.to_owned(),
                (0, 1..) => "delete arrays of tasks that have ended (`del`), or wait longer; a queue made with more outputs has more room".to_owned(),
                (_, _) => format!("take results, or drop them with `partywall queue purge {queue} --results`; a queue made with more outputs has more room"),
            }),
            Self::TasksKept { .. } => ErrorKind::Refused.help("tasks-kept", "StillUsed", DELETE_ARRAYS),
            Self::TaskRunning { .. } => ErrorKind::Refused.help("task-running", "TaskRunning", "wait for its result; only a pending task can be cancelled"),
            Self::TaskState { .. } => ErrorKind::Refused.help("task-state", "WrongTaskState", "only a dead letter can be retried, up to 255 attempts in all, and only a dead letter or a result that was not taken can be purged; a pending task can be cancelled by its ticket"),
            Self::InputsNotReady { .. } => ErrorKind::CheckFailed.help("inputs-not-ready", "InputsNotReady", "wait_inputs() on the host, or order a stream behind them with wait_inputs_on(), and complete the task after that"),
            Self::AttachmentInUse { queue, .. } => ErrorKind::Refused.help("attachment-in-use", "SegmentInUse", format!("wait for the tasks, or retry or purge dead letters (`partywall queue ls {queue}` lists them), then detach it")),
            Self::Withdrawing { name, pid, .. } => ErrorKind::Refused.help("withdrawing", "BeingWithdrawn", format!("`partywall show {name}` lists its readers and the deadline; `partywall evict PID` takes it from one of them now")).about(*pid),
            Self::StillShared { .. } => ErrorKind::Refused.help("still-shared", "StillShared", "close what has them: pools, topics, queues and builds at a GPU or pinned, and published memory"),
            Self::BrokerInUse { .. } => ErrorKind::Refused.help("in-use", "Error", "`partywall ls` and `partywall status` show them; `partywall stop --force` drops all"),
        }
    }
}

fn names(tasks: u32) -> String {
    format!("{} {}", counted(tasks.into(), "task"), if tasks == 1 { "names" } else { "name" })
}

fn occupied(results: u32, outputs_full: bool, kept: u32) -> String {
    let held = match results {
        0 => "",
        1 => ", and 1 slot holds a result that was not taken",
        results => &format!(", and {results} slots hold results that were not taken"),
    };
    let without = if results > 0 && outputs_full { "; no output block is free" } else { "" };
    let kept = match kept {
        0 => "",
        kept => &format!("; arrays of {} keep as many slots", ended(kept)),
    };
    format!("{held}{without}{kept}")
}

fn without_output(outputs: u32, results: u32, kept: u32) -> String {
    if kept >= outputs {
        return kept_all(kept);
    }
    let held = format!("{results} of {outputs} hold results that were not taken");
    match kept {
        0 => held,
        kept => format!("{held}, and arrays of {} keep {kept}", ended(kept)),
    }
}

fn kept_all(tasks: u32) -> String {
    format!("arrays of {} hold them", ended(tasks))
}

fn ended(tasks: u32) -> String {
    format!("{} of this process", counted(tasks.into(), "ended task"))
}

const DELETE_ARRAYS: &str = "delete them (`del`) before the next claim";
