//! Segments in programs that use cudarc.

use ::cudarc::driver::CudaContext;
use partywall::{Domain, cuda::Driver, cuda::kernels::expected};

use super::segments::{commit, verify};
use super::world::{TIMEOUT, World, ensure, say, tell};

/// The role of the other process in [`works_in_place`].
pub(crate) const ROLE: &str = "cudarc";

/// A process reads a frozen segment and writes a mutable one through cudarc, on cudarc's stream, in order with
/// Partywall's kernels there.
pub(crate) fn works_in_place() -> Result<(), String> {
    let world = World::new()?;
    let _frozen = commit(&world.domain, "frozen", false, false)?;
    let shared = commit(&world.domain, "shared", false, true)?;
    let actor = world.play_with(ROLE, &[], |command| {
        // cudarc loads the driver by its usual name only, so the simulated driver must have that name.
        if let Some(driver) = std::env::var_os(Driver::LIBRARY_VARIABLE) {
            let _ = std::os::unix::fs::symlink(driver, world.directory().join("libcuda.so"));
            command.env("LD_LIBRARY_PATH", world.directory());
        }
    });
    actor.finish();
    verify(&world.domain, &shared, 2)
}

pub(crate) fn play() -> Result<(), String> {
    let domain = Domain::options().start(false).connect().map_err(tell)?;
    let stream = CudaContext::new(0).and_then(|context| context.new_stream()).map_err(tell)?;

    let frozen = domain.open("frozen", TIMEOUT).map_err(tell)?;
    let mut frozen = frozen.tensor("x").map_err(tell)?.to_cudarc::<u32>(&stream).map_err(tell)?;
    let pattern: Vec<u32> = (0..frozen.len() as u64).map(expected).collect();
    ensure(stream.clone_dtoh(&frozen.view()).map_err(tell)? == pattern, || "cudarc reads something else".into())?;
    ensure(frozen.view_mut().is_err(), || "frozen memory may be written".into())?;

    let shared = domain.opener("shared").timeout(TIMEOUT).read_write().open().map_err(tell)?;
    let tensor = shared.tensor("x").map_err(tell)?;
    let mut slice = tensor.to_cudarc::<u32>(&stream).map_err(tell)?;
    stream.memset_zeros(&mut slice.view_mut().map_err(tell)?).map_err(tell)?;
    stream.memcpy_htod(&pattern, &mut slice.view_mut().map_err(tell)?).map_err(tell)?;
    // Ordered behind the copy, because it is on the same stream.
    let range = tensor.device().map_err(tell)?;
    let ours = range.gpu().cudarc_stream(&stream).map_err(tell)?;
    range.gpu().kernels().map_err(tell)?.enqueue_double(ours, range.as_slice()).map_err(tell)?;
    stream.synchronize().map_err(tell)?;
    say("ready");
    Ok(())
}
