//! A CUDA driver in software: the entry points of `libcuda.so.1` that Partywall uses, without a GPU.
//!
//! The program `partywall-lab` contains it ([`link()`]) and uses it if `PARTYWALL_LIBCUDA` is `simulated`. Other
//! programs load `libsimcuda.so` for that, which `testing/simcuda` builds from it and tests name by its path. It is
//! never used otherwise, and the library does not depend on it. A program that contains it has no symbol with a name of
//! the vendor's driver.
//!
//! It returns the same error codes as the vendor's driver, as far as these were measured on an H200 with driver 580 or
//! are documented by the vendor; the driver facts check both drivers against one list.
//!
//! Device memory is a memfd, so that processes can share it like real device memory. A device address is reserved
//! without access, so that a CPU that dereferences it crashes as with a GPU; the simulation uses a second mapping of
//! the memory. The machine has two NUMA nodes, to which the devices belong by turns; their memory can be shared as
//! well, and the CPU uses it at its device address once it has been given access. Behaviour that cannot be simulated
//! faithfully (time, time slices, MPS) is not simulated.
//!
//! | variable | what it sets |
//! |---|---|
//! | `SIMCUDA_DEVICES` | the number of devices of the machine (1, in the program `partywall-lab` 2) |
//! | `CUDA_VISIBLE_DEVICES` | those that the process sees, by index or UUID (all) |
//! | `SIMCUDA_MEMORY` | bytes of each device that the process may allocate, also with K, M or G (1G) |
//! | `SIMCUDA_NODE_MEMORY` | bytes of each NUMA node that the process may allocate by `cuMemCreate` (1G) |
//! | `SIMCUDA_LOSSES` | a file; each line in it is a loss of memory, as by a reset: what was allocated before cannot be imported. A device's number on the machine stands for the device, whose contexts fail from then on, and `node 0` for a NUMA node |
//! | `SIMCUDA_MPS` | 1: the devices say that the process is a client of MPS, which changes nothing else (0) |
//! | `SIMCUDA_DELAY` | the longest random pause before each operation of a stream, in microseconds (0) |
//! | `SIMCUDA_SEED` | repeats the pauses (0) |
//! | `SIMCUDA_CALLS` | a file that takes a line for each call: `PID INDEX FUNCTION CODE` |
//! | `SIMCUDA_FAULTS` | calls that fail or kill: `cuMemMap:3=2,*:17=kill` |
//! | `SIMCUDA_APART` | the name of threads whose calls are neither counted nor logged, and do not fail |
//! | `SIMCUDA_LEDGER` | a directory for `PID.json`, what a process leaves behind when it ends |
//!
//! | module | what it holds |
//! |---|---|
//! | `abi` | result codes, handles, structs and constants of `cuda.h` |
//! | `entry` | the one wrapper that every function goes through: log, injected faults, panics |
//! | [`functions`] | the list of all functions |
//! | `faults` | what `SIMCUDA_FAULTS` asks for |
//! | `ledger` | what exists and which call made it; written when the process ends |
//! | `device` | the devices, and what they say of themselves |
//! | `budget` | the memory of a device or a NUMA node |
//! | `context` | contexts, the stack of each thread, faults that stay |
//! | `primary` | the first and the last reference to a context |
//! | `stream` | streams: handles, default streams, what comes after what |
//! | `queue` | the thread of a stream, its pauses, and points in its work |
//! | `capture` | stream capture: what it forbids, and the graph that it records |
//! | `graph` | graphs: their nodes, instantiation, launches |
//! | `event` | events, in this process and between processes |
//! | `memop` | stream memory operations |
//! | `copy` | copies and fills |
//! | `module` | modules of PTX, their functions, launches |
//! | `kernel` | Partywall's kernels, and those that a program adds ([`add_kernels`]) |
//! | `ipc` | 64-byte handles that another process turns into a descriptor |
//! | `threads` | threads that the program's signals do not reach |
//! | `memory` | backings, the address space, access as a stream has it |
#![allow(unsafe_code)] // a C library: raw pointers in, mappings of memory behind them
#![allow(non_snake_case)] // the names of cuda.h
#![allow(clippy::missing_safety_doc)] // the contract of each function is the vendor's

mod abi;
mod budget;
mod capture;
mod context;
mod copy;
mod device;
mod entry;
mod event;
mod faults;
pub mod functions;
mod graph;
mod ipc;
mod kernel;
mod ledger;
mod memop;
mod memory;
mod module;
mod primary;
mod queue;
mod stream;
#[cfg(test)]
mod tests;
mod threads;

pub use abi::Code;
pub use kernel::{Kernel, add_kernels};
pub use memory::{HostRange, Want};
pub use queue::Runner;

/// Makes `PARTYWALL_LIBCUDA=simulated` choose this driver in the whole process, with two devices if `SIMCUDA_DEVICES`
/// is not set. Call it before any code loads the driver.
pub fn link() {
    device::set_default_count(2);
    // SAFETY: the functions have the signatures of `cuda.h` and are part of the program.
    unsafe { partywall_cuda::Driver::link_simulated(functions::find) };
}
