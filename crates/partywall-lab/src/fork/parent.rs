//! The parent: gives its handle to the child that it forked first, and forks again when CUDA is there.

use std::sync::atomic::Ordering;

use super::*;

pub(super) fn play(session: &mut Session) -> Result<(), Failure> {
    let mut child = session.forked();
    let gpu = session.gpu();
    let memory = DeviceBuffer::new(gpu.context(), BYTES).doing("allocating")?;
    device::set(&gpu, memory.as_slice(), WRITTEN)?;
    let address = memory.as_slice().device_ptr();
    let handle = IpcMemoryHandle::of(gpu.context(), address).doing("asking for a handle")?;

    let offer = |first: usize, bytes: &[u8]| {
        for (word, bytes) in child.words()[first..].iter().zip(bytes.chunks_exact(8)) {
            word.store(u64::from_le_bytes(std::array::from_fn(|index| bytes[index])), Ordering::Relaxed);
        }
    };
    offer(UUID, &gpu.uuid().0);
    offer(ADDRESS, &address.to_le_bytes());
    offer(HANDLE, &handle.0);
    child.words()[STATE].store(OFFERED, Ordering::Release);
    let ended = child.ends(LONGEST);
    if !ended || child.words()[STATE].load(Ordering::Acquire) != ANSWERED {
        return Err(unexpected("the forked child did not do its work"));
    }
    let answer = |word: usize| child.words()[word].load(Ordering::Relaxed);
    let code = |word: usize| CuResult(u32::try_from(answer(word)).unwrap_or(u32::MAX));

    let opened = code(HANDLE_CODE);
    session.report(
        Step::new(
            "forked-first",
            "The child was forked before the first CUDA call",
            "Parent and child start CUDA after the fork, each for itself. The handle goes through 64 bytes of memory \
             that both map; a fork passes on no device memory and no context.",
        )
        .value("parent, child", format!("{}, {}", std::process::id(), child.pid()))
        .answer("cuIpcOpenMemHandle in the child", opened)
        .value("address there, and here", format!("{:#x}, {address:#x}", answer(OWN_ADDRESS)))
        .value("first byte there", format!("{:#04x}", answer(FOUND)))
        .judge(
            opened.is_success() && answer(FOUND) == u64::from(WRITTEN),
            "the child reads the parent's memory",
            "the child does not read the parent's memory",
        ),
    )?;
    session.report(changed(&gpu, &memory)?)?;
    let refused = code(ADDRESS_CODE);
    session.report(
        Step::new(
            "address",
            "The parent's address in the child, without a handle",
            "A fork copies the addresses that the parent's variables contain. In the child's context nothing is mapped \
             there, or something else, and the driver knows no allocation. A kernel that uses such an address ends CUDA \
             in the child.",
        )
        .refused(format!("cuIpcGetMemHandle({address:#x}) in the child"), refused, ADDRESSES, None),
    )?;
    session.report(forked_later(&gpu)?)?;
    session.report(unharmed(&gpu, &memory)?)
}

fn changed(gpu: &Gpu, memory: &DeviceBuffer) -> Result<Step, Failure> {
    let bytes = device::bytes_of(gpu, memory.as_slice()).doing("reading memory")?;
    let changed = bytes.iter().filter(|byte| **byte == CHANGED).count();
    let all = changed == bytes.len();
    Ok(Step::new(
        "changed",
        "What the parent finds when the child has written and ended",
        "Host memory is copied when a forked process writes to it. Memory of a GPU is not: both processes use the same \
         bytes, and only the end of the child orders their accesses here.",
    )
    .value("written by the parent, by the child", format!("{WRITTEN:#04x}, {CHANGED:#04x}"))
    .value("read by the parent", format!("{CHANGED:#04x} in {changed} of {} bytes", bytes.len()))
    .says(COPY, !all)
    .judge(all, "the child has changed the parent's data", "not what the child wrote"))
}

fn forked_later(gpu: &Gpu) -> Result<Step, Failure> {
    let answers = experiment::calls_in_forked_children(gpu.context()).doing("forking a child")?;
    let mut step = Step::new(
        "forked-later",
        "Children that are forked after the first CUDA call",
        "The driver's threads do not exist in the child, and its connections to the GPU belong to the parent, so each \
         call is refused. There is no way to repair it: call exec, or fork before CUDA (Python: the start method spawn \
         or forkserver). Partywall's calls fail there with Forked. The child keeps the parent's GPU files open, and \
         with them the memory of a dead parent.",
    );
    let refused = answers.iter().all(|(_, code)| !code.is_success());
    let measured = answers.iter().all(|(_, code)| *code == CuResult::NOT_INITIALIZED);
    for (call, code) in answers {
        step = step.answer(format!("{call} in a child"), code);
    }
    Ok(step.says(SURVIVES, !refused).judge(
        measured,
        "refused, each of them",
        format!("an H200 with driver 580 said {} each time", CuResult::NOT_INITIALIZED),
    ))
}

fn unharmed(gpu: &Gpu, memory: &DeviceBuffer) -> Result<Step, Failure> {
    let stream = Stream::new(gpu.context()).doing("creating a stream");
    device::set(gpu, memory.as_slice(), WRITTEN)?;
    let found = first_byte(gpu, memory.as_slice()).doing("reading memory")?;
    let right = stream.is_ok() && found == WRITTEN;
    Ok(Step::new(
        "parent",
        "The parent after these forks",
        "The parent's context is as before, whatever its children tried.",
    )
    .value("a new stream", stream.map_or_else(|failure| failure.message, |_| "created".into()))
    .value("memory written and read again", format!("{found:#04x}"))
    .says(HARMS, !right)
    .judge(right, "it continues", "it does not work as before"))
}

/// How long the child may take, with the start of CUDA.
const LONGEST: Duration = Duration::from_secs(60);
