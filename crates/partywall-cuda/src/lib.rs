//! The CUDA driver for Partywall: entry points, results, and safe owners of shareable memory, streams and kernels.
//!
//! The crates above share GPU memory between processes by name. This crate knows no names, no processes
//! and no policy. It builds and runs without CUDA installed: the driver is loaded at run time, and a missing driver
//! is an error ([`LoadError`]), never a panic.
//!
//! ```no_run
//! use partywall_cuda::{Access, Context, Device, Driver, Kernels, Mapping, PhysicalMemory, Stream, round_up};
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let device = Device::by_ordinal(Driver::load()?, 0)?;
//! let context = Context::retain(device)?;
//! let kernels = Kernels::load(&context)?; // before any stream waits for another process
//!
//! let bytes = round_up(1 << 20, PhysicalMemory::granularity(&context)?).ok_or("too large")?;
//! let memory = PhysicalMemory::create(&context, bytes)?;
//! let descriptor = memory.export()?; // for another process
//! let mapping = Mapping::new(memory, Access::ReadWrite)?;
//!
//! let stream = Stream::new(&context)?;
//! kernels.enqueue_fill(stream.as_ref(), mapping.as_slice())?;
//! assert_eq!(kernels.verify(stream.as_ref(), mapping.as_slice(), 1)?, None);
//! # drop(descriptor);
//! # Ok(())
//! # }
//! ```
//!
//! # Modules
//!
//! There are three levels. At the bottom are the table of entry points and the numbers of the binary interface. Above
//! it, each entry point is a checked method that returns a [`CudaError`] with the name of the call. On top are the
//! owners, one module a noun, which are the public interface.
//!
//! | module | owns |
//! |---|---|
//! | `table` | [`Driver`]: the library and its entry points |
//! | `abi` | structs and constants of the driver's binary interface, held against generated bindings by tests |
//! | `result` | [`CuResult`], [`CudaError`]: codes stay numbers, errors name their call |
//! | `device`, `uuid` | [`Device`]: the GPUs of this process, and [`DeviceUuid`], their identity across processes |
//! | `context` | [`Context`]: the retained primary context, and guards that make it current on any thread |
//! | `physical` | [`PhysicalMemory`]: memory that travels as a file descriptor |
//! | `mapping` | [`Mapping`]: such memory at an address of this process, and more of it behind; [`Reservation`]: its addresses alone |
//! | `node` | [`NodeMemory`], [`NodeMapping`]: the same for host memory that the driver makes on a NUMA node, for the CPU and every GPU |
//! | `allocation`, `parts` | what the four have in common: handles and descriptors, parts in a range of addresses |
//! | `ipc` | [`IpcMemoryHandle`], [`IpcMapping`]: memory of `cuMemAlloc` in another process |
//! | `register` | [`HostRegistration`]: shared host memory that the GPU reaches |
//! | `foreign` | [`ForeignMemory`]: memory that other code allocated, and what keeps it |
//! | `pointer` | [`PointerInfo`]: what kind of memory an address is of |
//! | `slice` | [`DeviceSlice`], [`AccessError`]: checked ranges, and requests that do not fit |
//! | `buffer` | [`DeviceBuffer`], [`PinnedBuffer`]: memory of this process alone |
//! | `stream`, `event` | [`Stream`], [`StreamRef`], [`CurrentStream`], [`Event`]: order, copies, host functions, times |
//! | [`memop`] | a stream writes a word or waits for one: order between processes; whether that works here |
//! | `graph` | [`Graph`], [`GraphRef`], [`WordNode`]: graphs whose memory operations take a word and value for each launch |
//! | `ipc_event` | [`IpcEvent`], [`IpcEventHandle`]: events of several processes, for code that uses them |
//! | `experiment` | calls that sharing code must not make, for labs and for tests of the driver (feature `experiment`) |
//! | `cudarc_slice` | `CudarcSlice`: cudarc's streams in, its views out (feature `cudarc`) |
//! | `upload` | [`Upload`]: filling device memory from the host at full speed |
//! | `module`, [`kernels`] | [`Module`], [`Function`], [`Kernels`]: device code, and the embedded kernels |
//!
//! # Rules that hold everywhere
//!
//! - Every owner keeps its [`Context`] alive and frees on drop. `Drop` never panics; what it fails at is kept for
//!   [`Context::take_drop_error`]. Memory of a NUMA node has no context: [`Driver::take_drop_error`].
//! - Any thread may call anything: each call makes its context current and restores what was before. Calls that
//!   allocate, import, map or load do so in relaxed stream-capture mode, so that they spoil no capture of another
//!   thread.
//! - Device memory is never a Rust reference, because other processes may change it at any time. Memory of a NUMA node
//!   is one where nobody else writes it by agreement: see [`NodeUse`].
//! - A `Drop`, an allocation, loading a module or a kernel's first launch may wait for work that is running. None of
//!   them belongs behind a wait for another process.
//!
//! # Limits
//!
//! Linux with 64 bits; device memory on one GPU an owner; no managed memory, pools, multicast or fabric handles; of
//! graphs only what `graph` has. What the driver does was measured on H200 with driver 580, where "measured" is said;
//! else it is what the vendor's documentation says.

mod abi;
mod allocation;
mod buffer;
mod context;
#[cfg(feature = "cudarc")]
mod cudarc_slice;
mod device;
mod event;
#[cfg(feature = "experiment")]
pub mod experiment;
mod foreign;
mod graph;
mod ipc;
mod ipc_event;
pub mod kernels;
mod mapping;
pub mod memop;
mod module;
mod node;
mod parts;
mod physical;
mod pointer;
mod register;
mod result;
mod slice;
mod stream;
mod table;
mod upload;
mod uuid;

pub use allocation::{MemoryPlace, shared_allocations};
pub use buffer::{DeviceBuffer, PinnedBuffer};
pub use context::{Context, ContextGuard};
#[cfg(feature = "cudarc")]
pub use cudarc_slice::CudarcSlice;
pub use device::{ComputeMode, Device, DeviceAttribute};
pub use event::Event;
pub use foreign::ForeignMemory;
pub use graph::{Graph, GraphRef, RawGraph, RawGraphExec, WordNode};
pub use ipc::{IpcMapping, IpcMemoryHandle};
pub use ipc_event::{IpcEvent, IpcEventHandle};
pub use kernels::Kernels;
pub use mapping::{Access, Mapping, ReplaceError, Reservation};
pub use module::{Function, LaunchConfig, Module};
pub use node::{NodeImportError, NodeMapping, NodeMemory, NodeReservation, NodeUse, NodeWriter};
pub use parts::Extension;
pub use physical::{PhysicalMemory, round_up};
pub use pointer::{PointerInfo, PointerKind};
pub use register::HostRegistration;
pub use result::{CuResult, CudaError, MemoryInfo};
pub use slice::{AccessError, DeviceSlice};
pub use stream::{CurrentStream, RawStream, Stream, StreamId, StreamRef};
pub use table::{Driver, DriverVersion, LoadError};
pub use upload::Upload;
pub use uuid::{DeviceUuid, ParseUuidError};

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn owners_are_send_and_sync() {
        const fn anywhere<T: Send + Sync>() {}
        const {
            anywhere::<Context>();
            anywhere::<Device>();
            anywhere::<PhysicalMemory>();
            anywhere::<Mapping>();
            anywhere::<NodeMemory>();
            anywhere::<NodeMapping>();
            anywhere::<DeviceSlice<'_>>();
            anywhere::<DeviceBuffer>();
            anywhere::<IpcMapping>();
            anywhere::<HostRegistration>();
            anywhere::<PointerInfo>();
            anywhere::<PinnedBuffer>();
            anywhere::<Stream>();
            anywhere::<Upload>();
            anywhere::<StreamRef<'_>>();
            anywhere::<Event>();
            anywhere::<WordNode>();
            anywhere::<IpcEvent>();
            anywhere::<Module>();
            anywhere::<Function>();
            anywhere::<Kernels>();
            anywhere::<CudaError>();
            anywhere::<AccessError>();
        };
    }

    #[test]
    fn guards_stay_on_their_thread() {
        // Compiles only while `ContextGuard` is not `Send`: with `Send` both implementations would apply.
        trait AmbiguousIfSend<A> {
            fn check() {}
        }
        impl<T: ?Sized> AmbiguousIfSend<()> for T {}
        struct IsSend;
        impl<T: ?Sized + Send> AmbiguousIfSend<IsSend> for T {}
        <ContextGuard<'_> as AmbiguousIfSend<_>>::check();
    }
}
