//! The opener: opens the exporter's handles, also at the wrong time, and reports which beliefs are refuted.

use super::{intruder::Target, *};

pub(super) fn play(session: &mut Session) -> Result<(), Failure> {
    let gpu = session.gpu();
    let mut exporter = session.partner();
    let pid = exporter.pid;
    let Kept { handle } = session.options()?;
    let opener = Opener { gpu: &gpu, offer: exporter.hear()? };

    let base = opener.open(&opener.offer.base, BYTES)?;
    if let Some(step) = opener.interior()? {
        session.report(step)?;
    }
    session.report(opener.odd_size()?)?;
    session.report(opener.early(&mut exporter)?)?;
    session.report(opener.other_boot(handle))?;
    let Offer { base: handle, odd, neighbour, .. } = opener.offer.clone();
    session.report(intruder::watch(session, Target { base: handle, odd, neighbour })?)?;

    exporter.end();
    session.report(opener.gone(pid)?)?;
    session.report(opener.survives(&base)?)?;
    session.report(codes(&session.reporter().steps()))
}

struct Opener<'a> {
    gpu: &'a Gpu,
    offer: Offer,
}

impl Opener<'_> {
    fn open(&self, handle: &str, bytes: u64) -> Result<IpcMapping, Failure> {
        IpcMapping::open(self.gpu.context(), received(handle)?, bytes, Access::ReadOnly)
            .doing("opening a handle that the exporter made")
    }

    /// Opens the handle of an interior pointer.
    fn interior(&self) -> Result<Option<Step>, Failure> {
        let Some(inside) = &self.offer.inside else { return Ok(None) };
        let mapping = self.open(inside, BYTES)?;
        let found = first_byte(self.gpu, mapping.as_slice()).doing("reading shared memory")?;
        let step = Step::new(
            "interior-opened",
            "What the handle of an interior pointer opens",
            "The exporter asked for the handle of an address in the middle of the allocation, where it had written \
             another mark.",
        )
        .value("cuIpcOpenMemHandle", format!("{:#x}", mapping.device_ptr()))
        .value("first byte there", format!("{found:#04x}"))
        .value("written at the base, and inside", format!("{MARK:#04x}, {MARK_INSIDE:#04x}"))
        .says(INTERIOR, found == MARK_INSIDE);
        Ok(Some(step.judge(
            found == MARK,
            "it opens the base: without the offset these are the wrong bytes",
            "it does not open the base",
        )))
    }

    /// Checks the mapping of a small allocation.
    fn odd_size(&self) -> Result<Step, Failure> {
        let mapping = self.open(&self.offer.odd, ODD_BYTES)?;
        let info = PointerInfo::of(self.gpu.context(), mapping.device_ptr()).doing("asking about an address")?;
        let found = first_byte(self.gpu, mapping.as_slice()).doing("reading shared memory")?;
        Ok(Step::new(
            "odd-size",
            "An allocation of an odd size",
            "The driver shares any size. But cuMemAlloc takes small allocations from blocks of 2 MiB, and a reader \
             gets the whole block: see `neighbour`.",
        )
        .value("cuMemAlloc by the exporter", format!("{ODD_BYTES} bytes"))
        .value("cuIpcOpenMemHandle", format!("{:#x}", mapping.device_ptr()))
        .value("bytes, as the driver reports here", info.bytes.to_string())
        .value("first byte", format!("{found:#04x}"))
        .judge(found == MARK_ODD, "opened and read like any other", "its first byte differs"))
    }

    /// Opens memory whose contents are not written yet.
    fn early(&self, exporter: &mut Peer) -> Result<Step, Failure> {
        let step = Step::new(
            "too-early",
            "A handle opened before the memory was filled",
            "A handle does not order any work. The filling is enqueued here, and delayed by a stream memory operation \
             so that the result does not depend on luck. The reader needs its own order: an event or a timeline.",
        );
        if let Err(why) = exporter.ask::<Done>(Command::Enqueue)? {
            return Ok(step.untried(&[WAITS], why));
        }
        let mapping = self.open(&self.offer.late, BYTES);
        let read = |mapping: &IpcMapping| first_byte(self.gpu, mapping.as_slice()).doing("reading shared memory");
        let before = mapping.as_ref().map(read);
        // The exporter's stream waits, so it must continue before an error here is returned.
        let done: Done = exporter.ask(Command::Finish)?;
        let before = match before {
            Ok(before) => before?,
            Err(_) => return mapping.map(|_| step),
        };
        let after = read(&mapping?)?;
        Ok(step
            .value("byte before, and after the work", format!("{OLD:#04x}, {NEW:#04x}"))
            .value("read while the work waited", format!("{before:#04x}"))
            .value("read after the exporter's stream", format!("{after:#04x}"))
            .says(WAITS, before == NEW)
            .judge(
                before == OLD && after == NEW && done.is_ok(),
                "old bytes, and no error",
                "not the old bytes first and the new bytes after the work",
            ))
    }

    /// A handle from before the machine was restarted, if there is one.
    fn other_boot(&self, kept: Option<IpcMemoryHandle>) -> Step {
        let step = Step::new(
            "other-boot",
            "A handle from before the machine was restarted",
            "A handle names a process and an allocation since the last boot. A program that stores handles in a file \
             must recognise outdated ones itself.",
        );
        match kept {
            None => step.untried(
                &[],
                "it needs a restart: keep the handle that `same-process` shows, restart, and pass it with --handle",
            ),
            Some(handle) => {
                let answer = code(&IpcMapping::open(self.gpu.context(), handle, 1, Access::ReadOnly));
                step.value("handle", format!("{handle:?}")).refused("cuIpcOpenMemHandle", answer, KEEPS, None)
            }
        }
    }

    /// Opens a handle that no process had opened before its maker ended.
    fn gone(&self, pid: u32) -> Result<Step, Failure> {
        let ended = has_ended(pid);
        let handle = received(&self.offer.last)?;
        let answer = code(&IpcMapping::open(self.gpu.context(), handle, BYTES, Access::ReadOnly));
        let step = Step::new(
            "exporter-gone",
            "A handle whose maker has ended",
            "A handle keeps nothing alive. It is valid while its maker lives and has not freed the memory, which no \
             other process can check. A file descriptor of cuMemCreate memory is different: see `partywall lab vmm`.",
        )
        .value(format!("process {pid}"), if ended { "has ended" } else { "still runs" });
        Ok(if ended {
            step.refused("cuIpcOpenMemHandle", answer, KEEPS, Some(CuResult::INVALID_HANDLE))
        } else {
            step.untried(&[KEEPS], "the exporter did not end")
        })
    }

    /// Reads memory that was open before its maker ended.
    fn survives(&self, base: &IpcMapping) -> Result<Step, Failure> {
        let found = first_byte(self.gpu, base.as_slice());
        let shown = found.as_ref().map_or_else(ToString::to_string, |byte| format!("{byte:#04x}"));
        let intact = found == Ok(MARK);
        Ok(Step::new(
            "still-open",
            "Memory that was open when its maker ended",
            "The mapping is its own reference, and keeps the whole allocation on the GPU until it is closed here. Such \
             memory seems to leak, because the process that allocated it is gone.",
        )
        .value("read now", shown)
        .value("written by the exporter", format!("{MARK:#04x}"))
        .says(DIES, !intact)
        .judge(intact, "still there", "not what the exporter wrote"))
    }
}

/// Checks whether the codes of the refusals distinguish the reasons.
fn codes(steps: &[Step]) -> Step {
    let mut reasons: Vec<(CuResult, Vec<&str>)> = Vec::new();
    for step in steps {
        let Some(code) = step.refusal.map(CuResult) else { continue };
        match reasons.iter_mut().find(|(known, _)| *known == code) {
            Some((_, ids)) => ids.push(&step.id),
            None => reasons.push((code, vec![&step.id])),
        }
    }
    let most = reasons.iter().map(|(_, ids)| ids.len()).max().unwrap_or(0);
    let mut step = Step::new(
        "codes",
        "What the codes of all these refusals say",
        "Check the pointer's attributes before the call instead of the code after it: they identify the kind of \
         memory.",
    );
    let refusals = reasons.iter().map(|(_, ids)| ids.len()).sum::<usize>();
    let codes = reasons.len();
    for (code, ids) in reasons {
        step = step.value(code.to_string(), ids.join(", "));
    }
    step.says(CODES, most <= 1).judge(
        most > 1,
        format!("{refusals} refusals share {codes} codes"),
        format!("each of {refusals} refusals has its own code"),
    )
}
