//! One test per rule.

mod endings;
mod growth;
mod limits;
mod listings;
mod members;
mod versions;

use partywall_wire::NameEnd;

use super::*;

fn name(name: &str) -> Name {
    called(name)
}

fn stale(handle: Handle) -> Outcome {
    Err(Refusal::Stale { what: handle })
}

fn not_found(outcome: Outcome) -> bool {
    matches!(outcome, Err(Refusal::NotFound { .. }))
}

/// Returns whether the name belonged to legacy memory, and its end.
fn ended(outcome: Outcome) -> (bool, NameEnd) {
    match outcome {
        Err(Refusal::Ended { end, .. }) => (true, end),
        Err(Refusal::NotFound { ended: Some(end), .. }) => (false, *end),
        other => panic!("{other:?}"),
    }
}
