//! A queue in memory that the broker creates and members map.

use std::{
    io,
    os::fd::{AsFd, OwnedFd},
    sync::{Arc, atomic::Ordering},
};

use partywall_os::{map::SharedMap, memfd};

use super::{Header, Queue, Shape, body::Body, word::PlaceWord};
use crate::invalid;

impl Queue {
    /// Creates a memfd with an empty queue.
    ///
    /// # Errors
    /// `InvalidInput` unless the shape [is possible](Shape::is_possible); otherwise as memfd_create(2).
    pub fn create(shape: Shape) -> io::Result<OwnedFd> {
        if !shape.is_possible() {
            return Err(io::Error::new(io::ErrorKind::InvalidInput, format!("a queue cannot have {shape:?}")));
        }
        let mut draft = memfd::Draft::create("partywall:queue", bytes(&shape) as u64)?;
        let header = draft.writer();
        header.write_all_at(&MAGIC.to_le_bytes(), 0)?;
        header.write_all_at(&LAYOUT_HASH.to_le_bytes(), 8)?;
        for (word, at) in [shape.tasks, shape.inputs, shape.outputs].into_iter().zip((16..).step_by(4)) {
            header.write_all_at(&word.to_le_bytes(), at)?;
        }
        header.write_all_at(&shape.lease.to_le_bytes(), 32)?;
        Ok(draft.share()?)
    }

    /// Maps a queue that a broker has created.
    ///
    /// # Errors
    /// `InvalidData` if the memory is not a queue's, or has another layout; otherwise as [`SharedMap::writable`].
    pub fn map(fd: impl AsFd) -> io::Result<Self> {
        let memory = Arc::new(SharedMap::writable(fd)?);
        let len = memory.len();
        let Some([header]) = memory.atomics::<Header>(0, 1) else {
            return Err(invalid(format!("{len} bytes are too few for a queue")));
        };
        let found = (header.magic.load(Ordering::Relaxed), header.layout.load(Ordering::Relaxed));
        crate::check_layout("queue", found, (MAGIC, LAYOUT_HASH))?;
        let shape = Shape {
            tasks: header.tasks.load(Ordering::Relaxed),
            inputs: header.inputs.load(Ordering::Relaxed),
            outputs: header.outputs.load(Ordering::Relaxed),
            lease: header.lease.load(Ordering::Relaxed),
        };
        if !shape.is_possible() || len != bytes(&shape) {
            return Err(invalid(format!("a queue of {shape:?} and {len} bytes cannot be")));
        }
        Ok(Self::of(&memory, shape).expect("the length is that of the parts"))
    }

    fn of(memory: &Arc<SharedMap>, shape: Shape) -> Option<Self> {
        Some(Self {
            shape,
            header: memory.part(0, 1)?,
            places: memory.part(size_of::<Header>(), shape.tasks as usize)?,
            bodies: memory.part(bodies_offset(&shape), shape.tasks as usize)?,
        })
    }
}

impl Shape {
    /// Returns the bytes of the control memory.
    pub fn bytes(&self) -> u64 {
        bytes(self) as u64
    }
}

/// Byte offset of the bodies.
fn bodies_offset(shape: &Shape) -> usize {
    size_of::<Header>() + (shape.tasks as usize * size_of::<PlaceWord>()).next_multiple_of(CACHE_LINE)
}

fn bytes(shape: &Shape) -> usize {
    bodies_offset(shape) + shape.tasks as usize * size_of::<Body>()
}

/// The words of the places share no cache line with a body.
const CACHE_LINE: usize = 64;

const MAGIC: u64 = u64::from_le_bytes(*b"PWQUEUE1");

/// Change the text whenever the bytes change, and never for a name alone.
pub(crate) const LAYOUT_HASH: u64 = crate::layout_hash(
    b"header 512: magic8 hash8 tasks4 inputs4 outputs4 0:4 lease8 0:24 tail8 work:eventcount8 0:48 head8 \
    space:eventcount8 0:48 late8 late_claimed8 tended8 results:eventcount8 completed8 returned8 detached8 0:8 \
    attachments32x8 (number32 attached1); \
    eventcount: count4 sleepers4; place8: state4 unwanted1 row16 attempts8 generation35; body1944: head8 (kind1 inputs1 \
    arguments2 max_attempts1 flags1 row2) origin8 (submitted40 before8 \
    generation16) lease8 (attempt8 generation16 until40) value8 cell8 \
    lane8 (incarnation33 0:7 lane8 0:16) output72 records4x112 (state2:4 reason3 attempt8 row16 generation35; output8 value8 \
    cell8 lane8 contents72) kind32 \
    inputs8x88 (block: index16 generation46 0:2; part: number32 0:31 1:1; offset8 contents72) text128 arguments512; \
    contents72: bytes47 0:1 rank4 dtype8 0:3 is_there1 shape8x8",
);

#[cfg(test)]
mod tests {
    use super::*;

    const SHAPE: Shape = Shape { tasks: 30, inputs: 8, outputs: 4, lease: 5 };

    #[test]
    fn mapped_queue_has_its_shape() {
        let queue = Queue::map(Queue::create(SHAPE).unwrap()).unwrap();
        assert_eq!((queue.shape(), queue.audit().free), (SHAPE, 30));
        assert_eq!(queue.next(), None);
    }

    // Holds 214.
    #[test]
    fn control_memory_of_a_task_is_less_than_two_kibibytes() {
        let with = |tasks| Shape { tasks, ..SHAPE }.bytes();
        assert!(with(100_000) - with(1) <= 100_000 * 2048);
    }

    // Holds 159.
    #[test]
    fn impossible_layouts_are_refused() {
        let impossible = [
            Shape { tasks: 0, ..SHAPE },
            Shape { tasks: crate::queue::MAX_TASKS + 1, ..SHAPE },
            Shape { inputs: (1 << 16) + 1, ..SHAPE },
            Shape { lease: u64::MAX, ..SHAPE },
        ];
        for shape in impossible {
            assert_eq!(Queue::create(shape).unwrap_err().kind(), io::ErrorKind::InvalidInput, "{shape:?}");
        }
        // No queue, another layout, another length, and numbers that do not fit it.
        let len = bytes(&SHAPE);
        for (bytes, what, why) in [
            (len, (0, 1), "not the control memory of a queue"),
            (len, (8, 1), "another layout"),
            (len + 64, (0, 0), "cannot be"),
            (100, (0, 0), "too few"),
            (len, (16, 5), "cannot be"),
            (len, (38, 255), "cannot be"),
        ] {
            let mut draft = memfd::Draft::create("queue", bytes as u64).unwrap();
            let mut header = [MAGIC.to_le_bytes(), LAYOUT_HASH.to_le_bytes()].concat();
            for word in [30_u32, 8, 4, 0, 5, 0] {
                header.extend(word.to_le_bytes());
            }
            header[what.0] ^= what.1;
            draft.writer().write_all_at(&header[..header.len().min(bytes)], 0).unwrap();
            let error = Queue::map(draft.share().unwrap()).unwrap_err();
            assert_eq!(error.kind(), io::ErrorKind::InvalidData, "{bytes} {what:?}");
            assert!(error.to_string().contains(why), "{error}");
        }
    }
}
