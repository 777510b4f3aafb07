//! Programs of `benches/peers` in Python: rivals, and Partywall itself. Their Python is `PARTYWALL_PYTHON`, else `python3`.

use std::{
    env,
    ffi::{OsStr, OsString},
    fs,
    process::Command,
};

use partywall_measure::Failure;
use tempfile::TempDir;

use crate::{bench::Bench, program::Program};

/// What the programs are made of. They are part of this one, so that they come along wherever it runs.
const FILES: [(&str, &str); 4] = [
    ("peer.py", include_str!("../../../benches/peers/peer.py")),
    (OURS, include_str!("../../../benches/peers/ours.py")),
    (SAFETENSORS, include_str!("../../../benches/peers/safetensors_load.py")),
    (TORCH_MULTIPROCESSING, include_str!("../../../benches/peers/torch_multiprocessing.py")),
];

/// Partywall's own package.
pub(crate) const OURS: &str = "ours.py";
/// safetensors, loading a file.
pub(crate) const SAFETENSORS: &str = "safetensors_load.py";
/// torch.multiprocessing.
pub(crate) const TORCH_MULTIPROCESSING: &str = "torch_multiprocessing.py";

/// The programs as files.
#[derive(Debug)]
pub(crate) struct Programs {
    folder: TempDir,
}

impl Programs {
    pub(crate) fn unpack() -> Result<Self, Failure> {
        let folder = tempfile::Builder::new().prefix("partywall-bench").tempdir()?;
        for (name, text) in FILES {
            fs::write(folder.path().join(name), text)?;
        }
        Ok(Self { folder })
    }

    /// Starts a program, and does not wait until it is ready.
    pub(crate) fn spawn(&self, program: &str, arguments: &[&dyn AsRef<OsStr>]) -> Result<Program, Failure> {
        let python = env::var_os("PARTYWALL_PYTHON").unwrap_or_else(|| OsString::from("python3"));
        let words: Vec<_> = arguments.iter().map(|argument| argument.as_ref().to_string_lossy()).collect();
        let mut command = Command::new(&python);
        // Nothing is written beside the programs, nor beside the package.
        command.arg("-B").arg(self.folder.path().join(program)).args(arguments);
        Program::spawn(format!("{program} {}", words.join(" ")), &mut command)
    }

    /// Starts a program, and waits until it is ready.
    pub(crate) fn start(&self, program: &str, arguments: &[&dyn AsRef<OsStr>]) -> Result<Program, Failure> {
        let mut program = self.spawn(program, arguments)?;
        program.await_ready()?;
        Ok(program)
    }

    /// Starts a rival, and takes a sample of it, which does not count. If that fails, what it is a rival of is measured
    /// without it, and the report says why.
    pub(crate) fn start_rival(
        &self,
        bench: &mut Bench,
        program: &str,
        arguments: &[&dyn AsRef<OsStr>],
    ) -> Option<Program> {
        let started = self.start(program, arguments).and_then(|mut rival| rival.sample().map(|_| rival));
        started.inspect_err(|failure| bench.leave_out(failure)).ok()
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    /// A program of the test's own, which has what all have in common.
    fn start(text: &str) -> (Programs, Result<Program, Failure>) {
        let programs = Programs::unpack().unwrap();
        fs::write(programs.folder.path().join("tested.py"), text).unwrap();
        let started = programs.start("tested.py", &[&"argument"]);
        (programs, started)
    }

    #[test]
    fn needs_python_samples_are_numbers_in_order_and_nothing_else_that_is_printed() {
        let (_programs, started) = start(
            "import itertools, peer\n\
             print('preparing')\n\
             numbers = itertools.count(1)\n\
             def sample():\n\
             \x20   print('measuring')\n\
             \x20   return next(numbers) / 2\n\
             peer.serve(sample)\n",
        );
        let mut program = started.unwrap();
        let mut sampler = program.sampler(3);
        let samples: Vec<_> = (0..7).map(|_| sampler().unwrap()).collect();
        assert_eq!(samples, [0.5, 1.0, 1.5, 2.0, 2.5, 3.0, 3.5]);
        drop(sampler);
        assert_eq!(program.end(Duration::from_secs(60)), "exit status: 0");
    }

    #[test]
    fn needs_python_a_program_that_fails_says_why() {
        let (_programs, started) = start("import no_such_module\n");
        let failure = started.unwrap_err().to_string();
        assert!(failure.contains("tested.py argument has ended (exit status: 1)"), "{failure}");
        assert!(failure.contains("No module named 'no_such_module'"), "{failure}");

        let (_programs, started) = start("import peer\npeer.serve(lambda: {}['nothing'])\n");
        let failure = started.unwrap().sample().unwrap_err().to_string();
        assert!(failure.contains("KeyError: 'nothing'"), "{failure}");
    }

    #[test]
    fn needs_python_a_rival_that_fails_is_left_out_with_the_reason() {
        let programs = Programs::unpack().unwrap();
        let machine = partywall_measure::Machine::detect(None, None);
        let mut bench = Bench { quick: true, peers: true, report: partywall_measure::Report::new("a test", machine) };
        assert!(programs.start_rival(&mut bench, "no_such_program.py", &[]).is_none());
        assert!(bench.report.notes[0].starts_with("left out: no_such_program.py"), "{:?}", bench.report.notes);
    }
}
