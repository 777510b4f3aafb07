//! Images that kernels make smaller and blur.
//!
//! Their source is `kernels/images.cu`. A pixel is a word of four channels of 8 bits.

use std::ffi::CStr;

use super::launch;
use crate::kernels::ptx;
use crate::{AccessError, Context, CudaError, DeviceSlice, Function, Module, StreamRef};

/// An image on a device: rows of pixels, one behind the other.
#[derive(Clone, Copy, Debug)]
pub struct Image<'a> {
    /// Its first bytes are the image.
    pub pixels: DeviceSlice<'a>,
    /// In pixels.
    pub width: u32,
    /// In pixels.
    pub height: u32,
}

/// The kernels, loaded into one context. `Send` and `Sync`.
#[derive(Debug)]
pub struct Images {
    resize: Function,
    blur: Function,
}

impl Images {
    /// The farthest that a blur reaches.
    pub const MOST_RADIUS: u32 = 64;

    /// Loads them. Before any stream waits for another process.
    ///
    /// # Errors
    /// As for [`Kernels::load`](crate::Kernels::load).
    pub fn load(context: &Context) -> Result<Self, CudaError> {
        let module = Module::from_ptx(context, PTX)?;
        Ok(Self { resize: module.function(c"pw_resize")?, blur: module.function(c"pw_blur")? })
    }

    /// Enqueues making `to` of `from`, in the size of `to`: each pixel is the mean of those that it covers, of one at
    /// least.
    ///
    /// # Errors
    /// Memory that is too short, not aligned to 4 bytes or, of `to`, read-only; an image without pixels; the driver
    /// refuses.
    pub fn enqueue_resize(&self, stream: StreamRef<'_>, from: Image<'_>, to: Image<'_>) -> Result<(), AccessError> {
        let read = from.readable()?;
        let written = to.writable()?;
        let [width, height] = to.size();
        let parameters = [read, from.width.into(), from.height.into(), written, width, height];
        // SAFETY: the parameters are those of the kernel. It reads pixels of `from` and writes those of `to`, all of
        // which lie in the ranges that were checked.
        Ok(unsafe { launch(&self.resize, stream, shape(width * height), parameters) }?)
    }

    /// Enqueues making `to` of `from`, which is as large and other memory: each pixel is the mean of the square around it
    /// that reaches `radius` pixels far, at most [`Images::MOST_RADIUS`].
    ///
    /// # Errors
    /// As for [`Images::enqueue_resize`]; images of different sizes.
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

    /// Its address, if all of it is there.
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

/// Returns the blocks and threads of a kernel that strides over so many pixels.
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
