//! Programs of `crates/partywall-lab/peers` in Python: rivals, and Partywall itself. They run with `PARTYWALL_PYTHON`,
//! else `python3`.

use std::{
    env,
    ffi::{OsStr, OsString},
    fs,
    path::PathBuf,
    process::Command,
};

use partywall_measure::Failure;

use crate::{
    bench::{Bench, mps::Mps, program::Program},
    broker::Broker,
};

/// The files of the programs. They are compiled into this program, so that they are available wherever it runs.
const FILES: [(&str, &str); 18] = [
    ("peer.py", include_str!("../../peers/peer.py")),
    ("round_trip.py", include_str!("../../peers/round_trip.py")),
    (DATA_LOADER, include_str!("../../peers/data_loader.py")),
    (MESSAGES, include_str!("../../peers/messages.py")),
    (OURS, include_str!("../../peers/ours.py")),
    (OURS_TOPICS, include_str!("../../peers/ours_topics.py")),
    (RAW_TENSOR, include_str!("../../peers/raw_tensor.py")),
    (RESTART, include_str!("../../peers/restart.py")),
    (SIMPLE_QUEUE, include_str!("../../peers/simple_queue.py")),
    (SAFETENSORS, include_str!("../../peers/safetensors_load.py")),
    (TABLE, include_str!("../../peers/table.py")),
    ("table_cuda.py", include_str!("../../peers/table_cuda.py")),
    ("table_host.py", include_str!("../../peers/table_host.py")),
    (TASK_QUEUE, include_str!("../../peers/task_queue.py")),
    (TORCH_ALLOCATION, include_str!("../../peers/torch_allocation.py")),
    (TORCH_LOAD, include_str!("../../peers/torch_load.py")),
    (TORCH_MULTIPROCESSING, include_str!("../../peers/torch_multiprocessing.py")),
    (WEIGHT_UPDATES, include_str!("../../peers/weight_updates.py")),
];

/// Batches that workers decode for a trainer, by Partywall's topics and torch's DataLoader.
pub(crate) const DATA_LOADER: &str = "data_loader.py";
/// Messages there and back, by Partywall's topics, a queue and a pipe.
pub(crate) const MESSAGES: &str = "messages.py";
/// Partywall's own package.
pub(crate) const OURS: &str = "ours.py";
/// Topics of Partywall's package.
pub(crate) const OURS_TOPICS: &str = "ours_topics.py";
/// A tensor that is copied and read without Partywall, by the system's and the driver's calls.
pub(crate) const RAW_TENSOR: &str = "raw_tensor.py";
/// A model whose worker is killed, with spares and without.
pub(crate) const RESTART: &str = "restart.py";
/// Queues of multiprocessing, or of torch.multiprocessing.
pub(crate) const SIMPLE_QUEUE: &str = "simple_queue.py";
/// safetensors, loading a file.
pub(crate) const SAFETENSORS: &str = "safetensors_load.py";
/// Memory that is shared with another process, in all ways that there are.
pub(crate) const TABLE: &str = "table.py";
/// Tasks for workers, by Partywall, multiprocessing.Pool and Redis.
pub(crate) const TASK_QUEUE: &str = "task_queue.py";
/// Allocations of torch, in a pool and outside.
pub(crate) const TORCH_ALLOCATION: &str = "torch_allocation.py";
/// torch.load, of a file.
pub(crate) const TORCH_LOAD: &str = "torch_load.py";
/// torch.multiprocessing.
pub(crate) const TORCH_MULTIPROCESSING: &str = "torch_multiprocessing.py";
/// New weights for worker processes, by Partywall and torch.multiprocessing.
pub(crate) const WEIGHT_UPDATES: &str = "weight_updates.py";

/// The programs as files.
#[derive(Debug)]
pub(crate) struct Programs<'a> {
    folder: PathBuf,
    mps: Option<&'a Mps>,
}

impl<'a> Programs<'a> {
    /// Writes the programs into the directory of the broker, which is removed with it.
    pub(crate) fn unpack(broker: &Broker) -> Result<Self, Failure> {
        Self::unpack_into(broker.directory().join("programs"))
    }

    fn unpack_into(folder: PathBuf) -> Result<Self, Failure> {
        fs::create_dir_all(&folder)?;
        for (name, text) in FILES {
            fs::write(folder.join(name), text)?;
        }
        Ok(Self { folder, mps: None })
    }

    /// Makes the programs that are started from now on clients of an MPS server.
    pub(crate) fn under(self, mps: &'a Mps) -> Self {
        Self { mps: Some(mps), ..self }
    }

    /// Starts a program without waiting until it is ready.
    pub(crate) fn spawn(&self, program: &str, arguments: &[&dyn AsRef<OsStr>]) -> Result<Program, Failure> {
        let python = env::var_os("PARTYWALL_PYTHON").unwrap_or_else(|| OsString::from("python3"));
        let words: Vec<_> = arguments.iter().map(|argument| argument.as_ref().to_string_lossy()).collect();
        let mut command = Command::new(&python);
        // `-B` keeps Python from writing compiled files beside the programs and the package.
        command.arg("-B").arg(self.folder.join(program)).args(arguments);
        if let Some(mps) = self.mps {
            mps.serve(&mut command);
        }
        Program::spawn(format!("{program} {}", words.join(" ")), &mut command)
    }

    /// Starts a program, and waits until it is ready.
    pub(crate) fn start(&self, program: &str, arguments: &[&dyn AsRef<OsStr>]) -> Result<Program, Failure> {
        let mut program = self.spawn(program, arguments)?;
        program.await_ready()?;
        Ok(program)
    }

    /// Starts a rival, and takes one sample, which is not counted. If that fails, the report says why, and the case is
    /// measured without this rival.
    pub(crate) fn start_rival(
        &self,
        bench: &Bench<'_>,
        program: &str,
        arguments: &[&dyn AsRef<OsStr>],
    ) -> Option<Program> {
        Self::await_rival(bench, self.spawn(program, arguments))
    }

    /// Waits for a rival as [`start_rival`](Self::start_rival) does; it was spawned before.
    pub(crate) fn await_rival(bench: &Bench<'_>, spawned: Result<Program, Failure>) -> Option<Program> {
        let ready = spawned.and_then(|mut rival| {
            rival.await_ready()?;
            rival.sample()?;
            Ok(rival)
        });
        ready.inspect_err(|failure| bench.leave_out(failure)).ok()
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use tempfile::TempDir;

    use super::*;

    /// Starts a program of the test's own beside the shared files.
    fn start(text: &str) -> (TempDir, Result<Program, Failure>) {
        let folder = tempfile::tempdir().unwrap();
        let programs = Programs::unpack_into(folder.path().to_owned()).unwrap();
        fs::write(folder.path().join("tested.py"), text).unwrap();
        let started = programs.start("tested.py", &[&"argument"]);
        (folder, started)
    }

    #[test]
    fn needs_python_samples_are_the_printed_numbers_in_order() {
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
    fn needs_python_samples_are_of_what_was_asked_for_last() {
        let (_programs, started) = start(
            "import peer\n\
             peer.serve(lambda what='1', times='1': int(what) * int(times))\n",
        );
        let mut program = started.unwrap();
        assert_eq!(program.sample().unwrap(), 1.0);
        // Of a block of four, three are not taken.
        assert_eq!(program.sampler_of("2", 4)().unwrap(), 2.0);
        assert_eq!(program.sampler_of("3 5", 4)().unwrap(), 15.0);
    }

    #[test]
    fn needs_python_failing_program_reports_its_error() {
        let (_programs, started) = start("import no_such_module\n");
        let failure = started.unwrap_err().to_string();
        assert!(failure.contains("tested.py argument has ended (exit status: 1)"), "{failure}");
        assert!(failure.contains("No module named 'no_such_module'"), "{failure}");

        let (_programs, started) = start("import peer\npeer.serve(lambda: {}['nothing'])\n");
        let failure = started.unwrap().sample().unwrap_err().to_string();
        assert!(failure.contains("KeyError: 'nothing'"), "{failure}");
    }

    #[test]
    fn needs_python_missing_program_ends_with_the_reason() {
        let folder = tempfile::tempdir().unwrap();
        let programs = Programs::unpack_into(folder.path().to_owned()).unwrap();
        let failure = programs.start("no_such_program.py", &[]).unwrap_err().to_string();
        assert!(failure.starts_with("no_such_program.py"), "{failure}");
    }
}
