//! The compiled half of the Python package: the library's objects as Python classes, and its memory as DLPack tensors,
//! CUDA arrays and buffers. Users call the other half, in `python/src/partywall`.
//!
//! | module | contains |
//! |---|---|
//! | `domain`, `watch` | the connection, and events of names |
//! | `build`, `segment`, `descriptors` | segments; these and those below are one file for each Python object |
//! | `pool`, `block`, `queue`, `task`, `attachment`, `ticket`, `enqueued` | pools and queues |
//! | `topic`, `publisher`, `subscriber`, `sample` | topics |
//! | `timeline`, `semaphore` | timelines and semaphores |
//! | `tensor` | a tensor of any of these, as other libraries take it |
//! | `exported` | the base class of objects that other libraries take as an array |
//! | `memory` | reading and writing what a tensor is of |
//! | `owner` | what tensors keep alive |
//! | `part` | claims of tasks, and the memory of their inputs and outputs |
//! | `dlpack` | capsules out, and the C structs of DLPack |
//! | `exchange` | tensors in by DLPack's C interface |
//! | `ranges` | addresses of tensors, to find whose memory a library is about to write |
//! | `source` | capsules and buffers in |
//! | `refusal` | why an object cannot be taken |
//! | `heap` | memory for the allocators of torch and cupy |
//! | `members` | rows of listings |
//! | `value` | values, which are dataclasses of Python |
//! | `arguments` | types, shapes, places and numbers as Python writes them |
//! | `stream` | streams of other libraries |
//! | `handle` | what Python closes, or only drops |
//! | `hint` | types of objects, for type checkers |
//! | `hold` | segments that stay open for a time |
//! | `errors` | the library's errors as Python's |
//! | `wait` | waits that release the GIL and obey Ctrl-C |
//! | `reaper` | a thread for releases that may block |
//! | `doctor` | `partywall.doctor` |

#![allow(clippy::too_many_arguments, reason = "functions for Python take its keyword arguments one by one")]

mod arguments;
mod attachment;
mod block;
mod build;
mod descriptors;
mod dlpack;
mod doctor;
mod domain;
mod enqueued;
mod errors;
mod exchange;
mod exported;
mod graph;
mod handle;
mod heap;
mod hint;
mod hold;
mod ipc_handle;
mod members;
mod memory;
mod owner;
mod part;
mod pool;
mod publisher;
mod queue;
mod ranges;
mod reaper;
mod refusal;
mod sample;
mod segment;
mod semaphore;
mod source;
mod stream;
mod subscriber;
mod task;
mod tensor;
mod ticket;
mod timeline;
mod topic;
mod value;
mod wait;
mod watch;

/// The compiled half of the package.
#[allow(unsafe_code, reason = "asking Python which interpreter this is")]
#[pyo3::pymodule(name = "_native")]
mod native {
    use pyo3::{exceptions::PyImportError, ffi, prelude::*};

    #[pymodule_export]
    use crate::{
        attachment::{Attachment, SegmentPart},
        block::Block,
        build::{Build, Claim},
        descriptors::Descriptors,
        doctor::examine,
        domain::Domain,
        enqueued::EnqueuedResult,
        exchange::work_stream,
        exported::Exported,
        graph::{GraphNode, launch},
        heap::Heap,
        hold::Hold,
        ipc_handle::IpcHandle,
        pool::Pool,
        publisher::{Loan, Publisher},
        queue::Queue,
        ranges::read_only_at,
        reaper::flush,
        sample::Sample,
        segment::{Pinned, Segment},
        semaphore::{Permit, Semaphore},
        source::Source,
        subscriber::{Subscriber, SubscriberEvent},
        task::{ClaimedTask, Claims, TaskBytes},
        tensor::Tensor,
        ticket::{QueueEvent, TaskResult, Ticket},
        timeline::{LimitedWait, Timeline, TimelineEvent},
        topic::Topic,
        wait::checked_timeout,
        watch::Watch,
    };

    #[pymodule_export]
    const VERSION: &str = partywall::VERSION;
    #[pymodule_export]
    const MAX_INPUTS: usize = partywall::MAX_INPUTS;

    /// The module's statics belong to one interpreter. Python itself refuses interpreters with a GIL of their own.
    #[pymodule_init]
    fn refuse_subinterpreters() -> PyResult<()> {
        // SAFETY: this thread has the GIL, so its interpreter is alive.
        match unsafe { ffi::PyInterpreterState_GetID(ffi::PyInterpreterState_Get()) } {
            0 => Ok(()),
            _ => Err(PyImportError::new_err(
                "partywall works in the main interpreter only: start a process in place of a subinterpreter",
            )),
        }
    }
}
