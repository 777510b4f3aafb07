//! Control memory: the words of one object, which the broker creates and members map.
//!
//! | offset | | |
//! |---|---|---|
//! | 0 | magic | the sort of object |
//! | 8 | layout hash | of everything behind it: memory of another layout is refused, never guessed |
//! | 16 | shape | six numbers that the lengths of the parts depend on |
//! | 64 | parts | each begins at the next multiple of 64 bytes, or of its alignment if that is larger |
//!
//! The broker writes the first 64 bytes before it hands the memory out. Any member may overwrite them later, so a
//! process uses them only when it maps the memory. Everything else is zero at first.
//!
//! An object lists its parts once ([`parts!`]): the hash, the length and the mapping follow from the list.

use std::{
    io,
    os::fd::{AsFd, OwnedFd},
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
};

use partywall_os::{map::SharedMap, memfd::Draft};

use crate::layout::{Described, Hash};

/// An object with control memory.
pub(crate) trait ControlMemory: Sized {
    /// The first bytes of the memory.
    const MAGIC: [u8; 8];
    /// The object, for messages and the name of the file.
    const NAME: &'static str;
    /// What the lengths of the parts depend on.
    type Shape: Copy;

    /// Checks that there can be such an object.
    ///
    /// # Errors
    /// Why there cannot be one.
    fn check(shape: Self::Shape) -> Result<(), String>;

    /// A hash of the names of the numbers: see `numbers!`. A single number needs none.
    const NUMBERS: u64 = 0;

    /// Returns the shape as numbers.
    fn numbers(shape: Self::Shape) -> Numbers;

    /// Returns the shape that numbers stand for, which may be an impossible one.
    fn shape_of(numbers: Numbers) -> Self::Shape;

    /// The hash of the layouts of all parts: see `parts!`, as for the functions below.
    const LAYOUT: u64;

    /// Returns the byte offset of the end of the parts.
    fn end(shape: Self::Shape) -> usize;

    /// Maps the parts of an object; `None` if the memory ends before they do.
    fn of(shape: Self::Shape, memory: &Arc<SharedMap>) -> Option<Self>;
}

/// Describes the parts of an object, in its `impl` of [`ControlMemory`]: the name of each in the last expression, which
/// makes the object, its type, and how many there are.
macro_rules! parts {
    (|$shape:pat_param| { $($part:ident: $type:ty = $count:expr),* $(,)? } => $object:expr) => {
        const LAYOUT: u64 = {
            use $crate::layout::Described;
            $crate::layout::Hash::new()
                $(.text(stringify!($part)).number(<$type>::LAYOUT).text(stringify!($count)))*
                .end()
        };

        fn end($shape: Self::Shape) -> usize {
            let mut cursor = $crate::control::LayoutCursor::FIRST;
            $(cursor.next::<$type>($count as usize);)*
            cursor.end()
        }

        fn of(shape: Self::Shape, memory: &std::sync::Arc<partywall_os::map::SharedMap>) -> Option<Self> {
            let mut cursor = $crate::control::LayoutCursor::FIRST;
            let $shape = shape;
            $(let $part = memory.array::<$type>(cursor.next::<$type>($count as usize), $count as usize)?;)*
            Some($object)
        }
    };
}
pub(crate) use parts;

/// Describes the shape of an object, in its `impl` of [`ControlMemory`]: the fields in the order of the numbers.
macro_rules! numbers {
    ($shape:ident { $($field:ident),* }) => {
        const NUMBERS: u64 = $crate::layout::Hash::new()$(.text(stringify!($field)))*.end();

        fn numbers(shape: $shape) -> $crate::control::Numbers {
            let all = [$(u64::from(shape.$field)),*];
            std::array::from_fn(|index| all.get(index).copied().unwrap_or(0))
        }

        fn shape_of([$($field),*, ..]: $crate::control::Numbers) -> $shape {
            $shape { $($field: $crate::control::narrowed($field)),* }
        }
    };
}
pub(crate) use numbers;

/// A shape as numbers; what is left is 0.
pub(crate) type Numbers = [u64; 6];

/// Returns a number of a shape. One that is too large becomes the largest, which is impossible in every shape.
pub(crate) fn narrowed<N: TryFrom<u64> + From<u32>>(number: u64) -> N {
    N::try_from(number).unwrap_or_else(|_| u32::MAX.into())
}

/// Creates the memory of an object.
///
/// # Errors
/// `InvalidInput` unless there can be such an object; otherwise as memfd_create(2) and mmap(2).
pub(crate) fn create<C: ControlMemory>(shape: C::Shape) -> io::Result<OwnedFd> {
    C::check(shape).map_err(|why| io::Error::new(io::ErrorKind::InvalidInput, why))?;
    let fd = Draft::create(&format!("partywall:{}", C::NAME), bytes::<C>(shape) as u64)?.share()?;
    write_head::<C>(&SharedMap::writable(&fd)?, shape);
    Ok(fd)
}

/// Writes what comes before the parts of an object's memory.
pub(crate) fn write_head<C: ControlMemory>(memory: &SharedMap, shape: C::Shape) {
    let head = &memory.atomics::<Head>(0, 1).expect("it was created with a head")[0];
    let set = |word: &AtomicU64, number| word.store(number, Ordering::Relaxed);
    set(&head.magic, u64::from_le_bytes(C::MAGIC));
    set(&head.layout, layout_of::<C>());
    head.shape.iter().zip(C::numbers(shape)).for_each(|(word, number)| set(word, number));
}

/// Maps memory that a broker has created.
///
/// # Errors
/// `InvalidData` if the memory is not that of such an object, or has another layout; otherwise as
/// [`SharedMap::writable`].
pub(crate) fn map<C: ControlMemory>(fd: impl AsFd) -> io::Result<C> {
    let memory = Arc::new(SharedMap::writable(fd)?);
    let len = memory.len();
    let Some([head]) = memory.atomics::<Head>(0, 1) else {
        return Err(invalid(format!("{len} bytes are too few for a {}", C::NAME)));
    };
    let get = |word: &AtomicU64| word.load(Ordering::Relaxed);
    let magic = get(&head.magic);
    let layout = get(&head.layout);
    let expected = layout_of::<C>();
    if magic != u64::from_le_bytes(C::MAGIC) {
        return Err(invalid(format!("this is not the control memory of a {} ({magic:016x})", C::NAME)));
    }
    if layout != expected {
        let name = C::NAME;
        let text = format!("the control memory of the {name} has another layout ({layout:016x}, not {expected:016x})");
        return Err(invalid(text));
    }
    let shape = C::shape_of(head.shape.each_ref().map(get));
    map_as(&memory, shape)
}

/// Returns the object of this shape that is in mapped memory, whatever the memory itself says.
///
/// # Errors
/// `InvalidData` if there can be no such object, or its memory has another length.
pub(crate) fn map_as<C: ControlMemory>(memory: &Arc<SharedMap>, shape: C::Shape) -> io::Result<C> {
    C::check(shape).map_err(invalid)?;
    let len = memory.len();
    let expected = bytes::<C>(shape);
    if len != expected {
        let name = C::NAME;
        let text = format!("the control memory of this {name} has {expected} bytes, but this file has {len}");
        return Err(invalid(text));
    }
    Ok(C::of(shape, memory).expect("the length is that of the parts"))
}

/// Returns the bytes of an object's memory. There can be such an object.
pub(crate) fn bytes<C: ControlMemory>(shape: C::Shape) -> usize {
    C::end(shape)
}

/// Returns the byte offset of the first part.
pub(crate) const fn first_part<T>() -> usize {
    let mut cursor = LayoutCursor::FIRST;
    cursor.next::<T>(0)
}

/// Returns the hash of the layout of an object's memory.
pub(crate) const fn layout_of<C: ControlMemory>() -> u64 {
    let magic = u64::from_le_bytes(C::MAGIC);
    Hash::new().number(magic).number(Head::LAYOUT).number(C::NUMBERS).number(C::LAYOUT).end()
}

fn invalid(text: String) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, text)
}

/// The first bytes of control memory.
#[repr(C, align(64))]
struct Head {
    magic: AtomicU64,
    layout: AtomicU64,
    shape: [AtomicU64; 6],
}

shared!(Head { magic, layout, shape } bits { CACHE_LINE });

/// The byte offset behind the parts that have been laid out.
pub(crate) struct LayoutCursor(usize);

impl LayoutCursor {
    pub(crate) const FIRST: Self = Self(size_of::<Head>());

    /// Lays out the next part, and returns its byte offset.
    pub(crate) const fn next<T>(&mut self, count: usize) -> usize {
        // Structs of two parts share no cache line.
        let start = self.0.next_multiple_of(CACHE_LINE).next_multiple_of(align_of::<T>());
        self.0 = start + count * size_of::<T>();
        start
    }

    /// Returns the byte offset of the end of the parts.
    pub(crate) fn end(self) -> usize {
        self.0
    }
}

const CACHE_LINE: usize = 64;

#[cfg(test)]
mod tests {
    use std::fmt::Debug;

    use partywall_os::{map::SharedArray, memfd};

    use super::*;
    use crate::{
        members::Members, pool::Pool, queue, queue::Queue, semaphore::Semaphore, timeline::Slab, topic, topic::Topic,
    };

    /// Checks which memory is refused as that of an object. The object cannot have the shape `impossible`.
    fn refuses_foreign_memory<C: ControlMemory + Debug>(shape: C::Shape, impossible: Option<Numbers>) {
        let refused = |memory: OwnedFd, why: &str| {
            let error = map::<C>(memory).unwrap_err();
            assert_eq!(error.kind(), io::ErrorKind::InvalidData, "{error}");
            assert!(error.to_string().contains(why) && error.to_string().contains(C::NAME), "{error}");
        };
        let len = bytes::<C>(shape) as u64;
        let empty = |bytes| Draft::create("partywall:test", bytes).unwrap().share().unwrap();
        refused(empty(0), "0 bytes are too few for a");
        refused(empty(63), "63 bytes are too few for a");
        refused(empty(len), "this is not the control memory of a");
        // The word at `index` of what the memory begins with is another one.
        let changed = |bytes, index: usize, change: u64| {
            let fd = empty(bytes);
            let memory = SharedMap::writable(&fd).unwrap();
            write_head::<C>(&memory, shape);
            memory.atomics::<AtomicU64>(0, 8).unwrap()[index].fetch_xor(change, Ordering::Relaxed);
            fd
        };
        map::<C>(changed(len, 0, 0)).unwrap();
        map::<C>(create::<C>(shape).unwrap()).unwrap();
        refused(changed(len, 0, 1 << 56), "this is not the control memory of a");
        refused(changed(len, 1, 1), "has another layout");
        refused(changed(len + 64, 0, 0), "but this file has");
        refused(changed(64, 0, 0), "but this file has 64");
        if let Some(impossible) = impossible {
            for (index, number) in impossible.into_iter().enumerate().filter(|(_, number)| *number != 0) {
                refused(changed(len, 2 + index, C::numbers(shape)[index] ^ number), "");
                refused(changed(len, 2 + index, 1 << 63), "");
            }
            // Another possible shape, but not one of this length.
            refused(changed(len, 2, 1), "but this file has");
        }
    }

    // Holds 159.
    #[test]
    fn foreign_memory_is_refused_as_each_object() {
        let all = [u64::from(u32::MAX); 6];
        let shape = topic::TopicLimits { blocks: 40, depth: 8, publishers: 3, loans: 2, subscribers: 4, held: 4 };
        refuses_foreign_memory::<Topic>(shape, Some(all));
        let [tasks, inputs, outputs, lease, ..] = all;
        let shape = queue::QueueLimits { tasks: 30, inputs: 8, outputs: 4, lease: 5 };
        refuses_foreign_memory::<Queue>(shape, Some([tasks, inputs, outputs, lease << 32, 0, 0]));
        refuses_foreign_memory::<Pool>(8, Some([tasks, 0, 0, 0, 0, 0]));
        refuses_foreign_memory::<Semaphore>(8, Some([tasks, 0, 0, 0, 0, 0]));
        refuses_foreign_memory::<Members>(8, Some([tasks, 0, 0, 0, 0, 0]));
        refuses_foreign_memory::<Slab>((), None);
    }

    #[test]
    fn objects_of_one_layout_are_refused_as_each_other() {
        let error = Pool::map(Semaphore::create(3).unwrap()).unwrap_err();
        assert!(error.to_string().contains("not the control memory of a pool"), "{error}");
    }

    /// An object of three structs, or of other parts.
    #[derive(Debug)]
    struct Tested<P>(P);

    /// Implements the trait for an object of these parts, whose shape says how many of each there are.
    macro_rules! tested {
        ($object:ty, $($part:ident: $type:ty),*) => {
            impl ControlMemory for Tested<$object> {
                const MAGIC: [u8; 8] = *b"PWTESTED";
                const NAME: &'static str = "test";
                type Shape = Numbers;

                fn check(_: Numbers) -> Result<(), String> {
                    Ok(())
                }

                fn numbers(counts: Numbers) -> Numbers {
                    counts
                }

                fn shape_of(counts: Numbers) -> Numbers {
                    counts
                }

                parts!(|[$($part),*, ..]| { $($part: $type = $part),* } => Self(($($part,)*)));
            }
        };
    }

    #[derive(Debug)]
    #[repr(C)]
    struct Ours {
        head: AtomicU64,
        tail: AtomicU64,
    }

    /// As `Ours`, but for the offsets of the fields.
    #[derive(Debug)]
    #[repr(C)]
    struct Theirs {
        tail: AtomicU64,
        head: AtomicU64,
    }

    shared!(Ours { head, tail });
    shared!(Theirs { tail, head });

    #[repr(C, align(128))]
    struct Wide([AtomicU64; 16]);

    shared!(Wide { 0 });

    type Three = (SharedArray<Ours>, SharedArray<Wide>, SharedArray<AtomicU64>);
    tested!((SharedArray<Ours>,), ours: Ours);
    tested!((SharedArray<Theirs>,), theirs: Theirs);
    tested!(Three, ours: Ours, wide: Wide, words: AtomicU64);

    // Holds 159.
    #[test]
    fn memory_whose_fields_have_other_offsets_is_refused() {
        let counts = [3, 0, 0, 0, 0, 0];
        let theirs = create::<Tested<(SharedArray<Theirs>,)>>(counts).unwrap();
        assert_eq!(memfd::len(&theirs).unwrap(), bytes::<Tested<(SharedArray<Ours>,)>>(counts) as u64);
        let error = map::<Tested<(SharedArray<Ours>,)>>(&theirs).map(|_| ()).unwrap_err();
        assert!(error.to_string().contains("has another layout"), "{error}");
        let Tested((object,)) = map::<Tested<(SharedArray<Theirs>,)>>(&theirs).unwrap();
        object[2].head.store(7, Ordering::Relaxed);
        let memory = SharedMap::writable(&theirs).unwrap();
        assert_eq!(memory.atomics::<AtomicU64>(0, 14).unwrap()[8 + 2 * 2 + 1].load(Ordering::Relaxed), 7);
        assert_eq!(object[2].tail.load(Ordering::Relaxed), 0);
    }

    /// Each part begins in a cache line of its own, and at its alignment.
    #[test]
    fn parts_follow_each_other_in_cache_lines_of_their_own() {
        let end = |ours, wide, words| bytes::<Tested<Three>>([ours, wide, words, 0, 0, 0]);
        assert_eq!(end(1, 1, 1), 128 + 128 + 8);
        assert_eq!(end(0, 2, 0), 128 + 256);
        assert_eq!(end(5, 0, 9), 256 + 72);
        let counts = [1, 1, 1, 0, 0, 0];
        let fd = create::<Tested<Three>>(counts).unwrap();
        let memory = Arc::new(SharedMap::writable(fd).unwrap());
        let Tested((ours, wide, words)) = map_as(&memory, counts).unwrap();
        let offset = |address: *const u8| address as usize - memory.as_ptr() as usize;
        assert_eq!(offset(ours.as_ptr().cast()), 64);
        assert_eq!(offset(wide.as_ptr().cast()), 128);
        assert_eq!(offset(words.as_ptr().cast()), 256);
        assert!(Tested::<Three>::of([1, 1, 2, 0, 0, 0], &memory).is_none());
    }
}
