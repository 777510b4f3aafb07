//! Limits that are reached.

use partywall_wire::{Limit, LimitHolder};

use super::{
    Error, ErrorKind, Held, Help, Language, MemoryLimit,
    advice::open_files,
    text::{bytes, free_text, held_text, holders_text, limit_name, unread_text, user_option},
};
use crate::place::Place;

/// A limit is reached: of the broker, of a topic, of this process or of the machine.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum LimitReached {
    /// A limit that the topic was made with is reached.
    #[error("{}", limit.text(topic, *most))]
    Topic {
        /// The topic.
        topic: String,
        /// Which limit.
        limit: TopicLimit,
        /// Its value.
        most: u32,
    },
    /// There is not enough memory.
    #[error("cannot allocate {} for {name:?} on {place}{}{}", bytes(*asked), free_text(*free, *total), held_text(held))]
    Memory {
        /// The segment.
        name: String,
        /// Where.
        place: Place,
        /// Bytes asked for.
        asked: u64,
        /// Bytes free, where that is known.
        free: Option<u64>,
        /// Bytes in all.
        total: Option<u64>,
        /// Partywall's memory there: all bytes and the largest names. No tool of the vendor shows it.
        held: Option<Box<Held>>,
    },
    /// A heap may take no more memory from its GPU, and has no free range that is long enough.
    #[error(
        "cannot allocate {} for {name:?}: it has taken {} of its limit of {} from the GPU",
        bytes(*asked), bytes(*taken), bytes(*limit)
    )]
    Heap {
        /// The heap.
        name: String,
        /// Bytes asked for.
        asked: u64,
        /// Bytes that the heap has taken from the GPU.
        taken: u64,
        /// The most that it takes.
        limit: u64,
    },
    /// The process may not open more files.
    #[error("no file descriptor is free for {0}")]
    FileDescriptors(String),
    /// The kernel allows no further thread or process (`EAGAIN` of pthread_create(3) or fork(2)).
    #[error("cannot start {0}: no further thread or process is allowed here")]
    Processes(String),
    /// A limit of the broker is reached.
    #[error("the broker's limit on {} is {allowed}, this needs {needed}{}", limit_name(*limit), holders_text(*limit, holders))]
    Broker {
        /// Which.
        limit: Limit,
        /// Its value.
        allowed: u64,
        /// What would be needed.
        needed: u64,
        /// The processes that have most of it, as far as this one may see them; the largest first. Empty for limits of
        /// one process or one object.
        holders: Vec<LimitHolder>,
    },
    /// This user's share of a limit of the broker is reached.
    #[error(
        "user {uid} has a share of {allowed} of the broker's {}, and {held} in use; this needs {needed}{}",
        limit_name(*limit), holders_text(*limit, holders)
    )]
    User {
        /// The user.
        uid: u32,
        /// Which limit.
        limit: Limit,
        /// The user's share.
        allowed: u64,
        /// What the user has of it.
        held: u64,
        /// What would be needed.
        needed: u64,
        /// The processes that have most of it, as far as this one may see them; the largest first. Empty for limits of
        /// one process or one object.
        holders: Vec<LimitHolder>,
    },
    /// This process or others have not read file descriptors that the broker has sent. If it is others, the call has
    /// waited for them. Unread descriptors count against the limit of the user.
    #[error("{}", unread_text(*unread, *allowed, pids))]
    UnreadDescriptors {
        /// How many are unread.
        unread: u64,
        /// How many may be.
        allowed: u64,
        /// Pids of processes that have not read for longest. Empty if it is this process.
        pids: Vec<u32>,
    },
    /// The kernel refuses to send file descriptors because processes of this user have not read too many of them
    /// (`ETOOMANYREFS`, unix(7)).
    #[error("this user has more than {limit} file descriptors in flight")]
    DescriptorsInFlight {
        /// This process's limit of open files, which is what the kernel compares with.
        limit: u64,
    },
    /// The kernel has no memory or addresses for the call.
    #[error("{what}: {limit}")]
    SystemMemory {
        /// What it was for.
        what: String,
        /// The limit that is reached, as far as it is known.
        limit: MemoryLimit,
    },
}

/// A limit of a topic, as its options name it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum TopicLimit {
    /// Publishers at a time.
    Publishers,
    /// Subscribers at a time.
    Subscribers,
    /// Loans of one publisher at a time.
    Loans,
    /// Blocks of one publisher that are loans, or that views of former loans keep
    /// ([`LoanMemory`](crate::LoanMemory)).
    Viewed,
    /// Samples that one subscriber holds at a time.
    Held,
}

impl LimitReached {
    /// Returns the error that there is no memory for segment `name`; `memory` is the free and the whole memory, if
    /// known.
    pub(crate) fn memory(name: &str, place: Place, asked: u64, memory: Option<(u64, u64)>) -> Error {
        let (free, total) = memory.unzip();
        Self::Memory { name: name.to_owned(), place, asked, free, total, held: None }.into()
    }

    /// Returns what is reported about the error beside its message.
    pub(super) fn help(&self, language: Language) -> Help {
        match self {
            Self::Topic { topic, limit, most } => limit.help(topic, *most, language),
            Self::SystemMemory { limit, .. } => ErrorKind::Refused.help("no-memory", "OutOfMemory", match limit {
                MemoryLimit::AddressSpace(_) => "raise the limit (`ulimit -v`, RLIMIT_AS), or share less at a time",
                MemoryLimit::FileSize(_) => "raise the limit in the shell that starts this (`ulimit -f unlimited`, RLIMIT_FSIZE): host memory is files in memory",
                MemoryLimit::Container(_) => "raise the container's memory limit, or remove names (`partywall ls`): host memory counts against the container that wrote it, for as long as the name is there",
                MemoryLimit::Unknown => "free memory or addresses, or check the container's limits",
            }),
            Self::Memory { place, .. } => {
                let kind = if *place == Place::Host { ErrorKind::Refused } else { ErrorKind::Device };
                kind.help("out-of-memory", "OutOfMemory", "free memory there: `partywall status` shows what Partywall holds, `partywall rm NAME` drops it")
            }
            Self::Heap { .. } => ErrorKind::Refused.help("heap-is-full", "OutOfMemory", match language {
                Language::Python => "create the pool with a larger size=, or drop tensors that are in it",
                _ => "create the heap with a higher limit, or free blocks",
            }),
            Self::FileDescriptors(_) => ErrorKind::Refused.help("no-file-descriptor", "LimitReached", open_files()),
            Self::Processes(_) => ErrorKind::Refused.help("no-process", "LimitReached", "end threads or processes, or raise the limit: `ulimit -u` of the user, the container's limit of pids, TasksMax= of systemd"),
            Self::User { limit, .. } => ErrorKind::Refused.help("user-limit", "LimitReached", format!("remove something of this user (`partywall status` shows its share), or start the broker with a higher {}", user_option(*limit))),
            Self::Broker { limit, .. } => ErrorKind::Refused.help("limit-reached", "LimitReached", match limit {
                Limit::Handshakes => "try again: other processes are connecting",
                Limit::Chunks | Limit::Growths => "grow in fewer, larger steps (spare()), or commit a new version",
                Limit::ClientsOfProcess => "share one connection among the threads of the process, or start the broker with a higher --max-clients",
                Limit::HungUp => "close connections with a good-bye (drop the Domain, in Python close()); restart the process to forget the others",
                Limit::Operators => "try again in a second; `partywall logs` shows which process connects so often",
                Limit::Clients => "`partywall ps` lists them; `partywall rm --unproven` forgets those that are dead without proof; or start the broker with a higher --max-clients",
                Limit::Leases => "drop segments, timelines and semaphores that are open and not used (`partywall ps` shows the leases of each process), or start the broker with a higher --max-leases",
                Limit::Waits => "end processes that wait for names and are not needed (`partywall ps` shows what each waits for), or start the broker with a higher --max-waits",
                Limit::WaitsOfMember => "have fewer calls of this process wait at a time",
                Limit::LeasesOfMember => "drop segments, timelines and semaphores that this process has open and does not use",
                Limit::Attachments => "detach segments that no task names, or put more tensors into one segment",
                Limit::Pinned(_) => "remove names there (`partywall ls`), take another node (device `pinned:N`), or start the broker with a higher --max-pinned-bytes",
                _ => "remove something, or start the broker with a higher limit (`partywall serve --help`)",
            }),
            Self::UnreadDescriptors { pids, .. } => ErrorKind::Refused.help("unread-descriptors", "LimitReached", match pids.first() {
                None => "have the threads of this process that wait for the broker read their answers, or close those connections".to_owned(),
                Some(pid) => format!("see whether those processes are stopped (`partywall ps`); `partywall evict {pid} --kill` ends one"),
            }).about(pids.first().copied()),
            Self::DescriptorsInFlight { .. } => ErrorKind::Refused.help("descriptors-in-flight", "LimitReached", "end the processes of this user that do not read what they are sent, or raise the limit with `ulimit -n`"),
        }
    }
}

impl TopicLimit {
    fn text(self, topic: &str, most: u32) -> String {
        match self {
            Self::Publishers => format!("topic {topic:?} has {most} publishers, and no room for more"),
            Self::Subscribers => format!("topic {topic:?} has {most} subscribers, and no room for more"),
            Self::Loans => format!("this publisher of topic {topic:?} has {most} loans, which is its limit"),
            Self::Viewed => format!(
                "this publisher of topic {topic:?} has {most} blocks in arrays of former loans and in loans, which is its limit"
            ),
            Self::Held => format!("this subscriber of topic {topic:?} holds {most} samples, which is its limit"),
        }
    }

    fn help(self, topic: &str, most: u32, language: Language) -> Help {
        let (anchor, python_class, option, fewer) = match self {
            Self::Publishers => {
                let fewer = format!("close one of them, `partywall show {topic}` lists them");
                ("too-many-publishers", "LimitReached", "publishers", fewer)
            }
            Self::Subscribers => {
                let fewer = format!("close one of them and drop its samples, `partywall show {topic}` lists them");
                ("too-many-subscribers", "LimitReached", "subscribers", fewer)
            }
            Self::Loans => {
                ("too-many-loans", "TooManyLoans", "loans", "publish or drop loans before taking more".into())
            }
            Self::Viewed => {
                return ErrorKind::Refused.help(
                    "too-many-loans",
                    "TooManyLoans",
                    "drop arrays of former loans before taking more loans",
                );
            }
            Self::Held => ("too-many-held", "TooManyHeld", "held", "drop samples before receiving more".into()),
        };
        let more = most.saturating_add(1);
        let more = match language {
            Language::Rust => format!(": {option}({more})"),
            Language::Python => format!(": {option}={more}"),
            Language::C => format!(": {option} = {more}"),
            Language::Shell => format!(", as `partywall topic pub --{option} {more}` does"),
        };
        ErrorKind::Refused.help(anchor, python_class, format!("{fewer}; or make the topic with more{more}"))
    }
}
