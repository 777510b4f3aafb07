//! A chain of words through memory. Each link names the word of the next one, so that a load cannot begin before the
//! previous load has ended. The order looks random, so that no hardware can predict it.

/// Words from one link to the next in memory: 128 bytes, a line of the caches of GPUs and two of those of processors.
pub(crate) const STRIDE: usize = 16;

/// Returns memory with one chain through all of it, from word 0 back to word 0. `bytes` is a power of two.
pub(crate) fn new(bytes: u64) -> Vec<u64> {
    let mut words = vec![0; (bytes / 8) as usize];
    fill(&mut words);
    words
}

/// Writes a chain into zeroed words, whose number is a power of two.
pub(crate) fn fill(words: &mut [u64]) {
    let order = Order::of(words.len() as u64 * 8);
    for link in 0..words.len() / STRIDE {
        words[link * STRIDE] = order.after(link as u64) * STRIDE as u64;
    }
}

/// Returns the number of links of a chain through `bytes` bytes.
pub(crate) fn links(bytes: u64) -> u64 {
    bytes / 8 / STRIDE as u64
}

/// Returns the word that a chain through `bytes` bytes reaches from word 0 after `links` links.
pub(crate) fn end(bytes: u64, links: u64) -> u64 {
    let order = Order::of(bytes);
    (0..links).fold(0, |link, _| order.after(link)) * STRIDE as u64
}

/// The order of the links, as a function: a table would be as large as the measured memory. A permutation gives each
/// link a place, and the link at the next place follows it, so that one cycle contains all links.
struct Order {
    bits: u32,
}

/// Odd, so that it has an inverse modulo a power of two.
const FACTOR: u64 = 0x9e37_79b9_7f4a_7c15;

const INVERSE: u64 = inverse(FACTOR);

/// With fewer rounds the same distances would repeat.
const ROUNDS: usize = 4;

impl Order {
    fn of(bytes: u64) -> Self {
        Self { bits: links(bytes).ilog2() }
    }

    fn after(&self, link: u64) -> u64 {
        let place = (0..ROUNDS).fold(link, |value, _| self.mixed(value.wrapping_mul(FACTOR) & self.mask()));
        let next = (place + 1) & self.mask();
        (0..ROUNDS).fold(next, |value, _| self.mixed(value).wrapping_mul(INVERSE) & self.mask())
    }

    /// Mixes the bits of a value. The function is its own inverse, because it leaves the upper half of the bits
    /// unchanged.
    fn mixed(&self, value: u64) -> u64 {
        value ^ (value >> self.bits.div_ceil(2))
    }

    fn mask(&self) -> u64 {
        (1 << self.bits) - 1
    }
}

/// Returns the inverse of an odd number modulo 2⁶⁴.
const fn inverse(factor: u64) -> u64 {
    // An odd number is its own inverse in the lowest three bits. Each step of Newton's method doubles the correct bits.
    let mut inverse = factor;
    let mut step = 0;
    while step < 5 {
        inverse = inverse.wrapping_mul(2_u64.wrapping_sub(factor.wrapping_mul(inverse)));
        step += 1;
    }
    inverse
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    #[test]
    fn chain_visits_each_link_once() {
        for bytes in [4096, 8192, 1 << 20] {
            let words = new(bytes);
            let mut seen = vec![false; words.len()];
            let mut at = 0;
            for _ in 0..links(bytes) {
                assert!(!std::mem::replace(&mut seen[at], true));
                at = words[at] as usize;
            }
            assert_eq!((at, seen.iter().filter(|seen| **seen).count() as u64), (0, links(bytes)));
        }
        assert_eq!(end(4096, 2), new(4096)[new(4096)[0] as usize]);
    }

    #[test]
    fn links_of_a_chain_are_in_random_order() {
        let words = new(1 << 20);
        let links = words.iter().step_by(STRIDE).enumerate();
        let distances: BTreeSet<_> = links.map(|(link, next)| next.wrapping_sub((link * STRIDE) as u64)).collect();
        // Of n random numbers below n, about 0.63 n differ.
        assert!(distances.len() * 10 > words.len() / STRIDE * 6, "{}", distances.len());
    }
}
