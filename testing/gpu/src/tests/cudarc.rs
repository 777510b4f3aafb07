//! Segments in programs that use cudarc.

use ::cudarc::driver::CudaContext;
use partywall::{Domain, cuda::Driver, cuda::kernels::expected};

use super::segments::{commit, verify};
use super::world::{TIMEOUT, World, ensure, error_text, say};

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
    let domain = Domain::options().start(false).connect().map_err(error_text)?;
    let stream = CudaContext::new(0).and_then(|context| context.new_stream()).map_err(error_text)?;

    let frozen = domain.open("frozen", TIMEOUT).map_err(error_text)?;
    let mut frozen = frozen.tensor("x").map_err(error_text)?.to_cudarc::<u32>(&stream).map_err(error_text)?;
    let pattern: Vec<u32> = (0..frozen.len() as u64).map(expected).collect();
    ensure(stream.clone_dtoh(&frozen.view()).map_err(error_text)? == pattern, || "cudarc reads something else".into())?;
    ensure(frozen.view_mut().is_err(), || "frozen memory may be written".into())?;

    let shared = domain.opener("shared").timeout(TIMEOUT).read_write().open().map_err(error_text)?;
    let tensor = shared.tensor("x").map_err(error_text)?;
    let mut slice = tensor.to_cudarc::<u32>(&stream).map_err(error_text)?;
    stream.memset_zeros(&mut slice.view_mut().map_err(error_text)?).map_err(error_text)?;
    stream.memcpy_htod(&pattern, &mut slice.view_mut().map_err(error_text)?).map_err(error_text)?;
    // Ordered behind the copy, because it is on the same stream.
    let range = tensor.device().map_err(error_text)?;
    let ours = range.gpu().cudarc_stream(&stream).map_err(error_text)?;
    range.gpu().kernels().map_err(error_text)?.enqueue_double(ours, range.as_slice()).map_err(error_text)?;
    stream.synchronize().map_err(error_text)?;
    say("ready");
    Ok(())
}
