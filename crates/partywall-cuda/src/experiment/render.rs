//! A rasteriser of kernels.
//!
//! Their source is `kernels/render.cu`. A pixel is a word of red, green, blue and a tag, 8 bits each.

use std::ffi::CStr;

use super::launch;
use crate::kernels::ptx;
use crate::{AccessError, Context, CudaError, DeviceSlice, Function, Module, StreamRef};

/// What is drawn, and where.
#[derive(Clone, Copy, Debug)]
pub struct Drawing<'a> {
    /// Three words of 32 bits for each triangle: its vertices.
    pub indices: DeviceSlice<'a>,
    /// A word of 32 bits for each triangle: its colour.
    pub colours: DeviceSlice<'a>,
    /// Six words of 32 bits for each vertex: its position in 1/65,536, and its normal.
    pub vertices: DeviceSlice<'a>,
    /// The rows of a matrix of three rows and four columns, in 1/65,536.
    pub camera: &'a [i32; 12],
    /// The width and height of the whole picture, in pixels; at most 4,096 each.
    pub size: [u32; 2],
    /// The left upper corner of the tile, its width and its height, in pixels.
    pub tile: [u32; 4],
    /// Replaces the colours of all triangles.
    pub tint: Option<u32>,
    /// The fourth byte of each pixel.
    pub tag: u8,
    /// Memory for corners: [`Rasteriser::CORNER_BYTES`] for each vertex.
    pub corners: DeviceSlice<'a>,
    /// Memory for fragments: [`Rasteriser::FRAGMENT_BYTES`] for each pixel of the tile.
    pub fragments: DeviceSlice<'a>,
    /// The pixels of the tile, row by row.
    pub pixels: DeviceSlice<'a>,
}

/// The kernels, loaded into one context. `Send` and `Sync`.
#[derive(Debug)]
pub struct Rasteriser {
    project: Function,
    cover: Function,
    shade: Function,
}

impl Rasteriser {
    /// Bytes of a vertex on the screen.
    pub const CORNER_BYTES: u64 = 16;

    /// Bytes of the nearest fragment of a pixel.
    pub const FRAGMENT_BYTES: u64 = 8;

    /// Loads them. Before any stream waits for another process.
    ///
    /// # Errors
    /// As for [`Kernels::load`](crate::Kernels::load).
    pub fn load(context: &Context) -> Result<Self, CudaError> {
        let module = Module::from_ptx(context, PTX)?;
        let function = |name| module.function(name);
        Ok(Self { project: function(c"pw_project")?, cover: function(c"pw_cover")?, shade: function(c"pw_shade")? })
    }

    /// Enqueues drawing a tile.
    ///
    /// # Errors
    /// Memory that is too short, not aligned or, if it is written, read-only; more than 2^24 triangles; the driver refuses.
    pub fn enqueue(&self, stream: StreamRef<'_>, drawing: &Drawing<'_>) -> Result<(), AccessError> {
        let [x, y, width, height] = drawing.tile.map(u64::from);
        let count = width * height;
        let vertices = drawing.vertices.elements(4)? / 6;
        let triangles = drawing.indices.elements(4)? / 3;
        if triangles > MOST_TRIANGLES {
            return Err(AccessError::OutOfRange { offset: 0, len: triangles, available: MOST_TRIANGLES });
        }
        drawing.colours.slice(0, triangles * 4)?.elements(4)?;
        let corners = writable(drawing.corners, vertices * Self::CORNER_BYTES, 8)?;
        let fragments = writable(drawing.fragments, count * Self::FRAGMENT_BYTES, 8)?;
        let pixels = writable(drawing.pixels, count * 4, 4)?;
        stream.enqueue_set(fragments, 0)?;
        let [picture_width, picture_height] = drawing.size.map(u64::from);
        let mut project = [0; 17];
        project[..5].copy_from_slice(&[
            drawing.vertices.device_ptr(),
            corners.device_ptr(),
            vertices,
            picture_width,
            picture_height,
        ]);
        for (parameter, element) in project[5..].iter_mut().zip(drawing.camera) {
            *parameter = element.cast_unsigned().into();
        }
        // SAFETY: the parameters are those of the kernel. It reads six words of each vertex and writes its corner; both
        // ranges were checked.
        unsafe { launch(&self.project, stream, shape(vertices), project) }?;
        let [corners, fragments] = [corners.device_ptr(), fragments.device_ptr()];
        let indices = drawing.indices.device_ptr();
        let cover = [corners, vertices, indices, triangles, fragments, x, y, width, height];
        // SAFETY: as above. It reads the indices of each triangle and corners below the count of vertices, and writes
        // fragments within the tile.
        unsafe { launch(&self.cover, stream, shape(triangles), cover) }?;
        let tint = drawing.tint;
        let shade = [
            fragments,
            drawing.colours.device_ptr(),
            triangles,
            pixels.device_ptr(),
            count,
            tint.is_some().into(),
            tint.unwrap_or_default().into(),
            drawing.tag.into(),
        ];
        // SAFETY: as above. It reads a fragment and writes a pixel for each pixel of the tile, and reads colours below the
        // count of triangles.
        Ok(unsafe { launch(&self.shade, stream, shape(count), shade) }?)
    }
}

/// Returns the first bytes of memory that a kernel writes.
fn writable(memory: DeviceSlice<'_>, bytes: u64, element: u64) -> Result<DeviceSlice<'_>, AccessError> {
    let memory = memory.slice(0, bytes)?;
    memory.require_writable()?;
    memory.elements(element)?;
    Ok(memory)
}

/// Returns the blocks and threads of a kernel that strides over so many elements.
fn shape(elements: u64) -> [u32; 2] {
    // At most `MOST_BLOCKS`, which is 32 bits wide.
    [elements.div_ceil(u64::from(THREADS)).clamp(1, MOST_BLOCKS) as u32, THREADS]
}

const THREADS: u32 = 128;
const MOST_BLOCKS: u64 = 4096;

/// A fragment has 24 bits for the number of its triangle.
const MOST_TRIANGLES: u64 = 1 << 24;

const PTX: &CStr = ptx(concat!(include_str!("../../kernels/render.ptx"), "\0"));

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Access;

    #[test]
    fn memory_that_a_kernel_writes_is_checked() {
        // SAFETY: never accessed.
        let memory = |address, bytes, access| unsafe { DeviceSlice::from_raw(address, bytes, access) };
        assert!(writable(memory(4096, 64, Access::ReadWrite), 64, 8).is_ok());
        assert!(writable(memory(4096, 63, Access::ReadWrite), 64, 8).is_err(), "too short");
        assert!(writable(memory(4100, 64, Access::ReadWrite), 64, 8).is_err(), "not aligned");
        assert_eq!(writable(memory(4096, 64, Access::ReadOnly), 64, 8), Err(AccessError::ReadOnly));
    }

    #[test]
    fn memory_of_other_processes_is_never_read_through_the_non_coherent_path() {
        assert!(!PTX.to_str().unwrap().contains(".nc"));
    }
}
