//! Measures a hand-off from a kernel of one process to a kernel of another, which is what MPS makes faster.

use std::{
    os::fd::{AsFd, OwnedFd},
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

use partywall_cuda::{Context, Device, DeviceBuffer, Driver, HostRegistration, Kernels, Stream};
use partywall_os::{map::SharedMap, memfd, thread::spawn_scoped};

use super::{Trouble, on_each, sharing::in_context};
use crate::{
    doctor::{
        Doctor, Probe,
        exchange::{self, Parcel},
        finding::Finding,
    },
    mps,
};

/// Hand-offs each way. Each side enqueues three operations for each, and a stream's queue has room for about a
/// thousand.
const TURNS: u64 = 64;

/// How long each of the steps may take: time-sliced, all turns take 18 ms (measured on H200).
const TIMEOUT: Duration = Duration::from_secs(5);

/// Bytes of the shared words.
const BYTES: u64 = 4096;

/// Bytes that each kernel doubles.
const DATA: u64 = 128;

/// Measures how long a hand-off takes.
pub(in crate::doctor) fn hand_off(doctor: &Doctor) -> Finding {
    on_each(doctor.scope, |device| measure(doctor, &device)).or(
        "what a hand-off from a kernel of one process to a kernel of another takes here is not known",
        "see `stream waits, host` and `GPU kernels` above, which it needs",
    )
}

fn measure(doctor: &Doctor, device: &Device) -> Result<String, Trouble> {
    let file = memfd::Draft::create("partywall:doctor", BYTES).and_then(memfd::Draft::share);
    let file = file.map_err(|errno| Trouble::Wrong(format!("making shared memory: {errno}")))?;
    let context = Context::retain(*device)?;
    let side = HandOffSide::new(&context, &file)?;
    let parcel = Parcel { bytes: BYTES, gpu: device.uuid()?.to_string(), handle: Vec::new() };
    let taken = thread::scope(|threads| {
        let hand_over = || exchange::hand_over(doctor, Probe::TakeHandOff, &parcel, Some(file.as_fd()));
        let other = spawn_scoped(threads, "partywall-probe", hand_over)
            .map_err(|error| Trouble::Wrong(format!("starting a thread: {error}")))?;
        let taken = side.first(&|| other.is_finished());
        // Whatever has failed: no stream waits any longer, so that both processes can end.
        side.release();
        let said = other.join().unwrap_or_else(|_| Err("the other process was not started".to_owned()));
        said.map_err(Trouble::Wrong).and(taken)
    })?;
    let one = taken / (2 * TURNS as u32);
    let how = match mps::is_client(device) {
        _ if Driver::load()?.is_simulated() => "on the simulated driver, which has neither time slices nor MPS",
        Some(true) => "under MPS",
        _ => "in time slices; `partywall run --mps COMMAND` runs processes under MPS",
    };
    let micros = one.as_secs_f64() * 1e6;
    Ok(format!("a hand-off from a kernel of one process to a kernel of another takes {micros:.1} µs, {how}"))
}

/// The other side of [`hand_off`].
pub(in crate::doctor) fn take_hand_off(parcel: &Parcel, memory: Option<OwnedFd>) -> Result<String, String> {
    let memory = memory.ok_or("no file descriptor came along")?;
    in_context(parcel, |context| {
        HandOffSide::new(context, &memory)?.second()?;
        Ok("every turn taken".into())
    })
}

/// One side: its stream, and the words of both.
struct HandOffSide {
    map: Arc<SharedMap>,
    words: HostRegistration,
    stream: Stream,
    kernels: Kernels,
    data: DeviceBuffer,
}

/// A shared word, by its number. Each has two cache lines of its own.
#[derive(Debug, Clone, Copy)]
enum HandOffWord {
    /// The first side writes how many turns it has taken.
    First,
    /// The second side writes how many turns it has taken.
    Second,
    /// The second side's host writes 1 once all is enqueued there.
    Ready,
    /// The first side's host writes 1 to begin.
    Gate,
}

impl HandOffSide {
    fn new(context: &Context, file: &OwnedFd) -> Result<Self, Trouble> {
        let map = SharedMap::writable(file).map_err(|errno| Trouble::Wrong(format!("mapping memory: {errno}")))?;
        let map = Arc::new(map);
        let kernels = Kernels::load(context)?;
        let stream = Stream::new(context)?;
        let data = DeviceBuffer::new(context, DATA)?;
        // A kernel's first launch would wait behind a wait.
        kernels.enqueue_fill(stream.as_ref(), data.as_slice())?;
        kernels.enqueue_double(stream.as_ref(), data.as_slice())?;
        stream.synchronize()?;
        let words = HostRegistration::shared(context, map.clone())?;
        Ok(Self { map, words, stream, kernels, data })
    }

    /// Takes the first turn and every other one, once the other side is ready, unless it has `ended` before. Returns
    /// how long all turns took.
    fn first(&self, ended: &dyn Fn() -> bool) -> Result<Duration, Trouble> {
        self.wait_for_host(HandOffWord::Ready, ended)?;
        self.enqueue_wait(HandOffWord::Gate, 1)?;
        for turn in 1..=TURNS {
            self.take_turn(HandOffWord::First, turn)?;
            self.enqueue_wait(HandOffWord::Second, turn)?;
        }
        let start = Instant::now();
        self.store(HandOffWord::Gate, 1);
        self.finish()?;
        Ok(start.elapsed())
    }

    /// Takes the other turns.
    fn second(&self) -> Result<(), Trouble> {
        for turn in 1..=TURNS {
            self.enqueue_wait(HandOffWord::First, turn)?;
            self.take_turn(HandOffWord::Second, turn)?;
        }
        self.store(HandOffWord::Ready, 1);
        self.finish()
    }

    fn take_turn(&self, word: HandOffWord, turn: u64) -> Result<(), Trouble> {
        self.kernels.enqueue_double(self.stream.as_ref(), self.data.as_slice())?;
        self.stream.as_ref().enqueue_write_u64(self.words.slice(word.offset(), 8)?, turn)?;
        Ok(())
    }

    fn enqueue_wait(&self, word: HandOffWord, value: u64) -> Result<(), Trouble> {
        self.stream.as_ref().enqueue_wait_u64(self.words.slice(word.offset(), 8)?, value)?;
        Ok(())
    }

    /// Waits for the end of the stream's work, which polls so that the wait can end.
    fn finish(&self) -> Result<(), Trouble> {
        let deadline = Instant::now() + TIMEOUT;
        while !self.stream.as_ref().is_done()? {
            if Instant::now() > deadline {
                self.release();
                return Err(Trouble::Wrong(format!("the hand-offs are not over after {} s", TIMEOUT.as_secs())));
            }
            std::hint::spin_loop();
        }
        Ok(())
    }

    fn wait_for_host(&self, word: HandOffWord, ended: &dyn Fn() -> bool) -> Result<(), Trouble> {
        let deadline = Instant::now() + TIMEOUT;
        while self.host_word(word).load(Ordering::Acquire) == 0 {
            if ended() || Instant::now() > deadline {
                return Err(Trouble::Wrong("the other process has enqueued nothing".into()));
            }
            thread::sleep(Duration::from_micros(100));
        }
        Ok(())
    }

    /// Ends all waits of both streams.
    fn release(&self) {
        for word in [HandOffWord::First, HandOffWord::Second, HandOffWord::Gate] {
            self.store(word, TURNS);
        }
    }

    fn store(&self, word: HandOffWord, value: u64) {
        self.host_word(word).store(value, Ordering::Release);
    }

    fn host_word(&self, word: HandOffWord) -> &AtomicU64 {
        let words = self.map.atomics::<AtomicU64>(word.offset() as usize, 1);
        &words.expect("the map is writable and has room for four words")[0]
    }
}

impl HandOffWord {
    fn offset(self) -> u64 {
        self as u64 * 128
    }
}
