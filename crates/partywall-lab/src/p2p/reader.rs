//! A reader: uses another GPU than the owner's, which may be hidden from it.

use partywall::error::DeviceFault;

use super::*;

pub(super) fn play(session: &mut Session) -> Result<(), Failure> {
    let gpu = session.gpu();
    let Offer { owner, handle, hidden } = session.parent().hear()?;
    let descriptor = session.parent().take_fd()?;
    let handle = <[u8; 64]>::try_from(handle).map_err(|_| unexpected("the owner sent no handle"))?;
    let visible = gpu::devices()?.len();
    let reader = Reader { gpu: &gpu, owner, hidden, visible };

    let opened = IpcMapping::open(gpu.context(), IpcMemoryHandle(handle), BYTES, Access::ReadWrite);
    session.report(reader.legacy(&opened)?)?;
    let imported = PhysicalMemory::import(gpu.context(), descriptor.as_fd(), BYTES)
        .and_then(|memory| Mapping::new(memory, Access::ReadWrite));
    session.report(reader.vmm(&imported)?)?;
    if !hidden {
        if let Ok(mapping) = &imported {
            session.report(reader.speed(mapping)?)?;
        }
        session.report(reader.name(session.domain())?)?;
    }
    // Written last, because the steps compare bytes.
    for slice in [opened.as_ref().ok().map(IpcMapping::as_slice), imported.as_ref().ok().map(Mapping::as_slice)] {
        slice.map_or(Ok(()), |slice| device::set(&gpu, slice, WRITTEN_BACK))?;
    }
    drop((opened, imported));
    session.finish(())
}

struct Reader<'a> {
    gpu: &'a Gpu,
    /// The UUID of the owner's GPU.
    owner: String,
    hidden: bool,
    /// The number of GPUs that this process sees.
    visible: usize,
}

impl Reader<'_> {
    fn legacy(&self, opened: &Result<IpcMapping, CudaError>) -> Result<Step, Failure> {
        let step = self.step(
            "handle",
            "The handle of memory",
            "cuIpcOpenMemHandle maps the memory for the GPU that is current in the reader, and enables access to the \
             other GPU itself. Its flag has no alternative.",
        );
        self.read(step, "cuIpcOpenMemHandle", code(opened), opened.as_ref().ok().map(IpcMapping::as_slice))
    }

    fn vmm(&self, imported: &Result<Mapping, CudaError>) -> Result<Step, Failure> {
        let step = self.step(
            "descriptor",
            "The file descriptor of memory",
            "The memory stays where it is. cuMemSetAccess names the GPU that may use the mapping: the reader's, not the \
             owner's. So the reader needs no number for the owner's GPU.",
        );
        self.read(step, "import, map, set access", code(imported), imported.as_ref().ok().map(Mapping::as_slice))
    }

    /// Returns a step about memory of the owner's GPU.
    fn step(&self, id: &str, title: &str, why: &str) -> Step {
        if self.hidden {
            return Step::new(&format!("{id}-hidden"), format!("{title} on a GPU that the reader does not see"), why);
        }
        Step::new(id, format!("{title} on another GPU"), why)
    }

    /// Ends a step with the bytes of memory that was opened, or with the driver's refusal.
    fn read(&self, step: Step, call: &str, answer: CuResult, slice: Option<DeviceSlice<'_>>) -> Result<Step, Failure> {
        let step = step
            .value("GPUs that this process sees", self.visible.to_string())
            .value("owner's GPU, reader's", format!("{}, {}", self.owner, self.gpu.uuid()))
            .answer(call, answer);
        let right = match slice {
            Some(slice) => {
                let bytes = device::bytes_of(self.gpu, slice).doing("reading memory of another GPU")?;
                bytes.iter().all(|byte| *byte == WRITTEN)
            }
            None => false,
        };
        let step = step.says(OWN_ONLY, !right);
        let step = if self.hidden { step.says(VISIBLE, !right) } else { step };
        Ok(step.judge(
            right && self.hidden == (self.visible == 1),
            format!("opened, and all {} are right", bytes(BYTES)),
            "not opened, or not all bytes are right",
        ))
    }

    /// Copies out of the owner's memory, and out of memory of this GPU.
    fn speed(&self, mapping: &Mapping) -> Result<Step, Failure> {
        let buffer = || DeviceBuffer::new(self.gpu.context(), BYTES).doing("allocating");
        let [source, target] = [buffer()?, buffer()?];
        device::set(self.gpu, source.as_slice(), WRITTEN)?;
        let fastest = |from: DeviceSlice<'_>| {
            let mut fastest = Duration::MAX;
            for _ in 0..ROUNDS {
                let began = Instant::now();
                self.gpu.stream().enqueue_copy(target.as_slice(), from).doing("copying")?;
                self.gpu.stream().synchronize().doing("copying")?;
                fastest = fastest.min(began.elapsed());
            }
            Ok::<_, Failure>(fastest)
        };
        let near = fastest(source.as_slice())?;
        let far = fastest(mapping.as_slice())?;
        let step = Step::new(
            "speed",
            "Copies from the reader's own GPU, and from the owner's",
            "Each access goes over the link between the GPUs. Memory that is read often belongs on the reader's GPU: \
             copy it once.",
        )
        .value("from its own", format!("{} in {}", bytes(BYTES), short(near)))
        .value("from the owner's", format!("{} in {}", bytes(BYTES), short(far)));
        let simulated = self.gpu.context().driver().is_simulated();
        let step = if simulated { step.leaves_open(&[ALIKE]) } else { step.says(ALIKE, far < near + near / 4) };
        Ok(step.judge(true, if simulated { "times of the CPU" } else { "the shortest of some times" }, ""))
    }

    /// Opens a name, without permission and with it.
    fn name(&self, domain: &Domain) -> Result<Step, Failure> {
        let opener = || domain.opener(SEGMENT).device(self.gpu.uuid()).timeout(TIMEOUT);
        let refused = opener().open();
        let remote = matches!(&refused, Err(Error::DeviceFault(DeviceFault::Remote { .. })));
        let reason = refused.as_ref().map_or_else(ToString::to_string, |_| "no error".into());
        let segment = opener().allow_peer(true).open()?;
        let range = segment.tensor(TENSOR)?.device()?;
        let first = device::first_byte(self.gpu, range.as_slice()).doing("reading memory of another GPU")?;
        let right = first == WRITTEN;
        Ok(Step::new(
            "name",
            "A name of Partywall whose memory is on another GPU",
            "A slow path is never taken silently: without permission the error names both GPUs. With allow_peer the \
             memory is used through the link.",
        )
        .value("open", reason)
        .value("open with allow_peer", if right { "the owner's bytes" } else { "other bytes" })
        .says(SILENT, !remote)
        .judge(remote && right, "refused, and opened with permission", "not refused, or wrong bytes"))
    }
}

/// How often a copy is measured.
const ROUNDS: u32 = 10;
