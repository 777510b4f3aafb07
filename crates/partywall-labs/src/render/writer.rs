//! The writer: checks each frame and encodes it. Whole frames go to files or to the watcher, so that a killed writer
//! leaves no half of one.

use std::collections::BTreeMap;

use partywall::{TimelineWriter, error::Busy};

use super::{label::label, movie::Movie, objects::Header, *};

pub(super) fn play(session: &mut Session) -> Result<(), Failure> {
    let mut player = Player::new(session)?;
    let domain = player.domain();
    let frames = objects::frames(&domain)?.subscribe(Policy::Block).history(IN_FLIGHT).join()?;
    let mut writer = Writer::new(&player.job, timeline(&domain)?);
    if writer.written.timeline().value() < writer.next {
        writer.written.signal(writer.next)?;
    }
    player.ready()?;
    // Frames that came before one that is not written yet.
    let mut waiting = BTreeMap::new();
    while let Some(sample) = player.next(&frames)? {
        let header = Header::of(&sample, 2 * writer.tiles.len())?;
        if header.frame >= writer.next {
            waiting.insert(header.frame, (header, sample));
        }
        while let Some((header, sample)) = waiting.remove(&writer.next) {
            if !writer.write(&mut player, &header, sample)? {
                break;
            }
        }
    }
    player.finish(
        "Frames into files",
        "The writer checks the number of the frame in each pixel, encodes the frame, and says how many are written: the \
         geometry waits for that.",
        |step| step,
    )
}

/// Returns the timeline of written frames, once the death of a former writer is proved.
fn timeline(domain: &Domain) -> Result<TimelineWriter, Failure> {
    let deadline = Instant::now() + TIMEOUT;
    loop {
        match domain.timeline_writer(objects::WRITTEN) {
            Err(Error::Busy(Busy::Writer { .. })) if Instant::now() < deadline => {
                thread::sleep(Duration::from_millis(2))
            }
            writer => return Ok(writer?),
        }
    }
}

struct Writer {
    tiles: Vec<Tile>,
    size: Size,
    output: Output,
    /// `None` if there is none.
    movie: Option<Movie>,
    live: bool,
    compared: Vec<u64>,
    written: TimelineWriter,
    /// The next frame.
    next: u64,
    /// Frames that were not written because they rest on a killed process.
    tainted: u64,
}

impl Writer {
    fn new(job: &Job, written: TimelineWriter) -> Self {
        let is_gif = matches!(job.output, Output::Gif(_));
        let movie = (is_gif || matches!(job.output, Output::Y4m(_) | Output::Stream))
            .then(|| Movie::new(job.size, job.fps, is_gif));
        Self {
            tiles: job.tiles(),
            size: job.size,
            output: job.output.clone(),
            movie,
            live: job.live,
            compared: job.compared.clone(),
            written,
            next: job.unwritten,
            tainted: 0,
        }
    }

    /// Writes a frame. Returns false if it rests on a killed process: another one comes in its place.
    fn write(&mut self, player: &mut Player<'_>, header: &Header, sample: Sample) -> Result<bool, Failure> {
        player.begin();
        let mut pixels = match objects::elements::<u32>(&sample) {
            Err(_) if objects::has_failed(sample.check())? => {
                self.tainted += 1;
                return Ok(false);
            }
            pixels => pixels?.into_owned(),
        };
        drop(sample);
        let drawn = header.more.as_chunks().0.iter().map(|[frame, pid]| Drawn { frame: *frame, pid: *pid });
        let tiles: Vec<Drawn> = drawn.take(self.tiles.len()).collect();
        let torn =
            self.tiles.iter().zip(&tiles).any(|(tile, drawn)| is_torn(&pixels, self.size, *tile, drawn.frame as u8));
        let hash = self.compared.contains(&header.frame).then(|| raster::hash(&pixels));
        let newest = tiles.iter().map(|drawn| drawn.frame).max().unwrap_or_default();
        let is_stale = |drawn: &Drawn| self.live && newest - drawn.frame > STALE;
        if self.live {
            for (tile, drawn) in self.tiles.iter().zip(&tiles) {
                label(&mut pixels, self.size, *tile, drawn.pid, is_stale(drawn));
            }
        }
        let stale = tiles.iter().filter(|drawn| is_stale(drawn)).count() as u32;
        player.middle()?;
        let part = match &mut self.movie {
            Some(movie) => {
                pixels.iter_mut().for_each(|pixel| *pixel &= 0x00ff_ffff);
                Some(movie.part(pixels, header.frame == 0)?)
            }
            None => {
                if let Output::Folder(folder) = &self.output {
                    let path = folder.join(movie::file_name(header.frame));
                    watcher::write(&path, &movie::png(&pixels, self.size)?)?;
                }
                None
            }
        };
        let has_part = part.is_some();
        let [frame, published, tainted] = [header.frame, header.published.nanos(), self.tainted];
        let published = Moment::at(published);
        player.written(Written { frame, torn, tiles, stale, tainted, hash, published, has_part }, part)?;
        self.next = header.frame + 1;
        self.written.signal(self.next)?;
        player.end();
        Ok(true)
    }
}

/// Returns whether pixels of a tile are of another frame than its process says.
fn is_torn(pixels: &[u32], size: Size, tile: Tile, tag: u8) -> bool {
    (tile.y..tile.y + tile.size.height).any(|row| {
        let first = (row * size.width + tile.x) as usize;
        pixels[first..first + tile.size.width as usize].iter().any(|pixel| (pixel >> 24) as u8 != tag)
    })
}

/// By how many frames a tile may be behind the newest one before it is grey.
const STALE: u32 = 3;
