//! A rasteriser of kernels, and what comes before and after it in a rendering pipeline.
//!
//! Their source is `kernels/render.cu`. A pixel is a word of red, green, blue and a tag, 8 bits each.

use std::ffi::CStr;

use partywall::cuda::{
    AccessError, Context, CudaError, DeviceBuffer, DeviceSlice, Event, Function, LaunchConfig, Module, PinnedBuffer,
    StreamRef,
};

/// What is drawn, and where.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Drawing<'a> {
    /// Three words of 32 bits for each triangle: its vertices.
    pub(crate) indices: DeviceSlice<'a>,
    /// A word of 32 bits for each triangle: its colour.
    pub(crate) colours: DeviceSlice<'a>,
    /// Six words of 32 bits for each vertex: its position in 1/65,536, and its normal.
    pub(crate) vertices: DeviceSlice<'a>,
    /// The rows of a matrix of three rows and four columns, in 1/65,536.
    pub(crate) camera: &'a [i32; 12],
    /// The width and height of the whole picture, in pixels; at most 4,096 each.
    pub(crate) size: [u32; 2],
    /// The left upper corner of the tile, its width and its height, in pixels.
    pub(crate) tile: [u32; 4],
    /// Replaces the colours of all triangles.
    pub(crate) tint: Option<u32>,
    /// The fourth byte of each pixel.
    pub(crate) tag: u8,
    /// Memory for corners: [`Rasteriser::CORNER_BYTES`] for each vertex.
    pub(crate) corners: DeviceSlice<'a>,
    /// Memory for fragments: [`Rasteriser::FRAGMENT_BYTES`] for each pixel of the tile.
    pub(crate) fragments: DeviceSlice<'a>,
    /// The pixels of the tile, row by row.
    pub(crate) pixels: DeviceSlice<'a>,
}

/// The kernels, loaded into one context. `Send` and `Sync`.
#[derive(Debug)]
pub(crate) struct Rasteriser {
    turn: Function,
    project: Function,
    cover: Function,
    shade: Function,
    place: Function,
}

/// A picture that is divided into rows of tiles of about equal sizes.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Picture<'a> {
    /// Its pixels, row by row.
    pub(crate) pixels: DeviceSlice<'a>,
    /// Its width and height, in pixels; at most 4,096 each.
    pub(crate) size: [u32; 2],
    /// How many tiles are beside each other, and how many below each other; at most 16 in all. Tile `n` of `parts`
    /// begins at `length · n / parts`, rounded down.
    pub(crate) tiles: [u32; 2],
    /// The fourth byte that the pixels of each tile should have.
    pub(crate) tags: [u8; 16],
}

/// The checks of pictures on a GPU, of which several may be enqueued at a time. Only their results are copied to the
/// host.
///
/// `Send` and `Sync`.
#[derive(Debug)]
pub(crate) struct Checks {
    kernel: Function,
    /// A result for each place.
    results: DeviceBuffer,
    places: Vec<Place>,
}

#[derive(Debug)]
struct Place {
    copied: PinnedBuffer,
    done: Event,
    is_pending: bool,
}

/// What a check has found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Checked {
    /// The number of pixels whose fourth byte is not that of their tile.
    pub(crate) torn: u64,
    /// The sum of mixed pixels and their places, without the fourth bytes ([`Checks::mixed`]).
    pub(crate) sum: u64,
}

impl Rasteriser {
    /// Bytes of a vertex on the screen.
    pub(crate) const CORNER_BYTES: u64 = 16;

    /// Bytes of the nearest fragment of a pixel.
    pub(crate) const FRAGMENT_BYTES: u64 = 8;

    /// Loads them. Before any stream waits for another process.
    ///
    /// # Errors
    /// As for [`Kernels::load`](partywall::cuda::Kernels::load).
    pub(crate) fn load(context: &Context) -> Result<Self, CudaError> {
        let module = Module::from_ptx(context, PTX)?;
        let function = |name| module.function(name);
        Ok(Self {
            turn: function(c"pw_turn")?,
            project: function(c"pw_project")?,
            cover: function(c"pw_cover")?,
            shade: function(c"pw_shade")?,
            place: function(c"pw_place")?,
        })
    }

    /// Enqueues turning vectors of three words by a matrix of three rows, in 1/2^30.
    ///
    /// # Errors
    /// `turned` is shorter or read-only; memory is not aligned to 4 bytes or contains a part of a vector; the driver
    /// refuses.
    pub(crate) fn enqueue_turn(
        &self,
        stream: StreamRef<'_>,
        vectors: DeviceSlice<'_>,
        matrix: &[[i64; 3]; 3],
        turned: DeviceSlice<'_>,
    ) -> Result<(), AccessError> {
        let count = vectors.elements(4)? / 3;
        let turned = writable(turned, count * 12, 4)?;
        let mut parameters = [0; 12];
        parameters[..3].copy_from_slice(&[vectors.device_ptr(), turned.device_ptr(), count]);
        for (parameter, element) in parameters[3..].iter_mut().zip(matrix.as_flattened()) {
            *parameter = element.cast_unsigned();
        }
        // SAFETY: the parameters are those of the kernel. It reads three words of each vector and writes as many; both
        // ranges were checked.
        Ok(unsafe { launch(&self.turn, stream, shape(count), parameters) }?)
    }

    /// Enqueues a copy of a tile's pixels to its place in a picture. `tile` is its left upper corner, width and height.
    ///
    /// # Errors
    /// The tile is not in the picture; memory is too short, not aligned or, if it is written, read-only; the driver
    /// refuses.
    pub(crate) fn enqueue_place(
        &self,
        stream: StreamRef<'_>,
        pixels: DeviceSlice<'_>,
        tile: [u32; 4],
        picture: DeviceSlice<'_>,
        size: [u32; 2],
    ) -> Result<(), AccessError> {
        let [x, y, width, height] = tile.map(u64::from);
        let [picture_width, picture_height] = size.map(u64::from);
        for (end, available) in [(x + width, picture_width), (y + height, picture_height)] {
            if end > available {
                return Err(AccessError::OutOfRange { offset: 0, len: end, available });
            }
        }
        let pixels = pixels.slice(0, width * height * 4)?;
        pixels.elements(4)?;
        let picture = writable(picture, picture_width * picture_height * 4, 4)?;
        let parameters = [pixels.device_ptr(), picture.device_ptr(), picture_width, x, y, width, height];
        // SAFETY: the parameters are those of the kernel. It reads the pixels of the tile and writes as many within the
        // picture; both ranges were checked, and the tile is in the picture.
        Ok(unsafe { launch(&self.place, stream, shape(width * height), parameters) }?)
    }

    /// Enqueues drawing a tile.
    ///
    /// # Errors
    /// Memory that is too short, not aligned or, if it is written, read-only; more than 2^24 triangles; the driver
    /// refuses.
    pub(crate) fn enqueue(&self, stream: StreamRef<'_>, drawing: &Drawing<'_>) -> Result<(), AccessError> {
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
        // More blocks than for other kernels, because triangles differ in size.
        let blocks = triangles.div_ceil(u64::from(COVER_THREADS)).clamp(1, MOST_BLOCKS) as u32;
        // SAFETY: as above. It reads the indices of each triangle and corners below the count of vertices, and writes
        // fragments within the tile. The blocks have whole warps, as it demands.
        unsafe { launch(&self.cover, stream, [blocks, COVER_THREADS], cover) }?;
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
        // SAFETY: as above. It reads a fragment and writes a pixel for each pixel of the tile, and reads colours below
        // the count of triangles.
        Ok(unsafe { launch(&self.shade, stream, shape(count), shade) }?)
    }
}

impl Checks {
    /// Loads the kernel, and allocates memory for this many checks at a time. Before any stream waits for another
    /// process.
    ///
    /// # Errors
    /// As for [`Kernels::load`](partywall::cuda::Kernels::load); no memory.
    pub(crate) fn new(context: &Context, places: usize) -> Result<Self, CudaError> {
        let kernel = Module::from_ptx(context, PTX)?.function(c"pw_check")?;
        let place = |_| {
            let copied = PinnedBuffer::new(context, RESULT)?;
            Ok(Place { copied, done: Event::new(context)?, is_pending: false })
        };
        let results = DeviceBuffer::new(context, RESULT * places.max(1) as u64)?;
        Ok(Self { kernel, results, places: (0..places).map(place).collect::<Result<_, CudaError>>()? })
    }

    /// Enqueues a check, whose result comes to a place. [`finish`](Self::finish) returns it.
    ///
    /// # Errors
    /// [`AccessError::OutOfRange`] if there is no such place, or its check is not finished; memory is too short or not
    /// aligned; the sizes are 0 or too large; the driver refuses.
    pub(crate) fn enqueue(
        &mut self,
        stream: StreamRef<'_>,
        picture: &Picture<'_>,
        place: usize,
    ) -> Result<(), AccessError> {
        let out_of_range = |len, available| AccessError::OutOfRange { offset: 0, len, available };
        let available = self.places.len() as u64;
        let index = place as u64;
        let place = self.places.get_mut(place).filter(|place| !place.is_pending);
        let place = place.ok_or_else(|| out_of_range(index + 1, available))?;
        let [width, height] = picture.size.map(u64::from);
        let [columns, rows] = picture.tiles.map(u64::from);
        for (length, parts) in [(width, columns), (height, rows)] {
            if parts == 0 || parts > length || length > LONGEST {
                return Err(out_of_range(length, LONGEST));
            }
        }
        if columns * rows > MOST_TILES {
            return Err(out_of_range(columns * rows, MOST_TILES));
        }
        let pixels = picture.pixels.slice(0, width * height * 4)?;
        pixels.elements(4)?;
        let result = self.results.slice(index * RESULT, RESULT)?;
        stream.enqueue_set(result, 0)?;
        let (tags, _) = picture.tags.as_chunks();
        let [low, high] = [0, 1].map(|half: usize| u64::from_le_bytes(tags[half]));
        let parameters = [pixels.device_ptr(), width, height, columns, rows, low, high, result.device_ptr()];
        let blocks = (width * height).div_ceil(u64::from(CHECK_THREADS)).clamp(1, CHECK_BLOCKS) as u32;
        // SAFETY: the parameters are those of the kernel. It reads the pixels of the picture and adds to the two words
        // of the result; both ranges were checked. The blocks have whole warps, as it demands.
        unsafe { launch(&self.kernel, stream, [blocks, CHECK_THREADS], parameters) }?;
        // SAFETY: nothing reads or frees the memory before the copy is done: `finish` and dropping the place wait for
        // the event behind it, and without that event this waits for the stream.
        unsafe { stream.enqueue_copy_to_host(&mut place.copied, result) }?;
        place.done.record(stream).inspect_err(|_| drop(stream.synchronize()))?;
        place.is_pending = true;
        Ok(())
    }

    /// Waits for the check of a place and returns its result. The place may be used again.
    ///
    /// # Errors
    /// [`AccessError::OutOfRange`] if no check of that place was enqueued; the error of work on the stream.
    pub(crate) fn finish(&mut self, place: usize) -> Result<Checked, AccessError> {
        let available = self.places.len() as u64;
        let len = place as u64 + 1;
        let place = self.places.get_mut(place).filter(|place| place.is_pending);
        let place = place.ok_or(AccessError::OutOfRange { offset: 0, len, available })?;
        place.done.synchronize()?;
        place.is_pending = false;
        let (words, _) = place.copied.as_chunks();
        let [torn, sum] = [0, 1].map(|word: usize| u64::from_le_bytes(words[word]));
        Ok(Checked { torn, sum })
    }

    /// Returns the summand of a pixel at a place of a picture. A host that adds them up gets the same sum.
    #[must_use]
    pub(crate) fn mixed(place: u32, pixel: u32) -> u64 {
        let mixed = (u64::from(place) << 24 | u64::from(pixel & 0x00ff_ffff)).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        let mixed = (mixed ^ mixed >> 32).wrapping_mul(0xd6e8_feb8_6659_fd93);
        mixed ^ mixed >> 29
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        if self.is_pending {
            // If this fails, the context is lost, and the copy with it.
            let _ = self.done.synchronize();
        }
    }
}

/// Returns the first bytes of memory that a kernel writes.
fn writable(memory: DeviceSlice<'_>, bytes: u64, element: u64) -> Result<DeviceSlice<'_>, AccessError> {
    let memory = memory.slice(0, bytes)?;
    memory.require_writable()?;
    memory.elements(element)?;
    Ok(memory)
}

/// Launches a kernel with `blocks` blocks of `threads` threads. Its parameters are numbers and addresses of 32 or 64
/// bits.
///
/// # Safety
/// As for [`Function::launch`]. A parameter of 32 bits is the low half of its value.
unsafe fn launch<const N: usize>(
    kernel: &Function,
    stream: StreamRef<'_>,
    [blocks, threads]: [u32; 2],
    mut values: [u64; N],
) -> Result<(), CudaError> {
    const { assert!(cfg!(target_endian = "little"), "the low half of a value comes first") };
    let config = LaunchConfig { grid: [blocks, 1, 1], block: [threads, 1, 1], shared_bytes: 0 };
    // SAFETY: the caller's promise; the values outlive the call.
    unsafe { kernel.launch(stream, config, &mut values.each_mut().map(|value| std::ptr::from_mut(value).cast())) }
}

/// Returns the blocks and threads of a kernel that strides over so many elements.
fn shape(elements: u64) -> [u32; 2] {
    // At most `MOST_BLOCKS`, which is 32 bits wide.
    [elements.div_ceil(u64::from(THREADS)).clamp(1, MOST_BLOCKS) as u32, THREADS]
}

/// Bytes of the result of a check.
const RESULT: u64 = 16;

const LONGEST: u64 = 4096;
const MOST_TILES: u64 = 16;

/// A warp adds to one result, so that few of them are better.
const CHECK_BLOCKS: u64 = 512;
const CHECK_THREADS: u32 = 256;

const COVER_THREADS: u32 = 64;
const THREADS: u32 = 128;
const MOST_BLOCKS: u64 = 4096;

/// A fragment has 24 bits for the number of its triangle.
const MOST_TRIANGLES: u64 = 1 << 24;

const PTX: &CStr = match CStr::from_bytes_with_nul(concat!(include_str!("../kernels/render.ptx"), "\0").as_bytes()) {
    Ok(ptx) => ptx,
    Err(_) => panic!("the PTX contains a NUL byte"),
};

#[cfg(test)]
mod tests {
    use partywall::cuda::Access;

    use super::*;
    use crate::emulation;

    // Holds 330.
    #[test]
    fn each_kernel_is_emulated() {
        let text = PTX.to_str().unwrap();
        let names = text.split(".visible .entry ").skip(1).filter_map(|rest| rest.split('(').next());
        assert_eq!(names.collect::<Vec<_>>(), emulation::KERNELS.each_ref().map(|kernel| kernel.name));
        assert!(text.contains("\n.version 8.4\n") && text.contains("\n.target sm_70\n"), "old drivers load it");
    }

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
