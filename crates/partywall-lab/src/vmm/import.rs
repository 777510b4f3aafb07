//! The importer: imports memory from a file descriptor, and uses it after the exporter has ended.

use std::os::fd::AsRawFd;

use super::{export::mapped, *};

pub(super) fn play(session: &mut Session) -> Result<(), Failure> {
    let gpu = session.gpu();
    let mut exporter = session.partner();
    let pid = exporter.pid;
    let parcel: Parcel = exporter.hear()?;
    let memory = import(session, &mut exporter, &parcel)?;

    let reading = Mapping::new(Arc::clone(&memory), Access::ReadOnly).doing("mapping memory")?;
    let title = "The three calls in this process, for reading";
    let why = "The importer chooses its own access rights. The hardware then stops its own mistakes, although the \
        descriptor permits writing.";
    session.report(mapped("map-here", title, why, &gpu, &reading))?;
    session.report(read(&gpu, &reading, &parcel)?)?;
    session.report(pass_on(&memory))?;

    let writing = Mapping::new(memory, Access::ReadWrite).doing("mapping memory")?;
    device::set(&gpu, writing.as_slice(), WRITTEN_BACK)?;
    exporter.ask::<()>(())?;

    exporter.end();
    session.report(maker_gone(&gpu, &reading, pid)?)?;
    session.report(give_back(&gpu, [reading, writing]))
}

/// Receives the descriptor, imports it, and closes it.
fn import(session: &Session, exporter: &mut Peer, parcel: &Parcel) -> Result<Arc<PhysicalMemory>, Failure> {
    let gpu = session.gpu();
    let descriptor = exporter.take_fd()?;
    let number = descriptor.as_raw_fd();
    let link = open_files().remove(&number).unwrap_or_default();
    let step = Step::new(
        "receive",
        "recvmsg: the descriptor arrives under a number of this process",
        "A number is valid in one process only. Both numbers refer to the same open file.",
    );
    session.report(
        step.value("descriptor there, and here", format!("{}, {number}", parcel.fd))
            .value("/proc/self/fd", format!("{number} → {link}"))
            .says(SAME_NUMBER, number == parcel.fd)
            .judge(!link.is_empty(), "an open file of this process", "it is not in /proc/self/fd"),
    )?;

    let memory = PhysicalMemory::import(gpu.context(), descriptor.as_fd(), parcel.bytes);
    let memory = memory.doing("importing memory")?;
    let with = open_files();
    let still_open = with.contains_key(&number);
    let step = Step::new(
        "import",
        "cuMemImportFromShareableHandle: a handle of this process",
        "Only the descriptor is needed: any process that has it can import the memory, of any user and in any \
         container. Forgotten copies keep the memory alive, so it is closed immediately.",
    );
    session.report(
        step.value("cuMemImportFromShareableHandle", format!("descriptor {number} → handle {:#x}", memory.as_raw()))
            .value(format!("descriptor {number} afterwards"), if still_open { "still open" } else { "closed" })
            .says(CONSUMED, !still_open)
            .judge(still_open, "imported; the descriptor is ours to close", "imported, and the descriptor is gone"),
    )?;

    drop(descriptor);
    let without = open_files();
    let step = Step::new(
        "files-closed",
        "The open files of the importer, with the descriptor and without",
        "The handle is its own reference, and so is each mapping. A mapping needs no open file.",
    );
    session.report(
        step.value("/proc/self/fd, before", count(&with))
            .value("/proc/self/fd, after", count(&without))
            .value("closed", beyond(&with, &without))
            .judge(
                without.len() + 1 == with.len(),
                "one less",
                format!("{} before, {} now", with.len(), without.len()),
            ),
    )?;
    Ok(Arc::new(memory))
}

fn read(gpu: &Gpu, mapping: &Mapping, parcel: &Parcel) -> Result<Step, Failure> {
    let bytes = device::bytes_of(gpu, mapping.as_slice()).doing("reading memory")?;
    let wrong = bytes.iter().filter(|byte| **byte != WRITTEN).count();
    Ok(Step::new(
        "read",
        "The exporter's bytes, read here after the descriptor was closed",
        "The address is valid in this process only. Never put a device address into shared memory; use an offset, \
         which is valid everywhere.",
    )
    .value("address there", format!("{:#x}", parcel.address))
    .value("address here", format!("{:#x}", mapping.device_ptr()))
    .value(format!("{} bytes", bytes.len()), format!("{wrong} of them other than {WRITTEN:#04x}"))
    .says(SAME_ADDRESS, mapping.device_ptr() == parcel.address)
    .says(FD_HOLDS, wrong > 0)
    .judge(wrong == 0, "every byte is what the exporter wrote", "not what the exporter wrote"))
}

fn pass_on(memory: &PhysicalMemory) -> Step {
    let answer = code(&memory.export());
    Step::new(
        "pass-on",
        "Imported memory exported again",
        "Only the process that created it can export it. A process that passes it on must keep the received \
         descriptor, as the broker does.",
    )
    .refused("cuMemExportToShareableHandle", answer, PASSED_ON, Some(CuResult::INVALID_VALUE))
}

fn maker_gone(gpu: &Gpu, mapping: &Mapping, pid: u32) -> Result<Step, Failure> {
    let ended = has_ended(pid);
    let found = first_byte(gpu, mapping.as_slice()).doing("reading memory")?;
    let step = Step::new(
        "maker-gone",
        "The memory after the end of the process that made it",
        "The memory lives until its last reference is gone: a handle, a mapping or a descriptor, in any process. A \
         process without CUDA that keeps the descriptor is enough, for example the broker.",
    )
    .value(format!("process {pid}"), if ended { "has ended" } else { "still runs" })
    .value("read here", format!("{found:#04x}"));
    Ok(if ended {
        step.says(MAKER, found != WRITTEN_BACK).judge(found == WRITTEN_BACK, "still there", "the bytes have changed")
    } else {
        step.untried(&[MAKER], "the exporter did not end")
    })
}

fn give_back(gpu: &Gpu, mappings: [Mapping; 2]) -> Step {
    let mut step = Step::new(
        "give-back",
        "cuMemUnmap, cuMemAddressFree, cuMemRelease: everything is released",
        "Each import needs its own release, and each mapping its own unmapping. A forgotten one keeps the whole \
         allocation until the process ends.",
    );
    let mut refused = Vec::new();
    for mapping in mappings {
        let address = mapping.device_ptr();
        let answer = code(&mapping.close());
        refused.extend((!answer.is_success()).then_some(answer));
        step = step.value(format!("cuMemUnmap({address:#x})"), answer.to_string());
    }
    let later = gpu.context().take_drop_error();
    let clean = refused.is_empty() && later.is_none();
    step.value("the other two calls", later.map_or_else(|| "no error".to_owned(), |error| error.to_string())).judge(
        clean,
        "nothing is left",
        "something could not be released",
    )
}
