//! The compositor: puts the tiles of a frame together.

use std::collections::BTreeMap;

use partywall::Timeline;

use super::{
    objects::Header,
    player::{Pace, within},
    *,
};

pub(super) fn play(session: &mut Session) -> Result<(), Failure> {
    let mut player = Player::new(session)?;
    let domain = player.domain();
    let publisher = objects::frames(&domain)?.publisher()?;
    let tiles = objects::tiles(&domain)?
        .subscribe(Policy::Block)
        .history(objects::TILES_BEFORE * player.job.renderers)
        .join()?;
    let compositor = Compositor { tiles: player.job.tiles(), size: player.job.size, publisher };
    let written = domain.timeline(objects::WRITTEN)?;
    player.ready()?;
    if player.job.live {
        compositor.live(&mut player, &tiles)?
    } else {
        compositor.all(&mut player, &tiles, &written)?
    }
    player.finish(
        "Tiles into frames",
        "A tile that its renderer has not published does not exist for the compositor. It keeps the tiles of a frame \
         until the frame is written: if one of them turns out to rest on a killed process, its successor's replaces it.",
        |step| step,
    )
}

struct Compositor {
    tiles: Vec<Tile>,
    size: Size,
    publisher: Publisher,
}

/// A received tile.
struct Received {
    header: Header,
    sample: Sample,
}

impl Received {
    /// Returns a tile once it is drawn, or `None` if its renderer died before the GPU had drawn it.
    fn new(sample: Sample) -> Result<Option<Self>, Failure> {
        if objects::has_failed(sample.wait(TIMEOUT).and_then(|()| sample.check()))? {
            return Ok(None);
        }
        Ok(Some(Self { header: Header::of(&sample, 2)?, sample }))
    }

    fn number(&self) -> usize {
        self.header.more[0] as usize
    }

    fn pid(&self) -> u32 {
        self.header.more[1]
    }
}

impl Compositor {
    /// Composes every frame, each when all of its tiles are there.
    fn all(&self, player: &mut Player<'_>, tiles: &Subscriber, written: &Timeline) -> Result<(), Failure> {
        let mut frames: BTreeMap<u64, Vec<Option<Received>>> = BTreeMap::new();
        let mut unwritten = player.job.unwritten;
        while let Some(sample) = player.next(tiles)? {
            let Some(tile) = Received::new(sample)? else { continue };
            if written.ending().is_some() {
                written.follow()?;
            }
            unwritten = unwritten.max(written.value());
            frames = frames.split_off(&unwritten);
            let frame = tile.header.frame;
            if frame < unwritten {
                continue;
            }
            let row = frames.entry(frame).or_insert_with(|| self.tiles.iter().map(|_| None).collect());
            let number = tile.number();
            match row.get_mut(number) {
                // A renderer sends a tile again only in place of its predecessor.
                Some(place) if place.as_ref().is_none_or(|known| known.pid() != tile.pid()) => *place = Some(tile),
                _ => continue,
            }
            let row: Vec<&Received> = row.iter().flatten().collect();
            if row.len() == self.tiles.len() {
                self.compose(player, frame, &row)?;
            }
        }
        Ok(())
    }

    /// Composes frames at a rate, each of the latest tiles.
    fn live(&self, player: &mut Player<'_>, tiles: &Subscriber) -> Result<(), Failure> {
        let mut pace = Pace::new(player.job.rate.unwrap_or(1));
        let mut latest: Vec<Option<Received>> = self.tiles.iter().map(|_| None).collect();
        let mut frame = player.job.unwritten;
        while frame < player.job.frames && !player.is_over()? {
            let due = pace.due();
            while let Some(sample) = within(tiles, due.saturating_duration_since(Instant::now()))? {
                if let Some(tile) = Received::new(sample)?
                    && let Some(place) = latest.get_mut(tile.number())
                {
                    *place = Some(tile);
                }
                if Instant::now() >= due {
                    break;
                }
            }
            let row: Vec<&Received> = latest.iter().flatten().collect();
            if row.len() == self.tiles.len() {
                self.compose(player, frame, &row)?;
                frame += 1;
            }
        }
        while !player.is_over()? {
            within(tiles, player::TURN)?;
        }
        Ok(())
    }

    fn compose(&self, player: &mut Player<'_>, frame: u64, row: &[&Received]) -> Result<(), Failure> {
        player.begin();
        let mut loan = self.publisher.loan(DType::U32, &[self.size.height.into(), self.size.width.into()], TIMEOUT)?;
        objects::fill(&mut loan, |pixels: &mut [u32]| {
            for (number, (tile, received)) in self.tiles.iter().zip(row).enumerate() {
                let drawn = objects::elements::<u32>(&received.sample)?;
                for (row, drawn) in (tile.y..).zip(drawn.chunks_exact(tile.size.width as usize)) {
                    let first = (row * self.size.width + tile.x) as usize;
                    pixels[first..first + drawn.len()].copy_from_slice(drawn);
                }
                if number == self.tiles.len() / 2 {
                    player.middle()?;
                }
            }
            Ok(())
        })?;
        let more = row.iter().flat_map(|received| [received.header.frame as u32, received.pid()]).collect();
        let published = row.iter().map(|received| received.header.published).max().unwrap_or_else(Moment::now);
        Header { frame, published, more }.write(&mut loan)?;
        for received in row {
            loan.rests_on(&received.sample)?;
        }
        objects::publish(loan)?;
        player.end();
        Ok(())
    }
}
