//! One test per rule.

mod endings;
mod growth;
mod limits;
mod listings;
mod members;
mod versions;

use super::*;
use crate::registry::{
    effect::{Handle, Refused},
    tombstones::Tombstone,
};

fn name(name: &str) -> Name {
    Name::new(name)
}

fn stale(handle: Handle) -> Outcome {
    Err(Refused::Stale(handle))
}

fn not_found(outcome: Outcome) -> bool {
    matches!(outcome, Err(Refused::NotFound { .. }))
}

fn ended(outcome: Outcome) -> Tombstone {
    match outcome {
        Err(Refused::Ended { tombstone, .. }) if tombstone.legacy => tombstone,
        Err(Refused::NotFound { ended: Some(tombstone), .. }) if !tombstone.legacy => *tombstone,
        other => panic!("{other:?}"),
    }
}
