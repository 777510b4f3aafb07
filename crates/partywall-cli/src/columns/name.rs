//! The columns of names: segments, pools, topics and queues.

use partywall::{
    SampleType, bytes,
    info::{Control, NameInfo, Named, QueueUsage, TopicUsage, VersionInfo},
    kind_name,
};

use crate::{
    describe,
    table::{Cell, Column},
    text,
};

type Col = Column<NameInfo>;

// Of `ls`. The last column is left out where everything belongs to one user.
pub(crate) const SEGMENTS: &[Col] = &[NAME, VERSION, KIND, PLACE, SIZE, TENSORS, LIFETIME, LEASES, OLDER, AGE, USER];
pub(crate) const SEGMENTS_AND_COPIES: &[Col] =
    &[NAME, VERSION, KIND, PLACE, SIZE, TENSORS, LIFETIME, LEASES, OLDER, AGE, NOTE.headed("COPIED FROM"), USER];
pub(crate) const POOLS: &[Col] = &[POOL, KIND, PLACE, BLOCKS, EACH, UNUSED, LIFETIME, LEASES, AGE, USER];
pub(crate) const TOPICS: &[Col] =
    &[TOPIC, KIND, PLACE, SAMPLES, DEPTH, EACH, WRITERS, READERS, PUBLISHED, LIFETIME, AGE, USER];
pub(crate) const QUEUES: &[Col] =
    &[QUEUE, KIND, PLACE, PENDING, RUNNING, DONE, DEAD, FREE, COMPLETED, LIFETIME, AGE, USER];

/// Of `topic ls`.
pub(crate) const TOPIC_RATES: &[Col] = &[TOPIC, SAMPLES, WRITERS, READERS, RATE, MEMORY, PLACE];

// Of `top`. The note of a name is how it is used, that of a queue names its workers.
pub(crate) const TOP: &[Col] = &[
    NAME,
    KIND_OF_NAME,
    PLACE,
    SIZE,
    // What is older, and what is held, matters more there.
    VERSION.spare(7),
    OLDER.spare(9),
    LEASES.spare(10),
    AGE,
    PER_SECOND,
    NOTE.headed("USE"),
];
pub(crate) const TOP_QUEUES: &[Col] =
    &[QUEUE, PLACE, PENDING, RUNNING, DONE, DEAD, FREE, PER_SECOND, COMPLETED, RETURNED, NOTE.headed("WORKERS")];

const NAME: Col = Col::left("NAME", |name| name.long_name(&name.name));
const POOL: Col = NAME.headed("POOL");
const TOPIC: Col = NAME.headed("TOPIC");
const QUEUE: Col = NAME.headed("QUEUE");
const KIND_OF_NAME: Col = Col::left("KIND", |name| match name.latest {
    Some(_) => kind(name).name().into(),
    None => "removed".into(),
});
const OLDER: Col = Col::right("OLDER", |name| match name.older {
    0 => Cell::default(),
    n => Cell::ranked(format!("{n} ({})", bytes(name.older_bytes)), name.older_bytes as f64),
})
.spare(1);
const LIFETIME: Col = Col::left("LIFETIME", |name| lifetime(name).into()).spare(7);
const PER_SECOND: Col = Col::right("PER S", |name| name.rate());
const NOTE: Col = Col::left("", |name| name.note.as_str().into());

// Of the latest version; blank where there is none.
const VERSION: Col = Col::right("VERSION", |name| match &name.latest {
    Some(latest) => latest.version.into(),
    None => describe::gone(name).into(),
});
const KIND: Col = Col::left("KIND", |name| of_latest(name, |it| kind_name(it.kind).into())).spare(3);
const PLACE: Col = Col::left("PLACE", |name| of_latest(name, |it| name.place(it.place.into()))).spare(8);
const SIZE: Col = Col::right("SIZE", |name| of_latest(name, |it| Cell::bytes(it.bytes)));
const TENSORS: Col = Col::right("TENSORS", |name| of_latest(name, |it| it.tensors.into())).spare(4);
const MEMORY: Col = SIZE.headed("MEMORY").spare(9);
const LEASES: Col = Col::right("LEASES", |name| of_latest(name, |it| it.leases.into())).spare(2);
const AGE: Col = Col::right("AGE", |name| of_latest(name, |it| name.since(it.committed_at))).spare(6);
const USER: Col = Col::left("USER", |name| of_latest(name, |it| describe::user(it.uid, it.shared).into()));

// Of the blocks of a pool, topic or queue.
const BLOCKS: Col = Col::right("BLOCKS", |name| control(name).map(|it| it.blocks).into());
const EACH: Col = Col::right("BYTES EACH", |name| control(name).map(|it| it.block_bytes).into()).spare(9);
const UNUSED: Col = Col::right("FREE", |name| name.usage.map(|usage| usage.free).into());

// Of a topic.
const SAMPLES: Col = Col::left("SAMPLES", |name| {
    control(name).and_then(|it| it.topic).map(|shape| SampleType::of(&shape).to_string()).into()
});
const DEPTH: Col =
    Col::right("DEPTH", |name| control(name).and_then(|it| it.topic).map(|shape| shape.depth).into()).spare(5);
const WRITERS: Col = Col::right("PUBLISHERS", |name| topic(name).map(|it| it.publishers).into()).spare(10);
const READERS: Col = Col::right("SUBSCRIBERS", |name| topic(name).map(|it| it.subscribers).into());
const PUBLISHED: Col = Col::right("PUBLISHED", |name| topic(name).map(|it| it.published).into());
const RATE: Col = Col::right("RATE", |name| name.rate.map(|rate| format!("{rate:.1}/s")).into());

// Of a queue.
const PENDING: Col = Col::right("PENDING", |name| queue(name).map(|it| it.pending).into());
const RUNNING: Col = Col::right("RUNNING", |name| queue(name).map(|it| it.claimed + it.enqueued).into());
const DONE: Col = Col::right("DONE", |name| queue(name).map(|it| it.done).into()).spare(13);
const DEAD: Col = Col::right("DEAD", |name| queue(name).map(|it| it.dead).into());
const FREE: Col = Col::right("FREE", |name| queue(name).map(|it| it.free).into()).spare(12);
const COMPLETED: Col = Col::right("COMPLETED", |name| queue(name).map(|it| it.completed).into()).spare(11);
const RETURNED: Col = Col::right("RETURNED", |name| queue(name).map(|it| it.returned).into()).spare(10);

fn of_latest(name: &NameInfo, cell: impl FnOnce(&VersionInfo) -> Cell) -> Cell {
    name.latest.as_ref().map(cell).into()
}

fn control(name: &NameInfo) -> Option<Control> {
    name.latest.as_ref()?.control
}

/// Returns how a topic is used.
pub(crate) fn topic(name: &NameInfo) -> Option<TopicUsage> {
    name.usage?.topic
}

/// Returns how a queue is used.
pub(crate) fn queue(name: &NameInfo) -> Option<QueueUsage> {
    name.usage?.queue
}

/// Returns the kind of a name; of a removed one as well, which was a segment.
pub(crate) fn kind(name: &NameInfo) -> Named {
    Named::of(control(name).as_ref())
}

/// Returns how long a name lives, and of a segment what may be written; of a removed one its deadline.
fn lifetime(name: &NameInfo) -> String {
    let Some(latest) = &name.latest else {
        return name.notice.as_ref().map_or_else(String::new, |notice| {
            let left = text::until(notice.until);
            let now = if left.is_zero() { "over".into() } else { format!("in {}", text::duration(left)) };
            format!("{} {now}", notice.then.name())
        });
    };
    let mutable = match (latest.mutable && latest.control.is_none(), latest.reserved) {
        (false, _) => String::new(),
        (true, 0) => ", mutable".into(),
        (true, reserved) => format!(", mutable to {}", bytes(reserved)),
    };
    format!("{}{mutable}", latest.lifetime.name())
}
