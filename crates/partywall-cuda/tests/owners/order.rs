//! Streams, kernels, and their waits.

use std::sync::mpsc::{RecvError, channel};
use std::time::Duration;

use partywall_cuda::memop::{self, ProbeError};
use partywall_cuda::{
    Access, AccessError, CuResult, DeviceBuffer, Kernels, Mapping, PhysicalMemory, RawStream, Stream, StreamRef,
};
use partywall_harness::WATCHDOG;

use crate::{GRANULARITY, call_of, is_failed, on_the_simulated_gpu, while_capturing};

#[test]
fn kernels_run_behind_a_wait_and_check_their_ranges_on_the_simulated_gpu() {
    on_the_simulated_gpu(&[""], &[], |context, _| {
        let kernels = Kernels::load(context).unwrap();
        let buffer = DeviceBuffer::new(context, 64).unwrap();
        let word = DeviceBuffer::new(context, 8).unwrap();
        let stream = Stream::new(context).unwrap();
        let waiting = Stream::new(context).unwrap();
        waiting.as_ref().enqueue_set(word.as_slice(), 0).unwrap();
        // Otherwise the word might be set to 0 on another stream after it was written.
        waiting.synchronize().unwrap();
        waiting.as_ref().enqueue_wait_u64(word.as_slice(), 1).unwrap();
        kernels.enqueue_fill(stream.as_ref(), buffer.as_slice()).unwrap();
        kernels.enqueue_double(stream.as_ref(), buffer.as_slice()).unwrap();
        kernels.enqueue_read(stream.as_ref(), buffer.as_slice()).unwrap();
        assert_eq!(kernels.verify(stream.as_ref(), buffer.as_slice(), 2), Ok(None));
        assert_eq!(kernels.verify(stream.as_ref(), buffer.as_slice(), 1), Ok(Some(0)));
        assert_eq!(waiting.as_ref().is_done(), Ok(false));
        stream.as_ref().enqueue_write_u64(word.as_slice(), 1).unwrap();
        waiting.synchronize().unwrap();

        let odd = buffer.slice(2, 8).unwrap();
        assert!(matches!(kernels.enqueue_fill(stream.as_ref(), odd), Err(AccessError::Misaligned { element: 4, .. })));
        let short = buffer.slice(0, 20).unwrap();
        let refused = kernels.enqueue_read(stream.as_ref(), short);
        assert!(matches!(refused, Err(AccessError::Misaligned { element: 16, .. })));
        assert!(while_capturing(context, &stream, || {
            let refused = kernels.verify(stream.as_ref(), buffer.as_slice(), 1);
            assert_eq!(refused, Err(AccessError::Capturing));
        }));
    });
}

#[test]
fn streams_copy_equal_lengths_only_on_the_simulated_gpu() {
    on_the_simulated_gpu(&[""], &[], |context, _| {
        let buffer = DeviceBuffer::new(context, 8).unwrap();
        // SAFETY: the null stream is a default stream.
        let stream = unsafe { StreamRef::borrow(context, RawStream::NULL) };
        assert_eq!(
            stream.copy_from_host(buffer.as_slice(), &[0; 4]),
            Err(AccessError::LengthMismatch { source_len: 4, destination_len: 8 })
        );
        stream.copy_from_host(buffer.as_slice(), &[0xFE; 8]).unwrap();
        let mut bytes = [0; 8];
        stream.copy_to_host(&mut bytes, buffer.as_slice()).unwrap();
        assert_eq!(bytes, [0xFE; 8]);
        let own = Stream::new(context).unwrap();
        assert!(while_capturing(context, &own, || {
            assert_eq!(own.as_ref().copy_to_host(&mut bytes, buffer.as_slice()), Err(AccessError::Capturing));
        }));
    });
}

#[test]
fn memory_operations_take_aligned_writable_words_on_the_simulated_gpu() {
    on_the_simulated_gpu(&[""], &[], |context, _| {
        let mapping = Mapping::new(PhysicalMemory::create(context, GRANULARITY).unwrap(), Access::ReadOnly).unwrap();
        let stream = Stream::new(context).unwrap();
        let stream = stream.as_ref();
        assert_eq!(stream.enqueue_write_u32(mapping.as_slice(), 1), Err(AccessError::ReadOnly));
        assert_eq!(stream.enqueue_write_u64(mapping.as_slice(), 1), Err(AccessError::ReadOnly));
        stream.enqueue_wait_u32(mapping.slice(4, 4).unwrap(), 0).unwrap();
        let [odd, short] = [(2, 8), (0, 3)].map(|(offset, len)| mapping.slice(offset, len).unwrap());
        assert!(matches!(stream.enqueue_wait_u32(odd, 1), Err(AccessError::Misaligned { element: 4, .. })));
        assert!(matches!(stream.enqueue_wait_u32(short, 1), Err(AccessError::OutOfRange { available: 3, .. })));
        let half = mapping.slice(4, 8).unwrap();
        assert!(matches!(stream.enqueue_wait_u64(half, 1), Err(AccessError::Misaligned { element: 8, .. })));
        stream.synchronize().unwrap();
    });
}

#[test]
fn probe_of_memory_operations_reports_refusals_on_the_simulated_gpu() {
    on_the_simulated_gpu(&["cuStreamWriteValue32:1=801", "cuStreamWaitValue64:1=801"], &[], |context, step| {
        let Err(ProbeError::Refused(error)) = memop::probe_device_word(context, WATCHDOG) else { panic!("{step}") };
        assert_eq!(error.to_string(), format!("{} failed: CUDA_ERROR_NOT_SUPPORTED (801)", call_of(step)));
        memop::probe_device_word(context, WATCHDOG).unwrap();
    });
}

/// Calls that succeed and do nothing.
#[test]
fn probe_finds_broken_memory_operations_on_the_simulated_gpu() {
    on_the_simulated_gpu(&["cuStreamWaitValue64:2=0"], &[], |context, _| {
        assert_eq!(memop::probe_device_word(context, WATCHDOG), Err(ProbeError::DidNotWait));
    });
}

#[test]
fn memory_behind_a_streams_wait_is_never_freed_on_the_simulated_gpu() {
    let left = ["allocation", "primary context", "stream", "stream"];
    let limit = Duration::from_millis(1);
    on_the_simulated_gpu(&["cuStreamWriteValue32:1=0", "cuStreamWriteValue64:3=719"], &left, |context, step| {
        let error = memop::probe_device_word(context, if step.ends_with("=0") { limit } else { WATCHDOG }).unwrap_err();
        match error {
            ProbeError::StillWaits { bits, writer, .. } if step.ends_with("=0") => {
                assert_eq!((bits, writer), (32, "a stream"));
            }
            ProbeError::Refused(_) if step.ends_with("=719") => {}
            error => panic!("{step}: {error}"),
        }
    });
}

#[test]
fn host_function_runs_once_in_order_or_is_dropped_on_the_simulated_gpu() {
    on_the_simulated_gpu(&["", "cuLaunchHostFunc:1=801"], &[], |context, step| {
        let stream = Stream::new(context).unwrap();
        let word = DeviceBuffer::new(context, 8).unwrap();
        let stream = stream.as_ref();
        stream.enqueue_set(word.as_slice(), 0).unwrap();
        stream.synchronize().unwrap();
        let (sender, receiver) = channel();
        stream.enqueue_wait_u64(word.as_slice(), 1).unwrap();
        let enqueued = stream.enqueue_host_function(move || sender.send(7).unwrap());
        if !step.is_empty() {
            let Err(AccessError::Driver(error)) = enqueued else { panic!("{enqueued:?}") };
            assert!(is_failed(&error, call_of(step), CuResult::NOT_SUPPORTED), "{error}");
            assert_eq!(receiver.recv(), Err(RecvError), "it was dropped, and did not run");
        }
        assert_eq!(receiver.try_recv().ok(), None, "what is before it is not done");
        Stream::new(context).unwrap().as_ref().enqueue_write_u64(word.as_slice(), 1).unwrap();
        stream.synchronize().unwrap();
        assert_eq!(receiver.try_iter().collect::<Vec<_>>(), if step.is_empty() { vec![7] } else { vec![] });
        let captured = Stream::new(context).unwrap();
        assert!(while_capturing(context, &captured, || {
            let refused = captured.as_ref().enqueue_host_function(|| panic!("it was captured"));
            assert_eq!(refused, Err(AccessError::Capturing));
        }));
    });
}

#[test]
fn streams_have_distinct_ids_on_the_simulated_gpu() {
    on_the_simulated_gpu(&[""], &[], |context, _| {
        let one = Stream::new(context).unwrap();
        let other = Stream::new(context).unwrap();
        let id = |stream: &Stream| stream.as_ref().id().unwrap();
        assert_eq!(id(&one), id(&one));
        assert_ne!(id(&one), id(&other));
        assert_eq!(std::thread::scope(|scope| scope.spawn(|| id(&one)).join().unwrap()), id(&one));
        let default = || {
            // SAFETY: a default stream.
            unsafe { StreamRef::borrow(context, RawStream::PER_THREAD_DEFAULT) }.id().unwrap()
        };
        assert_ne!(std::thread::scope(|scope| scope.spawn(default).join().unwrap()), default());
    });
}
