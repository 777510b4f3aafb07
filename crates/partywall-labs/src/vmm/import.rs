//! The importer: a file descriptor becomes memory, and stays memory when its maker is gone.

use std::{
    os::fd::{AsFd, AsRawFd},
    sync::Arc,
};

use partywall::cuda::{Access, CuResult, Mapping, PhysicalMemory};

use super::{
    BELIEFS, CONSUMED, FD_HOLDS, Hello, Looked, MAKER, PASSED_ON, Parcel, SAME_ADDRESS, SAME_NUMBER, TITLE, WRITTEN,
    WRITTEN_BACK, Wish, beyond, counted, export::mapped, open_files,
};
use crate::{
    Options,
    device::{self, Chosen, Gpu, copy_failed, failed, first_byte},
    failure::Failure,
    peer::{Peer, has_ended},
    step::{Step, code},
    teller::Teller,
};

/// Plays the role, and ends the lab.
pub(super) fn run(options: &Options, mut exporter: Peer, teller: &mut Teller) -> Result<(), Failure> {
    let hello: Hello = exporter.hear(teller)?;
    let theirs = || hello.uuid.parse().map(Chosen::Uuid).unwrap_or(Chosen::Ordinal(0));
    let gpu = device::open(options.device.unwrap_or_else(theirs))?;
    teller.header(TITLE, &gpu).map_err(failed("asking about the GPU"))?;
    let parcel: Parcel = exporter.hear(teller)?;
    let memory = import(&gpu, &mut exporter, &parcel, teller)?;

    let reading = Mapping::new(Arc::clone(&memory), Access::ReadOnly).map_err(failed("mapping memory"))?;
    let title = "The three calls in this process, for reading";
    let why = "The importer chooses its own rights: the hardware then stops its own mistakes, but the descriptor would have \
         let it write.";
    teller.tell(mapped("map-here", title, why, &gpu, &reading));
    teller.tell(read(&gpu, &reading, &parcel)?);
    teller.tell(pass_on(&memory));

    let writing = Mapping::new(memory, Access::ReadWrite).map_err(failed("mapping memory"))?;
    device::set(&gpu, writing.as_slice(), WRITTEN_BACK)?;
    exporter.say(Wish::Look, &[])?;
    let Looked = exporter.hear(teller)?;

    exporter.say(Wish::End, &[])?;
    teller.tell(maker_gone(&gpu, &reading, hello.pid)?);
    teller.tell(give_back(&gpu, [reading, writing]));
    teller.conclude(&BELIEFS);
    Ok(())
}

/// Receives the descriptor, imports it, and closes it.
fn import(
    gpu: &Gpu,
    exporter: &mut Peer,
    parcel: &Parcel,
    teller: &mut Teller,
) -> Result<Arc<PhysicalMemory>, Failure> {
    let descriptor = exporter.take_fd()?;
    let number = descriptor.as_raw_fd();
    let link = open_files().remove(&number).unwrap_or_default();
    let step = Step::new(
        "receive",
        "recvmsg: the descriptor arrives under a number of this process",
        "A number means something in one process only. What is the same is the open file behind it.",
    );
    teller.tell(
        step.value("descriptor there, and here", format!("{}, {number}", parcel.fd))
            .value("/proc/self/fd", format!("{number} → {link}"))
            .says(SAME_NUMBER, number == parcel.fd)
            .judge(!link.is_empty(), "an open file of this process", "it cannot be seen in /proc/self/fd"),
    );

    let memory = PhysicalMemory::import(gpu.context(), descriptor.as_fd(), parcel.bytes);
    let memory = memory.map_err(failed("importing memory"))?;
    let with = open_files();
    let still_open = with.contains_key(&number);
    let step = Step::new(
        "import",
        "cuMemImportFromShareableHandle: a handle of this process",
        "Only the descriptor is needed: any process that has it may import, of any user, in any container. Forgotten \
         copies of it keep the memory alive, so it is closed at once.",
    );
    teller.tell(
        step.value("cuMemImportFromShareableHandle", format!("descriptor {number} → handle {:#x}", memory.as_raw()))
            .value(format!("descriptor {number} afterwards"), if still_open { "still open" } else { "closed" })
            .says(CONSUMED, !still_open)
            .judge(still_open, "imported; the descriptor is ours to close", "imported, and the descriptor is gone"),
    );

    drop(descriptor);
    let without = open_files();
    let step = Step::new(
        "files-closed",
        "The open files of the importer, with the descriptor and without",
        "The handle is a reference of its own, and so will be each mapping. What is mapped costs no open file.",
    );
    teller.tell(
        step.value("/proc/self/fd, before", counted(&with))
            .value("/proc/self/fd, after", counted(&without))
            .value("closed", beyond(&with, &without))
            .judge(
                without.len() + 1 == with.len(),
                "one less",
                format!("{} before, {} now", with.len(), without.len()),
            ),
    );
    Ok(Arc::new(memory))
}

fn read(gpu: &Gpu, mapping: &Mapping, parcel: &Parcel) -> Result<Step, Failure> {
    let mut bytes = vec![0; parcel.bytes as usize];
    gpu.stream().copy_to_host(&mut bytes, mapping.as_slice()).map_err(copy_failed("reading memory"))?;
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
        "Only its maker can make descriptors of it. Whoever shall hand it on must keep the descriptor that came, as the \
         broker does.",
    )
    .answer("cuMemExportToShareableHandle", answer)
    .says(PASSED_ON, answer.is_success())
    .judge_refusal(answer, Some(CuResult::INVALID_VALUE))
}

fn maker_gone(gpu: &Gpu, mapping: &Mapping, pid: u32) -> Result<Step, Failure> {
    let ended = has_ended(pid);
    let found = first_byte(gpu, mapping.as_slice()).map_err(copy_failed("reading memory"))?;
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
