//! The columns of publishers and subscribers.

use partywall::info::{Ages, Participant, PublisherInfo, SubscriberInfo};

use crate::{
    describe,
    table::{Cell, Column},
    text,
};

type Col = Column<TopicUser>;

/// A publisher or subscriber in a table.
pub(crate) struct TopicUser {
    pub(crate) topic: String,
    pub(crate) role: Role,
}

pub(crate) enum Role {
    Publisher(PublisherInfo),
    Subscriber(SubscriberInfo),
}

// Of `show`.
pub(crate) const PUBLISHERS: &[Col] = &[PID, STATE, NUMBER, SAMPLES.headed("PUBLISHED"), WAITS];
pub(crate) const SUBSCRIBERS: &[Col] =
    &[PID, STATE, NUMBER, POLICY, LAG, RECEIVED, MISSED, HELD, P50, P99, MAX, WAITS.headed("HOLDS UP OTHERS")];

/// Of `top`.
pub(crate) const TOP: &[Col] =
    &[TOPIC, ROLE, PID, STATE, POLICY, PER_SECOND, LAG, MISSED, P50, P99, HELD, SAMPLES, NOTE];

const TOPIC: Col = Col::left("TOPIC", |user| user.long_name(&user.topic));
const ROLE: Col = Col::left("ROLE", |user| match user.role {
    Role::Publisher(_) => "pub".into(),
    Role::Subscriber(_) => "sub".into(),
});
const PID: Col = Col::right("PID", |user| user.who().pid.map_or_else(|| "?".into(), Cell::from));
const STATE: Col = Col::left("STATE", |user| describe::control::state(user.who()).into()).spare(5);
const NUMBER: Col = Col::right("NUMBER", |user| user.who().id.into()).spare(1);
const SAMPLES: Col = Col::right("SAMPLES", |user| match &user.role {
    Role::Publisher(publisher) => publisher.published.into(),
    Role::Subscriber(subscriber) => subscriber.received.into(),
})
.spare(2);
const RECEIVED: Col = SAMPLES.headed("RECEIVED");
const PER_SECOND: Col = Col::right("PER S", |user| user.rate());
const WAITS: Col = Col::left("WAITS", |user| match &user.role {
    Role::Publisher(publisher) => {
        let waits = |(by, ms)| format!("for subscriber {by}, since {}", text::seconds(ms));
        publisher.blocked.map(waits).into()
    }
    Role::Subscriber(subscriber) => subscriber.stalled.map(|ms| format!("for {}", text::seconds(ms))).into(),
});
/// The note: the same, with the pid of the subscriber.
const NOTE: Col = Col::left("WAITS", |user| user.note.as_str().into());

// Of a subscriber; blank for a publisher.
const POLICY: Col = Col::left("POLICY", |user| user.subscriber().map(describe::control::policy).into()).spare(4);
const LAG: Col = Col::right("LAG", |user| user.subscriber().map(|it| it.lag).into());
const MISSED: Col = Col::right("MISSED", |user| user.subscriber().map(|it| it.dropped).into());
const HELD: Col = Col::right("HELD", |user| user.subscriber().map(|it| it.held).into()).spare(3);
const P50: Col = Col::right("AGE P50", |user| user.age(|ages| ages.p50));
const P99: Col = Col::right("P99", |user| user.age(|ages| ages.p99)).spare(7);
const MAX: Col = Col::right("MAX", |user| user.age(|ages| ages.max)).spare(6);

impl TopicUser {
    pub(crate) fn who(&self) -> &Participant {
        match &self.role {
            Role::Publisher(publisher) => &publisher.who,
            Role::Subscriber(subscriber) => &subscriber.who,
        }
    }

    fn subscriber(&self) -> Option<&SubscriberInfo> {
        if let Role::Subscriber(subscriber) = &self.role { Some(subscriber) } else { None }
    }

    /// Returns an age of samples, blank if none was measured.
    fn age(&self, ns: impl FnOnce(&Ages) -> u64) -> Cell {
        let ages = self.subscriber().map(|subscriber| &subscriber.ages).filter(|ages| ages.count > 0);
        ages.map(|ages| Cell::nanoseconds(ns(ages))).into()
    }
}
