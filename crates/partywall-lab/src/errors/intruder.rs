//! The intruder: a process that tries what may break its CUDA context. The opener checks afterwards that no other
//! process is affected.

use super::*;

/// The handles that the intruder misuses, in hexadecimal.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct Target {
    pub(super) base: String,
    pub(super) odd: String,
    /// The offset from `odd` to another allocation in the same 2 MiB.
    pub(super) neighbour: Option<u64>,
}

/// Runs the intruder, and checks that this process is not affected.
pub(super) fn watch(session: &Session, target: Target) -> Result<Step, Failure> {
    let gpu = session.gpu();
    let base = received(&target.base)?;
    let mut intruder = session.spawn("intruder")?;
    let ended = intruder.ask::<()>(target);
    intruder.end();
    let mapping = IpcMapping::open(gpu.context(), base, BYTES, Access::ReadOnly).doing("opening it again")?;
    let found = first_byte(&gpu, mapping.as_slice());
    let step = Step::new(
        "unharmed",
        "The same memory in a process that did nothing wrong",
        "Each process has its own mapping and its own context. A fault breaks CUDA in the process that caused it \
         (under MPS, in every client of the server).",
    )
    .value("the intruder", ended.map_or_else(|failure| failure.message, |()| "finished".into()))
    .value("read here", found.as_ref().map_or_else(ToString::to_string, |byte| format!("{byte:#04x}")));
    Ok(step.judge(found == Ok(MARK), "nothing has changed here", "it is affected"))
}

pub(super) fn play(session: &mut Session) -> Result<(), Failure> {
    let gpu = session.gpu();
    let target: Target = session.parent().hear()?;
    let base = received(&target.base)?;
    session.report(garbage(&gpu))?;
    session.report(damaged(&gpu, base))?;
    session.report(free(&gpu, base)?)?;
    session.report(close_twice(&gpu, base)?)?;
    // Last, because it may fault.
    session.report(neighbour(&gpu, &target)?)?;
    session.parent().say(())
}

fn open(gpu: &Gpu, handle: IpcMemoryHandle, bytes: u64) -> Result<IpcMapping, Failure> {
    IpcMapping::open(gpu.context(), handle, bytes, Access::ReadOnly).doing("opening a handle")
}

fn garbage(gpu: &Gpu) -> Step {
    let open = |bytes| code(&IpcMapping::open(gpu.context(), IpcMemoryHandle(bytes), 1, Access::ReadOnly));
    let zeros = open([0; 64]);
    let noise = open(std::array::from_fn(|index| (index as u8).wrapping_mul(151) ^ 0x5A));
    let step = Step::new(
        "garbage",
        "64 bytes that are not a handle",
        "Bytes from a file or a socket may be anything. The driver checks them, but not reliably: verify the sender.",
    );
    step.value("64 zeros", zeros.to_string())
        .answer("noise", noise)
        .says(CHECKED, !zeros.is_success() && !noise.is_success())
        .judge_refusal(if zeros.is_success() { zeros } else { noise }, None)
}

/// Opens the handle with each byte changed in turn.
fn damaged(gpu: &Gpu, handle: IpcMemoryHandle) -> Step {
    let mut opened = Vec::new();
    let mut codes: Vec<(CuResult, usize)> = Vec::new();
    for position in 0..handle.0.len() {
        let mut damaged = handle;
        damaged.0[position] ^= 0x80;
        let answer = code(&IpcMapping::open(gpu.context(), damaged, 1, Access::ReadOnly));
        if answer.is_success() {
            opened.push(position);
        } else if let Some((_, count)) = codes.iter_mut().find(|(known, _)| *known == answer) {
            *count += 1;
        } else {
            codes.push((answer, 1));
        }
    }
    let mut step = Step::new(
        "damaged",
        "A good handle with one bit changed, 64 times",
        "The driver promises nothing about damaged handles. An ignored bit changes nothing; another bit may select \
         another allocation.",
    );
    for (code, count) in codes {
        step = step.value(code.to_string(), format!("{count} times"));
    }
    let opened_at = match opened.len() {
        0 => "none".to_owned(),
        count => format!("{count}, with the bit in byte {}", ranges(&opened)),
    };
    let finding = if opened.is_empty() { "every wrong bit was noticed" } else { "a wrong bit may go unnoticed" };
    step.value("opened anyway", opened_at).says(CHECKED, opened.is_empty()).judge(true, finding, "")
}

fn free(gpu: &Gpu, handle: IpcMemoryHandle) -> Result<Step, Failure> {
    let mapping = open(gpu, handle, BYTES)?;
    let answer = code(&experiment::free_mapping(&mapping));
    Ok(Step::new(
        "free-mapping",
        "cuMemFree on memory that was opened by handle",
        "The allocation belongs to the process that made it. A reader closes its mapping (cuIpcCloseMemHandle) and \
         does not free the memory.",
    )
    .value("address", format!("{:#x}", mapping.device_ptr()))
    .refused("cuMemFree", answer, READER_FREES, None))
}

fn close_twice(gpu: &Gpu, handle: IpcMemoryHandle) -> Result<Step, Failure> {
    // Discards the error that the previous step caused when its mapping was closed.
    let _ = gpu.context().take_drop_error();
    let answer = code(&experiment::close_twice(open(gpu, handle, BYTES)?));
    Ok(Step::new(
        "closed-twice",
        "A mapping closed twice",
        "The driver counts how often a handle was opened. If other code in the process has also opened it, one close \
         too many takes the memory from that code, without any error.",
    )
    .answer("second cuIpcCloseMemHandle", answer)
    .says(CLOSED_ONCE, !answer.is_success())
    .judge_refusal(answer, None))
}

fn neighbour(gpu: &Gpu, target: &Target) -> Result<Step, Failure> {
    let step = Step::new(
        "neighbour",
        "The memory behind a small shared allocation",
        "A handle maps whole blocks of 2 MiB. Allocate shared memory in multiples of 2 MiB, or copy into such an \
         allocation.",
    );
    let Some(offset) = target.neighbour else {
        return Ok(step.untried(&[ONLY_SHARED], "the exporter got no two small allocations in one block of 2 MiB"));
    };
    let kernels = gpu.kernels()?;
    let mapping = open(gpu, received(&target.odd)?, ODD_BYTES)?;
    let behind = experiment::beyond(&mapping, offset, ODD_BYTES).doing("looking behind memory")?;
    let mut bytes = [0; ODD_BYTES as usize];
    let copied = gpu.stream().copy_to_host(&mut bytes, behind);
    // The driver may refuse a copy, but it does not check the reads of a kernel.
    let checked = kernels.verify(gpu.stream(), behind, 1);
    let seen = checked == Ok(None);
    Ok(step
        .value("shared", format!("{ODD_BYTES} bytes at {:#x}", mapping.device_ptr()))
        .value("another allocation of the exporter", format!("{offset} bytes behind, never shared"))
        .value("a copy of it", copied.map_or_else(|error| error.to_string(), |()| "succeeded".into()))
        .value(
            "a kernel that reads it",
            match checked {
                Ok(None) => "finds every word that the exporter wrote".into(),
                Ok(Some(_)) => "finds other words".into(),
                Err(error) => error.to_string(),
            },
        )
        .says(ONLY_SHARED, !seen)
        .judge(seen, "the reader sees memory that was never shared", "the reader does not see it"))
}

/// Formats ascending numbers, with runs as `8–15`.
fn ranges(numbers: &[usize]) -> String {
    let runs = numbers.chunk_by(|a, b| a + 1 == *b).map(|run| match run {
        [one] => one.to_string(),
        run => format!("{}–{}", run[0], run[run.len() - 1]),
    });
    runs.collect::<Vec<_>>().join(", ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn runs_of_numbers_are_short() {
        assert_eq!(ranges(&[1, 8, 9, 10, 32, 33, 63]), "1, 8–10, 32–33, 63");
        assert_eq!(ranges(&[]), "");
    }
}
