//! Vulkan beside CUDA. Khronos does not promise that Vulkan imports what CUDA exports.

use std::os::fd::AsFd;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;

use partywall::DeviceUuid;
use partywall_vulkan::ash::vk;
use rustix::fs::{MemfdFlags, SealFlags};

use super::{BYTES, MIB};
use crate::raw::{READ_WRITE, Words};
use crate::tests::stage::{Check, Line, Peer, pattern};
use crate::tests::world::{ensure, error_text};
use crate::vulkan::{Buffer, Memory, Vulkan};

/// Host memory, imported into Vulkan: where the facts read and write what Vulkan copies.
struct Desk {
    // Dropped in this order.
    buffer: Buffer,
    _memory: Memory,
    words: Words,
}

impl Desk {
    fn new(vulkan: &Vulkan, bytes: usize) -> Result<Self, String> {
        let words = Words::map(Words::file(bytes)?, true)?;
        let memory = vulkan.import_host(words.address(), bytes as u64).map_err(|refused| refused.text())?;
        let buffer = vulkan.buffer(&memory, 0, bytes as u64)?;
        Ok(Self { buffer, _memory: memory, words })
    }

    /// Writes the test pattern.
    fn fill(&self) {
        (0..self.words.bytes() / 8).for_each(|index| self.words.store(index, word(index, 1)));
    }

    /// Returns whether Vulkan finds the test pattern, each word `factor` times, in all of a buffer.
    fn finds_pattern(&self, vulkan: &Vulkan, from: &Buffer, factor: u32) -> Result<bool, String> {
        (0..self.words.bytes() / 8).for_each(|index| self.words.store(index, 0));
        vulkan.copy(from, &self.buffer)?;
        Ok(holds_pattern(&self.words, factor))
    }
}

/// Returns two words of the test pattern, each `factor` times.
fn word(index: usize, factor: u32) -> u64 {
    let half = |index: usize| u64::from(pattern(index as u64).wrapping_mul(factor));
    half(2 * index) | half(2 * index + 1) << 32
}

fn holds_pattern(words: &Words, factor: u32) -> bool {
    (0..words.bytes() / 8).all(|index| words.load(index) == word(index, factor))
}

/// Returns the UUID by which CUDA names its first GPU.
fn first_uuid(check: &Check) -> Result<DeviceUuid, String> {
    let mut uuid = [0; 16];
    check.cuda.init(0).ok()?;
    check.cuda.device_get_uuid(&mut uuid, 0).ok()?;
    Ok(DeviceUuid(uuid))
}

fn open(check: &Check) -> Result<Vulkan, String> {
    Vulkan::open(Some(first_uuid(check)?))
}

pub(super) fn vulkan_names_a_gpu_as_cuda_does(check: &Check) -> Result<(), String> {
    let uuid = first_uuid(check)?;
    check.same("the device of this UUID", Vulkan::open(Some(uuid))?.gpu.uuid() == uuid, true);
    check.same("a UUID that is no GPU's", Vulkan::open(Some(DeviceUuid([0xA5; 16]))).is_err(), true);
    Ok(())
}

pub(super) fn vulkan_imports_exported_memory(check: &Check) -> Result<(), String> {
    let mut owner = Peer::start("owner_of_exported_memory")?;
    let descriptor = owner.hear()?.descriptor()?;
    let vulkan = open(check)?;
    let desk = Desk::new(&vulkan, BYTES)?;
    let memory = vulkan.import(descriptor.as_fd(), BYTES as u64).map_err(|refused| refused.text())?;
    let buffer = vulkan.buffer(&memory, 0, BYTES as u64)?;
    check.same("what a kernel wrote before", desk.finds_pattern(&vulkan, &buffer, 1)?, true);
    owner.order("double")?;
    check.same("what a kernel changed", desk.finds_pattern(&vulkan, &buffer, 2)?, true);
    desk.fill();
    vulkan.copy(&desk.buffer, &buffer)?;
    // The owner checks it by a kernel.
    owner.order("verify")?;
    owner.finish()
}

pub(super) fn vulkan_buffers_begin_at_multiples_of_256(check: &Check) -> Result<(), String> {
    check.start()?;
    let (handle, address) = check.mapped(BYTES)?;
    check.fill(address, BYTES)?;
    let descriptor = check.export(handle)?;
    let vulkan = open(check)?;
    let memory = vulkan.import(descriptor.as_fd(), BYTES as u64).map_err(|refused| refused.text())?;
    let places = [(256, 1024), (4 * 1024 + 768, 256), (2 * MIB, 4096), (BYTES - 256, 256)];
    let mut expected: Vec<u8> = (0..BYTES as u64 / 4).flat_map(|index| pattern(index).to_ne_bytes()).collect();
    // All at a time, so that a driver that confuses them is found.
    let buffers: Result<Vec<_>, _> =
        places.iter().map(|(offset, bytes)| vulkan.buffer(&memory, *offset as u64, *bytes as u64)).collect();
    for ((buffer, (offset, bytes)), value) in buffers?.iter().zip(places).zip(1..) {
        vulkan.fill(buffer, u32::from_ne_bytes([value; 4]))?;
        expected[offset..offset + bytes].fill(value);
    }
    let mut found = vec![0; BYTES];
    check.cuda.read(&mut found, address).ok()?;
    let wrong = found.iter().zip(&expected).filter(|(found, expected)| found != expected).count();
    check.same("wrong bytes", wrong, 0);
    Ok(())
}

pub(super) fn vulkan_keeps_the_memory_of_a_killed_creator(check: &Check) -> Result<(), String> {
    let mut owner = Peer::start("owner_of_exported_memory")?;
    let descriptor = owner.hear()?.descriptor()?;
    let vulkan = open(check)?;
    let desk = Desk::new(&vulkan, BYTES)?;
    let before = vulkan.import(descriptor.as_fd(), BYTES as u64).map_err(|refused| refused.text())?;
    let buffer = vulkan.buffer(&before, 0, BYTES as u64)?;
    owner.kill()?;
    check.same("an import from before the death", desk.finds_pattern(&vulkan, &buffer, 1)?, true);
    let after = vulkan.import(descriptor.as_fd(), BYTES as u64).map_err(|refused| refused.text())?;
    drop(descriptor);
    let again = vulkan.buffer(&after, 0, BYTES as u64)?;
    check.same("an import from after it", desk.finds_pattern(&vulkan, &again, 1)?, true);
    vulkan.fill(&again, 7)?;
    vulkan.copy(&buffer, &desk.buffer)?;
    check.same("is the same memory", desk.words.load(BYTES / 16), 7 << 32 | 7);
    Ok(())
}

pub(super) fn vulkan_refuses_more_than_was_exported(check: &Check) -> Result<(), String> {
    check.start()?;
    let descriptor = check.export(check.create(BYTES)?)?;
    let vulkan = open(check)?;
    for (question, bytes) in [("twice the size", 2 * BYTES), ("a page more", BYTES + 4096)] {
        match vulkan.import(descriptor.as_fd(), bytes as u64) {
            Ok(_) => check.same(question, "imported", "refused"),
            Err(refused) => {
                check.same(question, refused.code, vk::Result::ERROR_OUT_OF_DEVICE_MEMORY);
                // Khronos documents the contrary: a descriptor that was not imported is still its caller's.
                check.same("its descriptor is still this process's", refused.ours, false);
            }
        }
    }
    let whole = vulkan.import(descriptor.as_fd(), BYTES as u64);
    check.same("the right size", whole.is_ok(), true);
    Ok(())
}

/// Partywall takes a type that the host does not see.
pub(super) fn vulkan_imports_as_each_type_of_memory(check: &Check) -> Result<(), String> {
    let mut owner = Peer::start("owner_of_exported_memory")?;
    let descriptor = owner.hear()?.descriptor()?;
    let vulkan = open(check)?;
    let desk = Desk::new(&vulkan, BYTES)?;
    let types = vulkan.memory_types();
    let local = |flags: vk::MemoryPropertyFlags| {
        let visible = vk::MemoryPropertyFlags::HOST_VISIBLE;
        flags.contains(vk::MemoryPropertyFlags::DEVICE_LOCAL) && !flags.contains(visible)
    };
    check.same("a type that the host does not see", types.iter().any(|(_, flags)| local(*flags)), true);
    for (index, flags) in types {
        let question = format!("type {index} (properties {:#x})", flags.as_raw());
        match vulkan.import_as(descriptor.as_fd(), BYTES as u64, index) {
            Ok(memory) => {
                let buffer = vulkan.buffer(&memory, 0, BYTES as u64)?;
                check.same(&question, desk.finds_pattern(&vulkan, &buffer, 1)?, true);
            }
            Err(refused) => check.same(&question, Err(refused.code), Ok(())),
        }
    }
    owner.finish()
}

pub(super) fn cuda_imports_memory_of_vulkan(check: &Check) -> Result<(), String> {
    check.start()?;
    let vulkan = open(check)?;
    let (memory, descriptor) = vulkan.export(BYTES as u64)?;
    let buffer = vulkan.buffer(&memory, 0, BYTES as u64)?;
    let desk = Desk::new(&vulkan, BYTES)?;
    desk.fill();
    vulkan.copy(&desk.buffer, &buffer)?;
    let address = check.map(check.import(&descriptor)?, BYTES, READ_WRITE)?;
    check.same("what Vulkan wrote", check.holds_pattern(address, BYTES, 1)?, true);
    check.double(address, BYTES)?.ok()?;
    check.same("what a kernel changed", desk.finds_pattern(&vulkan, &buffer, 2)?, true);
    Ok(())
}

/// A word of a timeline would be torn between these two values, if it were.
pub(super) fn vulkan_updates_eight_bytes_at_once(check: &Check) -> Result<(), String> {
    const ROUNDS: usize = 1000;
    let values = [u64::from(u32::MAX), 1 << 32];
    let vulkan = Vulkan::open(None)?;
    let desk = Desk::new(&vulkan, 64 << 10)?;
    desk.words.store(0, values[0]);
    let stop = AtomicBool::new(false);
    let (torn, seen) = thread::scope(|scope| {
        let watcher = scope.spawn(|| {
            let mut seen = [0_usize; 2];
            let mut torn = 0_usize;
            while !stop.load(Ordering::Acquire) {
                let found = desk.words.load(0);
                match values.iter().position(|value| *value == found) {
                    Some(index) => seen[index] += 1,
                    None => torn += 1,
                }
            }
            (torn, seen)
        });
        let updated = (1..=ROUNDS).try_for_each(|round| vulkan.update(&desk.buffer, values[round % 2]));
        stop.store(true, Ordering::Release);
        let counted = watcher.join().map_err(|_| "the watcher panicked".to_owned())?;
        updated.map(|()| counted)
    })?;
    ensure(seen.iter().all(|count| *count > 0), || format!("the watcher saw {seen:?} of the two values"))?;
    check.same("torn values", torn, 0);
    Ok(())
}

/// Uses memory that another process exports, until it is told to end.
pub(super) fn user_of_vulkan(check: &Check, line: &Line) -> Result<(), String> {
    let descriptor = line.hear()?.ok_or("no memory came")?.descriptor()?;
    let vulkan = open(check)?;
    let memory = vulkan.import(descriptor.as_fd(), BYTES as u64).map_err(|refused| refused.text())?;
    let buffer = vulkan.buffer(&memory, 0, BYTES as u64)?;
    line.send("ready")?;
    loop {
        vulkan.fill(&buffer, 7)?;
    }
}

pub(super) fn a_killed_user_of_vulkan_harms_no_other_process(check: &Check) -> Result<(), String> {
    check.start()?;
    let (handle, address) = check.mapped(BYTES)?;
    let (_, other) = check.mapped(BYTES)?;
    check.fill(other, BYTES)?;
    let mut user = Peer::start("user_of_vulkan")?;
    user.give("memory", check.export(handle)?)?;
    user.expect("ready")?;
    user.kill()?;
    check.fill(address, BYTES)?;
    check.same("memory that it wrote", check.holds_pattern(address, BYTES, 1)?, true);
    check.same("other memory", check.holds_pattern(other, BYTES, 1)?, true);
    Ok(())
}

pub(super) fn vulkan_imports_host_memory_that_cuda_has_registered(check: &Check) -> Result<(), String> {
    check.start()?;
    let vulkan = Vulkan::open(None)?;
    let file = Words::file(BYTES)?;
    let words = Words::map(&file, true)?;
    let other = Words::map(&file, true)?;
    let device = check.register(&words)?;
    let memory = vulkan.import_host(words.address(), BYTES as u64).map_err(|refused| refused.text())?;
    let buffer = vulkan.buffer(&memory, 0, BYTES as u64)?;
    let desk = Desk::new(&vulkan, BYTES)?;
    check.fill(device, BYTES)?;
    check.same("what a kernel wrote", desk.finds_pattern(&vulkan, &buffer, 1)?, true);
    check.double(device, BYTES)?.ok()?;
    check.same("what a kernel changed", desk.finds_pattern(&vulkan, &buffer, 2)?, true);
    (0..BYTES / 8).for_each(|index| other.store(index, 0));
    check.same("what another mapping wrote", desk.finds_pattern(&vulkan, &buffer, 1)?, false);
    desk.fill();
    vulkan.copy(&desk.buffer, &buffer)?;
    check.same("Vulkan's bytes in another mapping", holds_pattern(&other, 1), true);
    check.same("and in a kernel", check.holds_pattern(device, BYTES, 1)?, true);
    Ok(())
}

/// lavapipe imports all of them.
pub(super) fn vulkan_imports_no_frozen_host_memory(check: &Check) -> Result<(), String> {
    let vulkan = open(check)?;
    let before = Words::map(Words::file(BYTES)?, true)?;
    let import =
        |words: &Words| vulkan.import_host(words.address(), BYTES as u64).map(drop).map_err(|refused| refused.code);
    check.same("a writable mapping", import(&before), Ok(()));
    let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
    let file = rustix::fs::memfd_create("frozen", flags).map_err(error_text)?;
    let bytes: Vec<u8> = (0..BYTES as u64 / 4).flat_map(|index| pattern(index).to_ne_bytes()).collect();
    let written = rustix::io::pwrite(&file, &bytes, 0).map_err(error_text)?;
    ensure(written == BYTES, || format!("{written} bytes written"))?;
    let seals = SealFlags::WRITE | SealFlags::GROW | SealFlags::SHRINK;
    rustix::fs::fcntl_add_seals(&file, seals).map_err(error_text)?;
    let refused = Err(vk::Result::ERROR_OUT_OF_DEVICE_MEMORY);
    check.same("a read-only mapping", import(&Words::map(&file, false)?), refused);
    check.same("a private mapping", import(&Words::map_private(&file)?), refused);
    // So Partywall must not try and then fall back: it decides by the kind of driver.
    check.same("the writable mapping again", import(&before), refused);
    check.same("another writable mapping", import(&Words::map(Words::file(BYTES)?, true)?), refused);
    Ok(())
}
