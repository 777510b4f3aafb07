//! A chain of words through memory: each link says which word the next one is, so that a load cannot begin before the one before
//! it has ended. The order is random, so that no hardware foresees it.

/// Words from one link to the next in memory: 128 bytes, a line of the caches of GPUs and two of those of processors.
pub(super) const STRIDE: usize = 16;

/// Returns memory of so many bytes with one chain through all of it, from word 0 back to word 0.
pub(super) fn new(bytes: u64) -> Vec<u64> {
    let mut words = vec![0; (bytes / 8) as usize];
    let links = words.len() / STRIDE;
    // Sattolo's algorithm: a permutation that is one cycle.
    let mut order: Vec<u32> = (0..links as u32).collect();
    let mut random = 0x9e37_79b9_7f4a_7c15_u64;
    for last in (1..links).rev() {
        random ^= random << 13;
        random ^= random >> 7;
        random ^= random << 17;
        order.swap(last, (random % last as u64) as usize);
    }
    for (link, next) in order.into_iter().enumerate() {
        words[link * STRIDE] = u64::from(next) * STRIDE as u64;
    }
    words
}

/// Returns how many links a chain of so many bytes has.
pub(super) fn links(bytes: u64) -> u64 {
    bytes / 8 / STRIDE as u64
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn chain_goes_through_all_links_once() {
        for bytes in [4096, 1 << 20] {
            let words = new(bytes);
            let mut seen = vec![false; words.len()];
            let mut at = 0;
            for _ in 0..links(bytes) {
                assert!(!std::mem::replace(&mut seen[at], true));
                at = words[at] as usize;
            }
            assert_eq!((at, seen.iter().filter(|seen| **seen).count() as u64), (0, links(bytes)));
        }
    }
}
