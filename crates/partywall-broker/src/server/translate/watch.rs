//! What is said of what happens to names.

use partywall_wire::{self as wire, Pattern, Point, Refusal};

use crate::registry::{
    effect::{Change, Gap, Happened, Happening, Named},
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
        gap: happened.gap.map(|gap| match gap {
            Gap::Behind { events } => wire::Gap::Behind { events },
            Gap::OtherBroker => wire::Gap::OtherBroker,
        }),
        events: happened.events.iter().map(event).collect(),
        next: Point { instance, sequence: happened.next },
    }
}

pub(super) fn named(named: Named) -> wire::Named {
    match named {
        Named::Segment => wire::Named::Segment,
        Named::Timeline => wire::Named::Timeline,
        Named::Semaphore => wire::Named::Semaphore,
        Named::Pool => wire::Named::Pool,
        Named::Topic => wire::Named::Topic,
    }
}

fn event(happening: &Happening) -> wire::NameEvent {
    wire::NameEvent {
        sequence: happening.sequence,
        at: happening.at,
        named: named(happening.named),
        name: happening.name.to_string(),
        change: match happening.change {
            Change::Created { pid } => wire::Change::Created { pid },
            Change::Committed { version, bytes, pid } => wire::Change::Committed { version, bytes, pid },
            Change::Withdrawn { pid } => wire::Change::Withdrawn { pid },
            Change::OwnerDied { pid } => wire::Change::OwnerDied { pid },
            Change::OwnerFaulted { pid } => wire::Change::OwnerFaulted { pid },
            Change::Reclaimed { version, bytes } => wire::Change::Reclaimed { version, bytes },
        },
    }
}
