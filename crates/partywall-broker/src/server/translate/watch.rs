//! Events of names in answers.

use partywall_wire::{self as wire, Pattern, Point, Refusal};

use crate::registry::{
    effect::{Happened, Happening},
    event::{After, Watch},
};

pub(super) fn watch(pattern: String, after: Option<Point>, instance: u64) -> Result<Watch, Refusal> {
    let after = match after {
        None => After::Now,
        Some(point) if point.instance == instance => After::Event(point.sequence),
        Some(_) => After::Elsewhere,
    };
    match Pattern::new(&pattern) {
        Ok(pattern) => Ok(Watch { pattern, after }),
        Err(why) => Err(Refusal::BadPattern { pattern: pattern.chars().take(256).collect(), why }),
    }
}

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
