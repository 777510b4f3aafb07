//! Segments and timelines in Vulkan: GPU memory of CUDA processes, and host memory.

use std::sync::Arc;
use std::time::Duration;

use partywall::{DType, DeviceUuid, Domain, Error as PartywallError, Place, Segment, error::Gone};
use partywall_vulkan::{Buffer, Error, Gpu, ImportedMemory, ash::vk};

use super::segments::ELEMENTS;
use super::world::{TIMEOUT, World, ensure, error_text, first_gpu, ready_and_wait, say};
use crate::vulkan::{Pattern, Point, Vulkan};

/// The role that says what Vulkan lacks, behind [`LACKS`].
pub(crate) const PROBE: &str = "vulkan_probe";
pub(crate) const LACKS: &str = "Vulkan lacks: ";

const BYTES: u64 = 4 * ELEMENTS;
const READ: vk::BufferUsageFlags = vk::BufferUsageFlags::TRANSFER_SRC;
const WRITE: vk::BufferUsageFlags = vk::BufferUsageFlags::TRANSFER_DST;

/// The turns of [`takes_turns_with_kernels`]. Their values pass 2³².
const TURNS: u64 = 200;
const TURN_ELEMENTS: u64 = 1 << 20;
const BEFORE: u64 = (1 << 32) - TURNS / 2;
/// How many turns are enqueued at a time.
const AHEAD: u64 = 8;

/// The roles that this module's tests give to other processes.
pub(crate) fn play(role: &str, arguments: &[String]) -> Result<(), String> {
    if role == PROBE {
        let gpus = arguments.first().and_then(|number| number.parse().ok()).ok_or("no number of GPUs")?;
        return probe(gpus);
    }
    let domain = Domain::options().start(false).connect().map_err(error_text)?;
    match role {
        "vulkan_target" => {
            let _segment = gpu_segment(&domain, "target", ELEMENTS)?;
            ready_and_wait();
            Ok(())
        }
        "vulkan_kernels" => kernels(&domain),
        "vulkan_writer" => {
            let writer = domain.timeline_writer("frames").map_err(error_text)?;
            writer.signal(BEFORE).map_err(error_text)?;
            ready_and_wait();
            Ok(())
        }
        other => Err(format!("unknown role {other:?}")),
    }
}

fn probe(gpus: usize) -> Result<(), String> {
    let mut wanted = vec![None];
    if gpus > 0 {
        let devices = partywall::gpu::devices().map_err(error_text)?;
        wanted = devices
            .iter()
            .take(gpus)
            .map(|device| device.uuid().map(Some))
            .collect::<Result<_, _>>()
            .map_err(error_text)?;
    }
    for uuid in wanted {
        match Gpu::open(uuid) {
            Err(error @ (Error::NoLoader(_) | Error::NoDevice { .. } | Error::Unsupported { .. })) => {
                say(&format!("{LACKS}{error}"));
                return Ok(());
            }
            Err(error) => return Err(error_text(error)),
            Ok(_) => {}
        }
    }
    Ok(())
}

/// Commits zeroes on the first GPU, which every process may write.
fn gpu_segment(domain: &Domain, name: &str, elements: u64) -> Result<Segment, String> {
    let builder = domain.create(name, first_gpu()?).mutable(true).kept(true).tensor("x", DType::U32, &[elements]);
    let build = builder.allocate().map_err(error_text)?;
    let range = build.device("x").map_err(error_text)?;
    range.gpu().stream().enqueue_set(range.as_slice(), 0).map_err(error_text)?;
    build.commit().map_err(error_text)
}

fn host_segment(domain: &Domain, name: &str, bytes: u64) -> Result<Segment, String> {
    let builder = domain.create(name, Place::Host).mutable(true).tensor("x", DType::U8, &[bytes]);
    builder.allocate().map_err(error_text)?.commit().map_err(error_text)
}

fn import(vulkan: &Vulkan, domain: &Domain, name: &str) -> Result<Arc<ImportedMemory>, String> {
    vulkan.gpu.import(domain.descriptors(name, TIMEOUT).map_err(error_text)?).map_err(error_text)
}

/// Opens the device that has the memory of a name. The process needs no CUDA for that.
fn device_of(domain: &Domain, name: &str) -> Result<Vulkan, String> {
    Vulkan::open(domain.descriptors(name, TIMEOUT).map_err(error_text)?.place().gpu())
}

/// Submits a copy of a whole buffer.
fn copy(vulkan: &Vulkan, from: &Buffer, to: &Buffer, wait: Option<Point>, signal: Option<Point>) -> Result<(), String> {
    let (all, transfer) = (vk::PipelineStageFlags::ALL_COMMANDS, vk::PipelineStageFlags::TRANSFER);
    let none = vk::DependencyFlags::empty();
    let [read, write] = [vk::AccessFlags::TRANSFER_READ, vk::AccessFlags::TRANSFER_WRITE];
    let acquired = [from.acquire(read, vulkan.family), to.acquire(write, vulkan.family)];
    let released = [from.release(read, vulkan.family), to.release(write, vulkan.family)];
    let outside = from.outside() | to.outside() | all;
    let regions = [vk::BufferCopy::default().size(from.bytes())];
    #[allow(unsafe_code)]
    // SAFETY: the handles are alive, and callers wait for the work before they drop a buffer.
    vulkan.submit(wait, signal, |device, commands| unsafe {
        device.cmd_pipeline_barrier(commands, outside, transfer, none, &[], &acquired, &[]);
        device.cmd_copy_buffer(commands, from.handle(), to.handle(), &regions);
        device.cmd_pipeline_barrier(commands, transfer, outside, none, &[], &released, &[]);
    })
}

fn copy_and_wait(vulkan: &Vulkan, from: &Buffer, to: &Buffer) -> Result<(), String> {
    copy(vulkan, from, to, None, None)?;
    vulkan.finish()
}

/// Returns the test pattern as bytes.
fn pattern(elements: u64) -> Vec<u8> {
    (0..elements).flat_map(|index| partywall::cuda::kernels::expected(index).to_ne_bytes()).collect()
}

/// Compares all bytes of the tensor `x`, and clears them.
fn expect_pattern(segment: &Segment, what: &str) -> Result<(), String> {
    let tensor = segment.tensor("x").map_err(error_text)?;
    let found = tensor.to_vec().map_err(error_text)?;
    let expected = pattern(found.len() as u64 / 4);
    let wrong = found.iter().zip(&expected).filter(|(found, expected)| found != expected).count();
    ensure(wrong == 0, || format!("{what}: {wrong} of {} bytes are wrong", found.len()))?;
    tensor.write_at(0, &vec![0; found.len()]).map_err(error_text)
}

/// Another process writes the memory by a kernel, and is killed. This process uses no CUDA.
pub(crate) fn segment_is_read_without_cuda() -> Result<(), String> {
    let world = World::new()?;
    let mut creator = world.play("commit", &["mesh"]);
    let vulkan = device_of(&world.domain, "mesh")?;
    let copied = host_segment(&world.domain, "copy", BYTES)?;
    let target = import(&vulkan, &world.domain, "copy")?.buffer("x", WRITE).map_err(error_text)?;
    let mesh = import(&vulkan, &world.domain, "mesh")?.buffer("x", READ).map_err(error_text)?;
    ensure(mesh.bytes() == BYTES, || format!("{mesh:?}"))?;
    copy_and_wait(&vulkan, &mesh, &target)?;
    expect_pattern(&copied, "while the creator lives")?;
    creator.kill();
    copy_and_wait(&vulkan, &mesh, &target)?;
    expect_pattern(&copied, "after its death")?;
    drop(mesh);
    let again = import(&vulkan, &world.domain, "mesh")?.buffer("x", READ).map_err(error_text)?;
    copy_and_wait(&vulkan, &again, &target)?;
    expect_pattern(&copied, "imported after its death")?;
    // A frozen version is not written.
    let refused = import(&vulkan, &world.domain, "mesh")?.buffer("x", WRITE);
    ensure(matches!(refused, Err(Error::ReadOnly { .. })), || format!("{refused:?}"))
}

/// A transfer writes the memory, then a shader; another process checks each by a kernel.
pub(crate) fn writes_are_read_by_kernels() -> Result<(), String> {
    let world = World::new()?;
    let owner = world.play("vulkan_target", &[]);
    let vulkan = device_of(&world.domain, "target")?;
    let source = host_segment(&world.domain, "source", BYTES)?;
    source.tensor("x").map_err(error_text)?.write_at(0, &pattern(ELEMENTS)).map_err(error_text)?;
    let from = import(&vulkan, &world.domain, "source")?.buffer("x", READ).map_err(error_text)?;
    let target = import(&vulkan, &world.domain, "target")?;
    let usage = READ | WRITE | vk::BufferUsageFlags::STORAGE_BUFFER;
    let to = target.buffer("x", usage).map_err(error_text)?;
    copy_and_wait(&vulkan, &from, &to)?;
    world.play("verify", &["target"]).finish();

    source.tensor("x").map_err(error_text)?.write_at(0, &vec![0; BYTES as usize]).map_err(error_text)?;
    copy_and_wait(&vulkan, &from, &to)?;
    let shader = Pattern::new(&vulkan.gpu, to.handle())?;
    write_pattern(&vulkan, &shader, &to)?;
    world.play("verify", &["target"]).finish();
    owner.finish();
    Ok(())
}

fn write_pattern(vulkan: &Vulkan, shader: &Pattern, to: &Buffer) -> Result<(), String> {
    let (compute, none) = (vk::PipelineStageFlags::COMPUTE_SHADER, vk::DependencyFlags::empty());
    let acquired = [to.acquire(vk::AccessFlags::SHADER_WRITE, vulkan.family)];
    let released = [to.release(vk::AccessFlags::SHADER_WRITE, vulkan.family)];
    let words = u32::try_from(to.bytes() / 4).map_err(error_text)?;
    #[allow(unsafe_code)]
    // SAFETY: the handles are alive, and the work is waited for.
    vulkan.submit(None, None, |device, commands| unsafe {
        device.cmd_pipeline_barrier(commands, to.outside(), compute, none, &[], &acquired, &[]);
        shader.record(commands, words);
        device.cmd_pipeline_barrier(commands, compute, to.outside(), none, &[], &released, &[]);
    })?;
    vulkan.finish()
}

/// A pool is imported once: a kernel writes a block, Vulkan copies it to another one, and a kernel checks that. This
/// process uses both, because a pool on a GPU is opened by CUDA.
pub(crate) fn blocks_of_a_pool_are_used_in_place() -> Result<(), String> {
    let world = World::new()?;
    let pool = world.domain.pool("frames").place(first_gpu()?).blocks(3).block_bytes(BYTES).create();
    let pool = pool.map_err(error_text)?;
    let Place::Gpu(uuid) = pool.place() else { return Err("the pool is in host memory".to_owned()) };
    let vulkan = Vulkan::open(Some(uuid))?;
    let imported = vulkan.gpu.import(pool.descriptors().map_err(error_text)?).map_err(error_text)?;
    let mut source = pool.alloc(TIMEOUT).map_err(error_text)?;
    for round in 1..=3 {
        let mut target = pool.alloc(TIMEOUT).map_err(error_text)?;
        let range = source.device().map_err(error_text)?;
        let gpu = range.gpu();
        let kernels = gpu.kernels().map_err(error_text)?;
        kernels.enqueue_fill(gpu.stream(), range.as_slice()).map_err(error_text)?;
        gpu.stream().synchronize().map_err(error_text)?;
        let from = imported.block(&mut source, READ).map_err(error_text)?;
        let to = imported.block(&mut target, WRITE).map_err(error_text)?;
        copy_and_wait(&vulkan, &from, &to)?;
        drop((from, to));
        let range = target.device().map_err(error_text)?;
        let (gpu, written) = (range.gpu(), range.as_slice());
        let wrong = gpu.kernels().map_err(error_text)?.verify(gpu.stream(), written, 1).map_err(error_text)?;
        ensure(wrong.is_none(), || format!("in round {round} element {wrong:?} of block {} is wrong", target.index()))?;
        gpu.stream().enqueue_set(target.device().map_err(error_text)?.as_slice(), 0).map_err(error_text)?;
        // The next round reads the block that this one has written.
        source = target;
    }
    Ok(())
}

/// The CUDA process of [`takes_turns_with_kernels`]: in each turn it writes `a` by a kernel, and once Vulkan has copied
/// that to `b`, checks `b` by a kernel. Only the stream waits for Vulkan.
fn kernels(domain: &Domain) -> Result<(), String> {
    let written = domain.timeline_writer("written").map_err(error_text)?;
    let copied = domain.timeline("copied").map_err(error_text)?;
    let a = gpu_segment(domain, "a", TURN_ELEMENTS)?;
    let b = gpu_segment(domain, "b", TURN_ELEMENTS)?;
    let (a, b) = (a.tensor("x").map_err(error_text)?, b.tensor("x").map_err(error_text)?);
    let (a, b) = (a.device().map_err(error_text)?, b.device().map_err(error_text)?);
    let gpu = a.gpu();
    let kernels = gpu.kernels().map_err(error_text)?;
    // A semaphore of Vulkan may not be told to wait for a value that is 2³¹ ahead.
    written.signal(BEFORE).map_err(error_text)?;
    say("ready");
    for turn in 1..=TURNS {
        let v = BEFORE + turn;
        // Odd turns write the pattern, even ones double it, so that a copy of the turn before is found.
        if turn % 2 == 1 {
            kernels.enqueue_fill(gpu.stream(), a.as_slice()).map_err(error_text)?;
        } else {
            kernels.enqueue_double(gpu.stream(), a.as_slice()).map_err(error_text)?;
        }
        written.signal_on(gpu.stream(), v).map_err(error_text)?;
        copied.wait_on(gpu.stream(), v).map_err(error_text)?;
        let wrong =
            kernels.verify(gpu.stream(), b.as_slice(), if turn % 2 == 1 { 1 } else { 2 }).map_err(error_text)?;
        copied.check().map_err(error_text)?;
        ensure(wrong.is_none(), || format!("in turn {turn} element {wrong:?} is wrong"))?;
    }
    say("checked");
    ready_and_wait();
    Ok(())
}

/// Two timelines order kernels of one process and transfers of the other. No host waits for the other side's GPU work.
pub(crate) fn takes_turns_with_kernels() -> Result<(), String> {
    let world = World::new()?;
    let writer = world.domain.timeline_writer("copied").map_err(error_text)?;
    let done = world.domain.timeline("copied").map_err(error_text)?;
    let mut other = world.play("vulkan_kernels", &[]);
    let vulkan = device_of(&world.domain, "a")?;
    let from = import(&vulkan, &world.domain, "a")?.buffer("x", READ).map_err(error_text)?;
    let to = import(&vulkan, &world.domain, "b")?.buffer("x", WRITE).map_err(error_text)?;
    let written = vulkan.gpu.follow(world.domain.timeline("written").map_err(error_text)?).map_err(error_text)?;
    writer.signal(BEFORE).map_err(error_text)?;
    let copied = vulkan.gpu.signaller(writer).map_err(error_text)?;
    for turn in 1..=TURNS {
        let v = BEFORE + turn;
        if turn > AHEAD {
            done.wait(v - AHEAD, TIMEOUT).map_err(error_text)?;
        }
        let wait = written.wait(v).map_err(error_text)?;
        let signal = copied.signal(v).map_err(error_text)?;
        copy(&vulkan, &from, &to, Some(wait), Some(signal))?;
    }
    other.expect("checked");
    written.check(BEFORE + TURNS).map_err(error_text)?;
    copied.finish(TIMEOUT).map_err(error_text)?;
    vulkan.finish()?;
    other.finish();
    Ok(())
}

/// Memory of one GPU is not imported on the other, and each is found by its UUID.
pub(crate) fn another_gpu_is_refused() -> Result<(), String> {
    let world = World::new()?;
    let devices = partywall::gpu::devices().map_err(error_text)?;
    let uuids: Vec<DeviceUuid> =
        devices.iter().take(2).map(|device| device.uuid()).collect::<Result<_, _>>().map_err(error_text)?;
    let _segment = gpu_segment(&world.domain, "x", 1024)?;
    for (uuid, is_there) in uuids.into_iter().zip([true, false]) {
        let vulkan = Vulkan::open(Some(uuid))?;
        let imported = vulkan.gpu.import(world.domain.descriptors("x", TIMEOUT).map_err(error_text)?);
        match imported {
            Ok(_) if is_there => {}
            Err(Error::WrongGpu { owner, uuid: device, .. }) if !is_there => {
                ensure(owner != device && device == uuid, || format!("{owner} and {device}"))?;
            }
            other => return Err(format!("on {uuid}: {other:?}")),
        }
    }
    Ok(())
}

/// Mutable and frozen host memory, of lengths that are no whole pages.
pub(crate) fn host_memory_is_shared() -> Result<(), String> {
    const ODD: u64 = 4 * 12_345;
    let world = World::new()?;
    let vulkan = Vulkan::open(None)?;
    let name = vulkan.gpu.name();
    let mut build =
        world.domain.create("frozen", Place::Host).tensor("x", DType::U8, &[ODD]).allocate().map_err(error_text)?;
    build.as_mut_bytes("x").map_err(error_text)?.copy_from_slice(&pattern(ODD / 4));
    let frozen = build.commit().map_err(error_text)?;
    let copied = host_segment(&world.domain, "copy", ODD)?;
    let usage = READ | WRITE | vk::BufferUsageFlags::STORAGE_BUFFER;
    let to = import(&vulkan, &world.domain, "copy")?.buffer("x", usage).map_err(error_text)?;
    let from = import(&vulkan, &world.domain, "frozen")?.buffer("x", READ).map_err(error_text)?;
    copy_and_wait(&vulkan, &from, &to)?;
    expect_pattern(&copied, &format!("a copy of frozen memory on {name}"))?;
    let shader = Pattern::new(&vulkan.gpu, to.handle())?;
    write_pattern(&vulkan, &shader, &to)?;
    expect_pattern(&copied, &format!("what a shader wrote on {name}"))?;
    let found = frozen.tensor("x").map_err(error_text)?.to_vec().map_err(error_text)?;
    ensure(found == pattern(ODD / 4), || "the frozen version has changed".to_owned())
}

/// Work that waits for a killed process goes on, and the check says why.
pub(crate) fn waits_end_with_their_writer() -> Result<(), String> {
    let world = World::new()?;
    let vulkan = Vulkan::open(None)?;
    let mut writer = world.play("vulkan_writer", &[]);
    let frames = vulkan.gpu.follow(world.domain.timeline("frames").map_err(error_text)?).map_err(error_text)?;
    for v in [BEFORE, BEFORE + 1, BEFORE + TURNS] {
        let wait = frames.wait(v).map_err(error_text)?;
        vulkan.submit(Some(wait), None, |_, _| ())?;
    }
    frames.check(BEFORE).map_err(error_text)?;
    ensure(frames.timeline().wait(BEFORE + 1, Duration::ZERO).is_err(), || "nothing was signalled".to_owned())?;
    writer.kill();
    vulkan.finish()?;
    frames.check(BEFORE).map_err(error_text)?;
    for result in [frames.check(BEFORE + 1), frames.wait(BEFORE + 1).map(drop)] {
        let is_right =
            matches!(&result, Err(Error::Partywall(PartywallError::Gone(Gone::Timeline { last: BEFORE, .. }))));
        ensure(is_right, || format!("{result:?}"))?;
    }
    Ok(())
}
