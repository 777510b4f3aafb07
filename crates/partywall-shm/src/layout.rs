//! The layouts of structs, as numbers that the compiler computes.
//!
//! `shared!` describes a struct that processes share: it lists the fields and the constants that give the bits of its
//! words a meaning. From this follow
//!
//! * [`Described::LAYOUT`], a hash of the size and alignment of the struct, of the name, offset and layout of each
//!   field, and of the name and value of each constant;
//! * the proof that the struct consists of atomics, without a gap between them. A struct with a field that is not
//!   listed, with a gap, or with anything but atomics does not compile.
//!
//! Control memory begins with the hash of its layout ([`control`](crate::control)), so builds that differ in one of
//! these refuse each other's memory, without anybody having to remember it.
//!
//! The hash does not see what a word means. A field or a constant that gets another meaning needs another name.

use std::{
    marker::PhantomData,
    mem::needs_drop,
    sync::atomic::{AtomicU32, AtomicU64},
};

use partywall_os::map::Atomics;

/// A type whose layout has been described. Two types of different layouts have different numbers.
pub(crate) trait Described {
    /// The hash of the layout.
    const LAYOUT: u64;
}

/// Describes a struct of atomics, which other processes may write at any time.
macro_rules! shared {
    ($type:ty { $($field:tt),* $(,)? } $($bits:tt)*) => {
        described!($type { $($field),* } $($bits)*);

        #[allow(unsafe_code, reason = "the one assertion that a struct consists of atomics")]
        const _: () = {
            $($crate::layout::is_atomic::<$type, _>(|whole| &whole.$field);)*
            // SAFETY:
            // - It has no other fields, and each consists of atomics: `described!` names all of them, or does not
            //   compile, and so does the line above unless each is `Atomics`.
            // - It has no padding and no drop glue, and its layout is fixed: `StructHash` has checked that each field
            //   begins where the one before it ends, that the last one ends the struct, and that it has no drop glue.
            unsafe impl partywall_os::map::Atomics for $type {}
        };
    };
}

/// Describes a struct. Its fields are listed in their order, and leave no gap.
macro_rules! described {
    ($type:ty { $($field:tt),* $(,)? } $(bits { $($bits:expr),* $(,)? })?) => {
        impl $crate::layout::Described for $type {
            const LAYOUT: u64 = {
                type Whole = $type;
                // Does not compile if a field is missing.
                let _ = |whole: &Whole| {
                    let Whole { $($field: _),* } = whole;
                };
                $crate::layout::StructHash::<Whole>::new()
                    $(.field(stringify!($field), std::mem::offset_of!(Whole, $field), |whole| &whole.$field))*
                    $($(.bits(stringify!($bits), $bits as u64))*)?
                    .end()
            };
        }

        // Evaluated here, so that a struct with a gap does not compile even if it is in no memory.
        const _: u64 = <$type as $crate::layout::Described>::LAYOUT;
    };
}

/// An FNV-1a hash under construction.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Hash(u64);

impl Hash {
    pub(crate) const fn new() -> Self {
        Self(0xcbf2_9ce4_8422_2325)
    }

    pub(crate) const fn number(self, number: u64) -> Self {
        self.bytes(&number.to_le_bytes())
    }

    /// Continues with a text and its length, so that two texts are never taken for two others.
    pub(crate) const fn text(self, text: &str) -> Self {
        self.number(text.len() as u64).bytes(text.as_bytes())
    }

    pub(crate) const fn end(self) -> u64 {
        self.0
    }

    const fn bytes(mut self, bytes: &[u8]) -> Self {
        let mut i = 0;
        while i < bytes.len() {
            self.0 = (self.0 ^ bytes[i] as u64).wrapping_mul(0x0000_0100_0000_01b3);
            i += 1;
        }
        self
    }
}

/// The hash of a struct under construction: see `described!`.
#[derive(Debug)]
pub(crate) struct StructHash<S> {
    hash: Hash,
    /// Where the next field begins.
    next: usize,
    of: PhantomData<S>,
}

impl<S> StructHash<S> {
    pub(crate) const fn new() -> Self {
        let hash = Hash::new().number(size_of::<S>() as u64).number(align_of::<S>() as u64);
        Self { hash, next: 0, of: PhantomData }
    }

    /// Continues with a field. The function that takes it says of which type it is.
    pub(crate) const fn field<T: Described>(self, name: &str, offset: usize, _: fn(&S) -> &T) -> Self {
        assert!(offset == self.next, "the fields are not listed in their order, or leave a gap");
        let hash = self.hash.text(name).number(offset as u64).number(T::LAYOUT);
        Self { hash, next: offset + size_of::<T>(), of: PhantomData }
    }

    /// Continues with a constant that gives bits of a word a meaning.
    pub(crate) const fn bits(self, name: &str, value: u64) -> Self {
        Self { hash: self.hash.text(name).number(value), ..self }
    }

    pub(crate) const fn end(self) -> u64 {
        assert!(self.next == size_of::<S>(), "there is a gap behind the last field");
        assert!(!needs_drop::<S>(), "nothing in memory that processes share is dropped");
        self.hash.end()
    }
}

/// Compiles for fields that consist of atomics alone.
pub(crate) const fn is_atomic<S, T: Atomics>(_: fn(&S) -> &T) {}

/// Integers have the order of bytes of the machine, which all processes share.
macro_rules! integers {
    ($($integer:ty),*) => {
        $(impl Described for $integer {
            const LAYOUT: u64 = Hash::new().text(stringify!($integer)).end();
        })*
    };
}

integers!(AtomicU32, AtomicU64, u8, u32, u64);

impl<T: Described, const N: usize> Described for [T; N] {
    const LAYOUT: u64 = Hash::new().number(N as u64).number(T::LAYOUT).end();
}

#[cfg(test)]
mod tests {
    use super::*;

    #[allow(dead_code, reason = "nothing but its layout counts")]
    struct Port(AtomicU64);
    #[allow(dead_code, reason = "as above")]
    struct Place(AtomicU64);
    shared!(Port { 0 } bits { 2 });
    shared!(Place { 0 } bits { 3 });

    /// Describes structs that differ in the given way, and returns their hashes.
    macro_rules! layouts {
        ($($(#[$repr:meta])* { $($field:ident: $type:ty),* } [$($name:ident = $value:expr),*];)*) => {
            [$({
                $(#[$repr])*
                #[allow(dead_code, reason = "nothing but its layout counts")]
                struct Words { $($field: $type),* }
                $(const $name: u64 = $value;)*
                shared!(Words { $($field),* } bits { $($name),* });
                Words::LAYOUT
            }),*]
        };
    }

    // Holds 159.
    #[test]
    fn each_difference_in_a_layout_changes_its_hash() {
        let layouts = layouts! {
            #[repr(C)] { a: AtomicU32, b: AtomicU32, c: AtomicU64 } [ROW = 2, TAG = 18];
            // Another offset of one field, and of two of the same type.
            #[repr(C)] { c: AtomicU64, a: AtomicU32, b: AtomicU32 } [ROW = 2, TAG = 18];
            #[repr(C)] { b: AtomicU32, a: AtomicU32, c: AtomicU64 } [ROW = 2, TAG = 18];
            // Another size of a field, one more field, another alignment.
            #[repr(C)] { a: AtomicU64, c: AtomicU64 } [ROW = 2, TAG = 18];
            #[repr(C)] { a: AtomicU32, b: AtomicU32, c: [AtomicU64; 1] } [ROW = 2, TAG = 18];
            #[repr(C)] { a: AtomicU32, b: AtomicU32, c: [AtomicU64; 2] } [ROW = 2, TAG = 18];
            #[repr(C)] { a: AtomicU32, b: AtomicU32, c: AtomicU64, d: AtomicU64 } [ROW = 2, TAG = 18];
            #[repr(C, align(16))] { a: AtomicU32, b: AtomicU32, c: AtomicU64 } [ROW = 2, TAG = 18];
            // Another bit, fewer bits, another meaning.
            #[repr(C)] { a: AtomicU32, b: AtomicU32, c: AtomicU64 } [ROW = 3, TAG = 18];
            #[repr(C)] { a: AtomicU32, b: AtomicU32, c: AtomicU64 } [ROW = 2];
            #[repr(C)] { a: AtomicU32, b: AtomicU32, c: AtomicU64 } [TAG = 18];
            #[repr(C)] { a: AtomicU32, b: AtomicU32, c: AtomicU64 } [ROW = 2, LAP = 18];
            #[repr(C)] { a: AtomicU32, b: AtomicU32, seen: AtomicU64 } [ROW = 2, TAG = 18];
        };
        let mut different = layouts.to_vec();
        different.sort_unstable();
        different.dedup();
        assert_eq!(different.len(), layouts.len(), "{layouts:x?}");
    }

    /// The first one twice: nothing else goes into the hash, so another build of the same source has it, too.
    #[test]
    fn equal_layouts_have_one_hash() {
        let [one, other] = layouts! {
            #[repr(C)] { a: AtomicU32, b: AtomicU32, c: AtomicU64 } [ROW = 2];
            #[repr(C)] { a: AtomicU32, b: AtomicU32, c: AtomicU64 } [ROW = 2];
        };
        assert_eq!(one, other);
    }

    #[test]
    fn layouts_of_fields_count() {
        let [port, place] = layouts! {
            #[repr(C)] { words: [Port; 2] } [];
            #[repr(C)] { words: [Place; 2] } [];
        };
        assert_ne!(port, place);
    }
}
