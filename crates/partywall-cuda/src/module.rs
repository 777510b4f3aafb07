//! Modules of device code and the functions in them.
#![allow(unsafe_code)] // driver calls

use std::ffi::{CStr, c_void};
use std::sync::Arc;

use crate::abi::Handle;
use crate::{Context, CuResult, CudaError, StreamRef};

/// Device code that the driver has loaded into a context.
///
/// Cheap to clone; unloaded when the last clone and the last [`Function`] are gone. `Send` and `Sync`.
#[derive(Clone, Debug)]
pub struct Module {
    inner: Arc<ModuleInner>,
}

#[derive(Debug)]
struct ModuleInner {
    context: Context,
    handle: Handle,
}

/// One kernel of a module. Keeps the module loaded. `Send` and `Sync`.
#[derive(Clone, Debug)]
pub struct Function {
    module: Module,
    handle: Handle,
    name: &'static CStr,
}

/// The shape of a launch: blocks, threads in each, bytes of dynamic shared memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LaunchConfig {
    /// Blocks in x, y and z.
    pub grid: [u32; 3],
    /// Threads of a block in x, y and z.
    pub block: [u32; 3],
    /// Dynamic shared memory of a block, in bytes.
    pub shared_bytes: u32,
}

impl Module {
    /// Loads PTX text; the driver compiles it for the device, which takes milliseconds the first time and is cached by
    /// the driver after that.
    ///
    /// Load it, and get its functions, before any stream waits for another process: behind such a wait loading blocks,
    /// and under `CUDA_MODULE_LOADING=LAZY`, the default, a kernel whose function was first asked for there does not
    /// run before the wait ends (measured). Launch a kernel with local arrays once as well: its first launch waits for
    /// the context if that has too little local memory (measured).
    ///
    /// # Errors
    /// `CUDA_ERROR_UNSUPPORTED_PTX_VERSION` if the driver is older than the text, `CUDA_ERROR_INVALID_PTX`;
    /// `CUDA_ERROR_INVALID_IMAGE` if it is not text at all.
    pub fn from_ptx(context: &Context, ptx: &CStr) -> Result<Self, CudaError> {
        const CALL: &str = "cuModuleLoadData";
        // A binary image begins with other bytes; the driver would trust its internal lengths.
        if !ptx.to_bytes().iter().all(|byte| byte.is_ascii_graphic() || byte.is_ascii_whitespace()) {
            return Err(CudaError::new(CALL, CuResult::INVALID_IMAGE).with_context("PTX is plain ASCII text"));
        }
        let _guard = context.guard_relaxed()?;
        let mut handle = 0;
        // SAFETY: the image is NUL-terminated text, not a binary, and is not needed after the call.
        unsafe { context.driver().module_load_data(&mut handle, ptx.as_ptr().cast::<c_void>()) }?;
        Ok(Self { inner: Arc::new(ModuleInner { context: context.clone(), handle }) })
    }

    /// Returns the kernel of this name.
    ///
    /// # Errors
    /// `CUDA_ERROR_NOT_FOUND` if there is none.
    pub fn function(&self, name: &'static CStr) -> Result<Function, CudaError> {
        let context = &self.inner.context;
        let _guard = context.guard_relaxed()?;
        let mut handle = 0;
        // SAFETY: the module is loaded, the name is NUL-terminated, the pointer is to a live handle.
        unsafe { context.driver().module_get_function(&mut handle, self.inner.handle, name.as_ptr()) }
            .map_err(|error| error.with_context(format!("kernel {}", name.to_string_lossy())))?;
        Ok(Function { module: self.clone(), handle, name })
    }

    /// Returns the context in which the module is loaded.
    #[must_use]
    pub fn context(&self) -> &Context {
        &self.inner.context
    }
}

impl Drop for ModuleInner {
    fn drop(&mut self) {
        self.context.release(|driver| {
            // SAFETY: loaded once, unloaded once; every Function holds a clone of the Arc.
            unsafe { driver.module_unload(self.handle) }
        });
    }
}

impl Function {
    /// Enqueues the kernel on a stream. Errors of the kernel itself show up at a later call.
    ///
    /// # Errors
    /// `CUDA_ERROR_INVALID_VALUE` for a shape that the device or the kernel does not allow,
    /// `CUDA_ERROR_INVALID_HANDLE` for a stream of another context.
    ///
    /// # Safety
    /// `parameters` holds one pointer for each parameter of the kernel, in order, to a live value of that parameter's
    /// size and alignment; the driver copies the values during the call. What the kernel does with them is in bounds
    /// of memory that stays mapped until the kernel is done, and is no race with the host.
    pub unsafe fn launch(
        &self,
        stream: StreamRef<'_>,
        config: LaunchConfig,
        parameters: &mut [*mut c_void],
    ) -> Result<(), CudaError> {
        let context = self.module.context();
        let _guard = context.guard()?;
        let [grid_x, grid_y, grid_z] = config.grid;
        let [block_x, block_y, block_z] = config.block;
        // SAFETY: the function's module is loaded, the stream is live, the parameters are the caller's promise; the
        // extra array may be null.
        unsafe {
            context.driver().launch_kernel(
                self.handle,
                grid_x,
                grid_y,
                grid_z,
                block_x,
                block_y,
                block_z,
                config.shared_bytes,
                stream.handle(),
                parameters.as_mut_ptr(),
                std::ptr::null_mut(),
            )
        }
        .map_err(|error| error.with_context(format!("kernel {}", self.name.to_string_lossy())))
    }

    /// Returns the module of the function.
    #[must_use]
    pub fn module(&self) -> &Module {
        &self.module
    }

    /// Returns the name.
    #[must_use]
    pub fn name(&self) -> &'static CStr {
        self.name
    }
}
