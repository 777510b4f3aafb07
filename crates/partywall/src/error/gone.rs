//! Objects that have ended.

use std::time::Duration;

use partywall_wire::TimelineEnding;

use super::{
    ErrorKind, Help, Language,
    text::{seconds, timeline_ending},
};

/// The object has ended: with its owner, by a call, or because it was released.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Gone {
    /// The process that published the memory is dead, and the memory ended with it. Segments that were open before stay
    /// readable.
    #[error("{name:?} is gone: its publisher, pid {pid}, died {} ago", seconds(*ago))]
    OwnerDied {
        /// The name.
        name: String,
        /// The publisher.
        pid: u32,
        /// How long ago that was proved.
        ago: Duration,
    },
    /// The memory can no longer be opened, because its publisher dropped it or a process removed the name; or no new
    /// view of it is allowed, because the [deadline](crate::Domain::withdraw) for dropping it has passed. Views that
    /// exist stay valid.
    #[error("{name:?} was withdrawn by pid {pid} {} ago", seconds(*ago))]
    Withdrawn {
        /// The name.
        name: String,
        /// The process that dropped or removed it.
        pid: u32,
        /// How long ago.
        ago: Duration,
    },
    /// The timeline ended before it reached the value. Values signalled until then are valid.
    #[error("timeline {name:?} ended at {last}, before {wanted}: {}", timeline_ending(*ending))]
    Timeline {
        /// The timeline.
        name: String,
        /// How it ended.
        ending: TimelineEnding,
        /// The value to wait for or to signal.
        wanted: u64,
        /// The last value that was signalled.
        last: u64,
    },
    /// The permit to release is not held any more, or never was.
    #[error("this permit of semaphore {name:?} is not held")]
    Permit {
        /// The semaphore.
        name: String,
    },
    /// The referenced block is no longer offered: it was accepted, taken back, or freed after its holder's death. The
    /// block may contain data of another process now.
    #[error("{block} is no longer offered")]
    Block {
        /// The reference.
        block: String,
    },
    /// The block to release is not held any more, or never was.
    #[error("this block of pool {pool:?} is not held")]
    HeldBlock {
        /// The pool.
        pool: String,
    },
    /// The topic's last publisher has left, and the subscriber has received all samples. Only subscribers with
    /// [`until_idle`](crate::SubscriberOptions::until_idle) get this error.
    #[error("topic {topic:?} is idle: its last publisher has left, and all samples were received")]
    TopicIdle {
        /// The topic.
        topic: String,
    },
    /// The broker has detached this publisher or subscriber from the topic.
    #[error("this process is detached from topic {topic:?}")]
    Detached {
        /// The topic.
        topic: String,
    },
    /// The claim of a task has been taken back: its lease ended, or the broker took this process for dead. The task
    /// goes to another worker, or has ended.
    #[error("attempt {attempt} of task {task} was taken back")]
    Claim {
        /// The reference of the task.
        task: String,
        /// The number of the attempt, from 1.
        attempt: u8,
    },
    /// This process has completed, failed or closed the task that it claimed. In Rust the compiler refuses such a call.
    #[error("attempt {attempt} of task {task} has ended: this process completed, failed or closed it")]
    Attempt {
        /// The reference of the task.
        task: String,
        /// The number of the attempt, from 1.
        attempt: u8,
    },
    /// The task is over: its result was taken, or it was cancelled or purged.
    #[error("task {task} is gone: its result was taken, or it was cancelled or purged")]
    Task {
        /// The reference of the task.
        task: String,
    },
    /// The queue does not hold this segment any more: it was detached.
    #[error("attachment {attachment} of queue {queue:?} is gone: its segment was detached")]
    Attachment {
        /// The queue.
        queue: String,
        /// The number of the attachment.
        attachment: u32,
    },
    /// This process was evicted from the domain: its names are withdrawn, and its calls are refused. Mapped memory
    /// stays mapped.
    #[error("this process was evicted by pid {by} {} ago", seconds(*ago))]
    Evicted {
        /// The process that evicted it.
        by: u32,
        /// How long ago.
        ago: Duration,
    },
}

impl Gone {
    /// Returns what is reported about the error beside its message.
    pub(super) fn help(&self, language: Language) -> Help {
        match self {
            Self::OwnerDied { pid, .. } => ErrorKind::NotFound.help("owner-died", "OwnerDied", "start its publisher again and wait for it with a timeout; memory that must outlive its process is committed or published as a copy").about(*pid),
            Self::Withdrawn { pid, .. } => ErrorKind::NotFound.help("withdrawn", "Withdrawn", "drop it; open the name again with a timeout if it will be published again").about(*pid),
            Self::Timeline { ending, .. } => ended_timeline(*ending),
            Self::Permit { .. } => ErrorKind::Refused.help("not-held", "NotHeld", "give each permit back once, by the process that acquired it"),
            Self::Block { .. } => ErrorKind::NotFound.help("stale-block", "StaleBlock", "accept each reference once, while the process that offered it lives and has the pool open"),
            Self::HeldBlock { .. } => ErrorKind::Refused.help("block-not-held", "NotHeld", "give each block back once, by the process that holds it, and do not use it afterwards"),
            Self::TopicIdle { .. } => ErrorKind::CheckFailed.help("topic-idle", "TopicIdle", match language {
                Language::Rust => "stop receiving; to wait for further publishers subscribe without until_idle()",
                Language::Python => "stop receiving; to wait for further publishers subscribe without until=\"idle\"",
                Language::C => "stop receiving; to wait for further publishers leave until_idle zero",
                Language::Shell => "stop receiving; to wait for further publishers leave out --until-idle",
            }),
            Self::Detached { .. } => ErrorKind::Refused.help("detached", "Detached", "join the topic again"),
            Self::Claim { .. } => ErrorKind::Refused.help("claim-taken-back", "ClaimLost", "drop its results and claim the next task; a worker that needs more time must extend its lease"),
            Self::Attempt { .. } => ErrorKind::Refused.help("attempt-ended", "ClaimLost", "complete or fail each task once, as the last call"),
            Self::Task { .. } => ErrorKind::NotFound.help("task-gone", "TaskGone", "take each result once; `partywall show NAME` counts the tasks of the queue"),
            Self::Attachment { .. } => ErrorKind::NotFound.help("attachment-gone", "NotAttached", "attach the segment again, and name the part by the new attachment"),
            Self::Evicted { by, .. } => ErrorKind::Refused.help("evicted", "Evicted", "restart this process, or connect anew: a new connection is a new member").about(*by),
        }
    }
}

fn ended_timeline(ending: TimelineEnding) -> Help {
    match ending {
        TimelineEnding::OwnerDied => ErrorKind::CheckFailed.help("writer-died", "WriterDied", START_AGAIN),
        TimelineEnding::OwnerFaulted => ErrorKind::CheckFailed.help("writer-faulted", "WriterFaulted", START_AGAIN),
        TimelineEnding::Evicted => ErrorKind::CheckFailed.help("writer-evicted", "WriterEvicted", START_AGAIN),
        TimelineEnding::Closed => ErrorKind::CheckFailed.help(
            "timeline-closed",
            "WriterClosed",
            "wait for values that its writer signals, or follow() the timeline when it has another writer",
        ),
        TimelineEnding::Abandoned => ErrorKind::CheckFailed.help(
            "timeline-abandoned",
            "Abandoned",
            "open it again in its writer, which continues from the last value; waiters then follow()",
        ),
        TimelineEnding::BrokerGone => ErrorKind::CheckFailed.help(
            "timeline-lost",
            "TimelineLost",
            "connect again; the processes that open timelines create them again",
        ),
        _ => ErrorKind::CheckFailed.help("writer-died", "TimelineEnded", START_AGAIN),
    }
}

const START_AGAIN: &str = "start its writer again, then follow() the timeline: the next writer continues from the last value; treat the results of work enqueued behind this wait as garbage";
