//! Faults of enqueued work, which lose the context for good. Each test runs in a process of its own, because a fault
//! would affect the other tests.

use super::memory::{GRANULE, READ, READ_WRITE, map};
use super::peer::in_a_process;
use super::process::create;
use super::{SharedWords, answer, begin, device_memory, is_done, kernel, launch, must, new_stream, synchronize};
use crate::abi::Code;
use crate::copy::cuMemsetD8_v2;
use crate::event::{cuEventCreate, cuEventQuery, cuEventRecord};
use crate::memop::cuStreamWaitValue64_v2;
use crate::primary::{cuCtxSynchronize, cuDevicePrimaryCtxRelease_v2};
use crate::stream::{cuStreamQuery, cuStreamSynchronize};

#[test]
fn out_of_bounds_kernel_loses_the_context() {
    if !in_a_process("tests::faults::out_of_bounds_kernel_loses_the_context", &[]) {
        return;
    }
    begin();
    let stream = new_stream();
    let waiting = new_stream();
    let words = SharedWords::new(4096);
    let fill = kernel(c"pw_fill");
    let memory = device_memory(64);
    assert_eq!(launch(fill, stream, &mut [memory, 16]), Code::SUCCESS);
    synchronize(stream);
    let mut event = 0;
    must!(cuEventCreate(&mut event, 2));
    must!(cuStreamWaitValue64_v2(waiting, words.device, 1, 0));
    must!(cuEventRecord(event, waiting));
    assert!(!is_done(waiting));
    // Far beyond the memory, where no other memory is.
    assert_eq!(launch(fill, stream, &mut [memory, 1 << 40]), Code::SUCCESS, "found out later");
    assert_eq!(answer!(cuStreamSynchronize(stream)), Code::ILLEGAL_ADDRESS);
    assert_eq!(answer!(cuStreamSynchronize(waiting)), Code::ILLEGAL_ADDRESS, "waits end too");
    assert_eq!(answer!(cuStreamQuery(waiting)), Code::ILLEGAL_ADDRESS);
    assert_eq!(answer!(cuEventQuery(event)), Code::ILLEGAL_ADDRESS);
    assert_eq!(answer!(cuMemsetD8_v2(memory, 0, 1)), Code::ILLEGAL_ADDRESS);
    assert_eq!(answer!(cuCtxSynchronize()), Code::ILLEGAL_ADDRESS);
    must!(cuDevicePrimaryCtxRelease_v2(0));
    begin_again();
}

/// The primary context is lost until the process ends.
fn begin_again() {
    begin();
    assert_eq!(answer!(cuCtxSynchronize()), Code::ILLEGAL_ADDRESS);
}

#[test]
fn write_through_a_read_only_mapping_loses_the_context() {
    if !in_a_process("tests::faults::write_through_a_read_only_mapping_loses_the_context", &[]) {
        return;
    }
    begin();
    let stream = new_stream();
    let fill = kernel(c"pw_fill");
    let double = kernel(c"pw_double");
    let memory = create(GRANULE).unwrap();
    let writable = map(memory, GRANULE, READ_WRITE);
    let read_only = map(memory, GRANULE, READ);
    assert_eq!(launch(fill, stream, &mut [writable, 16]), Code::SUCCESS);
    synchronize(stream);
    assert_eq!(launch(double, stream, &mut [read_only, 16]), Code::SUCCESS, "found out later");
    assert_eq!(answer!(cuStreamSynchronize(stream)), Code::ILLEGAL_ADDRESS);
    assert_eq!(answer!(cuCtxSynchronize()), Code::ILLEGAL_ADDRESS);
    assert_eq!(launch(fill, stream, &mut [writable, 16]), Code::ILLEGAL_ADDRESS, "and for good");
}

#[test]
fn visible_errors_are_refused_at_the_call() {
    begin();
    let stream = new_stream();
    let fill = kernel(c"pw_fill");
    let memory = device_memory(64);
    assert_eq!(answer!(cuMemsetD8_v2(8, 0, 1)), Code::INVALID_VALUE);
    assert_eq!(launch(fill + 1, stream, &mut [memory, 16]), Code::INVALID_HANDLE);
    assert_eq!(launch(fill, stream + 1, &mut [memory, 16]), Code::INVALID_HANDLE);
    assert_eq!(launch(fill, stream, &mut [memory, 16]), Code::SUCCESS);
    synchronize(stream);
}
