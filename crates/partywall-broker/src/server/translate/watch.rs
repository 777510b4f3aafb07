//! Events of names in answers.

use partywall_wire::{self as wire, Point};

use crate::registry::effect::{Happened, Happening};

pub(super) fn happened(happened: &Happened, instance: u64) -> wire::Happened {
    wire::Happened {
        gap: happened.gap,
        events: happened.events.iter().map(event).collect(),
        next: Point { instance, sequence: happened.next },
    }
}

fn event(happening: &Happening) -> wire::NameEvent {
    wire::NameEvent {
        sequence: happening.sequence,
        at: happening.at,
        named: happening.named,
        name: happening.name.to_string(),
        change: happening.change,
    }
}
