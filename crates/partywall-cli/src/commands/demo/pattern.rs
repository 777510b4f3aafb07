//! Writes, checks and doubles the array of the demo, `data[i] = (i*2 + 1337) ^ 0xDEADBEEF`, in place: by kernels on a
//! GPU and by the CPU in host memory. Every function waits until its work is done.

use partywall::{
    Build, DType, DeviceRange, Error, Place, Result, Segment, Tensor,
    cuda::{AccessError, CudaError, kernels},
    error::{DeviceFault, InvalidArgument},
};

/// The number of integers.
pub(super) const ELEMENTS: u64 = 1 << 18;

/// The size of all integers in bytes: 1 MiB.
pub(super) const BYTES: u64 = ELEMENTS * 4;

/// The tensor that holds the integers.
pub(super) const TENSOR: &str = "data";

/// The type of the integers.
pub(super) const DTYPE: DType = DType::U32;

/// The formula of an element, for people.
pub(super) const FORMULA: &str = "data[i] = (i*2 + 1337) ^ 0xDEADBEEF";

/// An element that is not as expected.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Bad {
    pub(super) index: u64,
    pub(super) expected: u32,
    pub(super) found: u32,
}

/// Returns the kind of worker for memory at `place`: the CPU or a kernel.
pub(super) fn worker(place: Place) -> &'static str {
    if place == Place::Host { "CPU" } else { "kernel" }
}

/// Writes the pattern.
pub(super) fn fill(build: &mut Build, place: Place) -> Result<()> {
    if place == Place::Host {
        for (index, element) in build.as_mut_slice::<u32>(TENSOR)?.iter_mut().enumerate() {
            *element = kernels::expected(index as u64);
        }
        return Ok(());
    }
    let range = build.device(TENSOR)?;
    range
        .gpu()
        .kernels()?
        .enqueue_fill(range.gpu().stream(), range.as_slice())
        .map_err(refused("writing by a kernel"))?;
    synchronize(range)
}

/// Flips the lowest bit of one element, for tests of the check.
pub(super) fn corrupt(build: &mut Build, place: Place, index: u64) -> Result<()> {
    if place == Place::Host {
        build.as_mut_slice::<u32>(TENSOR)?[index as usize] ^= 1;
        return Ok(());
    }
    let range = build.device(TENSOR)?;
    let element = range.as_slice().slice(index * 4, 4).map_err(refused("an element"))?;
    let wrong = (kernels::expected(index) ^ 1).to_ne_bytes();
    range.gpu().stream().copy_from_host(element, &wrong).map_err(refused("writing an element"))
}

/// Doubles every element in place.
pub(super) fn double(segment: &Segment) -> Result<()> {
    let tensor = segment.tensor(TENSOR)?;
    if segment.place() == Place::Host {
        let shared = tensor.shared::<u32>()?;
        for index in 0..shared.len() {
            shared.set(index, shared.get(index).wrapping_mul(2));
        }
        return Ok(());
    }
    let range = tensor.device()?;
    let done = range.gpu().kernels()?.enqueue_double(range.gpu().stream(), range.as_slice());
    done.map_err(refused("doubling by a kernel"))?;
    synchronize(range)
}

/// Checks every element in place against `factor` times the pattern. Returns the first bad one.
pub(super) fn verify(segment: &Segment, factor: u32) -> Result<Option<Bad>> {
    let tensor = segment.tensor(TENSOR)?;
    match (segment.place().gpu(), segment.is_mutable()) {
        (None, false) => Ok(first_bad(tensor.as_slice::<u32>()?.iter().copied(), factor)),
        (None, true) => {
            let shared = tensor.shared::<u32>()?;
            Ok(first_bad((0..shared.len()).map(|index| shared.get(index)), factor))
        }
        (Some(_), _) => {
            let range = tensor.device()?;
            let checked = range.gpu().kernels()?.verify(range.gpu().stream(), range.as_slice(), factor);
            let Some(index) = checked.map_err(refused("checking by a kernel"))? else {
                return Ok(None);
            };
            let found = element(tensor, index)?;
            Ok(Some(Bad { index, expected: kernels::expected(index).wrapping_mul(factor), found }))
        }
    }
}

/// Copies all elements into memory of this process and checks the copy.
pub(super) fn verify_copy(segment: &Segment, factor: u32) -> Result<Option<Bad>> {
    let copy = segment.tensor(TENSOR)?.to_vec()?;
    let elements = copy.as_chunks::<4>().0.iter().map(|bytes| u32::from_ne_bytes(*bytes));
    Ok(first_bad(elements, factor))
}

fn element(tensor: Tensor<'_>, index: u64) -> Result<u32> {
    let mut bytes = [0; 4];
    tensor.read_at(index * 4, &mut bytes)?;
    Ok(u32::from_ne_bytes(bytes))
}

fn first_bad(elements: impl Iterator<Item = u32>, factor: u32) -> Option<Bad> {
    let all = elements.zip(0..).map(|(found, index)| {
        let expected = kernels::expected(index).wrapping_mul(factor);
        Bad { index, expected, found }
    });
    all.into_iter().find(|element| element.found != element.expected)
}

fn synchronize(range: DeviceRange<'_>) -> Result<()> {
    range.gpu().stream().synchronize().map_err(fault("waiting for a kernel"))
}

/// Returns the error of a failed call of CUDA.
pub(super) fn fault(what: impl Into<String>) -> impl FnOnce(CudaError) -> Error {
    |source| Error::DeviceFault(DeviceFault::Cuda { what: what.into(), source })
}

fn refused(what: &'static str) -> impl Fn(AccessError) -> Error {
    move |error| match error {
        AccessError::Driver(source) => fault(what)(source),
        other => {
            Error::InvalidArgument(InvalidArgument::Range { tensor: TENSOR.into(), why: format!("{what}: {other}") })
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn first_bad_element_is_found() {
        let good = |index: u64| ((index as u32).wrapping_mul(2).wrapping_add(1337)) ^ 0xDEAD_BEEF;
        let right: Vec<u32> = (0..100).map(good).collect();
        assert_eq!(first_bad(right.iter().copied(), 1), None);
        assert_eq!(first_bad(right.iter().map(|it| it.wrapping_mul(2)), 2), None);
        let mut wrong = right.clone();
        wrong[41] = 0;
        wrong[77] = 0;
        assert_eq!(first_bad(wrong.into_iter(), 1), Some(Bad { index: 41, expected: right[41], found: 0 }));
    }
}
