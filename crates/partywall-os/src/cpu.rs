//! Hints to the processor. They change only the time that later accesses take.
#![allow(unsafe_code)]

/// Starts to fetch the cache line at the beginning of `value`, which will be read soon.
#[inline]
pub fn prefetch<T: ?Sized>(value: &T) {
    fetch(std::ptr::from_ref(value).cast());
}

/// Starts to fetch the cache line at the beginning of `value` for writing, and invalidates it in other processors.
#[inline]
pub fn prefetch_to_write<T: ?Sized>(value: &T) {
    fetch_to_write(std::ptr::from_ref(value).cast());
}

#[inline]
pub(crate) fn fetch(address: *const u8) {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: the instruction is a hint, which is allowed for any address; it reads nothing into a register and never
    // faults.
    unsafe {
        std::arch::x86_64::_mm_prefetch::<{ std::arch::x86_64::_MM_HINT_T0 }>(address.cast());
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = address;
}

#[inline]
pub(crate) fn fetch_to_write(address: *const u8) {
    #[cfg(target_arch = "x86_64")]
    // The compiler's intrinsic would emit a prefetch for reading, because not every x86-64 processor reports
    // `prefetchw`. A processor without it treats the instruction as a no-op. SAFETY: as above.
    unsafe {
        std::arch::asm!("prefetchw [{}]", in(reg) address, options(nostack, preserves_flags, readonly));
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = address;
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hints_change_nothing() {
        let bytes = [7_u8; 64];
        prefetch(&bytes);
        prefetch_to_write(&bytes[..]);
        fetch(std::ptr::null());
        fetch_to_write(std::ptr::null());
        assert_eq!(bytes, [7; 64]);
    }
}
