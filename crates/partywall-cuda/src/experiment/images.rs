//! Kernels that shrink and blur images.
//!
//! The source of the kernels is `kernels/images.cu`. A pixel is a word of four channels of 8 bits.

use std::ffi::CStr;

use super::launch;
use crate::kernels::ptx;
use crate::{AccessError, Context, CudaError, DeviceSlice, Function, Module, StreamRef};

/// An image on a device: rows of pixels, one after another.
#[derive(Clone, Copy, Debug)]
pub struct Image<'a> {
    /// Memory that begins with the image.
    pub pixels: DeviceSlice<'a>,
    /// The width in pixels.
    pub width: u32,
    /// The height in pixels.
    pub height: u32,
}

/// The kernels, loaded into one context. `Send` and `Sync`.
#[derive(Debug)]
pub struct Images {
    resize: Function,
    blur: Function,
}

impl Images {
    /// The largest radius of a blur, in pixels.
    pub const MOST_RADIUS: u32 = 64;

    /// Loads the kernels. Call it before any stream waits for another process.
    ///
    /// # Errors
    /// As for [`Kernels::load`](crate::Kernels::load).
    pub fn load(context: &Context) -> Result<Self, CudaError> {
        let module = Module::from_ptx(context, PTX)?;
        Ok(Self { resize: module.function(c"pw_resize")?, blur: module.function(c"pw_blur")? })
    }

    /// Enqueues scaling `from` to the size of `to`: each pixel becomes the mean of the pixels that it covers, at least
    /// one.
    ///
    /// # Errors
    /// Memory is too short or not aligned to 4 bytes; `to` is read-only; an image has no pixels; the driver refuses.
    pub fn enqueue_resize(&self, stream: StreamRef<'_>, from: Image<'_>, to: Image<'_>) -> Result<(), AccessError> {
        let read = from.readable()?;
        let written = to.writable()?;
        let [width, height] = to.size();
        let parameters = [read, from.width.into(), from.height.into(), written, width, height];
        // SAFETY: the parameters are those of the kernel. It reads pixels of `from` and writes those of `to`, all of
        // which lie in the ranges that were checked.
        Ok(unsafe { launch(&self.resize, stream, shape(width * height), parameters) }?)
    }

    /// Enqueues blurring `from` into `to`, an image of the same size in other memory: each pixel becomes the mean of
    /// the square of pixels up to `radius` away, at most [`Images::MOST_RADIUS`].
    ///
    /// # Errors
    /// As for [`Images::enqueue_resize`]; the sizes of the images differ.
    pub fn enqueue_blur(
        &self,
        stream: StreamRef<'_>,
        from: Image<'_>,
        to: Image<'_>,
        radius: u32,
    ) -> Result<(), AccessError> {
        let read = from.readable()?;
        let written = to.writable()?;
        let [width, height] = to.size();
        if from.size() != to.size() {
            return Err(AccessError::OutOfRange { offset: 0, len: from.bytes(), available: to.bytes() });
        }
        let parameters = [read, written, width, height, radius.min(Self::MOST_RADIUS).into()];
        // SAFETY: as above; what lies outside of the image is not read.
        Ok(unsafe { launch(&self.blur, stream, shape(width * height), parameters) }?)
    }
}

impl Image<'_> {
    /// Returns its width and height.
    fn size(&self) -> [u64; 2] {
        [self.width.into(), self.height.into()]
    }

    fn bytes(&self) -> u64 {
        (u64::from(self.width) * u64::from(self.height)).saturating_mul(4)
    }

    /// Returns the address, if the memory contains the whole image.
    fn readable(&self) -> Result<u64, AccessError> {
        let image = self.pixels.slice(0, self.bytes())?;
        match image.elements(4)? {
            0 => Err(AccessError::OutOfRange { offset: 0, len: 4, available: 0 }),
            _ => Ok(image.device_ptr()),
        }
    }

    fn writable(&self) -> Result<u64, AccessError> {
        self.pixels.require_writable()?;
        self.readable()
    }
}

/// Returns the blocks and threads of a kernel that strides over this many pixels.
fn shape(pixels: u64) -> [u32; 2] {
    // At most `MOST_BLOCKS`, which is 32 bits wide.
    [pixels.div_ceil(u64::from(THREADS)).min(MOST_BLOCKS) as u32, THREADS]
}

const THREADS: u32 = 256;
const MOST_BLOCKS: u64 = 4096;

const PTX: &CStr = ptx(concat!(include_str!("../../kernels/images.ptx"), "\0"));

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Access;

    #[test]
    fn an_image_is_checked_against_its_memory() {
        let image = |bytes, width, height, access| Image {
            // SAFETY: never accessed.
            pixels: unsafe { DeviceSlice::from_raw(4096, bytes, access) },
            width,
            height,
        };
        assert_eq!(image(48, 3, 4, Access::ReadWrite).writable(), Ok(4096));
        assert!(image(47, 3, 4, Access::ReadWrite).readable().is_err(), "too short");
        assert!(image(48, 3, 0, Access::ReadWrite).readable().is_err(), "empty");
        assert_eq!(image(48, 3, 4, Access::ReadOnly).writable(), Err(AccessError::ReadOnly));
        assert_eq!(image(48, 3, 4, Access::ReadOnly).readable(), Ok(4096));
        assert!(image(48, u32::MAX, u32::MAX, Access::ReadOnly).readable().is_err(), "larger than any memory");
    }

    #[test]
    fn memory_of_other_processes_is_never_read_through_the_non_coherent_path() {
        assert!(!PTX.to_str().unwrap().contains(".nc"));
    }
}
