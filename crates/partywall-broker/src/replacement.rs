//! Replaces a running broker by another program, with everything open.
//!
//! A process of the same user sends the file of the program. The program is executed twice, each time with the
//! arguments and the environment of the running broker, except that [`VARIABLE`] says what it is wanted for: first as a
//! child that reads a copy of the state and answers whether it can continue, then in the process of the supervisor.
//!
//! | order | step | killed before the next step |
//! |---|---|---|
//! | 1 | the worker starts the child with a copy of its state | nothing has happened: the next worker closes the copy, and the request is repeated |
//! | 2 | the child answers and ends | as above |
//! | 3 | the worker begins its journal anew with a snapshot | as above |
//! | 4 | the worker answers the request | the next worker goes on as the former program, and the process that asked can see that |
//! | 5 | the worker notes the program in the supervisor's page | as above: a worker that dies is no worker that hands over |
//! | 6 | the worker exits | the supervisor is alone; if it is killed too, the broker is gone, as when both die at any other time |
//! | 7 | the supervisor describes what is open (`Handover`), clears close-on-exec and executes the program | as above; if the program cannot be executed, the next worker is one of the former program |
//! | 8 | the new program starts a worker, which reads the snapshot | the supervisor, now the new program, executes the former program again, once |
//! | 9 | the worker serves, and the supervisor closes the file of the former program | the next worker is one of the new program |
//!
//! The journal contains no records at step 6, so no event is applied by another program than the one that recorded it.
//! Between 6 and 9 members see what they see after a death: their connections end, they resume and repeat their calls.
//!
//! At step 8 a worker may also lack descriptors or memory, or report that it cannot read the state. The supervisor
//! starts it again for a minute in the first case, as after a death, and then executes the former program again.
//!
//! Both programs must agree on the format of the state and on the protocol; otherwise step 1 or the request is refused
//! and nothing has changed. A state begins with the number of its format and a hash of all layouts of control memory.
//! The child also encodes again what it has read, and compares.
//!
//! A replacement is no restart: `restarts` in `partywall status` counts deaths.

use std::{
    collections::BTreeSet,
    os::fd::{AsFd, AsRawFd, OwnedFd, RawFd},
};

use partywall_os::{
    Errno,
    memfd::{self, Draft},
    process::{inherited, raise_fd_limit},
    supervision::{Invocation, LeftOpen, set_inherited},
};
use rustix::{
    fs::{Mode, OFlags},
    io::{pread, retry_on_intr, write},
};
use serde::{Deserialize, Serialize};

use crate::{Config, StartError, bind::SocketFile, memory_check::MemoryCheck};

/// The environment variable that says what a program is executed for.
pub const VARIABLE: &str = "PARTYWALL_HANDOVER";

/// The number of the format of everything that one program leaves to the next: `Handover`, the words of the page, the
/// frames of the journal, the state in its snapshot, and its records. The two last contain calls of the protocol, whose
/// own number says nothing about the journal. Raise this one with each change of any of these.
pub(crate) const STATE_VERSION: u32 = 14;

/// What a program is executed for by the broker.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Purpose {
    /// To find out whether the memory at a place is lost.
    CheckMemory(MemoryCheck),
    /// To answer whether it can continue with a state.
    Check(Check),
    /// To continue as the supervisor.
    Continue(Continuation),
}

/// The descriptors of a child that answers whether it can continue.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Check {
    state: RawFd,
    answer: RawFd,
}

/// The descriptor of a `Handover`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Continuation(RawFd);

impl Purpose {
    /// Returns what this process was executed for, if the broker has executed it.
    pub fn of_this_process() -> Option<Self> {
        let value = std::env::var(VARIABLE).ok()?;
        let (purpose, numbers) = value.split_once(' ')?;
        if purpose == MEMORY {
            return MemoryCheck::parse(numbers).map(Self::CheckMemory);
        }
        let mut numbers = numbers.split(' ').map(|number| number.parse().ok());
        match purpose {
            "check" => Some(Self::Check(Check { state: numbers.next()??, answer: numbers.next()?? })),
            "continue" => Some(Self::Continue(Continuation(numbers.next()??))),
            _ => None,
        }
    }

    /// Returns the value of [`VARIABLE`] for a child that has the state and the pipe for its answer under these
    /// numbers.
    pub(crate) fn check(numbers: &[RawFd]) -> String {
        let numbers: Vec<_> = numbers.iter().map(RawFd::to_string).collect();
        format!("check {}", numbers.join(" "))
    }

    /// Returns the value of [`VARIABLE`] for a child that checks memory.
    pub(crate) fn check_memory(place: partywall_wire::Place, numbers: &[RawFd]) -> String {
        format!("{MEMORY} {}", MemoryCheck::describe(place, numbers))
    }
}

impl Check {
    /// Reads the state and answers the broker. Returns whether this program can continue. `change` may change the state
    /// before it is read, for tests.
    ///
    /// # Errors
    /// If the descriptors were not inherited, or the broker is gone.
    pub fn answer(self, config: &Config, change: impl FnOnce(&mut Vec<u8>)) -> Result<bool, Errno> {
        let mut state = read_all(&inherited(self.state)?)?;
        change(&mut state);
        let outcome = check(config, &state);
        let answer =
            ProgramAnswer { can_continue: outcome.is_ok(), said: outcome.err().unwrap_or(config.version.clone()) };
        // Both are short enough for a pipe.
        let bytes = postcard::to_extend(&answer, MAGIC.to_vec()).map_err(|_| Errno::INVAL)?;
        retry_on_intr(|| write(&inherited(self.answer)?, &bytes))?;
        Ok(answer.can_continue)
    }
}

/// The answer of a child: its release, or why it cannot continue.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct ProgramAnswer {
    pub(crate) can_continue: bool,
    pub(crate) said: String,
}

impl ProgramAnswer {
    /// Decodes what a child has written. Any program may have been executed.
    pub(crate) fn decode(bytes: &[u8]) -> Option<Self> {
        bytes.strip_prefix(&MAGIC).and_then(|bytes| postcard::from_bytes(bytes).ok())
    }
}

/// Checks whether this program can continue with a state.
fn check(config: &Config, state: &[u8]) -> Result<(), String> {
    config.limits.resolve(raise_fd_limit()).map_err(|error| error.to_string())?;
    crate::server::check_state(state)
}

/// The format of a state. A program continues only with its own.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Format {
    state: u32,
    /// [`partywall_shm::LAYOUTS`].
    layouts: u64,
}

impl Format {
    /// The format of this program.
    pub(crate) const OURS: Self = Self { state: STATE_VERSION, layouts: partywall_shm::LAYOUTS };

    /// Returns the format of a later release.
    #[cfg(test)]
    pub(crate) fn unknown() -> Self {
        Self { state: STATE_VERSION + 1, ..Self::OURS }
    }

    /// Reads the format at the beginning of a state.
    pub(crate) fn check(state: &[u8]) -> Result<(), String> {
        match postcard::take_from_bytes::<Self>(state) {
            Ok((Self::OURS, _)) => Ok(()),
            Ok((Self { state, .. }, _)) if state != STATE_VERSION => {
                Err(format!("the state has format {state}, and this release reads format {STATE_VERSION}"))
            }
            Ok(_) => Err("control memory has another layout than in this release".into()),
            Err(error) => Err(format!("the state is unreadable: {error}")),
        }
    }
}

/// What a supervisor leaves to the program that it executes: the numbers of its descriptors.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct Handover {
    pub(crate) listener: RawFd,
    pub(crate) file: SocketFile,
    pub(crate) journal: [RawFd; 2],
    pub(crate) page: RawFd,
    pub(crate) poke: RawFd,
    /// The file of the program that served before, unless it has been executed again.
    pub(crate) former: Option<RawFd>,
    /// All that the supervisor has open, apart from `former`.
    pub(crate) of_supervisor: BTreeSet<RawFd>,
}

impl Handover {
    /// Executes `program` by `execute`, with everything open. Returns only if that fails, and then why.
    pub(crate) fn execute(&self, program: RawFd, execute: impl FnOnce(RawFd, Continuation) -> Errno) -> Errno {
        let describe = || {
            let bytes = postcard::to_extend(self, Vec::new()).map_err(|_| Errno::INVAL)?;
            let mut draft = Draft::create("partywall:handover", bytes.len() as u64)?;
            draft.writer().write_all_at(&bytes, 0)?;
            draft.share()
        };
        let described = match describe() {
            Ok(described) => described,
            Err(errno) => return errno,
        };
        let mut numbers = match partywall_os::supervision::open_numbers() {
            Ok(numbers) => numbers,
            Err(errno) => return errno,
        };
        // Closed by the kernel as soon as it is executed.
        numbers.remove(&program);
        set_inherited(&numbers, true);
        let errno = execute(program, Continuation(described.as_raw_fd()));
        close_on_exec(numbers);
        errno
    }

    /// Reads what the former program has left.
    pub(crate) fn read(continuation: Continuation, left: &mut LeftOpen) -> Result<Self, StartError> {
        let broken = |why: String| StartError::Journal { why };
        let Continuation(number) = continuation;
        let file = left.take(number).ok_or_else(|| broken(format!("descriptor {number} of {VARIABLE} is not open")))?;
        let bytes = read_all(&file).map_err(StartError::errno("read what the former program has left"))?;
        postcard::from_bytes(&bytes).map_err(|error| broken(error.to_string()))
    }
}

/// Executes a program in this process, to continue as the supervisor. Returns only if that fails, and then why.
pub fn execute(program: RawFd, Continuation(number): Continuation) -> Errno {
    Invocation::of_this_process(VARIABLE, &format!("continue {number}")).execute(program)
}

/// Has no further program inherit these descriptors, apart from the standard streams.
pub(crate) fn close_on_exec(mut numbers: BTreeSet<RawFd>) {
    numbers.retain(|number| *number > 2);
    set_inherited(&numbers, false);
}

/// Opens the file of the program that runs in this process, to execute it.
///
/// # Errors
/// As open(2); `ENOENT` without /proc.
pub fn this_program() -> Result<OwnedFd, Errno> {
    rustix::fs::open("/proc/self/exe", OFlags::PATH | OFlags::CLOEXEC, Mode::empty())
}

fn read_all(file: impl AsFd) -> Result<Vec<u8>, Errno> {
    let mut bytes = vec![0; usize::try_from(memfd::len(&file)?).map_err(|_| Errno::FBIG)?];
    let mut filled = 0;
    while filled < bytes.len() {
        match retry_on_intr(|| pread(&file, &mut bytes[filled..], filled as u64))? {
            0 => return Err(Errno::IO),
            read => filled += read,
        }
    }
    Ok(bytes)
}

/// The first word of [`VARIABLE`] for a child that checks memory.
const MEMORY: &str = "memory";

/// Precedes an answer, because any program may have been executed.
const MAGIC: [u8; 8] = *b"PWANSWER";

#[cfg(test)]
mod tests {
    use super::*;

    // Holds 367.
    #[test]
    fn state_of_another_format_is_refused() {
        let format = |state: u32, layouts: u64| postcard::to_extend(&Format { state, layouts }, Vec::new()).unwrap();
        let Format { state, layouts } = Format::OURS;
        assert_eq!(Format::check(&format(state, layouts)), Ok(()));
        let ours = format!("format {STATE_VERSION}");
        assert!(Format::check(&format(state + 1, layouts)).unwrap_err().contains(&ours));
        assert!(Format::check(&format(state, layouts + 1)).unwrap_err().contains("another layout"));
        assert!(Format::check(&[]).unwrap_err().contains("unreadable"));
    }

    #[test]
    fn answers_of_other_programs_are_none() {
        let answer = ProgramAnswer { can_continue: true, said: "0.1.0".into() };
        let bytes = postcard::to_extend(&answer, MAGIC.to_vec()).unwrap();
        assert!(ProgramAnswer::decode(&bytes).is_some_and(|answer| answer.can_continue && answer.said == "0.1.0"));
        for end in 0..bytes.len() {
            assert!(ProgramAnswer::decode(&bytes[..end]).is_none(), "{end}");
        }
        assert!(ProgramAnswer::decode(b"usage: true").is_none());
    }
}
