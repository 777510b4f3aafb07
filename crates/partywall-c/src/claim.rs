//! Tasks that this process has claimed, for one attempt.

use std::{
    ffi::{CString, c_char, c_void},
    time::Duration,
};

use partywall::{ClaimedTask, DeviceUuid, Domain, Gpu, Queue, TaskInput};

use crate::{
    argument::{self, array, array_mut, c_text, dtype, store_bytes, store_info, structs, text, timeout},
    error::{Failure, call, pw_status},
    handle::{self, object},
    queue::{OpenQueue, pw_queue},
    segment::beyond,
    timeline::gpu_of,
};

/// A task that this process has claimed. One thread may use it at a time.
pub struct pw_claim {
    _opaque: (),
}

struct Claimed {
    task: ClaimedTask,
    kind: CString,
    /// The queue's GPU, for streams.
    gpu: Option<DeviceUuid>,
    domain: Domain,
}

object!(Claimed, pw_claim, 22, "claimed task");
structs!(pw_claim_info, pw_input_info);

impl Claimed {
    fn new(queue: &Queue, task: ClaimedTask) -> Self {
        let kind = c_text(&task.kind());
        Self { task, kind, gpu: queue.gpu().map(Gpu::uuid), domain: queue.domain().clone() }
    }

    fn input(&self, index: usize) -> Result<&TaskInput, Failure> {
        let inputs = self.task.inputs();
        inputs.get(index).ok_or_else(|| beyond("input", index, inputs.len()))
    }
}

/// Claims the next task, and waits for one up to `timeout_ns`; negative means without end. The caller owns `*claim`, and
/// completes, fails or closes it. If this process dies, another worker gets the task.
///
/// # Safety
/// No other thread closes `queue`; `claim` may be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pw_queue_claim(
    queue: *const pw_queue,
    timeout_ns: i64,
    claim: *mut *mut pw_claim,
) -> pw_status {
    // SAFETY: the caller's promise.
    call(|| unsafe {
        handle::give(claim, || {
            let OpenQueue { queue, .. } = handle::get::<OpenQueue>(queue)?;
            Ok(Claimed::new(queue, queue.claim(timeout(timeout_ns))?))
        })
    })
}

/// Claims a task that waits already; otherwise stores null, which is no failure. Does not block.
///
/// # Safety
/// As `pw_queue_claim`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pw_queue_try_claim(queue: *const pw_queue, claim: *mut *mut pw_claim) -> pw_status {
    // SAFETY: the caller's promise.
    call(|| unsafe {
        handle::give_some(claim, || {
            let OpenQueue { queue, .. } = handle::get::<OpenQueue>(queue)?;
            Ok(queue.try_claim()?.map(|task| Claimed::new(queue, task)))
        })
    })
}

/// What `pw_claim_info_get` stores.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct pw_claim_info {
    /// `sizeof(pw_claim_info)`, which the caller sets.
    pub size: usize,
    /// The kind of work. Valid until the task is closed, as are the arguments.
    pub kind: *const c_char,
    /// The arguments.
    pub arguments: *const c_void,
    /// Their length.
    pub arguments_length: usize,
    /// The bytes of output that the submitter asked for.
    pub output_bytes: u64,
    /// How many inputs there are.
    pub inputs: u32,
    /// The number of the attempt, from 1.
    pub attempt: u32,
    /// The number of the last attempt that the task may have.
    pub max_attempts: u32,
    /// 1 while the claim stands. If it was taken back, further work is wasted.
    pub is_claimed: u8,
}

/// Stores what is known about a claimed task. Does not block.
///
/// # Safety
/// No other thread changes or closes `claim`; `info` points to a struct whose size is set.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pw_claim_info_get(claim: *const pw_claim, info: *mut pw_claim_info) -> pw_status {
    // SAFETY: the caller's promise.
    call(|| unsafe {
        let Claimed { task, kind, .. } = handle::get::<Claimed>(claim)?;
        let known = pw_claim_info {
            size: 0,
            kind: kind.as_ptr(),
            arguments: task.arguments().as_ptr().cast(),
            arguments_length: task.arguments().len(),
            output_bytes: task.output_bytes(),
            inputs: task.inputs().len() as u32,
            attempt: task.attempt().into(),
            max_attempts: task.max_attempts().into(),
            is_claimed: task.is_claimed().into(),
        };
        store_info(info, known)
    })
}

/// What `pw_claim_input_get` stores.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct pw_input_info {
    /// `sizeof(pw_input_info)`, which the caller sets.
    pub size: usize,
    /// The elements along each dimension. Valid until the task is closed.
    pub shape: *const u64,
    /// The length in bytes.
    pub bytes: u64,
    /// How many dimensions there are.
    pub rank: u32,
    /// The element type: bytes if the submitter gave none.
    pub dtype: u32,
}

/// Stores what is known about an input, counted from 0. Does not block.
///
/// # Safety
/// As `pw_claim_info_get`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pw_claim_input_get(
    claim: *const pw_claim,
    index: usize,
    info: *mut pw_input_info,
) -> pw_status {
    // SAFETY: the caller's promise.
    call(|| unsafe {
        let input = handle::get::<Claimed>(claim)?.input(index)?;
        let known = pw_input_info {
            size: 0,
            shape: input.shape().as_ptr(),
            bytes: input.len(),
            rank: input.shape().len() as u32,
            dtype: input.dtype().code().into(),
        };
        store_info(info, known)
    })
}

/// Stores the address and length of an input in host or pinned memory, for reading until the task is closed.
///
/// # Safety
/// No other thread changes or closes `claim`; `data` and `length` may be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pw_claim_input_data(
    claim: *const pw_claim,
    index: usize,
    data: *mut *const c_void,
    length: *mut usize,
) -> pw_status {
    // SAFETY: the caller's promise.
    call(|| unsafe {
        let input = handle::get::<Claimed>(claim)?.input(index)?;
        store_bytes(data, input.as_ptr()?.cast(), length, input.len())
    })
}

/// Stores the device address and length of an input, for kernels and copies that only read it. `pw_claim_wait_inputs_on`
/// orders them behind the submitter's stream.
///
/// # Safety
/// As `pw_claim_input_data`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pw_claim_input_device(
    claim: *const pw_claim,
    index: usize,
    address: *mut *const c_void,
    length: *mut usize,
) -> pw_status {
    // SAFETY: the caller's promise.
    call(|| unsafe {
        let range = handle::get::<Claimed>(claim)?.input(index)?.device()?;
        store_bytes(address, argument::address(range.device_ptr()).cast_const(), length, range.bytes())
    })
}

/// Copies `length` bytes of an input, from `offset` on, to `bytes`, from any kind of memory. Blocks until they are copied.
///
/// # Safety
/// No other thread changes or closes `claim`; `bytes` may be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pw_claim_input_read(
    claim: *const pw_claim,
    index: usize,
    offset: u64,
    bytes: *mut c_void,
    length: usize,
) -> pw_status {
    // SAFETY: the caller's promise.
    call(|| unsafe {
        let input = handle::get::<Claimed>(claim)?.input(index)?;
        Ok(input.read_at(offset, array_mut(bytes.cast(), length, "bytes")?)?)
    })
}

/// Waits until the submitter's stream has completed the inputs, up to `timeout_ns`; negative means without end.
///
/// # Safety
/// No other thread changes or closes the handle.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pw_claim_wait_inputs(claim: *const pw_claim, timeout_ns: i64) -> pw_status {
    // SAFETY: the caller's promise.
    call(|| Ok(unsafe { handle::get::<Claimed>(claim) }?.task.wait_inputs(timeout(timeout_ns))?))
}

/// Makes a stream wait until the submitter's stream has completed the inputs. Does not block. Null is the legacy default
/// stream.
///
/// # Safety
/// No other thread changes or closes `claim`; `stream` is a stream of the primary context of the queue's GPU.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pw_claim_wait_inputs_on(claim: *const pw_claim, stream: *mut c_void) -> pw_status {
    // SAFETY: the caller's promise.
    call(|| unsafe {
        let Claimed { task, domain, gpu, .. } = handle::get::<Claimed>(claim)?;
        let gpu = gpu_of(domain, *gpu)?;
        Ok(task.wait_inputs_on(argument::stream(&gpu, stream))?)
    })
}

/// Stores the address and length of the output in host or pinned memory, for writing until the task is closed.
///
/// # Safety
/// No other thread uses `claim`; `data` and `length` may be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pw_claim_output_data(
    claim: *mut pw_claim,
    data: *mut *mut c_void,
    length: *mut usize,
) -> pw_status {
    // SAFETY: the caller's promise.
    call(|| unsafe {
        let bytes = handle::get_mut::<Claimed>(claim)?.task.output_mut()?.bytes_mut()?;
        store_bytes(data, bytes.as_mut_ptr().cast(), length, bytes.len() as u64)
    })
}

/// Stores the device address and length of the output, for the caller's kernels and copies.
///
/// # Safety
/// As `pw_claim_output_data`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pw_claim_output_device(
    claim: *mut pw_claim,
    address: *mut *mut c_void,
    length: *mut usize,
) -> pw_status {
    // SAFETY: the caller's promise.
    call(|| unsafe {
        let range = handle::get_mut::<Claimed>(claim)?.task.output_mut()?.device_mut()?;
        store_bytes(address, argument::address(range.device_ptr()), length, range.bytes())
    })
}

/// Copies `length` bytes to the beginning of the output, in any kind of memory. Blocks until they are copied.
///
/// # Safety
/// No other thread uses `claim`; `bytes` may be read.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pw_claim_output_write(claim: *mut pw_claim, bytes: *const c_void, length: usize) -> pw_status {
    // SAFETY: the caller's promise.
    call(|| unsafe {
        let output = handle::get_mut::<Claimed>(claim)?.task.output_mut()?;
        Ok(output.write(array(bytes.cast(), length, "bytes")?)?)
    })
}

/// Says which type and shape the result has, if it is less than the submitter asked for.
///
/// # Safety
/// No other thread uses `claim`; `shape` has `rank` lengths.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pw_claim_output_set_tensor(
    claim: *mut pw_claim,
    element: u32,
    shape: *const u64,
    rank: usize,
) -> pw_status {
    // SAFETY: the caller's promise.
    call(|| unsafe {
        let output = handle::get_mut::<Claimed>(claim)?.task.output_mut()?;
        Ok(output.set_tensor(dtype(element)?, array(shape, rank, "shape")?)?)
    })
}

/// Moves the end of the claim to `from_now_ns` from now, in a queue with a lease; fails with `PW_GONE` if the claim was
/// taken back.
///
/// # Safety
/// No other thread changes or closes the handle.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pw_claim_extend(claim: *const pw_claim, from_now_ns: u64) -> pw_status {
    // SAFETY: the caller's promise.
    call(|| Ok(unsafe { handle::get::<Claimed>(claim) }?.task.extend(Duration::from_nanos(from_now_ns))?))
}

/// Completes a task: its output is the result. If a device address was given, first waits for the work of this process on
/// that GPU. Closes the handle, also on failure: then another worker gets the task.
///
/// # Safety
/// No other thread uses the handle.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pw_claim_complete(claim: *mut pw_claim) -> pw_status {
    call(|| Ok(handle::take::<Claimed>(claim)?.task.complete()?))
}

/// Completes a task once the work that is on `stream` now is done. Does not wait. Null is the legacy default stream. On
/// success the handle is closed; on failure the task is still the caller's.
///
/// # Safety
/// No other thread uses the handle; `stream` is a stream of the primary context of the queue's GPU.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pw_claim_complete_on(claim: *mut pw_claim, stream: *mut c_void) -> pw_status {
    call(|| {
        handle::consume(claim, |Claimed { task, kind, gpu, domain }| {
            let named = match gpu_of(&domain, gpu) {
                Ok(named) => named,
                Err(error) => return Err((error.into(), Claimed { task, kind, gpu, domain })),
            };
            // SAFETY: the caller's promise.
            let stream = unsafe { argument::stream(&named, stream) };
            task.complete_on(stream).map_err(|failed| {
                let (error, task) = *failed;
                (error.into(), Claimed { task, kind, gpu, domain })
            })
        })
    })
}

/// Fails an attempt, with a reason of which 127 bytes are kept: the task goes to another worker, or becomes a dead letter.
/// Closes the handle, unless `reason` is no text.
///
/// # Safety
/// No other thread uses `claim`; `reason` ends with a zero byte.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pw_claim_fail(claim: *mut pw_claim, reason: *const c_char) -> pw_status {
    // SAFETY: the caller's promise.
    call(|| unsafe {
        let reason = text(reason, "reason")?;
        Ok(handle::take::<Claimed>(claim)?.task.fail(reason)?)
    })
}

/// Gives a task back, which counts as an attempt. Null is ignored.
///
/// # Safety
/// No other thread uses the handle.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pw_claim_close(claim: *mut pw_claim) -> pw_status {
    call(|| handle::close::<Claimed>(claim))
}
