//! Modules of PTX text, their functions, and launches.
//!
//! The text is not compiled: it only provides the names of the kernels and the local memory that they need. The
//! emulation of a kernel is looked up by its name.
//!
//! As measured, the following waits for pending work of the context: loading a module, always; a kernel whose function
//! was first looked up while the work was pending, except with `CUDA_MODULE_LOADING=EAGER`; a launch, if the kernel
//! needs more local memory than any before it.

use std::collections::BTreeMap;
use std::ffi::{CStr, c_char, c_void};
use std::sync::{Arc, LazyLock, Mutex, MutexGuard, OnceLock};

use partywall_os::lock::IgnorePoison;

use crate::abi::{Code, Handle};
use crate::context::{self, Ctx};
use crate::entry::{entry_points, store};
use crate::kernel::{self, Kernel};
use crate::queue::Ticket;
use crate::{capture, entry, ledger, stream};

struct Module {
    /// The functions, by name; each has its handle from the beginning.
    functions: BTreeMap<String, Handle>,
}

struct Function {
    context: Arc<Ctx>,
    name: String,
    kernel: Option<&'static Kernel>,
    /// The local memory of a thread, in bytes.
    local_bytes: u64,
    /// The points after which its code is on the device: the work that was pending when the function was first looked
    /// up.
    loaded: OnceLock<Vec<Ticket>>,
}

struct Modules {
    modules: BTreeMap<Handle, Module>,
    functions: BTreeMap<Handle, Arc<Function>>,
}

static MODULES: Mutex<Modules> = Mutex::new(Modules { modules: BTreeMap::new(), functions: BTreeMap::new() });

fn lock() -> MutexGuard<'static, Modules> {
    MODULES.lock().ignore_poison()
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
    let code = without_comments(text);
    let names = entries(&code)?;
    stream::synchronize(&context)?;
    let handle = entry::new_handle();
    let mut modules = lock();
    let mut functions = BTreeMap::new();
    for name in names {
        let handle = entry::new_handle();
        let kernel = kernel::find(&name);
        let local_bytes = local_bytes(&code, &name);
        let loaded = OnceLock::new();
        let function = Function { context: context.clone(), name: name.clone(), kernel, local_bytes, loaded };
        modules.functions.insert(handle, Arc::new(function));
        functions.insert(name, handle);
    }
    modules.modules.insert(handle, Module { functions });
    ledger::record(LEDGER, handle as u64, 0);
    store(module, handle)
}

fn without_comments(text: &str) -> String {
    text.lines().map(|line| line.split("//").next().unwrap_or_default()).collect::<Vec<_>>().join(" ")
}

/// Returns the names of the kernels in PTX text without comments.
///
/// # Errors
/// `INVALID_IMAGE` for text that does not begin as PTX does, `UNSUPPORTED_PTX_VERSION` if it is newer than the driver,
/// `INVALID_PTX` if it has an error that can be seen without compiling it.
fn entries(code: &str) -> Result<Vec<String>, Code> {
    let words = declarations(code);
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

/// Returns the words outside of bodies and lists of parameters: directives, each followed by what it names.
fn declarations(code: &str) -> Vec<String> {
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

/// Returns the bytes of local memory that a thread of the kernel needs: arrays of bytes, as compilers declare it.
fn local_bytes(code: &str, kernel: &str) -> u64 {
    let is_it = |part: &&str| {
        let behind = part.trim_start().strip_prefix(kernel);
        behind.is_some_and(|rest| rest.trim_start().starts_with(['(', '{']))
    };
    let array = |statement: &str| {
        let (_, declared) = statement.split_once(".local .")?;
        declared.split_once('[')?.1.split_once(']')?.0.trim().parse::<u64>().ok()
    };
    code.split(".entry").find(is_it).unwrap_or_default().split(';').filter_map(array).sum()
}

impl Function {
    fn loaded(&self) -> &Vec<Ticket> {
        static EAGER: LazyLock<bool> =
            LazyLock::new(|| std::env::var("CUDA_MODULE_LOADING").is_ok_and(|mode| mode == "EAGER"));
        self.loaded.get_or_init(|| if *EAGER { Vec::new() } else { stream::pending(&self.context) })
    }
}

/// Returns whether the device takes a launch of this shape; limits as its attributes have them.
fn check_shape(grid: [u32; 3], block: [u32; 3], shared_bytes: u32) -> Result<(), Code> {
    let within = |shape: [u32; 3], most: [u32; 3]| (0..3).all(|i| (1..=most[i]).contains(&shape[i]));
    let threads: u64 = block.iter().map(|&threads| u64::from(threads)).product();
    let fits = within(grid, [i32::MAX as u32, 65535, 65535]) && within(block, [1024, 1024, 64]) && threads <= 1024;
    if fits && shared_bytes <= 48 << 10 { Ok(()) } else { Err(Code::INVALID_VALUE) }
}

entry_points! {
    fn cuLaunchHostFunc(stream: Handle, function: Option<unsafe extern "C" fn(*mut c_void)>, data: *mut c_void) {
        let function = function.ok_or(Code::INVALID_VALUE)?;
        let data = data as usize;
        stream::find(stream)?.submit(move |_| {
            // SAFETY: the caller of cuLaunchHostFunc passed a function for this argument, both valid until it ran.
            unsafe { function(data as *mut c_void) };
            Ok(())
        })?;
        Ok(())
    }
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
        let found = *module.functions.get(name).ok_or(Code::NOT_FOUND)?;
        modules.functions[&found].loaded();
        store(function, found)
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
            eprintln!("the simulated CUDA driver cannot run the kernel {}: it knows Partywall's own, and those of the \
                       program that contains it, with their parameters passed one by one", function.name);
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
        if function.context.grows_local_memory(function.local_bytes) { stream::synchronize(&function.context)?; }
        stream.submit(move |runner| {
            function.loaded().iter().for_each(Ticket::wait);
            runner.context().check()?;
            (kernel.run)(runner, &values)
        })?;
        Ok(())
    }
}

/// The version of PTX that CUDA 13.0 has.
const PTX_VERSION: (u32, u32) = (9, 0);

const LEDGER: &str = "module";

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kernels_are_found_in_the_text() {
        let names = entries(&without_comments(include_str!("../../partywall-cuda/kernels/partywall.ptx"))).unwrap();
        assert_eq!(names, ["pw_fill", "pw_verify", "pw_double", "pw_read"]);
        let labs = entries(&without_comments(include_str!("../../partywall-cuda/kernels/lab.ptx"))).unwrap();
        assert_eq!(labs.len(), 10);
        let images = entries(&without_comments(include_str!("../../partywall-cuda/kernels/images.ptx"))).unwrap();
        assert_eq!(images, ["pw_resize", "pw_blur"]);
        let mut all = names.iter().chain(&labs).chain(&images);
        assert!(all.all(|name| kernel::find(name).is_some()), "each is emulated");
    }

    #[test]
    fn other_text_is_refused() {
        assert_eq!(entries("no code at all"), Err(Code::INVALID_IMAGE));
        assert_eq!(entries(&without_comments("// .version 8.4\n.target sm_70")), Err(Code::INVALID_IMAGE));
        assert_eq!(entries(".version none"), Err(Code::INVALID_PTX));
        assert_eq!(entries(".version 8.4\n.address_size 64\nnonsense"), Err(Code::INVALID_PTX));
        assert_eq!(entries(".version 99.0\n.entry f("), Err(Code::UNSUPPORTED_PTX_VERSION));
        let code = without_comments(".version 8.4\n// .entry f()\n.entry g() { ret; }\n");
        assert_eq!(entries(&code), Ok(vec!["g".to_owned()]));
    }

    #[test]
    fn local_memory_of_a_kernel_is_read() {
        let code = ".version 8.4 .entry f() { ret; } .entry ff () { .local .align 16 .b8 a[40]; .local .b8 b[2]; \
                    ld.local.u32 %r1, [%rd2]; }";
        assert_eq!((local_bytes(code, "f"), local_bytes(code, "ff")), (0, 42));
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
