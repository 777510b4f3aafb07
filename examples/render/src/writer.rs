//! The writer: checks each frame and encodes it. Whole frames go to files or to the watcher, so that a killed writer
//! leaves no half of one.
//!
//! On a GPU a kernel checks a frame, and 16 bytes come back. The pixels are copied only if they are kept. Checks of
//! several frames are enqueued at a time, so that the GPU need not come back to this process for each of them.

use std::collections::{BTreeMap, VecDeque};

use partywall::error::Busy;

use super::{
    label::label,
    movie::Movie,
    objects::Header,
    player::TURN,
    rasteriser::{Checked, Checks, Picture},
    *,
};

pub(super) fn play(session: &mut Session) -> Result<(), Failure> {
    let mut player = Player::new(session)?;
    let domain = player.domain();
    let topic = objects::open(&domain, objects::FRAMES, None)?;
    let kernels = Kernels::of(&domain, topic.place())?;
    let mut writer = Writer::new(&player.job, kernels, timeline(&domain)?)?;
    // In `--live` no frame comes again.
    let history = if player.job.live { 0 } else { IN_FLIGHT };
    let frames = topic.subscribe(Policy::Block).history(history).join()?;
    if writer.written.timeline().value() < writer.next {
        writer.written.signal(writer.next)?;
    }
    player.say(Report::Ready)?;
    while writer.next < player.job.frames {
        let sample = match writer.pending.len() {
            0 => player.next(&frames)?,
            1..PLACES => frames.try_recv()?,
            _ => None,
        };
        match sample {
            Some(sample) => writer.receive(&mut player, sample)?,
            None if writer.pending.is_empty() => break,
            None => writer.finish(&mut player)?,
        }
    }
    drop(frames);
    while !player.is_over()? {
        thread::sleep(TURN / 10);
    }
    player.finish(
        "Frames into files",
        "The writer checks the number of the frame in each pixel, encodes the frame, and says how many are written: the \
         geometry waits for that. On a GPU a kernel checks, and pixels come to the host only if they are kept.",
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
    gpu: Option<Device>,
    /// Frames whose checks are enqueued, in that order.
    pending: VecDeque<Pending>,
    /// Checked frames that came before one that is not written yet.
    checked: BTreeMap<u64, Frame>,
    renderers: u32,
    tiles: Vec<Tile>,
    size: Size,
    output: Output,
    /// `None` if there is none.
    movie: Option<Movie>,
    live: bool,
    written: TimelineWriter,
    /// The next frame.
    next: u64,
    /// Frames that were not written because they rest on a killed process.
    tainted: u64,
}

/// The resources of checks on a GPU.
struct Device {
    kernels: Kernels,
    checks: Checks,
    /// The place of the next check.
    place: usize,
}

/// A frame whose check is enqueued.
struct Pending {
    header: Header,
    sample: Sample,
    place: usize,
}

/// A frame that is checked.
struct Frame {
    header: Header,
    sample: Sample,
    found: Checked,
}

impl Writer {
    fn new(job: &Job, kernels: Option<Kernels>, written: TimelineWriter) -> Result<Self, Failure> {
        let is_gif = matches!(job.output, Output::Gif(_));
        let movie = (is_gif || matches!(job.output, Output::Y4m(_) | Output::Stream))
            .then(|| Movie::new(job.size, job.fps, is_gif));
        let device = |kernels: Kernels| {
            let checks = Checks::new(kernels.stream().context(), PLACES).doing("loading kernels")?;
            Ok::<_, Failure>(Device { kernels, checks, place: 0 })
        };
        Ok(Self {
            gpu: kernels.map(device).transpose()?,
            pending: VecDeque::new(),
            checked: BTreeMap::new(),
            renderers: job.renderers,
            tiles: job.tiles(),
            size: job.size,
            output: job.output.clone(),
            movie,
            live: job.live,
            written,
            next: job.unwritten,
            tainted: 0,
        })
    }

    /// Receives a frame. On a GPU its check is enqueued.
    fn receive(&mut self, player: &mut Player<'_>, sample: Sample) -> Result<(), Failure> {
        player.begin();
        let header = Header::of(&sample, 1 + 3 * self.tiles.len())?;
        if !self.live && header.frame < self.next {
            return Ok(());
        }
        let tags = drawn(&header).map(|drawn| drawn.frame as u8);
        let Some(Device { kernels, checks, place }) = &mut self.gpu else {
            let Some(pixels) = objects::valid(sample.check().and_then(|()| sample.as_slice()))? else {
                self.tainted += 1;
                return Ok(());
            };
            let torn = self.tiles.iter().zip(tags).map(|(tile, tag)| torn(pixels, self.size, *tile, tag)).sum();
            let found = Checked { torn, sum: raster::hash(pixels) };
            return self.take(player, Frame { header, sample, found });
        };
        let Some(pixels) = objects::valid(sample.device_on(kernels.stream()))? else {
            self.tainted += 1;
            return Ok(());
        };
        let mut picture = Picture {
            pixels: pixels.as_slice(),
            size: [self.size.width, self.size.height],
            tiles: Tile::grid(self.renderers),
            tags: [0; 16],
        };
        picture.tags.iter_mut().zip(tags).for_each(|(own, tag)| *own = tag);
        checks.enqueue(kernels.stream(), &picture, *place).doing("launching a kernel")?;
        self.pending.push_back(Pending { header, sample, place: *place });
        *place = (*place + 1) % PLACES;
        Ok(())
    }

    /// Waits for the oldest check.
    fn finish(&mut self, player: &mut Player<'_>) -> Result<(), Failure> {
        player.begin();
        let Some(Device { kernels, checks, .. }) = &mut self.gpu else { return Ok(()) };
        let Some(Pending { header, sample, place }) = self.pending.pop_front() else { return Ok(()) };
        let found = checks.finish(place).doing("checking a frame")?;
        if objects::valid(sample.check())?.is_none() {
            self.tainted += 1;
            return kernels::release(Some(kernels), sample);
        }
        self.take(player, Frame { header, sample, found })
    }

    /// Takes a checked frame, and writes those whose turn it is. In place of a frame that rests on a killed process
    /// comes another one. In `--live` frames are written as they come, and numbered here.
    fn take(&mut self, player: &mut Player<'_>, mut frame: Frame) -> Result<(), Failure> {
        if self.live {
            frame.header.frame = self.next;
            return self.write(player, frame);
        }
        self.checked.insert(frame.header.frame, frame);
        while let Some(frame) = self.checked.remove(&self.next) {
            self.write(player, frame)?;
        }
        self.checked = self.checked.split_off(&self.next);
        Ok(())
    }

    fn write(&mut self, player: &mut Player<'_>, Frame { header, sample, found }: Frame) -> Result<(), Failure> {
        let tiles: Vec<Drawn> = drawn(&header).take(self.tiles.len()).collect();
        let late = header.more[0];
        let is_kept = self.movie.is_some() || matches!(self.output, Output::Folder(_));
        let mut pixels = if is_kept { objects::elements(&sample)?.into_owned() } else { Vec::new() };
        kernels::release(self.gpu.as_ref().map(|device| &device.kernels), sample)?;
        if self.live && is_kept {
            for (number, (tile, drawn)) in self.tiles.iter().zip(&tiles).enumerate() {
                label(&mut pixels, self.size, *tile, drawn.pid, late >> number & 1 == 1);
            }
        }
        player.middle()?;
        let part = match &mut self.movie {
            Some(movie) => {
                pixels.iter_mut().for_each(|pixel| *pixel &= 0x00ff_ffff);
                Some(movie.part(pixels, header.frame == 0)?)
            }
            None => {
                if let Output::Folder(folder) = &self.output {
                    let path = folder.join(movie::file_name(header.frame));
                    sink::write(&path, &movie::png(&pixels, self.size)?)?;
                }
                None
            }
        };
        let Header { frame, published, .. } = header;
        let (torn, hash, tainted, has_part) = (found.torn > 0, found.sum, self.tainted, part.is_some());
        let at = Moment::now();
        player.written(Written { frame, torn, tiles, late, tainted, hash, published, at, has_part }, part)?;
        self.next = frame + 1;
        self.written.signal(self.next)?;
        player.end();
        Ok(())
    }
}

/// Returns when, by which process and how fast each tile of a frame was drawn.
fn drawn(header: &Header) -> impl Iterator<Item = Drawn> {
    header.more[1..].as_chunks().0.iter().map(|[frame, pid, nanos]| Drawn { frame: *frame, pid: *pid, nanos: *nanos })
}

/// Returns how many pixels of a tile are of another frame than its process says.
fn torn(pixels: &[u32], size: Size, tile: Tile, tag: u8) -> u64 {
    let pixels = tile.rows(size.width).flat_map(|row| &pixels[row]);
    pixels.filter(|pixel| (**pixel >> 24) as u8 != tag).count() as u64
}

/// How many checks are enqueued at most.
const PLACES: usize = IN_FLIGHT as usize;
