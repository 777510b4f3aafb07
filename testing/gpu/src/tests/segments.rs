//! Segments on a GPU between processes: deaths, versions, permissions, freed memory.

use std::time::Duration;

use partywall::{
    DType, Domain, Error, Gpu, Place, Segment, cuda,
    error::{Denied, DeviceFault, LimitReached, NotFound},
};

use super::world::{TIMEOUT, World, ensure, error_text, eventually, first_gpu, free_bytes, ready_and_wait, say};

const MIB: u64 = 1 << 20;
/// Elements of the test pattern: 64 MiB.
pub(super) const ELEMENTS: u64 = 16 * MIB;

/// The tolerance for free memory, because contexts of other processes come and go.
const SLACK: u64 = 64 * MIB;

/// The roles that this module's tests give to other processes.
pub(crate) fn play(role: &str, arguments: &[String]) -> Result<(), String> {
    let domain = Domain::options().start(false).connect().map_err(error_text)?;
    let name = arguments.first().map_or("test/pattern", String::as_str);
    match role {
        "commit" => {
            let _segment = commit(&domain, name, true, false)?;
            ready_and_wait();
            Ok(())
        }
        "build" => {
            let build =
                domain.create(name, first_gpu()?).tensor("x", DType::U32, &[1 << 28]).allocate().map_err(error_text)?;
            say(&format!("bytes {}", build.bytes()));
            ready_and_wait();
            build.commit().map(drop).map_err(error_text)
        }
        "verify" => {
            let segment = domain.open(name, TIMEOUT).map_err(error_text)?;
            verify(&domain, &segment, 1)?;
            ready_and_wait();
            verify(&domain, &segment, 1)
        }
        "double" => {
            let segment = domain.opener(name).timeout(TIMEOUT).read_write().open().map_err(error_text)?;
            let range = segment.tensor("x").map_err(error_text)?.device().map_err(error_text)?;
            let gpu = range.gpu();
            gpu.kernels().map_err(error_text)?.enqueue_double(gpu.stream(), range.as_slice()).map_err(error_text)?;
            gpu.stream().synchronize().map_err(error_text)?;
            say("ready");
            Ok(())
        }
        "write_read_only" => write_read_only(&domain, name),
        "follow" => super::growth::follow(&domain, name),
        "peer" => peer(&domain, name),
        other => Err(format!("unknown role {other:?}")),
    }
}

pub(super) fn commit(domain: &Domain, name: &str, kept: bool, mutable: bool) -> Result<Segment, String> {
    let build = domain.create(name, first_gpu()?).tensor("x", DType::U32, &[ELEMENTS]).kept(kept).mutable(mutable);
    let build = build.allocate().map_err(error_text)?;
    let range = build.device("x").map_err(error_text)?;
    range
        .gpu()
        .kernels()
        .map_err(error_text)?
        .enqueue_fill(range.gpu().stream(), range.as_slice())
        .map_err(error_text)?;
    build.commit().map_err(error_text)
}

/// Verifies all elements by a kernel, and the first, a middle and the last one by copies to the host.
pub(super) fn verify(_: &Domain, segment: &Segment, factor: u32) -> Result<(), String> {
    let tensor = segment.tensor("x").map_err(error_text)?;
    let range = tensor.device().map_err(error_text)?;
    let gpu = range.gpu();
    match gpu.kernels().map_err(error_text)?.verify(gpu.stream(), range.as_slice(), factor).map_err(error_text)? {
        None => {}
        Some(index) => return Err(format!("element {index} is wrong")),
    }
    for index in [0, tensor.elements() / 2 + 1, tensor.elements() - 1] {
        let mut word = [0; 4];
        tensor.read_at(index * 4, &mut word).map_err(error_text)?;
        let expected = cuda::kernels::expected(index).wrapping_mul(factor);
        ensure(u32::from_ne_bytes(word) == expected, || format!("element {index} copied to the host is wrong"))?;
    }
    Ok(())
}

/// The creator is killed. Another process finds the bytes, even if no process had CUDA open meanwhile.
pub(crate) fn memory_outlives_its_creator() -> Result<(), String> {
    let world = World::new()?;
    let mut creator = world.play("commit", &["survivor"]);
    creator.kill();
    eventually("the proof of death", || {
        Ok(world.domain.members().map_err(error_text)?.iter().all(|member| member.pid != creator.pid()))
    })?;
    world.play("verify", &["survivor"]).finish();
    Ok(())
}

/// The checks of a GPU and of a NUMA node find memory that only a descriptor holds, and take another file for lost
/// memory.
pub(crate) fn held_memory_is_not_lost() -> Result<(), String> {
    let Place::Gpu(uuid) = first_gpu()? else { return Err("no GPU".into()) };
    let gpu = Gpu::open(uuid).map_err(error_text)?;
    let granularity = cuda::PhysicalMemory::granularity(gpu.context()).map_err(error_text)?;
    let memory = cuda::PhysicalMemory::create(gpu.context(), granularity).map_err(error_text)?;
    let held = memory.export().map_err(error_text)?;
    drop(memory);
    let other = std::fs::File::open("/dev/null").map_err(error_text)?.into();
    let held = [held, other];
    let lost = gpu.find_lost(&held).map_err(error_text)?;
    ensure(matches!(lost[..], [None, Some(_)]), || format!("{lost:?}"))?;
    let node = gpu.context().device().numa_node().map_err(error_text)?;
    let memory = cuda::NodeMemory::create(cuda::Driver::load().map_err(error_text)?, node, 2 << 20);
    let pinned = memory.and_then(|memory| memory.export()).map_err(error_text)?;
    let [elsewhere, other] = held;
    let lost = partywall::gpu::find_lost_on_node(node, &[pinned, elsewhere, other]).map_err(error_text)?;
    ensure(matches!(lost[..], [None, None, Some(_)]), || format!("{lost:?}"))
}

/// A reader keeps its version while newer versions are committed and the name is removed.
pub(crate) fn readers_keep_their_version() -> Result<(), String> {
    let world = World::new()?;
    let first = commit(&world.domain, "model", true, false)?;
    drop(first);
    let reader = world.play("verify", &["model"]);
    drop(commit(&world.domain, "model", true, false)?);
    let removed = world.domain.remove("model").map_err(error_text)?;
    ensure(removed.version == 2, || format!("{removed:?}"))?;
    reader.finish();
    eventually("the end of the last version", || Ok(world.domain.status().map_err(error_text)?.versions == 0))
}

/// Memory that was never committed is freed with its builder.
pub(crate) fn uncommitted_memory_comes_back() -> Result<(), String> {
    let world = World::new()?;
    let before = free_bytes()?;
    let mut builder = world.play("build", &["never"]);
    ensure(free_bytes()? + (1 << 30) <= before + SLACK, || "the builder has allocated nothing".into())?;
    builder.kill();
    eventually("the return of the builder's memory", || Ok(free_bytes()? + SLACK >= before))?;
    match world.domain.open("never", Duration::ZERO) {
        Err(Error::NotFound(NotFound::Name { .. })) => Ok(()),
        other => Err(format!("{other:?}")),
    }
}

/// The memory of a removed name is freed as soon as it has no holder.
pub(crate) fn removed_memory_comes_back() -> Result<(), String> {
    let world = World::new()?;
    let before = free_bytes()?;
    for _ in 0..20 {
        let build = world.domain.create("big", first_gpu()?).tensor("x", DType::U8, &[1 << 30]).kept(true);
        drop(build.allocate().map_err(error_text)?.commit().map_err(error_text)?);
        ensure(free_bytes()? + (1 << 30) <= before + SLACK, || "a kept name does not hold its memory".into())?;
        world.domain.remove("big").map_err(error_text)?;
        eventually("the return of the memory", || Ok(free_bytes()? + SLACK >= before))?;
    }
    Ok(())
}

/// A killed reader's lease is dropped, and an owned name goes with its killed owner.
pub(crate) fn owned_names_go_with_their_owner() -> Result<(), String> {
    let world = World::new()?;
    let segment = commit(&world.domain, "owned", false, false)?;
    let mut reader = world.play("verify", &["owned"]);
    let holders = world.domain.inspect("owned").map_err(error_text)?.holders;
    ensure(holders.len() == 2, || format!("{holders:?}"))?;
    reader.kill();
    eventually(
        "the return of the lease",
        || Ok(world.domain.inspect("owned").map_err(error_text)?.holders.len() == 1),
    )?;
    drop(segment);
    match world.domain.open("owned", Duration::ZERO) {
        Err(Error::NotFound(NotFound::Name { .. })) => Ok(()),
        other => Err(format!("{other:?}")),
    }
}

/// A frozen version is read-only, both for the library's calls and for a kernel that writes anyway.
pub(crate) fn frozen_memory_is_read_only() -> Result<(), String> {
    let world = World::new()?;
    let segment = commit(&world.domain, "frozen", true, false)?;
    match world.domain.opener("frozen").read_write().open() {
        Err(Error::Denied(Denied::ReadOnly { .. })) => {}
        other => return Err(format!("{other:?}")),
    }
    let range = segment.tensor("x").map_err(error_text)?.device().map_err(error_text)?;
    ensure(!range.is_writable(), || "the committer may still write".into())?;
    world.play("write_read_only", &["frozen"]).finish();
    // The writer broke only its own context, and no other data.
    verify(&world.domain, &segment, 1)
}

/// Writes through a read-only mapping, which must end this process's context.
#[allow(unsafe_code)]
fn write_read_only(domain: &Domain, name: &str) -> Result<(), String> {
    let segment = domain.open(name, TIMEOUT).map_err(error_text)?;
    let range = segment.tensor("x").map_err(error_text)?.device().map_err(error_text)?;
    let gpu = range.gpu();
    let refused = gpu.kernels().map_err(error_text)?.enqueue_double(gpu.stream(), range.as_slice());
    ensure(refused == Err(cuda::AccessError::ReadOnly), || format!("{refused:?}"))?;
    // SAFETY: the range is mapped while `segment` lives. The hardware refuses the forbidden write, which breaks this
    // process's context and changes no byte.
    let forged = unsafe { cuda::DeviceSlice::from_raw(range.device_ptr(), range.bytes(), cuda::Access::ReadWrite) };
    gpu.kernels().map_err(error_text)?.enqueue_double(gpu.stream(), forged).map_err(error_text)?;
    match gpu.stream().synchronize() {
        Err(error) if error.is_sticky() => {
            say("ready");
            Ok(())
        }
        other => Err(format!("a write through a read-only mapping returned {other:?}")),
    }
}

/// Mutable memory is written in place by another process.
pub(crate) fn mutable_memory_is_shared() -> Result<(), String> {
    let world = World::new()?;
    let segment = commit(&world.domain, "shared", false, true)?;
    world.play("double", &["shared"]).finish();
    verify(&world.domain, &segment, 2)
}

/// A segment may be dropped while kernels use its memory: the drop waits for them.
pub(crate) fn dropped_under_running_work() -> Result<(), String> {
    let world = World::new()?;
    let place = first_gpu()?;
    let Place::Gpu(uuid) = place else { return Err("no GPU".to_owned()) };
    let gpu = world.domain.gpu(uuid).map_err(error_text)?;
    let total = gpu.context().memory_info().map_err(error_text)?.total;
    let words = (total / 64).min(1 << 30) / 4;
    let build = world.domain.create("x", place).tensor("x", DType::U32, &[words]).mutable(true).allocate();
    let segment = build.map_err(error_text)?.commit().map_err(error_text)?;
    let kernels = gpu.kernels().map_err(error_text)?;
    let range = segment.tensor("x").map_err(error_text)?.device().map_err(error_text)?.as_slice();
    for _ in 0..40 {
        kernels.enqueue_fill(gpu.stream(), range).map_err(error_text)?;
    }
    drop(segment);
    gpu.stream().synchronize().map_err(error_text)
}

/// No work can use memory whose address was never handed out, so dropping it does not wait for other work of the
/// process.
pub(crate) fn dropped_behind_a_wait() -> Result<(), String> {
    let world = World::new()?;
    let place = first_gpu()?;
    let Place::Gpu(uuid) = place else { return Err("no GPU".to_owned()) };
    let gpu = world.domain.gpu(uuid).map_err(error_text)?;
    let build = world.domain.create("x", place).tensor("x", DType::U32, &[MIB]).kept(true).allocate();
    drop(build.map_err(error_text)?.commit().map_err(error_text)?);
    let word = cuda::DeviceBuffer::new(gpu.context(), 8).map_err(error_text)?;
    gpu.stream().copy_from_host(word.as_slice(), &[0; 8]).map_err(error_text)?;
    let [waiting, other] = [(), ()].map(|()| cuda::Stream::new(gpu.context()));
    let waiting = waiting.map_err(error_text)?;
    let other = other.map_err(error_text)?;
    waiting.as_ref().enqueue_wait_u64(word.as_slice(), 1).map_err(error_text)?;
    for _ in 0..3 {
        world.domain.open("x", TIMEOUT).map_err(error_text)?.release().map_err(error_text)?;
    }
    let waits = !waiting.as_ref().is_done().map_err(error_text)?;
    ensure(waits, || "the stream did not wait".to_owned())?;
    other.as_ref().enqueue_write_u64(word.as_slice(), 1).map_err(error_text)?;
    waiting.synchronize().map_err(error_text)
}

/// A failed allocation reports how much memory is free and how much Partywall holds.
pub(crate) fn out_of_memory_says_what_is_free() -> Result<(), String> {
    let world = World::new()?;
    let _held = commit(&world.domain, "held", true, false)?;
    let before = free_bytes()?;
    match world.domain.create("huge", first_gpu()?).tensor("x", DType::U8, &[1 << 42]).allocate() {
        Err(Error::LimitReached(LimitReached::Memory {
            free: Some(free),
            total: Some(total),
            held: Some(held),
            ..
        })) => {
            ensure(free <= total && held.bytes == 4 * ELEMENTS && held.largest.len() == 1, || format!("{held:?}"))?;
        }
        other => return Err(format!("{other:?}")),
    }
    eventually("the return of what was allocated before it failed", || Ok(free_bytes()? + SLACK >= before))
}

/// Many tensors in a few chunks arrive where they belong, through page-locked buffers.
pub(crate) fn many_tensors_keep_their_places() -> Result<(), String> {
    let world = World::new()?;
    let mut builder = world.domain.create("many", first_gpu()?).chunk_bytes(MIB);
    let shape = |i: u64| [i % 7 + 1, 1000 + i];
    for i in 0..500 {
        builder = builder.tensor(&format!("layer.{i}"), DType::U16, &shape(i));
    }
    let mut build = builder.tensor("empty", DType::F32, &[0, 3]).allocate().map_err(error_text)?;
    let content = |i: u64| -> Vec<u8> {
        let bytes = shape(i).iter().product::<u64>() * 2;
        (0..bytes).map(|b| (b.wrapping_mul(31).wrapping_add(i * 7) % 251) as u8).collect()
    };
    for i in 0..500 {
        build.write(&format!("layer.{i}"), &content(i)).map_err(error_text)?;
    }
    ensure(build.chunks().len() > 1, || "one chunk shows nothing".into())?;
    let segment = build.commit().map_err(error_text)?;
    for i in 0..500 {
        let tensor = segment.tensor(&format!("layer.{i}")).map_err(error_text)?;
        ensure(tensor.to_vec().map_err(error_text)? == content(i), || format!("layer {i} differs"))?;
        ensure(tensor.device().map_err(error_text)?.device_ptr().is_multiple_of(256), || {
            format!("layer {i} is not aligned")
        })?;
    }
    ensure(segment.tensor("empty").map_err(error_text)?.to_vec().map_err(error_text)?.is_empty(), || "not empty".into())
}

/// A reader that sees only another GPU is refused. With permission it reads over the link.
pub(crate) fn another_gpu_needs_permission() -> Result<(), String> {
    let world = World::new()?;
    let _segment = commit(&world.domain, "remote", true, false)?;
    let other = partywall::gpu::devices().map_err(error_text)?[1].uuid().map_err(error_text)?;
    match world.domain.opener("remote").device(other).open() {
        Err(Error::DeviceFault(DeviceFault::Remote { .. })) => {}
        outcome => return Err(format!("{outcome:?}")),
    }
    let segment = world.domain.opener("remote").device(other).allow_peer(true).open().map_err(error_text)?;
    ensure(segment.tensor("x").map_err(error_text)?.device().map_err(error_text)?.gpu().uuid() == other, || {
        "wrong GPU".into()
    })?;
    verify(&world.domain, &segment, 1)?;
    drop(segment);
    let actor = world.play_with("peer", &["remote"], |command| {
        command.env("CUDA_VISIBLE_DEVICES", "1");
    });
    actor.finish();
    Ok(())
}

fn peer(domain: &Domain, name: &str) -> Result<(), String> {
    match domain.open(name, Duration::ZERO) {
        Err(Error::DeviceFault(DeviceFault::Remote { .. })) => {}
        outcome => return Err(format!("{outcome:?}")),
    }
    let segment = domain.opener(name).allow_peer(true).open().map_err(error_text)?;
    ensure(segment.place() != first_gpu()?, || "the owner is not hidden".into())?;
    verify(domain, &segment, 1)?;
    say("ready");
    Ok(())
}

/// A process whose first GPU is the second one of the others opens by UUID, not by ordinal.
pub(crate) fn ordinals_may_differ() -> Result<(), String> {
    let world = World::new()?;
    let segment = commit(&world.domain, "uuid", true, false)?;
    ensure(matches!(segment.place(), Place::Gpu(_)), || "not on a GPU".into())?;
    let actor = world.play_with("verify", &["uuid"], |command| {
        command.env("CUDA_VISIBLE_DEVICES", "1,0");
    });
    actor.finish();
    Ok(())
}
