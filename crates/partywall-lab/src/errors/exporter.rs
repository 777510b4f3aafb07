//! The exporter: allocates memory of every kind, asks the driver for handles, sends the good ones, and ends.

use super::*;
use crate::device::{Gate, kind_of};

pub(super) fn play(session: &mut Session) -> Result<(), Failure> {
    let gpu = session.gpu();
    let exporter = Exporter { gpu: &gpu };
    for step in exporter.pointers()?.into_iter().chain(exporter.events()).chain([exporter.unaligned()?]) {
        session.report(step)?;
    }
    let goods = exporter.goods()?;
    for step in [exporter.interior(&goods)?, exporter.same_process(&goods)?] {
        session.report(step)?;
    }
    let opener = session.parent();
    opener.say(goods.offer(&gpu)?)?;
    while let Some(command) = opener.next()? {
        match command {
            // No work was enqueued.
            Command::Finish => opener.say(Done::Ok(()))?,
            Command::Enqueue => goods.late.fill(opener)?,
        }
    }
    Ok(())
}

struct Exporter<'a> {
    gpu: &'a Gpu,
}

impl Exporter<'_> {
    /// Asks for handles of every kind of memory that the driver refuses.
    fn pointers(&self) -> Result<Vec<Step>, Failure> {
        let context = self.gpu.context();
        let host = vec![0_u8; 4096];
        let freed = DeviceBuffer::new(context, BYTES).doing("allocating")?.as_slice().device_ptr();
        let mut steps = vec![
            self.refused(
                "host-pointer",
                "A pointer to ordinary host memory",
                ("vec![0_u8; 4096]", host.as_ptr() as u64),
                "A handle names an allocation of the driver, and the driver has never seen this one.",
            ),
            self.refused(
                "freed",
                "A pointer to memory that was freed",
                ("cuMemAlloc, cuMemFree", freed),
                "The address still looks valid, but no memory is behind it. A framework whose cache frees memory \
                 causes this.",
            ),
            self.refused(
                "uninitialised",
                "A pointer that was never set",
                ("a stray value", 0x0BAD_C0DE_0BAD_C0DE),
                "The code is the same as for freed memory.",
            ),
        ];
        let pinned = PinnedBuffer::new(context, 4096);
        steps.push(self.of_kind(
            "pinned",
            "Page-locked host memory (cudaMallocHost)",
            "cuMemHostAlloc(4096)",
            pinned.as_ref().map(|buffer| buffer.as_ptr() as u64),
            "Kernels reach it, but it belongs to this process. Share a memfd, and register it in each process instead.",
        ));
        let managed = experiment::UnshareableMemory::managed(context, 4096);
        steps.push(self.of_kind(
            "managed",
            "Managed memory (cudaMallocManaged)",
            "cuMemAllocManaged(4096)",
            managed.as_ref().map(experiment::UnshareableMemory::device_ptr),
            "Its pages move between host and device, so there is no one place that a handle could name.",
        ));
        let pooled = experiment::UnshareableMemory::pooled(context, 4096);
        steps.push(self.of_kind(
            "pool",
            "Memory of a pool (cudaMallocAsync)",
            "cuMemAllocAsync(4096)",
            pooled.as_ref().map(experiment::UnshareableMemory::device_ptr),
            "The default pool of a device cannot be shared at all. cudarc allocates from it by default, which is why \
             its slices have no handle.",
        ));
        let granularity = PhysicalMemory::granularity(context);
        let mapping = granularity
            .and_then(|bytes| PhysicalMemory::create(context, bytes))
            .and_then(|memory| Mapping::new(memory, Access::ReadWrite));
        steps.push(self.of_kind(
            "vmm",
            "Memory of cuMemCreate, mapped",
            "cuMemCreate, cuMemMap",
            mapping.as_ref().map(Mapping::device_ptr),
            "It travels as a file descriptor, never as a handle: the two ways are disjoint. torch with \
             expandable_segments allocates so.",
        ));
        Ok(steps)
    }

    fn refused(&self, id: &str, title: &str, (how, address): (&str, u64), why: &str) -> Step {
        let context = self.gpu.context();
        let answer = code(&IpcMemoryHandle::of(context, address));
        Step::new(id, title, why)
            .value(how, format!("{address:#x}"))
            .value("kind, as the driver reports", kind_of(context, address))
            .answer("cuIpcGetMemHandle", answer)
            .judge_refusal(answer, None)
    }

    /// Does the same for memory that a kernel can use.
    fn of_kind(&self, id: &str, title: &str, how: &str, made: Result<u64, &CudaError>, why: &str) -> Step {
        match made {
            Err(error) => Step::new(id, title, why).untried(&[], error.to_string()),
            Ok(address) => {
                let step = self.refused(id, title, (how, address), why);
                let accepted = step.refusal.is_none();
                step.says(ANY_POINTER, accepted)
            }
        }
    }

    fn events(&self) -> [Step; 3] {
        let context = self.gpu.context();
        let lacking = |id, title, interprocess, timing, flags: &str, why| {
            let answer = experiment::event_handle(context, interprocess, timing);
            let call = answer.as_ref().err().map_or("cuIpcGetEventHandle", |error| error.call);
            Step::new(id, title, why).value("flags of cuEventCreate", flags).refused(
                call,
                code(&answer),
                ANY_EVENT,
                None,
            )
        };
        let here = Step::new(
            "event-here",
            "An event opened in the process that made it",
            "As with memory, the driver does not open handles in the process that made them. A program that may talk \
             to itself needs another way.",
        );
        let here = match IpcEvent::new(context).and_then(|event| event.export().map(|handle| (event, handle))) {
            Err(error) => here.untried(&[EVENT_HERE], format!("events have no handles here: {error}")),
            Ok((_event, handle)) => {
                let answer = code(&IpcEvent::open(context, &handle));
                here.value("flags of cuEventCreate", "INTERPROCESS, DISABLE_TIMING").refused(
                    "cuIpcOpenEventHandle",
                    answer,
                    EVENT_HERE,
                    None,
                )
            }
        };
        [
            lacking(
                "event-plain",
                "An event without the interprocess flag",
                false,
                false,
                "DISABLE_TIMING",
                "Whether an event can be shared is decided when it is created. torch and the CUDA runtime create plain \
                 events.",
            ),
            lacking(
                "event-timing",
                "A shared event with timing",
                true,
                true,
                "INTERPROCESS",
                "Between processes an event is only a point in a stream: INTERPROCESS requires DISABLE_TIMING.",
            ),
            here,
        ]
    }

    fn unaligned(&self) -> Result<Step, Failure> {
        let granularity = PhysicalMemory::granularity(self.gpu.context()).doing("asking for the granularity")?;
        let answer = code(&PhysicalMemory::create(self.gpu.context(), granularity + 4096));
        Ok(Step::new(
            "vmm-size",
            "A size that is not a multiple of the granularity",
            "Memory that travels as a file descriptor consists of whole pages of the device. Round up, and put many \
             tensors into one allocation.",
        )
        .value("granularity", format!("{granularity} bytes"))
        .refused(format!("cuMemCreate({})", granularity + 4096), answer, ANY_SIZE, None))
    }

    fn goods(&self) -> Result<Goods, Failure> {
        let allocate = |bytes, mark| {
            let buffer = DeviceBuffer::new(self.gpu.context(), bytes).doing("allocating")?;
            device::set(self.gpu, buffer.as_slice(), mark)?;
            Ok::<_, Failure>(buffer)
        };
        let base = allocate(BYTES, MARK)?;
        let inside = base.slice(INSIDE, 1).doing("marking memory")?;
        device::set(self.gpu, inside, MARK_INSIDE)?;
        let odd = allocate(ODD_BYTES, MARK_ODD)?;
        let first = odd.as_slice().device_ptr();
        let kernels = self.gpu.kernels()?;
        // The driver places small allocations side by side, so one of a few follows the first in its block.
        let mut others = Vec::new();
        let mut neighbour = None;
        while neighbour.is_none() && others.len() < 8 {
            let other = DeviceBuffer::new(self.gpu.context(), ODD_BYTES).doing("allocating")?;
            kernels.enqueue_fill(self.gpu.stream(), other.as_slice()).doing("filling memory")?;
            let address = other.as_slice().device_ptr();
            neighbour = (address > first && address >> 21 == first >> 21).then(|| address - first);
            others.push(other);
        }
        self.gpu.stream().synchronize().doing("filling memory")?;
        let late = Late::new(self.gpu, allocate(BYTES, OLD)?)?;
        Ok(Goods { base, odd, _others: others, neighbour, late, last: allocate(BYTES, MARK)? })
    }

    fn interior(&self, goods: &Goods) -> Result<Step, Failure> {
        let context = self.gpu.context();
        let base = goods.base.as_slice().device_ptr();
        let whole = handle_of(self.gpu, &goods.base)?;
        let inside = IpcMemoryHandle::of(context, base + INSIDE);
        let step = Step::new(
            "interior",
            "A pointer into an allocation",
            "The driver returns a handle without a warning, but it is that of the whole allocation. The offset must \
             travel with the handle; otherwise the reader gets other bytes and no error.",
        )
        .value("allocation", format!("{base:#x}, {BYTES} bytes"))
        .value("pointer", format!("{:#x}, {INSIDE} bytes into it", base + INSIDE))
        .answer("cuIpcGetMemHandle", code(&inside));
        Ok(match inside {
            Ok(inside) => {
                let same = "the same 64 bytes as the handle of the base";
                let other = "a different handle: see what it opens";
                let step = step.value("handle", if inside == whole { same } else { other });
                step.judge(inside == whole, same, other)
            }
            Err(error) => step.says(INTERIOR, false).judge(false, "", format!("refused here: {}", error.code)),
        })
    }

    fn same_process(&self, goods: &Goods) -> Result<Step, Failure> {
        let handle = handle_of(self.gpu, &goods.base)?;
        let answer = code(&IpcMapping::open(self.gpu.context(), handle, BYTES, Access::ReadOnly));
        Ok(Step::new(
            "same-process",
            "A handle opened in the process that made it",
            "The driver compares process ids, and refuses handles of its own process. A program that may talk to \
             itself keeps a table of its exports. Two containers in which both processes have pid 1 get the same \
             refusal.",
        )
        .value("handle", handle_text(handle))
        .refused("cuIpcOpenMemHandle", answer, EVERYWHERE, Some(CuResult::INVALID_CONTEXT)))
    }
}

/// The shared memory, kept until the exporter ends.
struct Goods {
    base: DeviceBuffer,
    odd: DeviceBuffer,
    _others: Vec<DeviceBuffer>,
    neighbour: Option<u64>,
    late: Late,
    last: DeviceBuffer,
}

impl Goods {
    fn offer(&self, gpu: &Gpu) -> Result<Offer, Failure> {
        let text = |buffer| handle_of(gpu, buffer).map(handle_text);
        let inside = IpcMemoryHandle::of(gpu.context(), self.base.as_slice().device_ptr() + INSIDE);
        Ok(Offer {
            base: text(&self.base)?,
            inside: inside.ok().map(handle_text),
            odd: text(&self.odd)?,
            neighbour: self.neighbour,
            late: text(&self.late.buffer)?,
            last: text(&self.last)?,
        })
    }
}

/// Memory that is filled behind a wait. All resources are created and warmed up before the wait.
struct Late {
    buffer: DeviceBuffer,
    /// Delays the filling.
    gate: Gate,
    filling: Stream,
    /// Why this is not possible here.
    obstacle: Option<String>,
}

impl Late {
    fn new(gpu: &Gpu, buffer: DeviceBuffer) -> Result<Self, Failure> {
        let obstacle = device::streams_cannot_wait(gpu);
        let filling = Stream::new(gpu.context()).doing("creating a stream")?;
        Ok(Self { buffer, gate: Gate::new(gpu)?, filling, obstacle })
    }

    /// Enqueues the filling and reports that. The filling runs at the opener's command, or when the opener is gone.
    fn fill(&self, opener: &mut Peer) -> Result<(), Failure> {
        if let Some(why) = &self.obstacle {
            return opener.say(Done::Err(why.clone()));
        }
        let what = "filling memory behind a wait";
        let filling = self.filling.as_ref();
        self.gate.hold(filling)?;
        let enqueued = filling.enqueue_set(self.buffer.as_slice(), NEW).doing(what);
        let heard = opener.ask::<Command>(Done::Ok(()));
        // Opened even after an error: this process could not end while its stream waits.
        self.gate.open()?;
        self.filling.synchronize().doing(what)?;
        enqueued?;
        heard?;
        opener.say(Done::Ok(()))
    }
}

fn handle_of(gpu: &Gpu, buffer: &DeviceBuffer) -> Result<IpcMemoryHandle, Failure> {
    IpcMemoryHandle::of(gpu.context(), buffer.as_slice().device_ptr()).doing("asking for a handle")
}
