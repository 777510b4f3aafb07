//! Opening and closing: how long it takes by size, and how often it can be done.

use partywall::error::LimitReached;
use partywall_measure::{Case, Comparison, Failure as Sampled, Unit};
use partywall_os::{map::SharedMap, memfd};
use rustix::process::{Resource, getrlimit};

use super::{
    Setting, cases, chain, failed,
    memory::open,
    peer::{Handle, Order, TENSOR},
    samplers::Half,
};
use crate::{bench::ping_pong::PingPong, prelude::*};

/// The largest number of openings of one segment.
const OPENINGS: usize = 20_000;

pub(crate) fn run(setting: &Setting<'_>) -> Result<(), Failure> {
    let mut peer = setting.peer()?;
    // A request to the broker is a part of each opening; on a GPU the driver's part is far longer.
    let mut raw = match setting.gpu {
        None => Some(PingPong::start(setting.bench, &setting.broker).map_err(failed)?),
        Some(_) => None,
    };
    for size in setting.sizes("attach", 3, 3) {
        peer.ask::<()>(Order::Commit { name: name(size), bytes: size, mutable: false })?;
        let handle = match &setting.gpu {
            Some(_) => Some(peer.ask::<Handle>(Order::Legacy { bytes: size, chain: true })?),
            None => None,
        };
        by_size(setting, size, handle.as_ref(), raw.as_mut())?;
        peer.ask::<()>(Order::Free)?;
    }
    peer.ask::<()>(Order::Commit { name: name(SMALL), bytes: SMALL, mutable: false })?;
    until_refused(setting)?;
    peer.end();
    Ok(())
}

/// The segment that is opened often.
const SMALL: u64 = 2 << 20;

fn name(bytes: u64) -> String {
    format!("attached.{bytes}")
}

fn name_of(half: Half) -> &'static str {
    match half {
        Half::Opening => "opening shared memory",
        Half::Closing => "closing shared memory",
    }
}

fn by_size(
    setting: &Setting<'_>,
    size: u64,
    handle: Option<&Handle>,
    raw: Option<&mut PingPong>,
) -> Result<(), Failure> {
    half_by_size(setting, Half::Opening, size, handle, raw)?;
    half_by_size(setting, Half::Closing, size, handle, None)
}

fn half_by_size(
    setting: &Setting<'_>,
    half: Half,
    size: u64,
    handle: Option<&Handle>,
    raw: Option<&mut PingPong>,
) -> Result<(), Failure> {
    let case = cases(Unit::Microseconds, size, name_of(half));
    let name = name(size);
    let ours = half.sampler(
        || Ok(setting.domain.opener(&name).open()?),
        |segment| check(segment, size),
        |segment| Ok(segment.release()?),
    );
    let comparison = Comparison::new(case("a Partywall segment, by name"), ours);
    match (&setting.gpu, handle) {
        (Some(gpu), Some(handle)) => {
            let granule = PhysicalMemory::granularity(gpu.context()).doing("asking for the granularity")?;
            let bytes = size.next_multiple_of(granule);
            let memory = PhysicalMemory::create(gpu.context(), bytes).doing("making memory")?;
            let files = [(bytes, memory.export().doing("exporting memory")?)];
            let floor = half.of_the_driver(gpu.context(), &files);
            let legacy = half.sampler(
                || open(gpu, handle, size).map_err(|failure| Sampled::from(failure.message)),
                |_| Ok(()),
                |mapping| {
                    drop(mapping);
                    Ok(())
                },
            );
            let comparison = comparison
                .floor(case("the driver's import and mapping of a descriptor that is there"), floor)
                .rival(case("a legacy handle that is there (cuIpcOpenMemHandle)"), legacy);
            setting.run(comparison)
        }
        _ => {
            let file: OwnedFd = memfd::Draft::create("partywall-bench:file", size)
                .and_then(memfd::Draft::share)
                .doing("making a file in memory")?;
            let floor = half.sampler(
                || Ok(SharedMap::readable(&file)?),
                |map| match map.slice::<u64>(map.len() - 8, 1).map(|end| end.get(0)) {
                    Some(0) => Ok(()),
                    _ => Err("the file has other bytes than zeros".into()),
                },
                |map| {
                    drop(map);
                    Ok(())
                },
            );
            let comparison = comparison.floor(case("mmap and munmap of a file that is there"), floor);
            setting.run(match raw {
                Some(raw) => comparison.rival(case(PingPong::NAME), raw.sampler()),
                None => comparison,
            })
        }
    }
}

/// Fails if a segment begins with another word than its committer has written.
pub(crate) fn check(segment: &Segment, size: u64) -> Result<(), Sampled> {
    let mut first = [0; 8];
    segment.tensor(TENSOR)?.read_at(0, &mut first)?;
    let first = u64::from_ne_bytes(first);
    let words = size / 8;
    // A chain begins at word 0, and leads elsewhere.
    let is_link = first != 0 && first < words && first.is_multiple_of(chain::STRIDE as u64);
    if is_link { Ok(()) } else { Err(format!("the segment begins with {first}").into()) }
}

/// Opens one segment repeatedly until an opening fails.
fn until_refused(setting: &Setting<'_>) -> Result<(), Failure> {
    let most = if setting.bench.quick { OPENINGS / 100 } else { OPENINGS };
    let mut opened = Vec::new();
    let refusal = loop {
        if opened.len() == most {
            break None;
        }
        match setting.domain.opener(&name(SMALL)).open() {
            Ok(segment) => opened.push(segment),
            Err(error) => break Some(error),
        }
    };
    let count = opened.len() as f64;
    // Before they are dropped.
    let usage = Usage::now();
    drop(opened);
    setting.note(match refusal {
        None => format!("one segment was opened {most} times in one process, and nothing refused"),
        Some(error) => {
            let limit = usage.limit_behind(&error);
            format!("one segment was opened {count} times in one process, then {limit} refused: {error}")
        }
    });
    setting.count(Case::new("openings in one process", Unit::Count).parameter("of", "a segment of 2 MiB"), &[count])
}

/// How much this process uses of the resources that the kernel limits.
struct Usage {
    files: u64,
    most_files: u64,
    mappings: u64,
    most_mappings: u64,
}

impl Usage {
    fn now() -> Self {
        let count = |path| fs::read_dir(path).map_or(0, |entries| entries.count() as u64);
        let text = |path| fs::read_to_string(path).unwrap_or_default();
        Self {
            files: count("/proc/self/fd"),
            most_files: getrlimit(Resource::Nofile).current.unwrap_or(u64::MAX),
            mappings: text("/proc/self/maps").lines().count() as u64,
            most_mappings: text("/proc/sys/vm/max_map_count").trim().parse().unwrap_or(u64::MAX),
        }
    }

    /// Names the limit that made an opening fail. The kernel's limits come first: the driver opens files and maps
    /// memory, too, and says little when the kernel refuses.
    fn limit_behind(&self, error: &Error) -> &'static str {
        match error {
            Error::LimitReached(LimitReached::FileDescriptors(_)) => FILES,
            _ if self.files.saturating_add(CLOSE) >= self.most_files => FILES,
            _ if self.mappings.saturating_add(CLOSE) >= self.most_mappings => {
                "the limit of mappings (vm.max_map_count)"
            }
            Error::LimitReached(LimitReached::SystemMemory { .. }) => "the kernel",
            Error::LimitReached(LimitReached::Broker { .. }) => "the broker",
            Error::DeviceFault(_) => "the driver",
            _ => "the library",
        }
    }
}

const FILES: &str = "the limit of open files (`ulimit -n`)";

/// How much of a limit may be left when a call that needs several at once fails.
const CLOSE: u64 = 16;

#[cfg(test)]
mod tests {
    use partywall::error::DeviceFault;

    use super::*;

    const ROOM: Usage = Usage { files: 40, most_files: 1024, mappings: 300, most_mappings: 65_530 };

    #[test]
    fn refusal_is_blamed_on_the_limit_that_is_reached() {
        let driver = || Error::from(DeviceFault::NoDevice { wanted: None, why: "a refusal".to_owned() });
        let descriptors = Error::from(LimitReached::FileDescriptors("a segment".to_owned()));
        assert_eq!(ROOM.limit_behind(&driver()), "the driver");
        assert_eq!(ROOM.limit_behind(&descriptors), FILES);
        assert_eq!(Usage { files: 1020, ..ROOM }.limit_behind(&driver()), FILES);
        let mapped = Usage { mappings: 65_529, ..ROOM };
        assert_eq!(mapped.limit_behind(&driver()), "the limit of mappings (vm.max_map_count)");
        assert_eq!(mapped.limit_behind(&descriptors), FILES, "what the library knows comes first");
    }

    #[test]
    fn usage_of_this_process_is_within_its_limits() {
        let now = Usage::now();
        assert!(now.files > 0 && now.files < now.most_files && now.mappings > 0 && now.mappings < now.most_mappings);
    }
}
