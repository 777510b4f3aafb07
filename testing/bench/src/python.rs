//! Programs of `benches/peers`, in processes of their own: rivals, and Partywall itself from Python.
//!
//! A program says `ready`, and then answers each line, a number, with as many lines, a sample each. It ends when its
//! standard input does. Its Python is `PARTYWALL_PYTHON`, else `python3`.

use std::{
    collections::VecDeque,
    env,
    ffi::{OsStr, OsString},
    fs,
    io::{BufRead, BufReader, Write},
    path::PathBuf,
    process::{Child, ChildStdin, Command, Stdio},
    sync::mpsc::{self, Receiver, RecvTimeoutError},
    thread,
    time::{Duration, Instant},
};

use partywall_measure::{Failure, Sampler};
use tempfile::TempDir;

use crate::bench::Bench;

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

/// How long a program may take to prepare itself, and for each answer: several times what the slowest one takes.
const PATIENCE: Duration = Duration::from_secs(90);

/// How long it may take to end, with what it has on the GPU.
const FAREWELL: Duration = Duration::from_secs(10);

/// How many of a program's last lines are told when it fails.
const TOLD: usize = 3;

/// The programs as files.
#[derive(Debug)]
pub(crate) struct Programs {
    folder: TempDir,
}

/// A program that runs. Dropping it ends it.
#[derive(Debug)]
pub(crate) struct Program {
    what: String,
    child: Child,
    /// Absent once it is to end.
    requests: Option<ChildStdin>,
    replies: Receiver<String>,
    errors: PathBuf,
    taken: VecDeque<f64>,
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
        let what = format!("{program} {}", words.join(" "));
        let errors = tempfile::Builder::new().prefix("stderr").tempfile_in(&self.folder)?;
        let (errors, path) = errors.keep()?;
        let mut child = Command::new(&python)
            // Nothing is written beside the programs, nor beside the package.
            .arg("-B")
            .arg(self.folder.path().join(program))
            .args(arguments)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(errors)
            .spawn()
            .map_err(|error| format!("{}: {error}", python.display()))?;
        let (said, replies) = mpsc::channel();
        let requests = child.stdin.take();
        if let Some(stdout) = child.stdout.take() {
            // Ends with the program, or when nobody listens any more.
            thread::spawn(move || {
                BufReader::new(stdout).lines().map_while(Result::ok).try_for_each(|line| said.send(line))
            });
        }
        Ok(Program { what, child, requests, replies, errors: path, taken: VecDeque::new() })
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
        let failed = |failure: &Failure| {
            eprintln!("  left out: {failure}");
            bench.report.note(format!("left out: {failure}"));
        };
        started.inspect_err(failed).ok()
    }
}

impl Program {
    pub(crate) fn await_ready(&mut self) -> Result<(), Failure> {
        match self.reply()?.as_str() {
            "ready" => Ok(()),
            other => Err(format!("{} says {other:?} instead of that it is ready", self.what).into()),
        }
    }

    pub(crate) fn pid(&self) -> u32 {
        self.child.id()
    }

    /// One sample.
    pub(crate) fn sample(&mut self) -> Result<f64, Failure> {
        self.sample_of(1)
    }

    /// Its samples, as many at once as a case has in its turn: asking for each would have the program sleep before it.
    pub(crate) fn sampler(&mut self, block: usize) -> Sampler<'_> {
        Box::new(move || self.sample_of(block))
    }

    fn sample_of(&mut self, block: usize) -> Result<f64, Failure> {
        if self.taken.is_empty() {
            let asked = self.requests.as_mut().map(|requests| writeln!(requests, "{block}"));
            if !matches!(asked, Some(Ok(()))) {
                return Err(self.failure("takes no requests", FAREWELL));
            }
            for _ in 0..block {
                let line = self.reply()?;
                let sample = line.parse().map_err(|_| format!("{} says {line:?} instead of a number", self.what))?;
                self.taken.push_back(sample);
            }
        }
        self.taken.pop_front().ok_or_else(|| "no samples were asked for".into())
    }

    fn reply(&mut self) -> Result<String, Failure> {
        self.replies.recv_timeout(PATIENCE).map_err(|error| match error {
            RecvTimeoutError::Timeout => {
                self.failure(&format!("says nothing for {} s", PATIENCE.as_secs()), Duration::ZERO)
            }
            RecvTimeoutError::Disconnected => self.failure("has ended", FAREWELL),
        })
    }

    /// Has it end, within `patience`, and tells what it said.
    fn failure(&mut self, how: &str, patience: Duration) -> Failure {
        let status = self.end(patience);
        let said = fs::read_to_string(&self.errors).unwrap_or_default();
        let said: Vec<_> = said.lines().filter(|line| !line.trim().is_empty()).collect();
        let said = said[said.len().saturating_sub(TOLD)..].join(" | ");
        format!("{} {how} ({status}): {said}", self.what).into()
    }

    /// Has it end, and kills it if it has not within `patience`.
    fn end(&mut self, patience: Duration) -> String {
        self.requests = None;
        let deadline = Instant::now() + patience;
        while matches!(self.child.try_wait(), Ok(None)) && Instant::now() < deadline {
            thread::sleep(Duration::from_millis(5));
        }
        let _ = self.child.kill();
        self.child.wait().map_or_else(|error| error.to_string(), |status| status.to_string())
    }
}

impl Drop for Program {
    fn drop(&mut self) {
        self.end(FAREWELL);
    }
}

#[cfg(test)]
mod tests {
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
        let mut bench = Bench { quick: true, report: partywall_measure::Report::new("a test", machine) };
        assert!(programs.start_rival(&mut bench, "no_such_program.py", &[]).is_none());
        assert!(bench.report.notes[0].starts_with("left out: no_such_program.py"), "{:?}", bench.report.notes);
    }
}
