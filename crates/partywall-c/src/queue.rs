//! Queues, and the tasks that processes submit to them.

use std::{
    ffi::{c_char, c_int, c_void},
    os::fd::{AsFd, AsRawFd},
    sync::OnceLock,
};

use partywall::{
    Domain, Place, Queue, QueueEvent, QueueOptions, Task, TaskResult, TaskStatus, Ticket, Unsubmitted, WhenSome,
};

use crate::{
    argument::{self, array, dtype, place_or, store, store_info, store_optional, stream_gpu, structs, text, timeout},
    block::{HeldBlock, pw_block},
    domain::pw_domain,
    error::{Failure, call, pw_status},
    handle::{self, object},
};

/// A queue of tasks. Any thread may use it.
pub struct pw_queue {
    _opaque: (),
}

/// A task that was not submitted. One thread may use it at a time.
pub struct pw_task {
    _opaque: (),
}

/// A submitted task. Any thread may use it.
pub struct pw_ticket {
    _opaque: (),
}

/// A queue and the descriptor that shows the ends of its tasks, once a caller wanted one.
pub(crate) struct OpenQueue {
    pub(crate) queue: Queue,
    event: OnceLock<QueueEvent>,
}

object!(OpenQueue, pw_queue, 19, "queue");
object!(Task, pw_task, 20, "task");
object!(Ticket, pw_ticket, 21, "ticket");
structs!(pw_queue_options, pw_queue_info, pw_task_options);

/// It waits for a worker.
pub const PW_TASK_PENDING: u32 = 0;
/// A worker has claimed it.
pub const PW_TASK_CLAIMED: u32 = 1;
/// A stream of its worker will complete it.
pub const PW_TASK_ENQUEUED: u32 = 2;
/// It has a result that no process has taken.
pub const PW_TASK_DONE: u32 = 3;
/// All its attempts have failed.
pub const PW_TASK_DEAD: u32 = 4;
/// Its result was taken, or it was cancelled or purged.
pub const PW_TASK_GONE: u32 = 5;

/// How a queue is created, or what an existing one must agree with. What is zero is not set.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct pw_queue_options {
    /// `sizeof(pw_queue_options)`.
    pub size: usize,
    /// Where inputs and outputs are: "host", "pinned", "cuda:0", a GPU's UUID, "auto". Null is host memory, and any
    /// for `pw_queue_open`.
    pub device: *const c_char,
    /// The bytes of each input block.
    pub input_bytes: u64,
    /// The bytes of each output block.
    pub output_bytes: u64,
    /// How long an attempt may take before its task goes to another worker, in nanoseconds. The default is no limit.
    pub lease_ns: i64,
    /// How many input blocks there are. With 0 tasks have only arguments.
    pub inputs: u32,
    /// How many output blocks there are. With 0 tasks have no output.
    pub outputs: u32,
    /// How many tasks there may be at a time. The default is 1,024.
    pub tasks: u32,
    /// Nonzero: other users whom the broker admits may use the queue.
    pub shared: u8,
    /// Nonzero: the queue stays until it is removed or the broker ends.
    pub kept: u8,
}

unsafe fn open(
    domain: *const pw_domain,
    name: *const c_char,
    options: *const pw_queue_options,
    queue: *mut *mut pw_queue,
    unset: Option<Place>,
    open: impl FnOnce(&QueueOptions) -> partywall::Result<Queue>,
) -> pw_status {
    // SAFETY: the caller's promise.
    call(|| unsafe {
        handle::give(queue, || {
            let options = argument::options(options)?;
            let mut known = handle::get::<Domain>(domain)?.queue(text(name, "name")?);
            known = known.shared(options.shared != 0).kept(options.kept != 0);
            known = known.when_some(place_or(options.device, unset)?, QueueOptions::place);
            if options.tasks != 0 {
                known = known.tasks(options.tasks);
            }
            if (options.inputs, options.input_bytes) != (0, 0) {
                known = known.inputs(options.inputs, options.input_bytes);
            }
            if (options.outputs, options.output_bytes) != (0, 0) {
                known = known.outputs(options.outputs, options.output_bytes);
            }
            if options.lease_ns > 0 {
                known = known.lease(timeout(options.lease_ns));
            }
            Ok(OpenQueue { queue: open(&known)?, event: OnceLock::new() })
        })
    })
}

/// Creates a queue. The caller owns `*queue` and closes it with `pw_queue_close`. Fails if the name exists. Blocks for a
/// few round trips to the broker, and while the memory is allocated. Any thread may call it.
///
/// # Safety
/// No other thread closes `domain`; `name` ends with a zero byte; `options` is null or valid; `queue` may be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pw_queue_create(
    domain: *const pw_domain,
    name: *const c_char,
    options: *const pw_queue_options,
    queue: *mut *mut pw_queue,
) -> pw_status {
    // SAFETY: the caller's promise.
    unsafe { open(domain, name, options, queue, Some(Place::Host), QueueOptions::create) }
}

/// Opens a queue that exists and agrees with each option that is set. Otherwise as `pw_queue_create`.
///
/// # Safety
/// As `pw_queue_create`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pw_queue_open(
    domain: *const pw_domain,
    name: *const c_char,
    options: *const pw_queue_options,
    queue: *mut *mut pw_queue,
) -> pw_status {
    // SAFETY: the caller's promise.
    unsafe { open(domain, name, options, queue, None, QueueOptions::open) }
}

/// Opens a queue, or creates it if the name does not exist. Otherwise as `pw_queue_create`.
///
/// # Safety
/// As `pw_queue_create`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pw_queue_open_or_create(
    domain: *const pw_domain,
    name: *const c_char,
    options: *const pw_queue_options,
    queue: *mut *mut pw_queue,
) -> pw_status {
    // SAFETY: the caller's promise.
    unsafe { open(domain, name, options, queue, Some(Place::Host), QueueOptions::open_or_create) }
}

/// Closes a queue. Null is ignored.
///
/// # Safety
/// No other thread uses the handle.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pw_queue_close(queue: *mut pw_queue) -> pw_status {
    call(|| handle::close::<OpenQueue>(queue))
}

/// What `pw_queue_info_get` stores.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct pw_queue_info {
    /// `sizeof(pw_queue_info)`, which the caller sets.
    pub size: usize,
    /// The version of the name.
    pub version: u64,
    /// The bytes of each input block.
    pub input_bytes: u64,
    /// The bytes of each output block.
    pub output_bytes: u64,
    /// How many tasks there may be at a time.
    pub capacity: u32,
    /// How many tasks wait for a worker.
    pub pending: u32,
    /// How many tasks workers have claimed.
    pub claimed: u32,
    /// How many results no process has taken.
    pub done: u32,
    /// How many tasks have failed in all their attempts.
    pub dead: u32,
}

/// Stores what is known about a queue now. Takes time in proportion to its capacity.
///
/// # Safety
/// No other thread closes `queue`; `info` points to a struct whose size is set.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pw_queue_info_get(queue: *const pw_queue, info: *mut pw_queue_info) -> pw_status {
    // SAFETY: the caller's promise.
    call(|| unsafe {
        let OpenQueue { queue, .. } = handle::get::<OpenQueue>(queue)?;
        let stats = queue.stats();
        let known = pw_queue_info {
            size: 0,
            version: queue.version(),
            input_bytes: queue.input_bytes(),
            output_bytes: queue.output_bytes(),
            capacity: queue.capacity(),
            pending: stats.pending,
            claimed: stats.claimed,
            done: stats.done,
            dead: stats.dead,
        };
        store_info(info, known)
    })
}

/// Fails if the queue must not be used any more. Takes nanoseconds.
///
/// # Safety
/// No other thread closes the handle.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pw_queue_check(queue: *const pw_queue) -> pw_status {
    // SAFETY: the caller's promise.
    call(|| Ok(unsafe { handle::get::<OpenQueue>(queue) }?.queue.check()?))
}

/// Takes an input block, and waits up to `timeout_ns` for a free one; negative means without end. The caller owns
/// `*block`, and adds it to a task or closes it.
///
/// # Safety
/// No other thread closes `queue`; `block` may be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pw_queue_alloc_input(
    queue: *const pw_queue,
    timeout_ns: i64,
    block: *mut *mut pw_block,
) -> pw_status {
    // SAFETY: the caller's promise.
    call(|| unsafe {
        handle::give(block, || {
            Ok(HeldBlock(handle::get::<OpenQueue>(queue)?.queue.inputs().alloc(timeout(timeout_ns))?))
        })
    })
}

/// Stores a file descriptor for `poll` and `epoll` that becomes readable when tasks have ended. Then call
/// `pw_queue_fd_clear`, and look at the tickets. It belongs to the queue, and is closed with it.
///
/// # Safety
/// No other thread closes `queue`; `fd` may be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pw_queue_fd(queue: *const pw_queue, fd: *mut c_int) -> pw_status {
    // SAFETY: the caller's promise.
    call(|| unsafe { store(fd, event(handle::get::<OpenQueue>(queue)?)?.as_fd().as_raw_fd(), "fd") })
}

/// Makes the descriptor of a queue unreadable until further tasks end. Does not block.
///
/// # Safety
/// No other thread closes the handle.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pw_queue_fd_clear(queue: *const pw_queue) -> pw_status {
    // SAFETY: the caller's promise.
    call(|| Ok(event(unsafe { handle::get::<OpenQueue>(queue) }?)?.clear()?))
}

fn event(opened: &OpenQueue) -> Result<&QueueEvent, Failure> {
    match opened.event.get() {
        Some(event) => Ok(event),
        None => {
            let event = opened.queue.event()?;
            Ok(opened.event.get_or_init(|| event))
        }
    }
}

/// What a task has besides its kind and inputs. What is zero has its default.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct pw_task_options {
    /// `sizeof(pw_task_options)`.
    pub size: usize,
    /// The arguments for the worker, which are copied: at most 512 bytes.
    pub arguments: *const c_void,
    /// Their length.
    pub arguments_length: usize,
    /// The bytes of output; not with `output_dtype`.
    pub output_bytes: u64,
    /// The shape of the output, with `output_dtype`.
    pub output_shape: *const u64,
    /// How many dimensions `output_shape` has.
    pub output_rank: u32,
    /// The element type of the output.
    pub output_dtype: u32,
    /// How often the task may be attempted, up to 255 times. The default is 3.
    pub max_attempts: u32,
    /// Nonzero: the task ends with the process that submitted it.
    pub cancel_with_submitter: u8,
}

/// Makes a task of a kind that workers know, at most 32 bytes. `options` may be null. The caller owns `*task`, and
/// submits or closes it. Does not block.
///
/// # Safety
/// `kind` ends with a zero byte; `options` is null or valid; `task` may be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pw_task_create(
    kind: *const c_char,
    options: *const pw_task_options,
    task: *mut *mut pw_task,
) -> pw_status {
    // SAFETY: the caller's promise.
    call(|| unsafe {
        handle::give(task, || {
            let options = argument::options(options)?;
            let arguments = array(options.arguments.cast(), options.arguments_length, "arguments")?;
            let mut known = Task::new(text(kind, "kind")?).arguments(arguments).output(options.output_bytes);
            known = known.cancel_with_submitter(options.cancel_with_submitter != 0);
            if options.output_dtype != 0 {
                let shape = array(options.output_shape, options.output_rank as usize, "output_shape")?;
                known = known.output_tensor(dtype(options.output_dtype)?, shape);
            }
            if options.max_attempts != 0 {
                // What is more than 255 is as invalid as 0, about which the library has a sentence.
                known = known.max_attempts(u8::try_from(options.max_attempts).unwrap_or(0));
            }
            Ok(known)
        })
    })
}

/// Adds an input block of the queue, or the range or tensor in it that was set. A task has at most 8. On success the
/// block is closed.
///
/// # Safety
/// No other thread uses `task` or `block`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pw_task_input(task: *mut pw_task, block: *mut pw_block) -> pw_status {
    call(|| {
        // SAFETY: the caller's promise.
        let task = unsafe { handle::get_mut::<Task>(task) }?;
        let HeldBlock(block) = handle::take(block)?;
        *task = std::mem::replace(task, Task::new("")).input(block);
        Ok(())
    })
}

/// Drops a task that is not to be submitted, and gives its inputs back. Null is ignored.
///
/// # Safety
/// No other thread uses the handle.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pw_task_close(task: *mut pw_task) -> pw_status {
    call(|| handle::close::<Task>(task))
}

unsafe fn submit(
    task: *mut pw_task,
    ticket: *mut *mut pw_ticket,
    submit: impl FnOnce(Task) -> Result<Ticket, Box<Unsubmitted>>,
) -> Result<(), Failure> {
    // SAFETY: the caller's promise.
    unsafe {
        handle::give(ticket, || {
            handle::consume(task, |task: Task| {
                submit(task).map_err(|mut refused| (refused.error.into(), refused.tasks.swap_remove(0)))
            })
        })
    }
}

/// Submits a task whose inputs are complete, and waits up to `timeout_ns` until the queue has room; negative means
/// without end. The caller owns `*ticket`.
///
/// On success the task is closed. On failure it is still the caller's, with its inputs.
///
/// # Safety
/// No other thread closes `queue` or uses `task`; `ticket` may be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pw_queue_submit(
    queue: *const pw_queue,
    task: *mut pw_task,
    timeout_ns: i64,
    ticket: *mut *mut pw_ticket,
) -> pw_status {
    // SAFETY: the caller's promise.
    call(|| unsafe {
        let OpenQueue { queue, .. } = handle::get::<OpenQueue>(queue)?;
        submit(task, ticket, |task| queue.submit(task, timeout(timeout_ns)))
    })
}

/// Submits a task whose inputs are complete once the work that is on `stream` now is done. Null is the legacy default
/// stream. Otherwise as `pw_queue_submit`.
///
/// # Safety
/// As `pw_queue_submit`; `stream` is a stream of the primary context of the queue's GPU.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pw_queue_submit_on(
    queue: *const pw_queue,
    task: *mut pw_task,
    stream: *mut c_void,
    timeout_ns: i64,
    ticket: *mut *mut pw_ticket,
) -> pw_status {
    // SAFETY: the caller's promise.
    call(|| unsafe {
        let OpenQueue { queue, .. } = handle::get::<OpenQueue>(queue)?;
        let gpu = stream_gpu(queue.domain(), queue.gpu())?;
        submit(task, ticket, |task| queue.submit_on(task, argument::stream(&gpu, stream), timeout(timeout_ns)))
    })
}

/// Waits until a task is done, up to `timeout_ns`, and takes its result; negative means without end. The caller owns
/// `*output`, which is null for a task without output, and closes it. `attempt` may be null. Fails with
/// `PW_INVALID_DATA` if all attempts have failed, with the reason in the message.
///
/// # Safety
/// No other thread closes `ticket`; `output` may be written; `attempt` is null or may be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pw_ticket_wait(
    ticket: *const pw_ticket,
    timeout_ns: i64,
    output: *mut *mut pw_block,
    attempt: *mut u32,
) -> pw_status {
    // SAFETY: the caller's promise.
    call(|| unsafe {
        handle::give_some(output, || {
            let result = handle::get::<Ticket>(ticket)?.wait(timeout(timeout_ns))?;
            store_optional(attempt, result.attempt().into());
            Ok(result.into_output().map(HeldBlock))
        })
    })
}

/// Takes the result of a task that is done: as `pw_ticket_wait`, and `*attempt` is its number, from 1. If the task is not
/// done, stores 0 in `*attempt` and null in `*output`, which is no failure. Does not block.
///
/// # Safety
/// As `pw_ticket_wait`; `attempt` may be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pw_ticket_try_take(
    ticket: *const pw_ticket,
    output: *mut *mut pw_block,
    attempt: *mut u32,
) -> pw_status {
    // SAFETY: the caller's promise.
    call(|| unsafe {
        argument::check_out(attempt, "attempt")?;
        handle::give_some(output, || {
            let result = handle::get::<Ticket>(ticket)?.try_take()?;
            store(attempt, result.as_ref().map_or(0, |result| result.attempt().into()), "attempt")?;
            Ok(result.and_then(TaskResult::into_output).map(HeldBlock))
        })
    })
}

/// Stores the state of a task: a constant `PW_TASK_…`. Does not block.
///
/// # Safety
/// No other thread closes `ticket`; `status` may be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pw_ticket_status(ticket: *const pw_ticket, status: *mut u32) -> pw_status {
    // SAFETY: the caller's promise.
    call(|| unsafe {
        let known = match handle::get::<Ticket>(ticket)?.status() {
            TaskStatus::Pending => PW_TASK_PENDING,
            TaskStatus::Claimed { .. } => PW_TASK_CLAIMED,
            TaskStatus::Enqueued { .. } => PW_TASK_ENQUEUED,
            TaskStatus::Done => PW_TASK_DONE,
            TaskStatus::Dead => PW_TASK_DEAD,
            _ => PW_TASK_GONE,
        };
        store(status, known, "status")
    })
}

/// Cancels a task unless a worker has claimed it: then it fails with `PW_BUSY`. Does not block.
///
/// # Safety
/// No other thread closes the handle.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pw_ticket_cancel(ticket: *const pw_ticket) -> pw_status {
    // SAFETY: the caller's promise.
    call(|| Ok(unsafe { handle::get::<Ticket>(ticket) }?.cancel()?))
}

/// Drops a ticket. The task goes on, and its result waits until a process takes it. Null is ignored.
///
/// # Safety
/// No other thread uses the handle.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pw_ticket_close(ticket: *mut pw_ticket) -> pw_status {
    call(|| handle::close::<Ticket>(ticket))
}
