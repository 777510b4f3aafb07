//! A safetensors file in the page cache.

use std::{
    env,
    fs::{self, File},
    io::{BufWriter, Read, Write},
    os::{fd::AsRawFd, unix::fs::symlink},
    path::{Path, PathBuf},
};

use partywall_measure::Failure;
use rustix::fs::statvfs;

use crate::{bench::Bench, broker::Broker};

/// A file without a name of its own, so that nothing is left if this process is killed: a link in the broker's
/// directory leads to it.
#[derive(Debug)]
pub(crate) struct ModelFile {
    path: PathBuf,
    /// Bytes of its tensors.
    bytes: u64,
    tensors: usize,
    _file: File,
}

impl ModelFile {
    /// Creates a file of 2 GiB, or of 512 MiB for a quick run or if the file and two copies do not fit into memory.
    pub(crate) fn make(bench: &Bench<'_>, broker: &Broker) -> Result<Self, Failure> {
        let large = 2 << 30;
        let small = 512 << 20;
        let bytes = match meminfo(AVAILABLE) {
            _ if bench.quick => small,
            Some(available) if available < 4 * large => {
                bench.note("the file is 512 MiB because there is not memory enough for three times 2 GiB");
                small
            }
            _ => large,
        };
        let matrix = Shape { rows: 2048, columns: 2048 };
        Self::write(broker, &vec![matrix; (bytes / matrix.bytes()) as usize])
    }

    /// Creates a file of 500 tensors in 14 GiB, similar to a model of seven billion parameters. A sixteenth of that for
    /// a quick run, or if the machine has not enough room.
    pub(crate) fn large(bench: &Bench<'_>, broker: &Broker, free_on_gpu: u64) -> Result<Self, Failure> {
        let model = |part: u64| {
            let matrix = |rows: u64, count| vec![Shape { rows: rows / part, columns: 4096 }; count];
            [matrix(4096, 436), matrix(768, 64)].concat()
        };
        let large = model(1);
        let bytes: u64 = large.iter().map(Shape::bytes).sum();
        let free = statvfs(env::temp_dir()).map(|fs| fs.f_bavail * fs.f_frsize)?;
        let lacks = [
            ("in the folder for temporary files", free, 1),
            ("in memory", meminfo(AVAILABLE).unwrap_or(u64::MAX), 2),
            ("on the GPU", free_on_gpu, 4),
        ];
        let lack = lacks.into_iter().find(|(_, free, times)| *free < times * bytes + (1 << 30));
        match lack {
            _ if bench.quick => Self::write(broker, &model(16)),
            Some((place, free, times)) => {
                let why = format!("{free} bytes are free {place}, which is not {times} times 14 GiB");
                bench.note(format!("the model is a sixteenth: {why}"));
                Self::write(broker, &model(16))
            }
            None => Self::write(broker, &large),
        }
    }

    fn write(broker: &Broker, tensors: &[Shape]) -> Result<Self, Failure> {
        let folder = env::temp_dir();
        let file = tempfile::tempfile_in(&folder)?;
        let bytes = tensors.iter().map(Shape::bytes).sum();
        write(&file, tensors).map_err(|e| format!("writing {bytes} bytes into {}: {e}", folder.display()))?;
        let path = broker.directory().join("model.safetensors");
        symlink(format!("/proc/{}/fd/{}", std::process::id(), file.as_raw_fd()), &path)?;
        let file = Self { path, bytes, tensors: tensors.len(), _file: file };
        file.read()?;
        Ok(file)
    }

    /// Reads all of it, so that it is in the page cache.
    fn read(&self) -> Result<(), Failure> {
        let mut file = File::open(&self.path)?;
        let mut buffer = vec![0; 1 << 20];
        while file.read(&mut buffer)? > 0 {}
        Ok(())
    }

    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    pub(crate) fn bytes(&self) -> u64 {
        self.bytes
    }

    pub(crate) fn tensors(&self) -> usize {
        self.tensors
    }
}

/// The shape of a matrix in bfloat16.
#[derive(Debug, Clone, Copy)]
struct Shape {
    rows: u64,
    columns: u64,
}

impl Shape {
    fn bytes(&self) -> u64 {
        self.rows * self.columns * 2
    }
}

/// Writes the tensors; tensor 3 is named `layers.3.weight`. Each page of 4,096 bytes begins with the page's number in
/// the tensor and the tensor's number in the file, so that the pages differ, in case the system merges equal pages.
fn write(file: &File, tensors: &[Shape]) -> std::io::Result<()> {
    let mut start = 0;
    let entry = |(i, shape): (usize, &Shape)| {
        let end = start + shape.bytes();
        let Shape { rows, columns } = shape;
        let entry = format!(
            r#""layers.{i}.weight":{{"dtype":"BF16","shape":[{rows},{columns}],"data_offsets":[{start},{end}]}}"#
        );
        start = end;
        entry
    };
    let entries: Vec<_> = tensors.iter().enumerate().map(entry).collect();
    let mut header = format!("{{{}}}", entries.join(","));
    // Padded with blanks, as the safetensors library does, so that the tensors are aligned.
    header.extend(std::iter::repeat_n(' ', header.len().next_multiple_of(8) - header.len()));
    let mut file = BufWriter::new(file);
    file.write_all(&(header.len() as u64).to_le_bytes())?;
    file.write_all(header.as_bytes())?;
    for (i, shape) in tensors.iter().enumerate() {
        let mut tensor = vec![0_u8; shape.bytes() as usize];
        for (page, bytes) in tensor.chunks_mut(4096).enumerate() {
            bytes[..8].copy_from_slice(&((i as u64) << 32 | page as u64).to_le_bytes());
        }
        file.write_all(&tensor)?;
    }
    let file = file.into_inner()?;
    // Without this, the kernel would write the file to the disk during a later measurement.
    file.sync_all()
}

/// The line of `/proc/meminfo` with the memory that can be used without swapping.
pub(crate) const AVAILABLE: &str = "MemAvailable:";

/// Returns a line of `/proc/meminfo`, in bytes.
pub(crate) fn meminfo(key: &str) -> Option<u64> {
    let text = fs::read_to_string("/proc/meminfo").ok()?;
    let line = text.lines().find_map(|line| line.strip_prefix(key))?;
    line.trim().strip_suffix("kB")?.trim().parse::<u64>().ok()?.checked_mul(1024)
}
