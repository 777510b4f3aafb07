//! How much memory a device or a NUMA node has for this process.

use std::sync::LazyLock;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::abi::Code;

/// Bytes that this process may allocate.
pub(crate) struct Budget {
    pub(crate) total: u64,
    used: AtomicU64,
}

impl Budget {
    pub(crate) fn new(total: u64) -> Self {
        Self { total, used: AtomicU64::new(0) }
    }

    /// Takes memory; its holder returns it by [`Self::give_back`].
    ///
    /// # Errors
    /// `OUT_OF_MEMORY`.
    pub(crate) fn take(&self, bytes: u64) -> Result<(), Code> {
        let more = |used: u64| used.checked_add(bytes).filter(|used| *used <= self.total);
        self.used.fetch_update(Ordering::Relaxed, Ordering::Relaxed, more).map_err(|_| Code::OUT_OF_MEMORY)?;
        Ok(())
    }

    pub(crate) fn give_back(&self, bytes: u64) {
        self.used.fetch_sub(bytes, Ordering::Relaxed);
    }

    pub(crate) fn free(&self) -> u64 {
        self.total - self.used.load(Ordering::Relaxed)
    }
}

/// Returns the memory of a NUMA node, if the simulated machine has the node.
pub(crate) fn of_node(node: i32) -> Option<&'static Budget> {
    static BUDGETS: LazyLock<[Budget; NODES as usize]> =
        LazyLock::new(|| std::array::from_fn(|_| Budget::new(bytes_of("SIMCUDA_NODE_MEMORY"))));
    BUDGETS.get(usize::try_from(node).ok()?)
}

/// Returns the number of bytes that a variable sets: 1 GiB if it is not set.
pub(crate) fn bytes_of(name: &str) -> u64 {
    std::env::var(name).map_or(1 << 30, |text| {
        parse_bytes(&text).unwrap_or_else(|| panic!("{name}={text}: a number of bytes, or with K, M or G"))
    })
}

fn parse_bytes(text: &str) -> Option<u64> {
    let (number, shift) = match text.as_bytes().last()? {
        b'K' => (&text[..text.len() - 1], 10),
        b'M' => (&text[..text.len() - 1], 20),
        b'G' => (&text[..text.len() - 1], 30),
        _ => (text, 0),
    };
    number.parse::<u64>().ok()?.checked_mul(1 << shift)
}

/// The number of NUMA nodes of the simulated machine.
pub(crate) const NODES: u8 = 2;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_have_suffixes() {
        assert_eq!(parse_bytes("4096"), Some(4096));
        assert_eq!(parse_bytes("64M"), Some(64 << 20));
        assert_eq!(parse_bytes("3G"), Some(3 << 30));
        assert_eq!(parse_bytes("1T"), None);
    }
}
