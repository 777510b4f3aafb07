//! The columns of timelines and semaphores.

use partywall::info::{ObjectInfo, SemaphoreInfo, TimelineInfo};

use crate::{
    describe,
    table::{Cell, Column},
};

type Col = Column<ObjectInfo>;

// Of `ls`. The last column is left out where everything belongs to one user.
pub(crate) const TIMELINES: &[Col] =
    &[NAME.headed("TIMELINE"), VALUE, LIMIT.headed("PROMISED").spare(2), LEASES, WRITER, USER];
pub(crate) const SEMAPHORES: &[Col] =
    &[NAME.headed("SEMAPHORE"), LIMIT.headed("PERMITS"), VALUE.headed("HELD"), WAITING.spare(2), LEASES, USER];

/// Of `top`.
pub(crate) const TOP: &[Col] = &[NAME, KIND, VALUE, LIMIT.headed("OF"), PER_SECOND, WAITING, LEASES, WRITER];

const NAME: Col = Col::left("NAME", |object| object.long_name(object.name()));
const KIND: Col = Col::left("KIND", |object| of(object, |_| "timeline".into(), |_| "semaphore".into())).spare(2);
const VALUE: Col = Col::right("VALUE", |object| of(object, |it| it.value.into(), |it| it.held.into()));
/// The highest value that was promised; the permits that there are.
const LIMIT: Col = Col::right("", |object| of(object, |it| it.announced.into(), |it| it.maximum.into()));
const PER_SECOND: Col = Col::right("PER S", |object| object.rate());
const WAITING: Col = Col::right("WAITING", |object| of(object, |_| Cell::default(), |it| it.waiting.into()));
const LEASES: Col = Col::right("LEASES", |object| of(object, |it| it.leases.into(), |it| it.leases.into())).spare(1);
const WRITER: Col = Col::left("WRITER", |object| of(object, |it| describe::writer(it).into(), |_| Cell::default()));
const USER: Col = Col::left("USER", |object| {
    let user = |uid, shared| describe::user(uid, shared).into();
    of(object, |it| user(it.uid, it.shared), |it| user(it.uid, it.shared))
});

/// Returns the cell of a timeline or of a semaphore.
fn of(
    object: &ObjectInfo,
    timeline: impl FnOnce(&TimelineInfo) -> Cell,
    semaphore: impl FnOnce(&SemaphoreInfo) -> Cell,
) -> Cell {
    match object {
        ObjectInfo::Timeline(it) => timeline(it),
        ObjectInfo::Semaphore(it) => semaphore(it),
        _ => Cell::default(),
    }
}
