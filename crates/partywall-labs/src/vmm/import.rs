//! The importer: a file descriptor becomes memory, and stays memory when its maker is gone.

use std::os::fd::{AsFd, AsRawFd};

use super::{export::mapped, *};

pub(super) fn play(session: &mut Session) -> Result<(), Failure> {
    let gpu = session.gpu();
    let mut exporter = session.partner();
    let pid = exporter.pid;
    let parcel: Parcel = exporter.hear()?;
    let memory = import(session, &mut exporter, &parcel)?;

    let reading = Mapping::new(Arc::clone(&memory), Access::ReadOnly).doing("mapping memory")?;
    let title = "The three calls in this process, for reading";
    let why = "The importer chooses its own rights: the hardware then stops its own mistakes, but the descriptor would have \
         let it write.";
    session.tell(mapped("map-here", title, why, &gpu, &reading))?;
    session.tell(read(&gpu, &reading, &parcel)?)?;
    session.tell(pass_on(&memory))?;

    let writing = Mapping::new(memory, Access::ReadWrite).doing("mapping memory")?;
    device::set(&gpu, writing.as_slice(), WRITTEN_BACK)?;
    exporter.ask::<()>(())?;

    exporter.end();
    session.tell(maker_gone(&gpu, &reading, pid)?)?;
    session.tell(give_back(&gpu, [reading, writing]))
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
        "A number means something in one process only. What is the same is the open file behind it.",
    );
    session.tell(
        step.value("descriptor there, and here", format!("{}, {number}", parcel.fd))
            .value("/proc/self/fd", format!("{number} → {link}"))
            .says(SAME_NUMBER, number == parcel.fd)
            .judge(!link.is_empty(), "an open file of this process", "it cannot be seen in /proc/self/fd"),
    )?;

    let memory = PhysicalMemory::import(gpu.context(), descriptor.as_fd(), parcel.bytes);
    let memory = memory.doing("importing memory")?;
    let with = open_files();
    let still_open = with.contains_key(&number);
    let step = Step::new(
        "import",
        "cuMemImportFromShareableHandle: a handle of this process",
        "Only the descriptor is needed: any process that has it may import, of any user, in any container. Forgotten \
         copies of it keep the memory alive, so it is closed at once.",
    );
    session.tell(
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
        "The handle is a reference of its own, and so will be each mapping. What is mapped costs no open file.",
    );
    session.tell(
        step.value("/proc/self/fd, before", counted(&with))
            .value("/proc/self/fd, after", counted(&without))
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
    let mut bytes = vec![0; parcel.bytes as usize];
    gpu.stream().copy_to_host(&mut bytes, mapping.as_slice()).doing("reading memory")?;
    let wrong = bytes.iter().filter(|byte| **byte != WRITTEN).count();
    Ok(Step::new(
        "read",
        "The exporter's bytes, read here after the descriptor was closed",
        "The address is this process's own. Never put a device address into shared memory; an offset means the same \
         everywhere.",
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
        "Only its maker can make descriptors of it. A process that hands it on must keep the descriptor that came, as the \
         broker does.",
    )
    .answer("cuMemExportToShareableHandle", answer)
    .says(PASSED_ON, answer.is_success())
    .judge_refusal(answer, Some(CuResult::INVALID_VALUE))
}

fn maker_gone(gpu: &Gpu, mapping: &Mapping, pid: u32) -> Result<Step, Failure> {
    let ended = has_ended(pid);
    let found = first_byte(gpu, mapping.as_slice()).doing("reading memory")?;
    let step = Step::new(
        "maker-gone",
        "The memory after the end of the process that made it",
        "The memory lives until its last reference goes: a handle, a mapping or a descriptor, in whatever process. A \
         process without CUDA that keeps the descriptor is enough: that is the broker.",
    )
    .value(format!("process {pid}"), if ended { "has ended" } else { "still runs" })
    .value("read here", format!("{found:#04x}"));
    Ok(if ended {
        step.says(MAKER, found != WRITTEN_BACK).judge(found == WRITTEN_BACK, "still there", "other bytes than before")
    } else {
        step.untried(Some(MAKER), "the exporter did not end")
    })
}

fn give_back(gpu: &Gpu, mappings: [Mapping; 2]) -> Step {
    let mut step = Step::new(
        "give-back",
        "cuMemUnmap, cuMemAddressFree, cuMemRelease: all of it given back",
        "Each import needs its own release, each mapping its own unmapping. One that is forgotten keeps the whole \
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
        "something could not be given back",
    )
}
