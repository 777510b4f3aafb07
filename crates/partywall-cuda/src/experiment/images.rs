//! Images that kernels make smaller and blur.
//!
//! Their source is `kernels/images.cu`. A pixel is a word of four channels of 8 bits.

use std::ffi::{CStr, c_void};
use std::fmt;

use crate::{AccessError, Context, CudaError, DeviceSlice, Function, LaunchConfig, Module, StreamRef};

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
        let mut read = from.readable()?;
        let mut written = to.writable()?;
        let mut from = (from.width, from.height);
        let mut to = (to.width, to.height);
        let parameters = &mut [
            (&raw mut read).cast(),
            (&raw mut from.0).cast(),
            (&raw mut from.1).cast(),
            (&raw mut written).cast(),
            (&raw mut to.0).cast(),
            (&raw mut to.1).cast(),
        ];
        // SAFETY: the parameters are those of the kernel. It reads pixels of `from` and writes those of `to`, all of
        // which lie in the ranges that were checked.
        unsafe { launch(&self.resize, stream, u64::from(to.0) * u64::from(to.1), parameters) }
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
        let mut read = from.readable()?;
        let mut written = to.writable()?;
        if (from.width, from.height) != (to.width, to.height) {
            return Err(AccessError::OutOfRange { offset: 0, len: from.bytes(), available: to.bytes() });
        }
        let mut width = to.width;
        let mut height = to.height;
        let mut radius = radius.min(Self::MOST_RADIUS);
        let parameters = &mut [
            (&raw mut read).cast(),
            (&raw mut written).cast(),
            (&raw mut width).cast(),
            (&raw mut height).cast(),
            (&raw mut radius).cast(),
        ];
        // SAFETY: as above; what lies outside of the image is not read.
        unsafe { launch(&self.blur, stream, u64::from(width) * u64::from(height), parameters) }
    }
}

impl fmt::Debug for Images {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Images").finish_non_exhaustive()
    }
}

impl Image<'_> {
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

/// Launches a kernel that strides over `pixels`.
///
/// # Safety
/// As for [`Function::launch`].
unsafe fn launch(
    kernel: &Function,
    stream: StreamRef<'_>,
    pixels: u64,
    parameters: &mut [*mut c_void],
) -> Result<(), AccessError> {
    let blocks = pixels.div_ceil(u64::from(THREADS)).min(MOST_BLOCKS);
    let config = LaunchConfig { grid: [blocks as u32, 1, 1], block: [THREADS, 1, 1], shared_bytes: 0 };
    // SAFETY: the caller's promise.
    Ok(unsafe { kernel.launch(stream, config, parameters) }?)
}

const THREADS: u32 = 256;
const MOST_BLOCKS: u64 = 4096;

/// The checked-in PTX, closed by the NUL that the driver looks for.
const PTX: &CStr = match CStr::from_bytes_with_nul(concat!(include_str!("../../kernels/images.ptx"), "\0").as_bytes()) {
    Ok(ptx) => ptx,
    Err(_) => panic!("the PTX contains a NUL byte"),
};

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
