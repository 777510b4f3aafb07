//! Examines what works on this machine, by trying it: the findings of `partywall doctor`, for any front end.
//!
//! Each [`Probe`] runs in a child process with a time limit, because the driver may hang or crash. The front end gives
//! the command line of that child, which calls [`Doctor::answer`]; the child prints a [`Finding`] as one line of JSON.
//! Some probes start a second process and pass memory to it over its standard input.
//!
//! A probe leaves nothing behind, starts no broker, and takes at most 64 MiB of memory, on the GPUs of the [`Scope`]
//! only. The function that judges a probe takes the evidence, such as files and facts about a GPU, as an argument, so
//! tests can present machines that are not available. The front end also supplies the probe of Vulkan, whose bindings
//! the library does not have.

mod exchange;
mod finding;
mod gpu;
mod host;
mod platform;
mod runner;
mod vulkan;

use std::{ffi::OsString, fmt, str::FromStr, time::Duration};

pub use self::{
    finding::{Finding, Outcome, Report},
    runner::{ChildEnd, run_within},
    vulkan::{Exported, NotUsable, TryVulkan},
};
use crate::{domain::DomainOptions, place::DeviceChoice};

/// The GPUs to examine.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Scope {
    /// The first GPU that this process sees.
    #[default]
    First,
    /// The GPU with this ordinal or UUID.
    One(DeviceChoice),
    /// All GPUs that this process sees.
    All,
}

/// The error that a text names no GPU to examine.
#[derive(Clone, PartialEq, Eq, thiserror::Error)]
#[error("{0:?} is no GPU: use auto, all, cuda, cuda:N or a GPU's UUID (GPU-…)")]
pub struct UnknownScope(String);

/// As `Display`, for a `main` that returns the error.
impl fmt::Debug for UnknownScope {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl FromStr for Scope {
    type Err = UnknownScope;

    /// `auto`, `all`, or a GPU as [`DeviceChoice`] names it.
    fn from_str(text: &str) -> Result<Self, UnknownScope> {
        match (text, text.parse()) {
            ("all", _) => Ok(Self::All),
            (_, Ok(DeviceChoice::Auto)) => Ok(Self::First),
            (_, Ok(choice @ (DeviceChoice::Cuda(_) | DeviceChoice::Uuid(_)))) => Ok(Self::One(choice)),
            _ => Err(UnknownScope(text.to_owned())),
        }
    }
}

impl fmt::Display for Scope {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::First => f.write_str("auto"),
            Self::One(choice) => choice.fmt(f),
            Self::All => f.write_str("all"),
        }
    }
}

macro_rules! probes {
    (
        examined { $($(#[$doc:meta])* $name:ident = $title:literal,)* }
        others { $($(#[$other_doc:meta])* $other:ident = $other_title:literal,)* }
    ) => {
        /// The subject of one probe, in the order of an examination. Parsed from its title.
        #[derive(Debug, Clone, Copy, PartialEq, Eq)]
        #[non_exhaustive]
        pub enum Probe {
            $($(#[$doc])* $name,)*
            $($(#[$other_doc])* $other,)*
        }

        impl Probe {
            const EXAMINED: &[Self] = &[$(Self::$name,)*];
            const OTHERS: &[Self] = &[$(Self::$other,)*];

            /// Returns the title.
            pub fn title(self) -> &'static str {
                match self {
                    $(Self::$name => $title,)*
                    $(Self::$other => $other_title,)*
                }
            }
        }
    };
}

probes! {
    examined {
        /// The kernel's version.
        Kernel = "kernel",
        /// Whether the end of a process can be proved.
        Processes = "processes",
        /// Open files and locked memory.
        Limits = "limits",
        /// Which namespaces separate this process from others.
        Namespaces = "namespaces",
        /// The directory `/dev/shm`.
        SharedMemory = "/dev/shm",
        /// Host memory, passed to another process.
        HostMemory = "host memory",
        /// The directory of the broker's socket.
        SocketDirectory = "socket directory",
        /// The broker of this domain.
        Broker = "broker",
        /// The environment of the process: a container, WSL, Jetson.
        Platform = "platform",
        /// The driver's library.
        Driver = "GPU driver",
        /// The GPUs, and which processes may use them.
        Devices = "GPUs",
        /// Time slicing or MPS.
        Mps = "MPS",
        /// Which GPU reaches the memory of which.
        Peers = "peers",
        /// Whether the embedded kernels run.
        Kernels = "GPU kernels",
        /// GPU memory, passed to another process as a file descriptor.
        Vmm = "GPU memory",
        /// Pinned host memory, written by the CPU and passed to another process, which reads it on a GPU.
        PinnedMemory = "pinned memory",
        /// Stream memory operations on words in GPU memory.
        DeviceWords = "stream waits, GPU",
        /// Stream memory operations on words in registered host memory.
        HostWords = "stream waits, host",
        /// What a hand-off from a kernel of one process to a kernel of another takes.
        HandOff = "hand-off",
        /// Memory of `cuMemAlloc`, opened by another process.
        LegacyMemory = "legacy memory",
        /// An event, opened by another process.
        LegacyEvents = "legacy events",
        /// Whether the driver checkpoints processes.
        Checkpoints = "checkpoints",
        /// Memory in Vulkan, which the front end tries ([`Doctor::vulkan`]).
        Vulkan = "Vulkan",
    }
    others {
        /// The other side of [`Probe::HostMemory`].
        TakeHostMemory = "take host memory",
        /// The other side of [`Probe::Vmm`].
        TakeVmm = "take GPU memory",
        /// The other side of [`Probe::PinnedMemory`].
        TakePinnedMemory = "take pinned memory",
        /// The other side of [`Probe::HandOff`].
        TakeHandOff = "take hand-off",
        /// The other side of [`Probe::LegacyMemory`].
        TakeLegacyMemory = "take legacy memory",
        /// The other side of [`Probe::LegacyEvents`].
        TakeLegacyEvent = "take legacy event",
    }
}

/// The error that a text is not the title of a probe.
#[derive(Clone, PartialEq, Eq, thiserror::Error)]
#[error("{0:?} is no probe")]
pub struct UnknownProbe(String);

/// As `Display`, for a `main` that returns the error.
impl fmt::Debug for UnknownProbe {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl FromStr for Probe {
    type Err = UnknownProbe;

    fn from_str(text: &str) -> Result<Self, UnknownProbe> {
        let all = Self::EXAMINED.iter().chain(Self::OTHERS).copied();
        all.into_iter().find(|probe| probe.title() == text).ok_or_else(|| UnknownProbe(text.to_owned()))
    }
}

/// Whether a GPU can be used.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum GpuState {
    /// This machine has no GPU.
    Absent,
    /// There is a GPU, but its driver does not work.
    Broken,
    /// There is a GPU, and it answers.
    Present,
}

/// Examines this machine.
#[derive(Debug, Clone)]
pub struct Doctor {
    child: Vec<OsString>,
    options: DomainOptions,
    scope: Scope,
    limit: Duration,
    vulkan: Option<TryVulkan>,
}

impl Doctor {
    /// Returns a doctor for the domain of `options`. `child` is a command line to which the title of a probe is
    /// appended; it must call [`Doctor::answer`] of a `Doctor` with the same options.
    pub fn new(child: Vec<OsString>, options: DomainOptions) -> Self {
        Self { child, options, scope: Scope::First, limit: Duration::from_secs(20), vulkan: None }
    }

    /// Sets the GPUs to examine. The default is the first.
    #[must_use]
    pub fn scope(mut self, scope: Scope) -> Self {
        self.scope = scope;
        self
    }

    /// Sets the timeout after which a probe is killed. The default is 20 s.
    #[must_use]
    pub fn limit(mut self, limit: Duration) -> Self {
        self.limit = limit;
        self
    }

    /// Sets how [`Probe::Vulkan`] tries Vulkan. This library has no bindings of it, so that the front end brings them.
    /// Only [`answer`](Self::answer) needs it.
    #[must_use]
    pub fn vulkan(mut self, try_it: TryVulkan) -> Self {
        self.vulkan = Some(try_it);
        self
    }

    /// Runs all probes, one after the other, and calls `show` with each report. Blocks until the last one, each probe
    /// for at most the limit.
    pub fn examine(&self, mut show: impl FnMut(&Report)) -> GpuState {
        let mut state = GpuState::Present;
        for &probe in Probe::EXAMINED {
            let report = Report::new(probe.title(), || match state {
                // Vulkan has host memory to try.
                _ if probe == Probe::Vulkan => self.probe(probe),
                GpuState::Present => self.probe(probe),
                GpuState::Absent | GpuState::Broken => Finding::skipped("there is no GPU to try it on"),
            });
            show(&report);
            state = match (state, probe, report.finding.outcome) {
                // Without a working driver, no GPU works.
                (GpuState::Present, Probe::Driver, Outcome::Failed) => GpuState::Broken,
                (GpuState::Present, Probe::Driver, Outcome::Warning | Outcome::Skipped)
                | (GpuState::Present, Probe::Devices, Outcome::Skipped) => GpuState::Absent,
                (state, _, _) => state,
            };
        }
        state
    }

    /// Runs one probe in this process and prints the finding. Called in the child process.
    ///
    /// The kernel kills this process when its parent ends, because no other process would end a hanging probe.
    pub fn answer(&self, probe: Probe) {
        // If this call fails, the time limit ends this process.
        let _ = rustix::process::set_parent_process_death_signal(Some(rustix::process::Signal::KILL));
        let finding = match probe {
            Probe::Kernel => host::kernel(),
            Probe::Processes => host::processes(),
            Probe::Limits => host::limits(),
            Probe::Namespaces => platform::namespaces(),
            Probe::SharedMemory => platform::shared_memory(),
            Probe::HostMemory => host::memory(self),
            Probe::SocketDirectory => host::socket_directory(&self.options),
            Probe::Broker => host::broker(&self.options),
            Probe::Platform => platform::platform(),
            Probe::Driver => gpu::driver::driver(),
            Probe::Devices => gpu::devices::devices(self.scope),
            Probe::Mps => gpu::devices::mps(self.scope),
            Probe::Peers => gpu::devices::peers(self.scope),
            Probe::Kernels => gpu::work::kernels(self.scope),
            Probe::DeviceWords => gpu::work::device_words(self.scope),
            Probe::HostWords => gpu::work::host_words(self.scope),
            Probe::HandOff => gpu::hand_off::hand_off(self),
            Probe::Vmm => gpu::sharing::vmm(self),
            Probe::PinnedMemory => gpu::pinned::pinned_memory(self),
            Probe::LegacyMemory => gpu::sharing::legacy_memory(self),
            Probe::LegacyEvents => gpu::sharing::legacy_events(self),
            Probe::Checkpoints => gpu::driver::checkpoints(),
            Probe::Vulkan => vulkan::vulkan(self),
            Probe::TakeHostMemory => return exchange::answer(host::take),
            Probe::TakeVmm => return exchange::answer(gpu::sharing::take_vmm),
            Probe::TakePinnedMemory => return exchange::answer(gpu::pinned::take_pinned_memory),
            Probe::TakeHandOff => return exchange::answer(gpu::hand_off::take_hand_off),
            Probe::TakeLegacyMemory => return exchange::answer(gpu::sharing::take_legacy_memory),
            Probe::TakeLegacyEvent => return exchange::answer(gpu::sharing::take_legacy_event),
        };
        finding.send();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn scope_is_one_gpu_by_default() {
        for text in ["auto", "all", "cuda:0", "cuda:3", "GPU-51301ca7-0000-0000-0000-000000000000"] {
            assert_eq!(text.parse::<Scope>().unwrap().to_string(), text);
        }
        assert_eq!("auto".parse(), Ok(Scope::default()));
        for text in ["host", "", "cuda:x"] {
            assert!(text.parse::<Scope>().unwrap_err().to_string().contains("is no GPU"));
        }
    }

    #[test]
    fn every_probe_has_a_title_of_its_own() {
        for &probe in Probe::EXAMINED.iter().chain(Probe::OTHERS) {
            assert_eq!(probe.title().parse(), Ok(probe));
        }
    }
}
