//! Segments of Partywall as Vulkan memory, and its timelines as Vulkan semaphores.
//!
//! A process that renders with Vulkan uses a segment of another process in place: [`Gpu::import`] imports each chunk
//! once, and [`ImportedMemory::buffer`] makes a `VkBuffer` at a tensor. GPU memory of CUDA arrives as `OPAQUE_FD`, host
//! memory by `VK_EXT_external_memory_host`. No CUDA is needed in the process.
//!
//! A pool or topic that is open is imported once in the same way, from `pool.descriptors()`. A buffer of one of its
//! blocks borrows the block ([`ImportedMemory::block`]), so the block stays with its holder as long as the buffer
//! lives.
//!
//! [`FollowedTimeline`] is a timeline semaphore of this process that follows a timeline, so that enqueued work of
//! Vulkan waits for other processes. [`SignalledTimeline`] signals a timeline once enqueued work of Vulkan is done. No
//! semaphore crosses a process: a wait for one ends when its writer is killed, as every wait of Partywall does.
//!
//! ```no_run
//! use std::time::Duration;
//! use partywall::Domain;
//! use partywall_vulkan::{Gpu, ash::vk};
//!
//! let domain = Domain::connect()?;
//! let gpu = Gpu::open(None)?; // a device of its own; `Gpu::adopt` takes yours
//! let weights = gpu.import(domain.descriptors("mesh", Duration::from_secs(10))?)?;
//! let vertices = weights.buffer("vertices", vk::BufferUsageFlags::VERTEX_BUFFER)?;
//! let frames = gpu.follow(domain.timeline("frames")?)?;
//! let (semaphore, value) = frames.wait(7)?; // give both to a submission that draws `vertices.handle()`
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! # Rules
//!
//! - **Import once.** An import takes about 25 ms for each GiB on an H200; a buffer costs nothing.
//! - **Vulkan keeps nothing alive.** As with any Vulkan object, drop a buffer, an import or a timeline when the work
//!   that uses it is done. An import unmaps its memory and then gives the lease back.
//! - **GPU memory is imported on its own GPU**, matched by UUID. Host memory is imported on any.
//! - **A frozen version is for reading.** Vulkan has no read-only import: buffers that only serve for writing are
//!   refused, and shaders must not write. In host memory a write crashes the process. A driver that imports no
//!   read-only mapping, as NVIDIA's, gets a copy of frozen host memory instead.
//! - After a fork, the child's objects do nothing, and Vulkan cannot be used there.
//!
//! Khronos does not promise that Vulkan imports what CUDA exports, and NVIDIA's driver does it (measured on an H200
//! with driver 580.159.04). Elsewhere an import that the driver refuses is [`Error::Vulkan`].
#![cfg_attr(test, allow(clippy::unwrap_used))] // tests
#![deny(unsafe_code)]

mod error;
#[allow(unsafe_code, reason = "calls of Vulkan")]
mod gpu;
#[allow(unsafe_code, reason = "calls of Vulkan")]
mod memory;
#[allow(unsafe_code, reason = "calls of Vulkan")]
pub mod probe;
#[allow(unsafe_code, reason = "calls of Vulkan")]
mod timeline;

pub use ash;

pub use self::{
    error::{Error, Result},
    gpu::Gpu,
    memory::{BlockBuffer, Buffer, ImportedMemory},
    timeline::{FollowedTimeline, SignalledTimeline},
};
