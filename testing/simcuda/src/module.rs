//! Modules of PTX text, their functions, and launches.
//!
//! The text is not compiled: it gives the names of the kernels, and what a kernel does is looked up by its name.

use std::collections::BTreeMap;
use std::ffi::{CStr, c_char, c_void};
use std::sync::{Arc, LazyLock, Mutex, MutexGuard, Once, PoisonError};

use crate::abi::{Code, Handle};
use crate::context::{self, Ctx};
use crate::entry::{entry_points, store};
use crate::kernel::{self, Kernel};
use crate::{capture, ledger, state, stream};

struct Module {
    /// By name; each has its handle from the beginning.
    functions: BTreeMap<String, Handle>,
}

struct Function {
    context: Arc<Ctx>,
    name: String,
    kernel: Option<&'static Kernel>,
    /// Its code is on the device: from the first launch on, or at once if `CUDA_MODULE_LOADING=EAGER`.
    loaded: Once,
}

struct Modules {
    modules: BTreeMap<Handle, Module>,
    functions: BTreeMap<Handle, Arc<Function>>,
}

static MODULES: Mutex<Modules> = Mutex::new(Modules { modules: BTreeMap::new(), functions: BTreeMap::new() });

fn lock() -> MutexGuard<'static, Modules> {
    MODULES.lock().unwrap_or_else(PoisonError::into_inner)
}

/// # Safety
/// As for `cuModuleLoadData`: `image` begins with a binary's first four bytes, or is NUL-terminated text.
unsafe fn load(module: *mut Handle, image: *const c_void) -> Result<(), Code> {
    let context = context::current()?;
    capture::unsafe_call()?;
    if module.is_null() || image.is_null() {
        return Err(Code::INVALID_VALUE);
    }
    // SAFETY: the first byte is there by the promise of the caller.
    let first = unsafe { image.cast::<u8>().read() };
    if !first.is_ascii_graphic() && !first.is_ascii_whitespace() {
        return Err(Code::INVALID_IMAGE);
    }
    // SAFETY: no binary, therefore NUL-terminated text.
    let text = unsafe { CStr::from_ptr(image.cast()) }.to_str().map_err(|_| Code::INVALID_PTX)?;
    let names = entries(text)?;
    let handle = state::new_handle();
    let mut modules = lock();
    let mut functions = BTreeMap::new();
    for name in names {
        let function = state::new_handle();
        let kernel = kernel::find(&name);
        modules.functions.insert(
            function,
            Arc::new(Function { context: context.clone(), name: name.clone(), kernel, loaded: Once::new() }),
        );
        functions.insert(name, function);
    }
    modules.modules.insert(handle, Module { functions });
    ledger::record(LEDGER, handle as u64, 0);
    store(module, handle)
}

/// The names of the kernels in PTX text.
///
/// # Errors
/// `INVALID_IMAGE` for text that does not begin as PTX does, `UNSUPPORTED_PTX_VERSION` if it is newer than the driver,
/// `INVALID_PTX` if it has an error that can be seen without compiling it.
fn entries(text: &str) -> Result<Vec<String>, Code> {
    let words = declarations(text);
    let Some((".version", version)) = words.first().map(String::as_str).zip(words.get(1)) else {
        return Err(Code::INVALID_IMAGE);
    };
    let number = |text: &str| text.parse::<u32>().map_err(|_| Code::INVALID_PTX);
    let (major, minor) = version.split_once('.').ok_or(Code::INVALID_PTX)?;
    if (number(major)?, number(minor)?) > PTX_VERSION {
        return Err(Code::UNSUPPORTED_PTX_VERSION);
    }
    let pairs = || words.iter().zip(&words[1..]);
    if pairs().any(|(word, next)| !word.starts_with('.') && !next.starts_with('.')) {
        return Err(Code::INVALID_PTX);
    }
    Ok(pairs().filter(|(word, _)| *word == ".entry").map(|(_, name)| name.clone()).collect())
}

/// The words outside of comments, bodies and lists of parameters: directives, each followed by what it names.
fn declarations(text: &str) -> Vec<String> {
    let code = text.lines().map(|line| line.split("//").next().unwrap_or_default()).collect::<Vec<_>>().join(" ");
    let mut depth = 0_u32;
    let outside = code.chars().map(|character| {
        match character {
            '(' | '{' => depth += 1,
            ')' | '}' => depth = depth.saturating_sub(1),
            _ if depth == 0 => return character,
            _ => {}
        }
        ' '
    });
    outside.collect::<String>().split_whitespace().map(str::to_owned).collect()
}

impl Function {
    /// Loading the code waits for the whole context: behind a wait that nobody ends, for ever.
    fn load(&self) -> Result<(), Code> {
        static EAGER: LazyLock<bool> =
            LazyLock::new(|| std::env::var("CUDA_MODULE_LOADING").is_ok_and(|mode| mode == "EAGER"));
        if !*EAGER {
            self.loaded.call_once(|| stream::drain(&self.context));
        }
        self.context.check()
    }
}

/// Whether the device takes a launch of this shape; limits as its attributes have them.
fn check_shape(grid: [u32; 3], block: [u32; 3], shared_bytes: u32) -> Result<(), Code> {
    let within = |shape: [u32; 3], most: [u32; 3]| (0..3).all(|i| (1..=most[i]).contains(&shape[i]));
    let threads: u64 = block.iter().map(|&threads| u64::from(threads)).product();
    let fits = within(grid, [i32::MAX as u32, 65535, 65535]) && within(block, [1024, 1024, 64]) && threads <= 1024;
    if fits && shared_bytes <= 48 << 10 { Ok(()) } else { Err(Code::INVALID_VALUE) }
}

entry_points! {
    fn cuModuleLoadData(module: *mut Handle, image: *const c_void) {
        // SAFETY: the contract of the function.
        unsafe { load(module, image) }
    }
    fn cuModuleLoadDataEx(
        module: *mut Handle, image: *const c_void, _count: u32, _options: *const u32, _values: *const *mut c_void,
    ) {
        // SAFETY: the contract of the function. The options are those of a compiler that is not there.
        unsafe { load(module, image) }
    }
    fn cuModuleUnload(module: Handle) {
        let context = context::current()?;
        capture::unsafe_call()?;
        let mut modules = lock();
        let unloaded = modules.modules.remove(&module).ok_or(Code::INVALID_HANDLE)?;
        for function in unloaded.functions.values() {
            modules.functions.remove(function);
        }
        ledger::remove(LEDGER, module as u64);
        context.check()
    }
    fn cuModuleGetFunction(function: *mut Handle, module: Handle, name: *const c_char) {
        context::current()?;
        if function.is_null() || name.is_null() {
            return Err(Code::INVALID_VALUE);
        }
        // SAFETY: not null, and NUL-terminated by the contract of the function.
        let name = unsafe { CStr::from_ptr(name) }.to_str().map_err(|_| Code::NOT_FOUND)?;
        let modules = lock();
        let module = modules.modules.get(&module).ok_or(Code::INVALID_HANDLE)?;
        store(function, *module.functions.get(name).ok_or(Code::NOT_FOUND)?)
    }
    fn cuLaunchKernel(
        function: Handle,
        grid_x: u32, grid_y: u32, grid_z: u32,
        block_x: u32, block_y: u32, block_z: u32,
        shared_bytes: u32, stream: Handle,
        parameters: *mut *mut c_void, extra: *mut *mut c_void,
    ) {
        let stream = stream::find(stream)?;
        let function = lock().functions.get(&function).cloned().ok_or(Code::INVALID_HANDLE)?;
        if !Arc::ptr_eq(&function.context, stream.context()) {
            return Err(Code::INVALID_HANDLE);
        }
        check_shape([grid_x, grid_y, grid_z], [block_x, block_y, block_z], shared_bytes)?;
        let Some(kernel) = function.kernel.filter(|_| extra.is_null()) else {
            eprintln!("the simulated CUDA driver cannot run the kernel {}: it knows Partywall's own, with their \
                       parameters passed one by one", function.name);
            return Err(Code::NOT_SUPPORTED);
        };
        if parameters.is_null() {
            return Err(Code::INVALID_VALUE);
        }
        let values = kernel.parameters.iter().enumerate().map(|(index, size)| {
            // SAFETY: the caller passes one pointer for each parameter, to a value of its size and alignment.
            unsafe {
                let parameter = parameters.add(index).read();
                if *size == 4 { u64::from(parameter.cast::<u32>().read()) } else { parameter.cast::<u64>().read() }
            }
        });
        let values: Vec<u64> = values.collect();
        function.load()?;
        stream.submit(move |runner| (kernel.run)(runner, &values))?;
        Ok(())
    }
}

/// That of CUDA 13.0.
const PTX_VERSION: (u32, u32) = (9, 0);

const LEDGER: &str = "module";

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kernels_are_found_in_the_text() {
        let names = entries(include_str!("../../../kernels/partywall.ptx")).unwrap();
        assert_eq!(names, ["pw_fill", "pw_verify", "pw_double", "pw_read"]);
        assert!(names.iter().all(|name| kernel::find(name).is_some()), "each is emulated");
    }

    #[test]
    fn other_text_is_refused() {
        assert_eq!(entries("no code at all"), Err(Code::INVALID_IMAGE));
        assert_eq!(entries("// .version 8.4\n.target sm_70"), Err(Code::INVALID_IMAGE));
        assert_eq!(entries(".version none"), Err(Code::INVALID_PTX));
        assert_eq!(entries(".version 8.4\n.address_size 64\nnonsense"), Err(Code::INVALID_PTX));
        assert_eq!(entries(".version 99.0\n.entry f("), Err(Code::UNSUPPORTED_PTX_VERSION));
        assert_eq!(entries(".version 8.4\n// .entry f()\n.entry g() { ret; }\n"), Ok(vec!["g".to_owned()]));
    }

    #[test]
    fn shapes_have_limits() {
        assert_eq!(check_shape([1, 1, 1], [1024, 1, 1], 0), Ok(()));
        for (grid, block, shared) in [
            ([0, 1, 1], [1, 1, 1], 0),
            ([1, 65536, 1], [1, 1, 1], 0),
            ([1, 1, 1], [1, 1, 0], 0),
            ([1, 1, 1], [1025, 1, 1], 0),
            ([1, 1, 1], [512, 4, 1], 0),
            ([1, 1, 1], [1, 1, 65], 0),
            ([1, 1, 1], [1, 1, 1], 1 << 20),
        ] {
            assert_eq!(check_shape(grid, block, shared), Err(Code::INVALID_VALUE), "{grid:?} {block:?} {shared}");
        }
    }
}
