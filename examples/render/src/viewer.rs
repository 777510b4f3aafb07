//! A viewer: sees the latest frame when it has time, and no process waits for it.

use super::{objects::Header, *};

pub(super) fn play(session: &mut Session) -> Result<(), Failure> {
    let mut player = Player::new(session)?;
    let topic = objects::open(&player.domain(), objects::FRAMES, None)?;
    if player.job.joins_late {
        player.say(Report::Ready)?;
        player.await_start()?;
    }
    let frames = topic.subscribe(Policy::Latest).join()?;
    player.say(Report::Ready)?;
    let mut missed = 0;
    let mut newest = None;
    while let Some(sample) = player.next(&frames)? {
        player.begin();
        missed += sample.missed();
        newest = Some(Header::of(&sample, 0)?.frame);
        drop(sample);
        player.end();
        if player.job.live && !player.job.joins_late {
            player.say(Report::Viewed)?;
        }
    }
    drop(frames);
    if player.job.joins_late {
        return player.say(Report::Left(player.frames()));
    }
    player.finish(
        "Frames that are looked at",
        "A viewer subscribes with the policy `Latest`: it misses frames, and delays nobody. It may come and go at any \
         time.",
        |step| {
            let newest = newest.map_or("none".to_owned(), |frame: u64| frame.to_string());
            step.value("missed", missed.to_string()).value("newest frame", newest)
        },
    )
}
