//! The steps that both roles share: connecting, preparing the device, waiting for each other, checking.

use std::time::{Duration, Instant};

use partywall::{
    DeviceUuid, Domain, Error, ErrorKind, Gpu, OpenOptions, Place, Segment, bytes,
    cuda::{CudaError, PhysicalMemory},
};
use serde_json::{Value, json};

use super::{Options, narrator::Narrator, pattern};
use crate::text::grouped;

use crate::{Context, failure::Failure};

/// The key under which the metadata of each segment names its run.
pub(super) const RUN: &str = "run";

/// How often a wait polls whether the other side has ended. The broker announces names immediately.
pub(super) const GLANCE: Duration = Duration::from_millis(250);

/// A running role.
#[derive(Debug)]
pub(super) struct Session {
    pub(super) domain: Domain,
    pub(super) narrator: Narrator,
    pub(super) place: Place,
    /// Every allocation is a multiple of this many bytes.
    pub(super) granularity: u64,
    pub(super) names: Names,
    pub(super) timeout: Duration,
    /// True if the demo has started this process, and kills the producer.
    pub(super) is_supervised: bool,
}

/// The names of a run.
#[derive(Debug)]
pub(super) struct Names {
    pub(super) data: String,
    pub(super) data_read: String,
    pub(super) shared: String,
    pub(super) shared_doubled: String,
    pub(super) data_held: String,
    pub(super) producer_killed: String,
    pub(super) data_reopened: String,
}

impl Names {
    /// Returns the names under a prefix.
    pub(super) fn under(prefix: &str) -> Self {
        let name = |name| format!("{prefix}/{name}");
        Self {
            data: name("data"),
            data_read: name("data-read"),
            shared: name("shared"),
            shared_doubled: name("shared-doubled"),
            data_held: name("data-held"),
            producer_killed: name("producer-killed"),
            data_reopened: name("data-reopened"),
        }
    }
}

impl Session {
    /// Connects, and prepares the device.
    pub(super) fn start(
        context: &Context,
        options: &Options,
        role: &'static str,
        place: Place,
    ) -> Result<Self, Failure> {
        let narrator = Narrator::new(context.output(), role);
        let (domain, took) = timed(|| context.options().connect())?;
        let socket = domain.socket().display().to_string();
        let broker = domain.status()?.pid;
        let text = format!("to the broker, process {broker}, at {socket}");
        let fields = json!({ "pid": std::process::id(), "broker": broker, "socket": socket });
        narrator.step("connect", Some(took), &text, fields);
        let names = Names::under(options.name.as_deref().unwrap_or("demo"));
        let is_supervised = context.with_parent.is_some();
        let timeout = options.timeout;
        let mut session = Self { domain, narrator, place, granularity: 0, names, timeout, is_supervised };
        session.granularity = match place.gpu() {
            None => session.host(),
            Some(uuid) => session.gpu(uuid)?,
        };
        Ok(session)
    }

    fn host(&self) -> u64 {
        let page = rustix::param::page_size() as u64;
        let text = format!("host memory: a sealed memfd for each allocation, in pages of {}", bytes(page));
        self.narrator.step("device", None, &text, json!({ "device": "host", "granularity": page }));
        page
    }

    fn gpu(&self, uuid: DeviceUuid) -> Result<u64, Failure> {
        // The context and the kernels are created now, so that no later step includes their time.
        let (gpu, took) = timed(|| {
            let gpu = self.domain.gpu(uuid)?;
            gpu.kernels()?;
            Ok(gpu)
        })?;
        let described = describe(&gpu).map_err(pattern::fault(format!("asking about GPU {uuid}")));
        let (granularity, text, fields) = described?;
        self.narrator.step("device", Some(took), &text, fields);
        Ok(granularity)
    }

    /// Reports how much memory of the GPU is free now. Other processes allocate and free, too.
    pub(super) fn memory(&self, when: &str) -> Result<(), Failure> {
        let Place::Gpu(uuid) = self.place else { return Ok(()) };
        let memory = self.domain.gpu(uuid)?.context().memory_info();
        let memory = memory.map_err(pattern::fault("asking for free memory"))?;
        let text = format!("{} of {} are free {when}", bytes(memory.free), bytes(memory.total));
        let fields = json!({ "when": when, "free_bytes": memory.free, "total_bytes": memory.total });
        self.narrator.step("memory", None, &text, fields);
        Ok(())
    }

    /// Waits for `name` of the given run, and returns it open. Ends early if `partner` is withdrawn meanwhile.
    pub(super) fn wait_for(
        &self,
        open: &OpenOptions,
        name: &str,
        run: Option<&str>,
        partner: Option<&Segment>,
        other: &str,
    ) -> Result<Segment, Failure> {
        let start = Instant::now();
        loop {
            let left = self.timeout.saturating_sub(start.elapsed());
            match open.clone().timeout(left.clamp(Duration::from_millis(1), GLANCE)).open() {
                Ok(segment) if run.is_none() || run_of(&segment) == run => {
                    let text = format!("for the commit of {name}");
                    self.narrator.step("wait", Some(start.elapsed()), &text, json!({ "name": name }));
                    return Ok(segment);
                }
                // This name belongs to a run that is just ending.
                Ok(stale) => drop(ended(&stale, left.min(GLANCE))?),
                Err(Error::Timeout { .. }) => {}
                Err(error) => return Err(error.into()),
            }
            if let Some(partner) = partner
                && ended(partner, Duration::ZERO)?
            {
                let partner = partner.name();
                let message = format!("the {other} has ended: {partner} was withdrawn before {name} was committed");
                let advice = format!("see what the {other} printed, then start both again");
                return Err(Failure::new(ErrorKind::CheckFailed, message, advice));
            }
            if left.is_zero() {
                let message = format!("{name} was not committed within {} s", self.timeout.as_secs_f64());
                let start = format!("start `partywall demo {other}` with the same --name, --domain and --socket");
                return Err(Failure::new(ErrorKind::TimedOut, message, format!("{start}; or wait longer (--timeout)")));
            }
        }
    }

    /// Waits until `segment` is withdrawn.
    pub(super) fn wait_withdrawn(&self, segment: &Segment, other: &str) -> Result<(), Failure> {
        let (ended, took) = timed(|| ended(segment, self.timeout))?;
        if !ended {
            let message =
                format!("waited {} s for the {other} to withdraw {}", self.timeout.as_secs_f64(), segment.name());
            return Err(Failure::new(ErrorKind::TimedOut, message, format!("check whether the {other} is stopped")));
        }
        let text = format!("until {} was withdrawn", segment.name());
        self.narrator.step("wait", Some(took), &text, json!({ "name": segment.name(), "withdrawn": true }));
        Ok(())
    }

    /// Opens the segment and measures the time. `first` is an earlier opening, which is closed: its time was mostly
    /// waiting.
    pub(super) fn open_again(&self, open: &OpenOptions, first: Segment) -> Result<Segment, Failure> {
        let open = open.clone().version(first.version());
        let (segment, took) = timed(|| open.open())?;
        first.release()?;
        let access = if segment.is_writable() { "read-write" } else { "read-only" };
        let text = format!(
            "{}@{}: {} of kind {}, {} received\nmapped {access}{}, without a copy",
            segment.name(),
            segment.version(),
            bytes(segment.bytes()),
            segment.kind(),
            fds_text(&segment),
            address(&segment).map_or_else(String::new, |address| format!(" at {address:#x}")),
        );
        self.narrator.step("open", Some(took), &text, facts_of(&segment));
        Ok(segment)
    }

    /// Waits to be killed, with `data` open. Withdraws `shared`, which tells the consumer to go on.
    pub(super) fn await_kill(&self, data: &Segment, shared: Segment) -> Result<(), Failure> {
        // The kill may come at once, so the step is reported before.
        let text = format!("to be killed, with {} mapped and {} withdrawn", data.name(), shared.name());
        self.narrator.step("wait", None, &text, json!({ "name": data.name() }));
        shared.release()?;
        std::thread::sleep(self.timeout);
        let message = format!("the demo has not killed the producer within {} s", self.timeout.as_secs_f64());
        Err(Failure::new(ErrorKind::TimedOut, message, "see what the consumer printed; or wait longer (--timeout)"))
    }

    /// Checks the array against `factor` times the pattern, in place and in a copy, and fails at the first bad element.
    pub(super) fn verify(&self, segment: &Segment, factor: u32) -> Result<(), Failure> {
        let in_place = format!("read in place by the {}", pattern::worker(segment.place()));
        self.check("verify", segment, factor, &in_place, || pattern::verify(segment, factor))?;
        let in_a_copy = "read in a private copy of this process";
        self.check("verify-copy", segment, factor, in_a_copy, || pattern::verify_copy(segment, factor))
    }

    /// Checks the array in place and reports nothing, unless an element is wrong.
    pub(super) fn require(&self, segment: &Segment, factor: u32) -> Result<(), Failure> {
        fail_if(segment, pattern::verify(segment, factor)?, "read in place")
    }

    fn check(
        &self,
        step: &str,
        segment: &Segment,
        factor: u32,
        how: &str,
        find_bad: impl FnOnce() -> partywall::Result<Option<pattern::Bad>>,
    ) -> Result<(), Failure> {
        let (bad, took) = timed(find_bad)?;
        fail_if(segment, bad, how)?;
        let rule = if factor == 1 { "right" } else { "what was written, doubled" };
        let text = format!("all {} integers are {rule}, {how}", grouped(pattern::ELEMENTS));
        let fields = json!({ "name": segment.name(), "elements": pattern::ELEMENTS, "factor": factor, "how": how });
        self.narrator.step(step, Some(took), &text, fields);
        Ok(())
    }
}

/// Returns the run that a segment belongs to.
pub(super) fn run_of(segment: &Segment) -> Option<&str> {
    segment.metadata().find(|(key, _)| *key == RUN).map(|(_, run)| run)
}

/// Calls a function and returns its result and duration.
pub(super) fn timed<T>(action: impl FnOnce() -> partywall::Result<T>) -> Result<(T, Duration), Failure> {
    let start = Instant::now();
    let value = action()?;
    Ok((value, start.elapsed()))
}

/// Returns the JSON fields of a segment.
pub(super) fn facts_of(segment: &Segment) -> Value {
    json!({
        "name": segment.name(), "version": segment.version(), "kind": segment.kind(),
        "place": segment.place().to_string(), "bytes": segment.bytes(), "mutable": segment.is_mutable(),
        "writable": segment.is_writable(), "fds": segment.fd_numbers(),
        "address": address(segment).map(|address| format!("{address:#x}")),
    })
}

/// `fd 9`, or `fds 9, 10`.
pub(super) fn fds_text(segment: &Segment) -> String {
    let numbers: Vec<String> = segment.fd_numbers().iter().map(ToString::to_string).collect();
    format!("{} {}", if numbers.len() == 1 { "fd" } else { "fds" }, numbers.join(", "))
}

/// Returns the address of the array in this process: on its GPU, or as the kernel lists it.
pub(super) fn address(segment: &Segment) -> Option<u64> {
    match segment.place().gpu() {
        None => host_address(segment.name()),
        Some(_) => Some(segment.tensor(pattern::TENSOR).ok()?.device().ok()?.device_ptr()),
    }
}

/// Returns the address at which host memory of a name is mapped into this process. The array starts there.
pub(super) fn host_address(name: &str) -> Option<u64> {
    let maps = std::fs::read_to_string("/proc/self/maps").ok()?;
    let file = format!("/memfd:partywall:{name} (deleted)");
    let line = maps.lines().find(|line| line.ends_with(&file))?;
    u64::from_str_radix(line.split('-').next()?, 16).ok()
}

/// Waits up to `timeout` for the withdrawal of a segment. Returns whether it was withdrawn.
fn ended(segment: &Segment, timeout: Duration) -> partywall::Result<bool> {
    match segment.wait_withdrawn(timeout) {
        Ok(_) => Ok(true),
        Err(Error::Timeout { .. }) => Ok(false),
        Err(error) => Err(error),
    }
}

fn fail_if(segment: &Segment, bad: Option<pattern::Bad>, how: &str) -> Result<(), Failure> {
    let Some(pattern::Bad { index, expected, found }) = bad else { return Ok(()) };
    let name = segment.name();
    let numbers = format!("expected {expected} ({expected:#010x}), found {found} ({found:#010x})");
    let message = format!("{name} is wrong at index {index}: {numbers}, {how}");
    Err(Failure::new(ErrorKind::CheckFailed, message, "run `partywall doctor`, which tests each part; this is a bug"))
}

/// Returns the granularity of a GPU's memory, and the GPU's properties as text and as JSON fields.
fn describe(gpu: &Gpu) -> Result<(u64, String, Value), CudaError> {
    let context = gpu.context();
    let device = context.device();
    let uuid = gpu.uuid();
    let name = device.name()?;
    let (major, minor) = device.compute_capability()?;
    let cuda = context.driver().version()?.to_string();
    let simulated = context.driver().is_simulated();
    let vmm = device.supports_vmm()?;
    let posix_fd = device.supports_posix_fd()?;
    let granularity = PhysicalMemory::granularity(context)?;
    let memory = context.memory_info()?;
    let yes = |it| if it { "yes" } else { "no" };
    let text = format!(
        "{}{name}, compute capability {major}.{minor}, CUDA {cuda}\n{uuid}\nVMM: {}; as file descriptors: {}; granularity \
         {}\nmemory: {} of {} are free",
        if simulated { "SIMULATED, which proves nothing about a GPU: " } else { "" },
        yes(vmm),
        yes(posix_fd),
        bytes(granularity),
        bytes(memory.free),
        bytes(memory.total),
    );
    let fields = json!({
        "device": name, "simulated": simulated, "uuid": uuid.to_string(), "cuda": cuda,
        "compute_capability": format!("{major}.{minor}"), "vmm": vmm, "posix_fd": posix_fd,
        "granularity": granularity, "free_bytes": memory.free, "total_bytes": memory.total,
    });
    Ok((granularity, text, fields))
}
