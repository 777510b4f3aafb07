//! The child: it was forked before its parent opened CUDA, so it can open CUDA itself.

use std::sync::atomic::{AtomicU64, Ordering};

use partywall::DeviceChoice;

use super::*;

pub(super) fn run(words: &[AtomicU64]) -> Result<(), Failure> {
    let is_offered = || Ok(words[STATE].load(Ordering::Acquire) == OFFERED);
    if !until(LONGEST, Duration::from_millis(1), is_offered)? {
        return Err(unexpected("the parent offered no handle"));
    }
    let bytes = |first: usize, count: usize| {
        let words = words[first..first + count].iter().map(|word| word.load(Ordering::Relaxed).to_le_bytes());
        words.flatten().collect::<Vec<u8>>()
    };
    let uuid = bytes(UUID, 2);
    let uuid = DeviceUuid(std::array::from_fn(|index| uuid[index]));
    let handle = bytes(HANDLE, 8);
    let handle = IpcMemoryHandle(std::array::from_fn(|index| handle[index]));
    let gpu = device::open(DeviceChoice::Uuid(uuid))?;

    let answer = code(&IpcMemoryHandle::of(gpu.context(), words[ADDRESS].load(Ordering::Relaxed)));
    words[ADDRESS_CODE].store(answer.0.into(), Ordering::Relaxed);
    let opened = IpcMapping::open(gpu.context(), handle, BYTES, Access::ReadWrite);
    words[HANDLE_CODE].store(code(&opened).0.into(), Ordering::Relaxed);
    if let Ok(mapping) = opened {
        words[OWN_ADDRESS].store(mapping.device_ptr(), Ordering::Relaxed);
        let found = first_byte(&gpu, mapping.as_slice()).doing("reading shared memory")?;
        words[FOUND].store(found.into(), Ordering::Relaxed);
        device::set(&gpu, mapping.as_slice(), CHANGED)?;
    }
    words[STATE].store(ANSWERED, Ordering::Release);
    Ok(())
}

/// How long the start of CUDA in the parent may take.
const LONGEST: Duration = Duration::from_secs(60);
