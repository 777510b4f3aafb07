//! The exporter: creates memory without an address, maps it at two addresses, exports a file descriptor, and ends.

use std::os::fd::AsRawFd;

use super::*;
use crate::device::{access_name, kind_of};

pub(super) fn play(session: &mut Session) -> Result<(), Failure> {
    let gpu = session.gpu();
    let (memory, step) = create(&gpu)?;
    session.report(step)?;

    let before = open_files();
    session.report(files_before(&before))?;
    let descriptor = memory.export().doing("exporting memory")?;
    let after = open_files();
    session.report(exported(&memory, descriptor.as_raw_fd(), &before, &after))?;
    session.report(files_after(&before, &after))?;

    let first = map(&gpu, &memory)?;
    let second = map(&gpu, &memory)?;
    let title = "cuMemAddressReserve, cuMemMap, cuMemSetAccess: an address for it";
    let why = "Addresses are reserved first, then memory is mapped there, then each GPU gets access rights. Before the \
        last call every access faults.";
    session.report(mapped("map", title, why, &gpu, &first))?;
    let title = "The same three calls again: a second address";
    let why = "Each mapping is its own reference to the memory, with its own access rights.";
    session.report(mapped("map-again", title, why, &gpu, &second))?;
    session.report(two_addresses(&gpu, &first, &second)?)?;
    for step in parts(&memory) {
        session.report(step)?;
    }

    let parcel = Parcel { bytes: memory.len(), address: first.device_ptr(), fd: descriptor.as_raw_fd() };
    session.report(send(&parcel))?;
    session.parent().say_with(&parcel, &[descriptor.as_fd()])?;
    drop(descriptor);

    // The importer has written.
    while session.parent().next::<()>()?.is_some() {
        session.report(after_the_import(&gpu, &first)?)?;
        session.parent().say(())?;
    }
    Ok(())
}

fn create(gpu: &Gpu) -> Result<(Arc<PhysicalMemory>, Step), Failure> {
    let granularity = PhysicalMemory::granularity(gpu.context()).doing("asking for the granularity")?;
    let memory = PhysicalMemory::create(gpu.context(), 2 * granularity).doing("creating memory")?;
    let step = Step::new(
        "create",
        "cuMemCreate: memory without an address",
        "Physical memory on one device. Its properties are fixed at creation: memory that was not created for export \
         as a file descriptor can never be exported.",
    )
    .value("cuMemGetAllocationGranularity", bytes(granularity))
    .value("cuMemCreate", format!("{}, POSIX file descriptor → handle {:#x}", bytes(memory.len()), memory.as_raw()));
    let step = step.judge(memory.len() == 2 * granularity, "created: two pages of the device", "");
    Ok((Arc::new(memory), step))
}

fn files_before(before: &Files) -> Step {
    Step::new(
        "files-before",
        "The open files of the exporter, before the export",
        "The export below is an ordinary file descriptor: it counts against the limit of open files, travels over Unix \
         sockets, and keeps its memory alive.",
    )
    .value("/proc/self/fd", count(before))
    .judge(!before.is_empty(), "counted", "/proc/self/fd cannot be read")
}

fn exported(memory: &PhysicalMemory, descriptor: i32, before: &Files, after: &Files) -> Step {
    let link = after.get(&descriptor).map_or("", String::as_str);
    Step::new(
        "export",
        "cuMemExportToShareableHandle: a file descriptor for it",
        "Only memory that was created for it can be exported. The driver does not set close-on-exec; this library \
         does, because otherwise every started program would inherit the memory.",
    )
    .value("cuMemExportToShareableHandle", format!("handle {:#x} → descriptor {descriptor}", memory.as_raw()))
    .value("/proc/self/fd", format!("{descriptor} → {link}"))
    .judge(!link.is_empty() && !before.contains_key(&descriptor), "a new open file", "no new open file")
}

fn files_after(before: &Files, after: &Files) -> Step {
    Step::new(
        "files-after",
        "The open files of the exporter, after the export",
        "One allocation is one descriptor. A model is therefore a table over a few large allocations, not one \
         allocation per tensor.",
    )
    .value("/proc/self/fd", count(after))
    .value("new", beyond(after, before))
    .judge(after.len() == before.len() + 1, "one more", format!("{} before, {} now", before.len(), after.len()))
}

fn send(parcel: &Parcel) -> Step {
    let open = open_files().contains_key(&parcel.fd);
    Step::new(
        "send",
        "sendmsg with SCM_RIGHTS: the descriptor goes to the other process",
        "The kernel adds the open file to the receiver's table, and this process may close its descriptor. The size \
         has to be sent, too, because the descriptor does not contain it.",
    )
    .value("sendmsg", format!("descriptor {}, with the size: {} bytes", parcel.fd, parcel.bytes))
    .judge(open, "sent", "the descriptor is not open")
}

fn map(gpu: &Gpu, memory: &Arc<PhysicalMemory>) -> Result<Mapping, Failure> {
    let mapping = Mapping::new(Arc::clone(memory), Access::ReadWrite).doing("mapping memory")?;
    device::set(gpu, mapping.as_slice(), 0)?;
    Ok(mapping)
}

/// Describes a mapping.
pub(super) fn mapped(id: &str, title: &str, why: &str, gpu: &Gpu, mapping: &Mapping) -> Step {
    let address = mapping.device_ptr();
    let kind = kind_of(gpu.context(), address);
    Step::new(id, title, why)
        .value("cuMemAddressReserve", format!("{} → {address:#x}", bytes(mapping.len())))
        .value("cuMemMap", format!("{address:#x}, offset 0, handle {:#x}", mapping.memory().as_raw()))
        .value("cuMemSetAccess", format!("{address:#x}, this GPU, {}", access_name(mapping.access())))
        .value("kind, as the driver reports", kind.clone())
        .judge(kind.contains("cuMemCreate"), "mapped", format!("mapped, but the driver calls it {kind}"))
}

fn two_addresses(gpu: &Gpu, first: &Mapping, second: &Mapping) -> Result<Step, Failure> {
    let read = |mapping: &Mapping| first_byte(gpu, mapping.as_slice()).doing("reading memory");
    let before = read(second)?;
    device::set(gpu, first.as_slice(), WRITTEN)?;
    let after = read(second)?;
    Ok(Step::new(
        "two-addresses",
        "Written through one address, read through the other",
        "An address is only one way to access memory. Therefore the memory behind an address can be exchanged, and an \
         address identifies nothing between processes.",
    )
    .value("second address, before", format!("{:#x}: {before:#04x}", second.device_ptr()))
    .value("cuMemsetD8Async, first address", format!("{:#x}: {WRITTEN:#04x}", first.device_ptr()))
    .value("second address, after", format!("{:#x}: {after:#04x}", second.device_ptr()))
    .says(ONE_ADDRESS, !(after == WRITTEN && first.device_ptr() != second.device_ptr()))
    .judge(before == 0 && after == WRITTEN, "the same memory at two addresses", "not the same memory"))
}

/// Tries to map a part of an allocation.
fn parts(memory: &PhysicalMemory) -> [Step; 2] {
    let half = memory.len() / 2;
    let attempt = |id, title, why, offset: u64| {
        let answer = code(&experiment::map_part(memory, offset as usize, half));
        let call = format!("cuMemMap(size {half}, offset {offset})");
        Step::new(id, title, why).refused(call, answer, PARTS, Some(CuResult::NOT_SUPPORTED))
    };
    [
        attempt(
            "map-offset",
            "The second half alone, by an offset",
            "The call has an offset, but the driver maps whole allocations only.",
            half,
        ),
        attempt(
            "map-half",
            "The first half alone",
            "The same holds for a size: memory that is mapped separately must be a separate allocation.",
            0,
        ),
    ]
}

fn after_the_import(gpu: &Gpu, mapping: &Mapping) -> Result<Step, Failure> {
    let found = first_byte(gpu, mapping.as_slice()).doing("reading memory")?;
    Ok(Step::new(
        "look",
        "What the exporter sees after the importer has written",
        "Both processes have the same physical memory. Nothing was copied, and only the messages between them order \
         their accesses.",
    )
    .value("written here at first", format!("{WRITTEN:#04x}"))
    .value("written by the importer", format!("{WRITTEN_BACK:#04x}"))
    .value("read here now", format!("{found:#04x}"))
    .says(COPY, found == WRITTEN)
    .judge(found == WRITTEN_BACK, "the importer's byte", "not what the importer wrote"))
}
