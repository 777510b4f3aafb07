//! The compositor: puts the tiles of a frame together.

use std::collections::BTreeMap;

use partywall::DeviceRange;

use super::{
    objects::Header,
    player::{Pace, within},
    *,
};

pub(super) fn play(session: &mut Session) -> Result<(), Failure> {
    let mut player = Player::new(session)?;
    let domain = player.domain();
    let frames = objects::open(&domain, objects::FRAMES, None)?;
    let publisher = frames.publisher()?;
    let tiles = objects::open(&domain, objects::TILES, None)?.subscribe(Policy::Block);
    let tiles = tiles.history(objects::TILES_BEFORE * player.job.renderers).join()?;
    let kernels = Kernels::of(&domain, frames.place())?;
    let compositor = Compositor { tiles: player.job.tiles(), size: player.job.size, publisher, kernels };
    let written = domain.timeline(objects::WRITTEN)?;
    player.say(Report::Ready)?;
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
    /// On a GPU.
    kernels: Option<Kernels>,
}

/// A received tile.
struct Received {
    header: Header,
    sample: Sample,
}

/// The pixels of a tile. On a GPU the kernels' stream waits for them.
enum Pixels<'a> {
    Host(&'a [u32]),
    Device(&'a Kernels, DeviceRange<'a>),
}

impl Received {
    fn new(sample: Sample) -> Result<Self, Failure> {
        Ok(Self { header: Header::of(&sample, 3)?, sample })
    }

    fn number(&self) -> usize {
        self.header.more[0] as usize
    }

    /// Returns the frame, the process and the time, as the header of a frame has them.
    fn words(&self) -> [u32; 3] {
        [self.header.frame as u32, self.header.more[1], self.header.more[2]]
    }
}

impl Compositor {
    /// Composes every frame, each when all of its tiles are there.
    fn all(&self, player: &mut Player<'_>, tiles: &Subscriber, written: &Timeline) -> Result<(), Failure> {
        let mut frames: BTreeMap<u64, Vec<Option<Received>>> = BTreeMap::new();
        let mut unwritten = player.job.unwritten;
        while let Some(sample) = player.next(tiles)? {
            let tile = Received::new(sample)?;
            if written.ending().is_some() {
                written.follow()?;
            }
            unwritten = unwritten.max(written.value());
            let later = frames.split_off(&unwritten);
            let before = std::mem::replace(&mut frames, later);
            before.into_values().flatten().flatten().try_for_each(|tile| self.release(tile))?;
            let frame = tile.header.frame;
            if frame < unwritten {
                continue;
            }
            let row = frames.entry(frame).or_insert_with(|| self.tiles.iter().map(|_| None).collect());
            let Some(place) = row.get_mut(tile.number()) else { continue };
            // A tile comes again only in place of one that rests on a killed process.
            if let Some(replaced) = place.replace(tile) {
                self.release(replaced)?;
            }
            self.compose(player, frame, row)?;
        }
        Ok(())
    }

    /// Composes frames at a rate, each of the latest tiles. It goes on while there is no writer: viewers see these
    /// frames, and the next writer continues with what it receives.
    fn live(&self, player: &mut Player<'_>, tiles: &Subscriber) -> Result<(), Failure> {
        let mut pace = Pace::new(player.job.rate.unwrap_or(1));
        let mut latest: Vec<Option<Received>> = self.tiles.iter().map(|_| None).collect();
        let mut frame = player.job.unwritten;
        while !player.is_over()? {
            let due = pace.due();
            while let Some(sample) = within(tiles, due.saturating_duration_since(Instant::now()))? {
                // A frame of the tiles that are there needs tiles that are drawn.
                if objects::valid(sample.wait(TIMEOUT).and_then(|()| sample.check()))?.is_some() {
                    let tile = Received::new(sample)?;
                    let replaced = latest.get_mut(tile.number()).and_then(|place| place.replace(tile));
                    replaced.map_or(Ok(()), |replaced| self.release(replaced))?;
                }
                if Instant::now() >= due {
                    break;
                }
            }
            if self.compose(player, frame, &mut latest)? {
                frame += 1;
            }
        }
        Ok(())
    }

    /// Composes a frame if all of its tiles are there. A tile of a process that died before it had drawn it is not.
    fn compose(&self, player: &mut Player<'_>, frame: u64, row: &mut [Option<Received>]) -> Result<bool, Failure> {
        if row.iter().any(Option::is_none) {
            return Ok(false);
        }
        let mut pixels = Vec::new();
        for received in row.iter().flatten() {
            match objects::valid(self.drawn(&received.sample))? {
                Some(drawn) => pixels.push(drawn),
                None => break,
            }
        }
        let valid = pixels.len();
        if valid < row.len() {
            drop(pixels);
            row[valid].take().map_or(Ok(()), |failed| self.release(failed))?;
            return Ok(false);
        }
        let row: Vec<&Received> = row.iter().flatten().collect();
        player.begin();
        let mut loan = self.publisher.loan(DType::U32, &self.size.shape(), TIMEOUT)?;
        for (number, (tile, drawn)) in self.tiles.iter().zip(pixels).enumerate() {
            self.place(*tile, drawn, &mut loan)?;
            if number == self.tiles.len() / 2 {
                player.middle()?;
            }
        }
        let late = if player.job.live { Self::late_bits(&row, Moment::now(), player.job.rate) } else { 0 };
        let more = [late].into_iter().chain(row.iter().flat_map(|received| received.words())).collect();
        let published = row.iter().map(|received| received.header.published).max().unwrap_or_else(Moment::now);
        Header { frame, published, more }.write(&mut loan)?;
        for received in row {
            loan.rests_on(&received.sample)?;
        }
        kernels::publish(self.kernels.as_ref(), loan)?;
        player.end();
        Ok(true)
    }

    /// Returns which tiles of a row are late, as bits.
    fn late_bits(row: &[&Received], composed: Moment, rate: Option<u32>) -> u32 {
        let published: Vec<Moment> = row.iter().map(|received| received.header.published).collect();
        let interval = Duration::from_secs(1) / rate.unwrap_or(1);
        (0..).zip(late(&published, composed, interval)).map(|(tile, is_late)| u32::from(is_late) << tile).sum()
    }

    fn drawn<'a>(&'a self, sample: &'a Sample) -> partywall::Result<Pixels<'a>> {
        match &self.kernels {
            None => sample.check().and_then(|()| sample.as_slice()).map(Pixels::Host),
            Some(kernels) => sample.device_on(kernels.stream()).map(|drawn| Pixels::Device(kernels, drawn)),
        }
    }

    /// Copies a tile to its place.
    fn place(&self, tile: Tile, drawn: Pixels<'_>, loan: &mut Loan) -> Result<(), Failure> {
        match drawn {
            Pixels::Device(kernels, drawn) => {
                let size = [self.size.width, self.size.height];
                let frame = loan.device()?.as_slice();
                let drawn = drawn.as_slice();
                let placed = kernels.rasteriser.enqueue_place(kernels.stream(), drawn, tile.sides(), frame, size);
                placed.doing("launching a kernel")
            }
            Pixels::Host(drawn) => {
                tile.copy(drawn, loan.as_mut_slice()?, self.size.width);
                Ok(())
            }
        }
    }

    fn release(&self, tile: Received) -> Result<(), Failure> {
        kernels::release(self.kernels.as_ref(), tile.sample)
    }
}

/// Returns which tiles are late, by the times at which their scenes were published: those whose renderer has not drawn
/// the next scene [`LATE`] after it came. While no other tile is newer the scenes themselves may be missing, and none
/// is late; that of a single renderer is.
fn late(published: &[Moment], composed: Moment, interval: Duration) -> impl Iterator<Item = bool> {
    let newest = published.iter().max().copied();
    let is_alone = published.len() == 1;
    published.iter().map(move |published| {
        let is_behind = is_alone || Some(*published) < newest;
        is_behind && composed.since(*published) >= interval + LATE
    })
}

/// How long a renderer may take for a scene before its tile is grey, with `--live`.
const LATE: Duration = Duration::from_millis(400);

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: u64 = 1_000_000_000;

    /// Returns when the last scene was published of which a tile is there at a time, if drawing one takes `drawing`.
    fn published(at: u64, interval: u64, drawing: u64) -> Moment {
        Moment::at(at.saturating_sub(drawing) / interval * interval)
    }

    #[test]
    fn tile_of_a_dead_renderer_is_late_within_a_second_at_any_rate() {
        for rate in 1..=240 {
            let interval = SECOND / rate;
            let drawing = interval / 10;
            // It dies while it draws the scene of this time.
            let death = 5 * SECOND / interval * interval;
            let last = Moment::at(death - interval);
            for composed in (death..death + 3 * SECOND).step_by(997_001) {
                let living = published(composed, interval, drawing);
                let late = |tiles: &[Moment]| -> Vec<bool> {
                    super::late(tiles, Moment::at(composed), Duration::from_nanos(interval)).collect()
                };
                let seen = late(&[living, last, living]);
                assert!(!seen[0] && !seen[2], "{rate}: a living renderer's tile keeps its colours");
                assert!(seen[1] || composed < death + SECOND, "{rate}: {} ns after the death", composed - death);
                assert!(late(&[last])[0] || composed < death + SECOND, "{rate}: a single renderer");
            }
        }
    }

    #[test]
    fn no_tile_is_late_while_there_are_no_scenes() {
        let last = [Moment::at(SECOND); 4];
        let mut late = late(&last, Moment::at(9 * SECOND), Duration::from_millis(10));
        assert!(late.all(|is_late| !is_late));
    }
}
