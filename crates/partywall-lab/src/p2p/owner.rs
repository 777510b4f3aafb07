//! The owner: has memory on its GPU, and starts readers on another one.

use super::*;

pub(super) fn play(session: &mut Session) -> Result<(), Failure> {
    let gpu = session.gpu();
    let devices = gpu::devices()?;
    let mut others = Vec::new();
    for device in &devices {
        let uuid = device.uuid().doing("asking for a UUID")?;
        if uuid != gpu.uuid() {
            others.push((uuid, device));
        }
    }
    let Some((other, device)) = others.first() else {
        return session.report(alone(&gpu)?);
    };
    let reaches = device.can_access_peer(&gpu.context().device()).doing("asking about a link")?;
    let rank = device.peer_performance_rank(&gpu.context().device());
    session.report(link(gpu.uuid(), *other, reaches, rank.map_err(|error| error.to_string())))?;
    if !reaches {
        return Ok(());
    }

    let plain = DeviceBuffer::new(gpu.context(), BYTES).doing("allocating")?;
    let handle = IpcMemoryHandle::of(gpu.context(), plain.as_slice().device_ptr()).doing("asking for a handle")?;
    let memory = PhysicalMemory::create(gpu.context(), BYTES).doing("creating memory")?;
    let descriptor = memory.export().doing("exporting memory")?;
    let mapping = Mapping::new(memory, Access::ReadWrite).doing("mapping memory")?;
    let place = Place::Gpu(gpu.uuid());
    let build = session.domain().create(SEGMENT, place).tensor(TENSOR, DType::U8, &[BYTES]).allocate()?;
    device::set(&gpu, build.device(TENSOR)?.as_slice(), WRITTEN)?;
    let _segment = build.commit()?;

    let visible = other.to_string();
    for hidden in [false, true] {
        device::set(&gpu, plain.as_slice(), WRITTEN)?;
        device::set(&gpu, mapping.as_slice(), WRITTEN)?;
        let environment: &[_] = if hidden { &[("CUDA_VISIBLE_DEVICES", visible.as_str())] } else { &[] };
        let mut reader = session.spawn_on("reader", Place::Gpu(*other), environment)?;
        let offer = Offer { owner: gpu.uuid().to_string(), handle: handle.0.to_vec(), hidden };
        reader.say_with(offer, &[descriptor.as_fd()])?;
        reader.hear::<()>()?;
        reader.end();
        let found = [plain.as_slice(), mapping.as_slice()].map(|slice| first_byte(&gpu, slice));
        session.report(written_back(hidden, found))?;
    }
    Ok(())
}

/// Says what cannot be shown with one GPU.
fn alone(gpu: &Gpu) -> Result<Step, Failure> {
    let name = gpu.context().device().name().doing("asking for a name")?;
    let step = Step::new(
        "one-gpu",
        "A reader on another GPU",
        "The reader would open memory of this GPU from another one: by handle, by file descriptor and by name, once \
         with this GPU visible and once with CUDA_VISIBLE_DEVICES naming the other one only.",
    )
    .value("visible GPUs", format!("1: {name}"));
    Ok(step.untried(BELIEFS, "only one GPU is visible, and every step needs two; --simulated runs it on two"))
}

fn link(owner: DeviceUuid, reader: DeviceUuid, reaches: bool, rank: Result<u32, String>) -> Step {
    let step = Step::new(
        "link",
        "Whether one GPU reaches the other's memory",
        "cuDeviceCanAccessPeer answers for two GPUs that this process sees. The rank compares links of one machine: 0 \
         is the fastest. Memory is sent through the link with each access; nothing is copied beforehand.",
    )
    .value("owner", owner.to_string())
    .value("reader", reader.to_string())
    .value("cuDeviceCanAccessPeer", if reaches { "yes" } else { "no" })
    .value("performance rank", rank.map_or_else(|error| error, |rank| rank.to_string()));
    if reaches {
        return step.judge(true, "it does", "");
    }
    step.untried(BELIEFS, "the driver offers no link between these two GPUs: `partywall doctor` shows all pairs")
}

fn written_back(hidden: bool, found: [Result<u8, partywall::cuda::AccessError>; 2]) -> Step {
    let shown = found.clone().map(|byte| byte.map_or_else(|error| error.to_string(), |byte| format!("{byte:#04x}")));
    let [plain, mapped] = shown;
    let right = found.iter().all(|byte| *byte == Ok(WRITTEN_BACK));
    let (id, title) = if hidden {
        ("written-hidden", "What the owner finds after a reader that does not see its GPU")
    } else {
        ("written", "What the owner finds after the reader has written")
    };
    Step::new(id, title, "Both processes use the same memory, on the owner's GPU. There is no copy on the other one.")
        .value("memory of the handle", plain)
        .value("memory of the file descriptor", mapped)
        .value("written by the reader", format!("{WRITTEN_BACK:#04x}"))
        .judge(right, "the reader's bytes", "not what the reader wrote")
}
