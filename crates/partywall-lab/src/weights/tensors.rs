//! The tensors of a version: their table, writing them, and checking them.

use partywall::{Builder, cuda::kernels::expected};

use super::*;

/// Begins a version of this number and size.
pub(crate) fn create(session: &Session, number: u64, mib: u64) -> Builder {
    let builder = session.domain().create(NAME, session.place).kept(true).metadata(NUMBER, &number.to_string());
    (0..TENSORS).fold(builder, |builder, tensor| builder.tensor(&name(tensor), DType::U32, &[mib, ROW]))
}

/// The words that host memory is filled with and compared with: one tensor for each number of doublings.
#[derive(Debug, Default)]
pub(crate) struct Patterns([Vec<u32>; VARIANTS]);

impl Patterns {
    /// Writes the first tensors of a version, and waits until that is done.
    pub(crate) fn write(&mut self, build: &mut Build, number: u64, tensors: u64) -> Result<(), Failure> {
        for tensor in 0..tensors {
            let by_gpu = is_of_gpu(build.place(), tensor);
            let tensor = name(tensor);
            if !by_gpu {
                let words = build.as_mut_slice::<u32>(&tensor)?;
                words.copy_from_slice(self.words(number, words.len()));
                continue;
            }
            let range = build.device(&tensor)?;
            let (gpu, range) = (range.gpu(), range.as_slice());
            let kernels = gpu.kernels()?;
            let mut enqueued = kernels.enqueue_fill(gpu.stream(), range);
            for _ in 0..doublings(number) {
                enqueued = enqueued.and_then(|()| kernels.enqueue_double(gpu.stream(), range));
            }
            enqueued.doing("writing weights")?;
            gpu.stream().synchronize().doing("writing weights")?;
        }
        Ok(())
    }

    /// Returns the number of a version, and whether every word of every tensor is of that version.
    pub(crate) fn check(&mut self, segment: &Segment) -> Result<(u64, bool), Failure> {
        let number = segment.metadata().find(|(key, _)| *key == NUMBER).and_then(|(_, number)| number.parse().ok());
        let number = number.ok_or_else(|| unexpected("the weights have no number"))?;
        let mut is_whole = segment.len() as u64 == TENSORS;
        for (index, tensor) in segment.tensors().into_iter().enumerate() {
            // In pinned memory the one that has not written the tensor.
            is_whole &= if is_of_gpu(segment.place(), index as u64 + 1) {
                let range = tensor.device()?;
                let gpu = range.gpu();
                let wrong = gpu.kernels()?.verify(gpu.stream(), range.as_slice(), 1 << doublings(number));
                wrong.doing("checking weights")?.is_none()
            } else {
                let words = tensor.as_slice::<u32>()?;
                words == self.words(number, words.len())
            };
        }
        Ok((number, is_whole))
    }

    /// Returns the words of a tensor, as the kernels write them.
    fn words(&mut self, number: u64, len: usize) -> &[u32] {
        let words = &mut self.0[doublings(number) as usize];
        words.extend((words.len()..len).map(|index| expected(index as u64) << doublings(number)));
        &words[..len]
    }
}

/// Returns how often the pattern is doubled in a version. Successive versions differ in every word except one, the
/// zero.
fn doublings(number: u64) -> u32 {
    (number % VARIANTS as u64) as u32
}

/// Returns whether a GPU uses the tensor with this number, and not the CPU: in pinned memory it is every other one.
fn is_of_gpu(place: Place, tensor: u64) -> bool {
    match place {
        Place::Host => false,
        Place::Gpu(_) => true,
        Place::Pinned(_) => tensor % 2 == 1,
    }
}

fn name(tensor: u64) -> String {
    format!("layers.{tensor}.weight")
}

const VARIANTS: usize = 4;

pub(crate) const TENSORS: u64 = 16;

/// Words in a row: a tensor of one row has a sixteenth of a MiB.
const ROW: u64 = (1 << 20) / 4 / TENSORS;

/// The key of a version's number in its metadata.
const NUMBER: &str = "number";

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn neighbouring_versions_differ_in_nearly_every_word() {
        let mut patterns = Patterns::default();
        let versions: Vec<Vec<u32>> = (0..=4).map(|number| patterns.words(number, 10_000).to_vec()).collect();
        for pair in versions.windows(2) {
            let same = pair[0].iter().zip(&pair[1]).filter(|(one, other)| one == other).count();
            assert!(same <= 1, "{same} words are the same");
        }
        assert_eq!(versions[0], versions[4]);
    }
}
