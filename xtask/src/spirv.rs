//! `cargo xtask spirv`: compiles `*/*/kernels/*.comp` to the SPIR-V beside them, or compares with what is checked in.
//!
//! The compiler is Debian 12's `glslangValidator`. Another version may write other bytes for the same shader, so that
//! nothing is compared with it.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use crate::tools::{self, Workspace, cannot_read};

const COMPILER: &str = "glslangValidator";
/// The beginning of what the compiler prints about itself.
const VERSION: &str = "Glslang Version: 11:12.0.0";
const OPTIONS: [&str; 5] = ["-V", "--target-env", "vulkan1.2", "-g0", "--quiet"];

/// The result of comparing the checked-in SPIR-V.
pub(crate) enum CheckOutcome {
    /// This many shaders compile to the SPIR-V beside them.
    Passed(usize),
    /// These do not.
    Differs(Vec<PathBuf>),
    /// Nothing was compared, with the reason.
    Skipped(String),
}

/// Compiles every shader and writes its SPIR-V beside it.
///
/// # Errors
/// The compiler is not available, a shader does not compile, or a file cannot be read or written.
pub(crate) fn regenerate(workspace: &Workspace) -> Result<(), String> {
    require_compiler()?;
    tools::kernels(&workspace.root, "comp")?
        .iter()
        .try_for_each(|shader| compile(shader, &shader.with_extension("spv")))
}

/// Compiles every shader and compares with the SPIR-V beside it; writes nothing outside `target/`.
///
/// # Errors
/// A shader does not compile, or a file cannot be read or written.
pub(crate) fn check(workspace: &Workspace) -> Result<CheckOutcome, String> {
    if let Err(reason) = require_compiler() {
        return Ok(CheckOutcome::Skipped(reason));
    }
    let made = workspace.target.join("xtask").join("shader.spv");
    let read = |path: &Path| fs::read(path).map_err(|error| cannot_read(path, &error));
    fs::create_dir_all(workspace.target.join("xtask")).map_err(|error| cannot_read(&made, &error))?;
    let shaders = tools::kernels(&workspace.root, "comp")?;
    let mut differ = Vec::new();
    for shader in &shaders {
        compile(shader, &made)?;
        if read(&made)? != read(&shader.with_extension("spv"))? {
            differ.push(shader.clone());
        }
    }
    Ok(if differ.is_empty() { CheckOutcome::Passed(shaders.len()) } else { CheckOutcome::Differs(differ) })
}

fn require_compiler() -> Result<(), String> {
    let asked = Command::new(COMPILER).arg("--version").stdin(Stdio::null()).output();
    let printed = asked.map_err(|error| format!("{COMPILER}: {error}; apt-get install glslang-tools"))?.stdout;
    let printed = String::from_utf8_lossy(&printed);
    let version = printed.lines().next().unwrap_or_default();
    if version == VERSION { Ok(()) } else { Err(format!("{COMPILER} is {version:?}, and {VERSION:?} is needed")) }
}

fn compile(shader: &Path, to: &Path) -> Result<(), String> {
    let mut command = Command::new(COMPILER);
    command.args(OPTIONS).arg("-o").arg(to).arg(shader).stdin(Stdio::null());
    let output = command.output().map_err(|error| format!("{COMPILER}: {error}"))?;
    let printed = String::from_utf8_lossy(&output.stdout);
    if output.status.success() { Ok(()) } else { Err(format!("{} does not compile:\n{printed}", shader.display())) }
}
