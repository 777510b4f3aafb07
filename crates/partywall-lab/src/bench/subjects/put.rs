//! Putting a model file that is in the page cache, against the two copies that it needs: reading the file, and writing
//! as many bytes into fresh memory. One thread makes both copies one after the other.

use std::{
    fs::File,
    os::{fd::OwnedFd, unix::fs::FileExt},
    path::Path,
    thread,
    time::{Duration, Instant},
};

use partywall::{Domain, Place};
use partywall_measure::{Case, Comparison, Failure, Sampler, Unit};
use rustix::fs::{MemfdFlags, memfd_create};

use crate::{
    bench::{
        Bench, clocked, milliseconds,
        model_file::{ModelFile, meminfo},
        size,
    },
    broker::Broker,
};

/// Bytes that the floor reads and writes at once.
const BUFFER: usize = 1 << 20;

pub(super) fn run(bench: &Bench<'_>, broker: &Broker) -> Result<(), Failure> {
    let file = ModelFile::make(bench, broker)?;
    let domain = broker.connect()?;
    let floor: Case = Case::new("read the cached file, write a fresh memfd", Unit::Milliseconds)
        .parameter("size", size(file.bytes()));
    // Few samples, because each is long: it moves the file twice.
    let plan = bench.plan(20).warm_up(1).block(1);
    for threads in [None, Some(1)] {
        let what = if threads.is_none() { "put" } else { "put by one thread" };
        let case = Case::new(what, Unit::Milliseconds).parameter("size", size(file.bytes()));
        let case = case.parameter("threads", threads.unwrap_or_else(partywall::files::default_threads));
        let put: Sampler<'_> = Box::new(|| put(&domain, file.path(), threads));
        let raw: Sampler<'_> = Box::new(|| read_and_write(file.path(), file.bytes()));
        bench.run(Comparison::new(case, put).floor(floor.clone(), raw), plan)?;
    }
    Ok(())
}

fn put(domain: &Domain, path: &Path, threads: Option<usize>) -> Result<f64, Failure> {
    let before = shared_memory();
    let put = domain.put("model", Place::Host);
    let put = match threads {
        Some(threads) => put.threads(threads),
        None => put,
    };
    let (elapsed, segment) = clocked(|| put.path(path))?;
    segment.release()?;
    await_release(before);
    Ok(milliseconds(elapsed))
}

fn read_and_write(path: &Path, bytes: u64) -> Result<f64, Failure> {
    let (elapsed, _fresh) = clocked(|| {
        let mut buffer = vec![0; BUFFER];
        let file = File::open(path)?;
        let mut at = 0;
        loop {
            match file.read_at(&mut buffer, at)? {
                0 => break,
                n => at += n as u64,
            }
        }
        let fresh = File::from(fresh(bytes)?);
        for at in (0..bytes).step_by(BUFFER) {
            fresh.write_all_at(&buffer[..BUFFER.min((bytes - at) as usize)], at)?;
        }
        Ok::<_, std::io::Error>(fresh)
    })?;
    Ok(milliseconds(elapsed))
}

fn fresh(bytes: u64) -> std::io::Result<OwnedFd> {
    let fd = memfd_create("partywall-bench", MemfdFlags::CLOEXEC)?;
    rustix::fs::ftruncate(&fd, bytes)?;
    Ok(fd)
}

/// Waits until the memory of a version is freed. The broker closes its last file descriptor on a helper thread, and
/// that must not overlap the next sample.
fn await_release(before: u64) {
    let deadline = Instant::now() + Duration::from_secs(5);
    while shared_memory() > before.saturating_add(32 << 20) && Instant::now() < deadline {
        thread::sleep(Duration::from_millis(10));
    }
}

/// Returns bytes of all memfds and other shared memory of the machine.
fn shared_memory() -> u64 {
    meminfo("Shmem:").unwrap_or(0)
}
