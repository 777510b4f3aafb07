//! Detection of GPUs.
//!
//! It calls the driver directly, through three of its functions. A fault in the layers above can therefore not make a
//! GPU look absent, which would skip every test.

#![allow(unsafe_code)]

use std::error::Error;
use std::ffi::{CStr, c_char, c_int, c_uint};
use std::path::Path;

use libloading::Library;
use partywall::cuda;
use serde::{Deserialize, Serialize};

/// The name of the driver's library, unless the environment names another one.
const LIBRARY: &str = "libcuda.so.1";
/// A symbol that only the simulated driver has.
const SIMULATED: &CStr = c"simcuda_version";
/// `CUDA_ERROR_NO_DEVICE`
const NO_DEVICE: c_int = 100;
/// The device node that every use of a GPU needs. Without it no GPU is usable, even if a driver is installed.
const CONTROL_NODE: &str = "/dev/nvidiactl";

/// The GPUs of this machine.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct GpuFacts {
    /// The name of the first GPU.
    pub(crate) name: String,
    /// The number of GPUs.
    pub(crate) count: usize,
    /// The version of the kernel driver, or `unknown`.
    pub(crate) driver: String,
    /// True if the driver is simulated.
    pub(crate) simulated: bool,
}

/// The result of looking for GPUs.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum Found {
    /// At least one GPU.
    Gpu(GpuFacts),
    /// No GPU, with the evidence.
    Nothing(String),
}

/// Looks for GPUs. An error means that a GPU exists but its driver cannot be used. That is a fault to report, not a
/// reason to skip tests.
pub(crate) fn probe() -> Result<Found, String> {
    let library = match open_driver() {
        Ok(library) => library,
        // A library named in the environment takes precedence.
        Err(reason) if std::env::var_os(cuda::Driver::LIBRARY_VARIABLE).is_some() => return Err(reason),
        Err(reason) => return Ok(Found::Nothing(reason)),
    };
    let init: unsafe extern "C" fn(c_uint) -> c_int = function(&library, c"cuInit")?;
    let count_devices: unsafe extern "C" fn(*mut c_int) -> c_int = function(&library, c"cuDeviceGetCount")?;
    let name_of: unsafe extern "C" fn(*mut c_char, c_int, c_int) -> c_int = function(&library, c"cuDeviceGetName")?;

    // SAFETY: looked up as an address, and never called.
    let simulated = unsafe { library.get::<*const ()>(SIMULATED) }.is_ok();

    // SAFETY: cuInit takes flags, which must be 0, and may be called at any time.
    match unsafe { init(0) } {
        0 => {}
        NO_DEVICE => return Ok(Found::Nothing("the driver finds no GPU".to_owned())),
        code if !simulated && !Path::new(CONTROL_NODE).exists() => {
            return Ok(Found::Nothing(format!("{LIBRARY} is here but {CONTROL_NODE} is not (cuInit: {code})")));
        }
        code => return Err(failed("cuInit", code)),
    }

    let mut count = 0;
    // SAFETY: `count` is a valid place for one int, and cuInit has succeeded.
    match unsafe { count_devices(&raw mut count) } {
        0 => {}
        code => return Err(failed("cuDeviceGetCount", code)),
    }
    let count = usize::try_from(count).unwrap_or(0);
    if count == 0 {
        return Ok(Found::Nothing("the driver shows no GPU to this process".to_owned()));
    }

    let mut name: [c_char; 256] = [0; 256];
    // SAFETY: `name` has room for the 255 bytes allowed, device 0 exists, and a CUdevice from
    // cuDeviceGet is the ordinal itself.
    match unsafe { name_of(name.as_mut_ptr(), 255, 0) } {
        0 => {}
        code => return Err(failed("cuDeviceGetName", code)),
    }
    // SAFETY: the driver wrote at most 255 bytes into zeroed 256, so a zero byte ends them.
    let name = unsafe { CStr::from_ptr(name.as_ptr()) };

    let driver = if simulated { "simulated".to_owned() } else { kernel_driver() };
    Ok(Found::Gpu(GpuFacts { name: name.to_string_lossy().into_owned(), count, driver, simulated }))
}

/// Returns the driver's library, freshly opened.
pub(crate) fn open_driver() -> Result<Library, String> {
    let name = std::env::var_os(cuda::Driver::LIBRARY_VARIABLE).unwrap_or_else(|| LIBRARY.into());
    // SAFETY: loading runs the library's initialisers, which are safe at any time and on any thread: every CUDA program
    // begins so. A simulated driver does nothing there.
    let opened = unsafe { Library::new(&name) };
    opened.map_err(|error| format!("{} cannot be opened: {}", name.display(), cause(&error)))
}

fn function<F: Copy>(library: &Library, name: &CStr) -> Result<F, String> {
    // SAFETY: the callers give the types that the driver API documents for these names, and the
    // driver's ABI is stable. The pointers are used only while `library` is open.
    let found = unsafe { library.get::<F>(name) };
    let name = name.to_string_lossy();
    found
        .map(|symbol| *symbol)
        .map_err(|error| format!("{LIBRARY} has no {name}: {error}; it is not NVIDIA's driver, or is too old"))
}

/// Returns the message of the dynamic linker; libloading's own message only names the call.
fn cause(error: &libloading::Error) -> String {
    error.source().map_or_else(|| error.to_string(), ToString::to_string)
}

fn failed(call: &str, code: c_int) -> String {
    format!("{call} failed with {code} although {CONTROL_NODE} is here; does nvidia-smi work?")
}

fn kernel_driver() -> String {
    let read = |path| std::fs::read_to_string(path).ok();
    read("/sys/module/nvidia/version")
        .or_else(|| read("/proc/driver/nvidia/version"))
        .and_then(|text| version(&text))
        .unwrap_or_else(|| "unknown".to_owned())
}

/// Returns the first word that looks like `580.159.03`. One file contains nothing else; the other contains it in a
/// sentence.
fn version(text: &str) -> Option<String> {
    text.split_whitespace()
        .find(|word| {
            word.contains('.')
                && word.split('.').all(|part| !part.is_empty() && part.bytes().all(|b| b.is_ascii_digit()))
        })
        .map(str::to_owned)
}

#[cfg(test)]
mod unit {
    use super::*;

    #[test]
    fn the_driver_version_is_found_in_either_file() {
        let prose = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.159.03  Release Build\n\
                     GCC version:  gcc version 12.2.0\n";
        assert_eq!(version(prose).unwrap(), "580.159.03");
        assert_eq!(version("550.54.14\n").unwrap(), "550.54.14");
        assert_eq!(version("no version here. at all\n"), None);
    }
}
