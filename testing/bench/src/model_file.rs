//! A safetensors file in the page cache.

use std::{
    fs::{self, File},
    io::{BufWriter, Read, Write},
    path::{Path, PathBuf},
};

use partywall_measure::Failure;
use tempfile::TempDir;

use crate::bench::Bench;

/// Bytes of a tensor: a square matrix of 2,048 x 2,048 in bfloat16.
const TENSOR: u64 = 8 << 20;

/// A file that goes with this.
#[derive(Debug)]
pub(crate) struct ModelFile {
    path: PathBuf,
    /// Bytes of its tensors.
    bytes: u64,
    _directory: TempDir,
}

impl ModelFile {
    /// 2 GiB, or 512 MiB for a quick run or where the machine cannot keep the file and two copies of it in memory.
    pub(crate) fn make(bench: &mut Bench) -> Result<Self, Failure> {
        let (large, small) = (2 << 30, 512 << 20);
        let bytes = match available_memory() {
            _ if bench.quick => small,
            Some(available) if available < 4 * large => {
                bench.report.note("the file is 512 MiB because there is not memory enough for three times 2 GiB");
                small
            }
            _ => large,
        };
        let directory = tempfile::Builder::new().prefix("partywall-bench").tempdir()?;
        let path = directory.path().join("model.safetensors");
        write(&path, bytes).map_err(|e| format!("writing {bytes} bytes to {}: {e}", path.display()))?;
        let file = Self { path, bytes, _directory: directory };
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
}

fn write(path: &Path, bytes: u64) -> std::io::Result<()> {
    let tensors: Vec<_> = (0..bytes / TENSOR)
        .map(|i| {
            let (start, end) = (i * TENSOR, (i + 1) * TENSOR);
            format!(r#""layers.{i}.weight":{{"dtype":"BF16","shape":[2048,2048],"data_offsets":[{start},{end}]}}"#)
        })
        .collect();
    let mut header = format!("{{{}}}", tensors.join(","));
    // Padded with blanks, as the format's own writers do, so that the tensors are aligned.
    header.extend(std::iter::repeat_n(' ', header.len().next_multiple_of(8) - header.len()));
    let mut file = BufWriter::new(File::create(path)?);
    file.write_all(&(header.len() as u64).to_le_bytes())?;
    file.write_all(header.as_bytes())?;
    let mut tensor = vec![0_u8; TENSOR as usize];
    for i in 0..bytes / TENSOR {
        // Not all alike, in case anything below us looks for equal pages.
        for (word, page) in tensor.chunks_mut(4096).enumerate() {
            page[..8].copy_from_slice(&(i << 32 | word as u64).to_le_bytes());
        }
        file.write_all(&tensor)?;
    }
    let file = file.into_inner()?;
    // Else the kernel writes it to the disk while others are measured.
    file.sync_all()
}

/// `MemAvailable` of `/proc/meminfo`, in bytes.
fn available_memory() -> Option<u64> {
    meminfo("MemAvailable:")
}

/// A line of `/proc/meminfo`, in bytes.
pub(crate) fn meminfo(key: &str) -> Option<u64> {
    let text = fs::read_to_string("/proc/meminfo").ok()?;
    let line = text.lines().find_map(|line| line.strip_prefix(key))?;
    line.trim().strip_suffix("kB")?.trim().parse::<u64>().ok()?.checked_mul(1024)
}
