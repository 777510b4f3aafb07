//! The workspace, child processes, and the tools that a machine with only Rust does not have.

use std::ffi::OsString;
use std::fs::File;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

/// Older versions reject our `deny.toml` or cannot read the output of the current cargo.
const CARGO_DENY: Tool = Tool { name: "cargo-deny", version: "0.20.2", oldest: (0, 19), options: &[] };

/// Older versions cannot read our `book.toml`. The default features, a server and search, need most of its
/// dependencies.
const MDBOOK: Tool = Tool { name: "mdbook", version: "0.5.4", oldest: (0, 5), options: &["--no-default-features"] };

/// A program that cargo can install.
struct Tool {
    name: &'static str,
    /// The version that is built when none is found.
    version: &'static str,
    /// The oldest version that works.
    oldest: (u32, u32),
    /// Further options of `cargo install`.
    options: &'static [&'static str],
}

/// Where the sources are, where builds go, which cargo builds them, and where output goes.
#[derive(Clone)]
pub(crate) struct Workspace {
    pub(crate) root: PathBuf,
    pub(crate) target: PathBuf,
    pub(crate) packages: Vec<Package>,
    pub(crate) once: Arc<Once>,
    cargo: OsString,
    /// True if this clone is developed in: cargo keeps what speeds up the next compilation, and the lines of
    /// backtraces.
    incremental: bool,
    /// The file that receives the output, if it is not the terminal.
    log: Option<Arc<File>>,
    /// The processor time of the commands that have ended, in milliseconds.
    processor_time: Arc<AtomicU64>,
}

/// A package of the workspace.
#[derive(Clone)]
pub(crate) struct Package {
    pub(crate) name: String,
    /// Its folder, from the root.
    pub(crate) folder: PathBuf,
    /// Its manifest as cargo reads it.
    pub(crate) manifest: serde_json::Value,
}

/// Work that several steps need and one of them does.
#[derive(Default)]
pub(crate) struct Once {
    pub(crate) built: OnceLock<Result<(), String>>,
    pub(crate) python: OnceLock<Result<(), String>>,
    pub(crate) installed: OnceLock<Result<(), String>>,
}

impl Workspace {
    /// Finds the workspace by asking cargo, which respects a target directory set by the environment or configuration.
    pub(crate) fn locate() -> Result<Self, String> {
        let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
        let output = Command::new(&cargo)
            .args(["metadata", "--no-deps", "--format-version", "1"])
            .stdin(Stdio::null())
            .stderr(Stdio::inherit())
            .output()
            .map_err(|error| format!("cannot start cargo: {error}; is Rust installed?"))?;
        if !output.status.success() {
            return Err("cargo metadata failed, see above; fix the manifests first".to_owned());
        }
        let metadata: serde_json::Value = serde_json::from_slice(&output.stdout)
            .map_err(|error| format!("cannot read the output of cargo metadata: {error}"))?;
        let lacks = |key| move || format!("cargo metadata names no {key}; use the pinned toolchain");
        let path = |key| metadata[key].as_str().map(PathBuf::from).ok_or_else(lacks(key));
        let root = path("workspace_root")?;
        let package = |package: &serde_json::Value| {
            let manifest = Path::new(package["manifest_path"].as_str()?);
            let folder = manifest.parent()?.strip_prefix(&root).ok()?.to_path_buf();
            Some(Package { name: package["name"].as_str()?.to_owned(), folder, manifest: package.clone() })
        };
        let packages = metadata["packages"].as_array().ok_or_else(lacks("packages"))?;
        let packages = packages.iter().map(package).collect::<Option<_>>().ok_or_else(lacks("packages"))?;
        let target = path("target_directory")?;
        let (once, processor_time) = Default::default();
        Ok(Self { target, root, packages, once, cargo, incremental: true, log: None, processor_time })
    }

    /// Returns the same workspace for a run that compiles everything once, if this clone is not developed in.
    ///
    /// To keep what speeds up the next compilation costs a fifth of the first one, and the lines of backtraces a tenth.
    /// Cargo keeps the builds with and without them apart, so a clone in which something was built incrementally stays
    /// incremental. This program does not count.
    pub(crate) fn compiling_once(&self) -> Self {
        let kept = entries(&self.target.join("debug/incremental")).unwrap_or_default();
        let is_ours =
            |path: &PathBuf| path.file_name().is_some_and(|name| name.to_string_lossy().starts_with("xtask-"));
        Self { incremental: !kept.iter().all(is_ours), ..self.clone() }
    }

    /// Returns the same workspace with its output in a file.
    pub(crate) fn logging_to(&self, log: File) -> Self {
        Self { log: Some(Arc::new(log)), ..self.clone() }
    }

    /// Returns the same workspace, whose commands are counted by themselves.
    pub(crate) fn counting(&self) -> Self {
        Self { processor_time: Arc::default(), ..self.clone() }
    }

    /// Returns the processor time of the commands that have ended, with that of the processes that they have waited
    /// for.
    pub(crate) fn processor_time(&self) -> Duration {
        Duration::from_millis(self.processor_time.load(Ordering::Relaxed))
    }

    /// Returns a cargo command in the root of the workspace.
    pub(crate) fn cargo<'a>(&self, arguments: impl IntoIterator<Item = &'a str>) -> Command {
        let mut command = Command::new(&self.cargo);
        command.args(arguments).current_dir(&self.root);
        self.compile_as_chosen(&mut command);
        command
    }

    /// Makes a command, and every cargo that it starts, build for development or once. A choice of the user prevails.
    pub(crate) fn compile_as_chosen(&self, command: &mut Command) {
        if self.incremental {
            return;
        }
        for variable in ["CARGO_INCREMENTAL", "CARGO_PROFILE_DEV_DEBUG"] {
            if std::env::var_os(variable).is_none() {
                command.env(variable, "0");
            }
        }
    }

    /// Returns the command of a program that cargo has built, in the root of the workspace. `cargo run` could select
    /// other features.
    pub(crate) fn program(&self, name: &str) -> Command {
        let mut command = Command::new(self.target.join("debug").join(name));
        command.current_dir(&self.root);
        command
    }

    /// Returns the path of the program that multi-process tests start.
    pub(crate) fn debug_binary(&self) -> PathBuf {
        self.target.join("debug/partywall")
    }

    /// Returns the path of the simulated driver.
    pub(crate) fn simulated_driver(&self) -> PathBuf {
        self.target.join("debug/libsimcuda.so")
    }

    /// Prints a line.
    pub(crate) fn say(&self, line: &str) {
        match &self.log {
            // A line that is lost because the disk is full needs no error of its own.
            Some(log) => drop(writeln!(&**log, "{line}")),
            None => println!("{line}"),
        }
    }

    /// Prints a command as a user would type it, and runs it.
    pub(crate) fn run(&self, command: &mut Command) -> Result<(), String> {
        self.run_within(Duration::MAX, command)
    }

    /// Runs a command as [`run`](Self::run) does, and writes its output to a file.
    pub(crate) fn run_into(&self, file: File, command: &mut Command) -> Result<(), String> {
        self.announce(command);
        let child = command.stdin(Stdio::null()).stdout(file).spawn().map_err(|error| cannot_start(command, &error))?;
        self.wait(child, Duration::MAX, command)
    }

    /// Runs a command as [`run`](Self::run) does, and ends it after `limit`.
    pub(crate) fn run_within(&self, limit: Duration, command: &mut Command) -> Result<(), String> {
        self.wait(self.start(command)?, limit, command)
    }

    fn wait(&self, mut child: Child, limit: Duration, command: &Command) -> Result<(), String> {
        let start = Instant::now();
        loop {
            if let Some(used) = processor_time_if_ended(child.id())? {
                self.processor_time.fetch_add(used, Ordering::Relaxed);
                return judge(command, child.wait().map_err(|error| cannot_wait(command, &error))?);
            }
            if start.elapsed() > limit {
                // Either fails only if the child has ended by itself meanwhile.
                let _ = child.kill();
                let _ = child.wait();
                let seconds = limit.as_secs();
                return Err(format!("{} took over {seconds} s", program(command)));
            }
            std::thread::sleep(Duration::from_millis(50));
        }
    }

    fn start(&self, command: &mut Command) -> Result<Child, String> {
        self.announce(command);
        if let Some(log) = &self.log {
            let log = || log.try_clone().map_err(|error| format!("cannot share a log: {error}"));
            command.stdout(log()?).stderr(log()?);
        }
        command.stdin(Stdio::null()).spawn().map_err(|error| cannot_start(command, &error))
    }

    fn announce(&self, command: &Command) {
        let words: Vec<_> = command.get_args().map(|word| word.to_string_lossy()).collect();
        self.say(&format!("$ {} {}", program(command), words.join(" ")));
    }
}

/// Returns whether cargo-nextest is installed. It is not installed automatically, because `cargo test` finds the same
/// faults.
pub(crate) fn has_nextest(workspace: &Workspace) -> bool {
    workspace.cargo(["nextest", "--version"]).stdin(Stdio::null()).output().is_ok_and(|output| output.status.success())
}

pub(crate) fn cargo_deny(workspace: &Workspace) -> Result<PathBuf, String> {
    CARGO_DENY.find_or_build(workspace)
}

pub(crate) fn mdbook(workspace: &Workspace) -> Result<PathBuf, String> {
    MDBOOK.find_or_build(workspace)
}

impl Tool {
    /// Returns the tool on the `PATH` if its version works, else the one in the target directory, which is built on
    /// first use. Building takes minutes, but prebuilt packages are often too old.
    fn find_or_build(&self, workspace: &Workspace) -> Result<PathBuf, String> {
        let Self { name, version, .. } = self;
        let home = workspace.target.join("tools");
        let own = home.join("bin").join(name);
        for candidate in [PathBuf::from(name), own.clone()] {
            if self.is_usable(&candidate) {
                return Ok(candidate);
            }
        }
        workspace.say(&format!("no recent {name} is installed: building {version} for this repository, once"));
        let mut install = workspace.cargo(["install", name, "--version", version]);
        // Unoptimised: it runs for seconds, and the build takes minutes longer otherwise.
        install.args(self.options).args(["--locked", "--quiet", "--debug", "--root"]).arg(&home);
        install.env("CARGO_PROFILE_DEV_DEBUG", "false");
        workspace.run(&mut install).map_err(|error| {
            format!(
                "{name} is not on the PATH and could not be built ({error}); install it with: \
                 cargo install --locked {name}@{version}"
            )
        })?;
        Ok(own)
    }

    fn is_usable(&self, program: &Path) -> bool {
        Command::new(program)
            .arg("--version")
            .stdin(Stdio::null())
            .output()
            .ok()
            .filter(|output| output.status.success())
            .and_then(|output| version(&String::from_utf8_lossy(&output.stdout)))
            .is_some_and(|version| version >= self.oldest)
    }
}

/// Returns the major and minor number of a text such as `cargo-deny 0.20.2` or `mdbook v0.5.4`.
fn version(text: &str) -> Option<(u32, u32)> {
    let mut numbers = text.split_whitespace().nth(1)?.trim_start_matches('v').split('.');
    let major = numbers.next()?.parse().ok()?;
    let minor = numbers.next()?.parse().ok()?;
    Some((major, minor))
}

/// Returns the entries of a folder, sorted.
pub(crate) fn entries(folder: &Path) -> Result<Vec<PathBuf>, String> {
    let read = || std::fs::read_dir(folder)?.map(|entry| Ok(entry?.path())).collect::<std::io::Result<Vec<_>>>();
    let mut paths = read().map_err(|error| cannot_read(folder, &error))?;
    paths.sort();
    Ok(paths)
}

/// Returns the files `*/*/kernels/*.EXTENSION`, sorted.
pub(crate) fn kernels(root: &Path, extension: &str) -> Result<Vec<PathBuf>, String> {
    let mut sources = Vec::new();
    for folder in ["crates", "examples", "testing"] {
        for package in entries(&root.join(folder))? {
            let kernels = package.join("kernels");
            if kernels.is_dir() {
                sources.extend(entries(&kernels)?);
            }
        }
    }
    sources.retain(|path| path.extension().is_some_and(|other| other == extension));
    if sources.is_empty() { Err(format!("there is no */*/kernels/*.{extension}")) } else { Ok(sources) }
}

/// Returns what a command prints.
pub(crate) fn output_of(command: &mut Command) -> Result<String, String> {
    let name = command.get_program().to_string_lossy().into_owned();
    let output = command.output().map_err(|error| format!("cannot start {name}: {error}"))?;
    if !output.status.success() {
        return Err(format!("{name}: {}: {}", output.status, String::from_utf8_lossy(&output.stderr)));
    }
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}

pub(crate) fn cannot_read(path: &Path, error: &std::io::Error) -> String {
    format!("cannot read {}: {error}", path.display())
}

/// Returns the program's name without its folder.
fn program(command: &Command) -> String {
    let path = Path::new(command.get_program());
    path.file_name().unwrap_or(path.as_os_str()).to_string_lossy().into_owned()
}

/// Returns the processor time of a child, in milliseconds, if it has ended. It contains that of the processes for which
/// the child has waited. The kernel reports it until somebody waits for the child.
fn processor_time_if_ended(child: u32) -> Result<Option<u64>, String> {
    /// The kernel's unit for times in `/proc` is 1/100 s for programs (proc_pid_stat(5), `USER_HZ`).
    const TICK: u64 = 10;
    let path = PathBuf::from(format!("/proc/{child}/stat"));
    let stat = std::fs::read_to_string(&path).map_err(|error| cannot_read(&path, &error))?;
    // The name, in parentheses, may contain spaces and parentheses. The state follows it.
    let fields: Vec<_> = stat.rsplit(')').next().unwrap_or_default().split_whitespace().collect();
    let ticks = fields.iter().skip(11).take(4).filter_map(|ticks| ticks.parse::<u64>().ok()).sum::<u64>();
    Ok((fields.first() == Some(&"Z")).then_some(ticks * TICK))
}

fn cannot_start(command: &Command, error: &std::io::Error) -> String {
    format!("cannot start {}: {error}", program(command))
}

fn cannot_wait(command: &Command, error: &std::io::Error) -> String {
    format!("cannot wait for {}: {error}", program(command))
}

fn judge(command: &Command, status: ExitStatus) -> Result<(), String> {
    if status.success() { Ok(()) } else { Err(format!("{}: {status}", subcommand(command))) }
}

/// Returns the program and its subcommand, without options: `cargo clippy`, `cargo-deny fetch db`.
fn subcommand(command: &Command) -> String {
    let is_option = |word: &String| word.starts_with('-');
    let words = command.get_args().map(|word| word.to_string_lossy().into_owned());
    let words = words.skip_while(is_option).take_while(|word| !is_option(word));
    std::iter::once(program(command)).chain(words).collect::<Vec<_>>().join(" ")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sh(script: &str) -> Command {
        let mut command = Command::new("/bin/sh");
        command.args(["-c", script]);
        command
    }

    #[test]
    fn versions_are_read_and_compared_as_numbers() {
        assert_eq!(version("cargo-deny 0.20.2\n"), Some((0, 20)));
        assert_eq!(version("mdbook v0.5.4\n"), Some((0, 5)));
        assert!(version("cargo-deny 0.14.2").unwrap() < CARGO_DENY.oldest);
        assert!(version("cargo-deny 1.0.0").unwrap() > CARGO_DENY.oldest);
        assert_eq!(version("cargo-deny"), None);
        assert_eq!(version("cargo-deny next"), None);
    }

    #[test]
    fn built_versions_are_accepted() {
        for tool in [CARGO_DENY, MDBOOK] {
            let text = format!("{} {}", tool.name, tool.version);
            assert!(version(&text).unwrap() >= tool.oldest);
        }
    }

    #[test]
    fn clone_that_nobody_develops_in_is_compiled_once() {
        let target = std::env::temp_dir().join(format!("xtask-incremental-{}", std::process::id()));
        let kept = target.join("debug/incremental");
        let workspace = Workspace { target: target.clone(), ..Workspace::locate().unwrap() };
        assert!(workspace.incremental && !workspace.compiling_once().incremental);
        std::fs::create_dir_all(kept.join("xtask-1a2b")).unwrap();
        assert!(!workspace.compiling_once().incremental);
        std::fs::create_dir(kept.join("partywall-1a2b")).unwrap();
        assert!(workspace.compiling_once().incremental);
        std::fs::remove_dir_all(target).unwrap();
    }

    #[test]
    fn a_failure_names_program_and_status() {
        let workspace = Workspace::locate().unwrap();
        let error = workspace.run(&mut sh("exit 3")).unwrap_err();
        assert!(error.contains("sh") && error.contains('3'), "{error}");
        let error = workspace.run(&mut Command::new("/no/such/program")).unwrap_err();
        assert!(error.contains("cannot start program"), "{error}");
    }

    #[test]
    fn failure_omits_options() {
        let mut command = Command::new("/somewhere/cargo-deny");
        command.args(["--locked", "fetch", "db", "--quiet", "more"]);
        assert_eq!(subcommand(&command), "cargo-deny fetch db");
    }

    #[test]
    fn slow_command_is_ended() {
        let workspace = Workspace::locate().unwrap();
        let error = workspace.run_within(Duration::from_millis(50), &mut sh("exec sleep 60")).unwrap_err();
        assert!(error.contains("took over"), "{error}");
        workspace.run_within(Duration::from_secs(60), &mut sh("true")).unwrap();
    }

    #[test]
    fn processor_time_of_a_command_contains_that_of_its_children() {
        let workspace = Workspace::locate().unwrap().counting();
        assert_eq!(workspace.processor_time(), Duration::ZERO);
        workspace.run(&mut sh("(i=0; while [ $i -lt 300000 ]; do i=$((i+1)); done); true")).unwrap();
        assert!(workspace.processor_time() > Duration::ZERO);
    }
}
