//! Segments that grow on a GPU, and host segments that a GPU accesses.

use std::time::Duration;

use partywall::{
    DType, Domain, Error, Place, Refreshed, Segment, cuda,
    error::{InvalidArgument, Mismatch},
};

use super::world::{TIMEOUT, World, ensure, error_text, first_gpu, ready_and_wait};

/// The number of elements in 2 MiB, the granularity of GPU memory. A tensor of this size fills its chunk, and the next
/// byte belongs to another allocation.
const CHUNK: u64 = 1 << 19;

/// Chunks at the end.
const CHUNKS: u64 = 5;

/// The role of the reader that follows.
pub(crate) fn follow(domain: &Domain, name: &str) -> Result<(), String> {
    let segment = domain.open(name, TIMEOUT).map_err(error_text)?;
    let whole = domain.opener(name).reserve(0).open().map_err(error_text)?;
    let range = segment.tensor("x").map_err(error_text)?.device().map_err(error_text)?;
    verify(&segment, CHUNK)?;
    ready_and_wait();
    let grown = segment.wait_growth(TIMEOUT).map_err(error_text)?;
    ensure(grown == Refreshed::Grown, || format!("{grown:?}"))?;
    let longer = segment.tensor("x").map_err(error_text)?.device().map_err(error_text)?;
    ensure(longer.device_ptr() == range.device_ptr(), || "it has moved".into())?;
    verify(&segment, CHUNKS * CHUNK)?;
    // The range from before the growth is still valid as its beginning.
    let kernels = range.gpu().kernels().map_err(error_text)?;
    let wrong = kernels.verify(range.gpu().stream(), range.as_slice(), 1).map_err(error_text)?;
    ensure(wrong.is_none(), || format!("element {wrong:?} of the old length is wrong"))?;

    let told = whole.refresh().map_err(error_text)?;
    ensure(matches!(told, Refreshed::DoesNotFit { .. }), || format!("without room: {told:?}"))?;
    verify(&whole, CHUNK)
}

/// Verifies all elements by one kernel, and by copies to the host that cross chunk borders.
fn verify(segment: &Segment, elements: u64) -> Result<(), String> {
    let tensor = segment.tensor("x").map_err(error_text)?;
    ensure(tensor.elements() == elements, || format!("{} elements", tensor.elements()))?;
    let range = tensor.device().map_err(error_text)?;
    let gpu = range.gpu();
    let wrong = gpu.kernels().map_err(error_text)?.verify(gpu.stream(), range.as_slice(), 1).map_err(error_text)?;
    ensure(wrong.is_none(), || format!("element {wrong:?} is wrong"))?;
    for end in (CHUNK..elements).step_by(CHUNK as usize) {
        let mut words = [0; 8];
        tensor.read_at((end - 1) * 4, &mut words).map_err(error_text)?;
        let expected = [end - 1, end].map(|i| cuda::kernels::expected(i).to_ne_bytes());
        ensure(words == expected.concat()[..], || format!("the words around element {end} are wrong"))?;
    }
    Ok(())
}

fn fill(segment: &Segment) -> Result<(), String> {
    let range = segment.tensor("x").map_err(error_text)?.device().map_err(error_text)?;
    range
        .gpu()
        .kernels()
        .map_err(error_text)?
        .enqueue_fill(range.gpu().stream(), range.as_slice())
        .map_err(error_text)?;
    range.gpu().stream().synchronize().map_err(error_text)
}

/// One kernel of another process reads one range across the original memory and all growths.
pub(crate) fn kernel_reads_across_a_grown_end() -> Result<(), String> {
    let world = World::new()?;
    let builder = world.domain.create("log", first_gpu()?).tensor("x", DType::U32, &[CHUNK]).mutable(true);
    let segment = builder.allocate().map_err(error_text)?.commit().map_err(error_text)?;
    fill(&segment)?;
    let reader = world.play("follow", &["log"]);
    segment.grow().extend("x", CHUNK + 100).commit().map_err(error_text)?;
    segment.grow().extend("x", CHUNK + 200).commit().map_err(error_text)?; // into the room that the last one left
    segment.grow().extend("x", CHUNKS * CHUNK).commit().map_err(error_text)?;
    ensure(segment.bytes() == CHUNKS * CHUNK * 4, || format!("{} bytes", segment.bytes()))?;
    fill(&segment)?;
    reader.finish();
    verify(&world.domain.open("log", Duration::ZERO).map_err(error_text)?, CHUNKS * CHUNK)
}

/// Copies between shared host memory and the GPU on a stream of the caller, and reads it in place by a kernel.
pub(crate) fn pinned_segments_are_copied_asynchronously() -> Result<(), String> {
    let world = World::new()?;
    let Place::Gpu(uuid) = first_gpu()? else { return Err("no GPU".into()) };
    let gpu = world.domain.gpu(uuid).map_err(error_text)?;
    let host = |name: &str| world.domain.create(name, Place::Host).tensor("pad", DType::U8, &[100]);
    let host = |name: &str| host(name).tensor("x", DType::U32, &[1 << 18]);
    let mut build = host("frozen").allocate().map_err(error_text)?;
    let values = build.as_mut_slice::<u32>("x").map_err(error_text)?;
    values.iter_mut().zip(0..).for_each(|(value, i)| *value = cuda::kernels::expected(i));
    let frozen = build.commit().map_err(error_text)?;
    let mutable = host("mutable").mutable(true).allocate().map_err(error_text)?.commit().map_err(error_text)?;
    let stream = cuda::Stream::new(gpu.context()).map_err(error_text)?;
    let device = cuda::DeviceBuffer::new(gpu.context(), 4 << 18).map_err(error_text)?;

    let pinned = mutable.pin(&gpu).map_err(error_text)?;
    let again = mutable.pin(&gpu).map_err(error_text)?;
    let address =
        |pinned: &partywall::Pinned<&Segment>| pinned.device("x").map(|range| range.device_ptr()).map_err(error_text);
    ensure(address(&pinned)? == address(&again)?, || "the second pin has another address".into())?;
    drop(again);
    // A kernel works in place, then a copy from the GPU writes back where another mapping sees it.
    let kernels = gpu.kernels().map_err(error_text)?;
    let range = pinned.device("x").map_err(error_text)?;
    kernels.enqueue_fill(stream.as_ref(), range.as_slice()).map_err(error_text)?;
    pinned.enqueue_copy_to("x", stream.as_ref(), device.as_slice()).map_err(error_text)?;
    kernels.enqueue_double(stream.as_ref(), device.as_slice()).map_err(error_text)?;
    pinned.enqueue_copy_from("x", stream.as_ref(), device.as_slice()).map_err(error_text)?;
    stream.synchronize().map_err(error_text)?;
    let reader = world.domain.open("mutable", Duration::ZERO).map_err(error_text)?;
    let seen = reader.tensor("x").map_err(error_text)?.shared::<u32>().map_err(error_text)?;
    for i in [0, 1, 777, (1 << 18) - 1] {
        ensure(seen.get(i) == cuda::kernels::expected(i as u64).wrapping_mul(2), || format!("element {i} is wrong"))?;
    }
    let short = device.slice(0, 8).map_err(error_text)?;
    let refused = pinned.enqueue_copy_to("x", stream.as_ref(), short);
    ensure(matches!(refused, Err(Error::InvalidArgument(InvalidArgument::Range { .. }))), || format!("{refused:?}"))?;
    // The remaining pin still counts. After it is dropped, the segment can be pinned again.
    drop(pinned);
    drop(mutable.pin(&gpu).map_err(error_text)?);

    match frozen.pin(&gpu) {
        Ok(pinned) => {
            pinned.enqueue_copy_to("x", stream.as_ref(), device.as_slice()).map_err(error_text)?;
            let wrong = kernels.verify(stream.as_ref(), device.as_slice(), 1).map_err(error_text)?;
            ensure(wrong.is_none(), || format!("element {wrong:?} of the frozen segment is wrong"))?;
            let refused = pinned.enqueue_copy_from("x", stream.as_ref(), device.as_slice());
            ensure(matches!(refused, Err(Error::InvalidArgument(InvalidArgument::Range { .. }))), || {
                format!("{refused:?}")
            })?;
        }
        // A GPU that cannot register read-only memory reports this in the error.
        Err(error) => ensure(error_text(&error).contains("read-only"), || error_text(&error))?,
    }
    let vmm =
        world.domain.create("vmm", Place::Gpu(uuid)).tensor("x", DType::U8, &[1]).allocate().map_err(error_text)?;
    let refused = vmm.commit().map_err(error_text)?.pin(&gpu).map(drop);
    ensure(matches!(refused, Err(Error::Mismatch(Mismatch::Kind { wanted: "host", .. }))), || format!("{refused:?}"))?;
    let left = gpu.context().take_drop_error();
    ensure(left.is_none(), || format!("{left:?}"))
}
