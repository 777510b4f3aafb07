//! Memory of other processes: descriptors and legacy handles.

use std::ffi::c_int;
use std::fs::File;
use std::os::fd::AsRawFd;

use super::memory::{GRANULE, READ, READ_WRITE, map, peek, poke};
use super::peer::{hear, heard, say, start};
use super::process::{create, export};
use super::{answer, begin, device_memory, must, role};
use crate::abi::{Code, DevicePtr, IpcHandle};
use crate::memory::legacy::{cuIpcCloseMemHandle, cuIpcGetMemHandle, cuIpcOpenMemHandle_v2};
use crate::memory::physical::cuMemImportFromShareableHandle;
use crate::memory::plain::cuMemFree_v2;

#[test]
fn descriptor_keeps_the_memory_of_a_killed_process() {
    const TEST: &str = "tests::sharing::descriptor_keeps_the_memory_of_a_killed_process";
    match role().as_deref() {
        None => {
            let mut maker = start(TEST, "make", &[]);
            // The result of passing it over a socket, without the socket.
            let held = File::options().read(true).write(true).open(hear(&mut maker)).unwrap();
            maker.kill();
            let mut reader = start(TEST, "read", &[]);
            reader.send(&format!("/proc/{}/fd/{}", std::process::id(), held.as_raw_fd()));
            assert_eq!(hear(&mut reader), "77");
            reader.finish();
        }
        Some("make") => {
            begin();
            let handle = create(GRANULE).unwrap();
            poke(map(handle, GRANULE, READ_WRITE), 77).unwrap();
            say(format!("/proc/{}/fd/{}", std::process::id(), export(handle)));
            heard();
        }
        _ => {
            begin();
            let file = File::options().read(true).write(true).open(heard()).unwrap();
            let mut handle = 0;
            let descriptor = file.as_raw_fd() as usize;
            must!(cuMemImportFromShareableHandle(&mut handle, descriptor, 1));
            drop(file);
            say(peek(map(handle, GRANULE, READ)).unwrap());
        }
    }
}

#[test]
fn lost_device_refuses_old_memory_and_gives_new() {
    const TEST: &str = "tests::sharing::lost_device_refuses_old_memory_and_gives_new";
    match role().as_deref() {
        None => {
            let losses = std::env::temp_dir().join(format!("simcuda-losses-{}", std::process::id()));
            let environment = [("SIMCUDA_LOSSES", losses.to_str().unwrap())];
            let mut maker = start(TEST, "make", &environment);
            let held = File::options().read(true).write(true).open(hear(&mut maker)).unwrap();
            // Of another device.
            std::fs::write(&losses, "1\n").unwrap();
            maker.send("again");
            assert_eq!(hear(&mut maker), Code::SUCCESS.0.to_string());
            std::fs::write(&losses, "1\n0\n").unwrap();
            maker.send("again");
            assert_eq!(hear(&mut maker), Code::ECC_UNCORRECTABLE.0.to_string());
            let mut reader = start(TEST, "read", &environment);
            reader.send(&format!("/proc/{}/fd/{}", std::process::id(), held.as_raw_fd()));
            assert_eq!(hear(&mut reader), Code::UNKNOWN.0.to_string());
            reader.finish();
            maker.finish();
            std::fs::remove_file(losses).unwrap();
        }
        Some("make") => {
            begin();
            let descriptor = export(create(GRANULE).unwrap());
            say(format!("/proc/{}/fd/{descriptor}", std::process::id()));
            for _ in 0..2 {
                heard();
                say(import(descriptor).0);
            }
        }
        _ => {
            begin();
            let file = File::options().read(true).write(true).open(heard()).unwrap();
            say(import(file.as_raw_fd()).0);
            assert_eq!(import(export(create(GRANULE).unwrap())), Code::SUCCESS);
        }
    }
}

fn import(descriptor: c_int) -> Code {
    let mut handle = 0;
    answer!(cuMemImportFromShareableHandle(&mut handle, descriptor as usize, 1))
}

fn to_text(handle: &IpcHandle) -> String {
    handle.0.iter().map(|byte| format!("{byte:02x}")).collect()
}

fn from_text(text: &str) -> IpcHandle {
    let byte = |at| u8::from_str_radix(&text[2 * at..2 * at + 2], 16).unwrap();
    IpcHandle(std::array::from_fn(byte))
}

fn open(handle: IpcHandle) -> Result<DevicePtr, Code> {
    let mut pointer = 0;
    answer!(cuIpcOpenMemHandle_v2(&mut pointer, handle, 1)).ok().map(|()| pointer)
}

fn handle_of(pointer: DevicePtr) -> Result<IpcHandle, Code> {
    let mut handle = IpcHandle([0; 64]);
    answer!(cuIpcGetMemHandle(&mut handle, pointer)).ok().map(|()| handle)
}

/// Makes two allocations that share a block, reports the handle of the second, and frees it on command.
fn export_legacy() {
    begin();
    let neighbour = device_memory(100);
    let shared = device_memory(100);
    poke(neighbour, 1).unwrap();
    poke(shared, 2).unwrap();
    let handle = handle_of(shared).unwrap();
    assert_eq!(handle_of(shared + 50), Ok(handle), "a handle names the whole allocation");
    assert_eq!(open(handle), Err(Code::INVALID_CONTEXT), "in the process that made it");
    let descriptor: c_int = export(create(GRANULE).unwrap());
    assert!(descriptor >= 0);
    assert_eq!(handle_of(map(create(GRANULE).unwrap(), GRANULE, READ)), Err(Code::INVALID_VALUE));
    say(to_text(&handle));
    say(shared - neighbour);
    heard();
    must!(cuMemFree_v2(shared));
    say("freed");
    heard();
}

#[test]
fn legacy_handle_opens_the_block_of_another_process() {
    const TEST: &str = "tests::sharing::legacy_handle_opens_the_block_of_another_process";
    match role().as_deref() {
        None => {
            let mut exporter = start(TEST, "export", &[]);
            let handle = hear(&mut exporter);
            let distance = hear(&mut exporter);
            let mut importer = start(TEST, "import", &[]);
            importer.send(&handle);
            importer.send(&distance);
            assert_eq!(hear(&mut importer), "open");
            exporter.send("free it");
            assert_eq!(hear(&mut exporter), "freed");
            importer.send("freed");
            assert_eq!(hear(&mut importer), "readable");
            exporter.kill();
            importer.send("killed");
            importer.finish();
        }
        Some("export") => export_legacy(),
        _ => {
            begin();
            let handle = from_text(&heard());
            let distance = heard().parse::<u64>().unwrap();
            let pointer = open(handle).unwrap();
            assert_eq!(open(handle), Ok(pointer), "a second open counts");
            assert_eq!(peek(pointer), Ok(2));
            assert_eq!(peek(pointer - distance), Ok(1), "the neighbour");
            assert_eq!(answer!(cuMemFree_v2(pointer)), Code::INVALID_VALUE);
            assert_eq!(handle_of(pointer), Err(Code::INVALID_VALUE));
            assert_eq!(answer!(cuIpcCloseMemHandle(pointer + 1)), Code::INVALID_VALUE);
            say("open");
            heard();
            assert_eq!(open(handle), Err(Code::INVALID_HANDLE), "withdrawn");
            assert_eq!(peek(pointer), Ok(2), "what is mapped stays");
            say("readable");
            heard();
            assert_eq!(open(handle), Err(Code::INVALID_HANDLE), "its maker is gone");
            must!(cuIpcCloseMemHandle(pointer));
            poke(pointer, 3).unwrap();
            must!(cuIpcCloseMemHandle(pointer));
            assert_eq!(answer!(cuIpcCloseMemHandle(pointer)), Code::INVALID_VALUE);
            assert_eq!(peek(pointer), Err(Code::ILLEGAL_ADDRESS));
            assert_eq!([open(IpcHandle([0; 64])), open(IpcHandle([0xA5; 64]))], [Err(Code::INVALID_VALUE); 2]);
        }
    }
}

#[test]
fn memory_of_a_hidden_device_can_be_shared() {
    const TEST: &str = "tests::sharing::memory_of_a_hidden_device_can_be_shared";
    match role().as_deref() {
        None => {
            let seen = |device| [("SIMCUDA_DEVICES", "2"), ("CUDA_VISIBLE_DEVICES", device)];
            let mut exporter = start(TEST, "export", &seen("0"));
            let handle = hear(&mut exporter);
            let mut importer = start(TEST, "import", &seen("1"));
            importer.send(&handle);
            importer.finish();
        }
        Some("export") => export_legacy(),
        _ => {
            begin();
            assert_eq!(peek(open(from_text(&heard())).unwrap()), Ok(2));
        }
    }
}
