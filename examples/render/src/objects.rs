//! The names, sizes and headers of what the processes share.

use std::borrow::Cow;

use bytemuck::Zeroable;
use partywall::{Element, WhenSome};

use super::*;

pub(super) const MESH: &str = "mesh";
pub(super) const SCENE: &str = "scene";
pub(super) const TILES: &str = "tiles";
pub(super) const FRAMES: &str = "frames";

/// The timeline of the writer: how many frames are written.
pub(super) const WRITTEN: &str = "written";

/// How many tiles of each renderer the ring of tiles keeps. A renderer may be [`IN_FLIGHT`] frames ahead of another
/// one, so between its tile of a frame that is not written and the newest tile may lie those of as many frames before
/// and behind.
pub(super) const TILES_BEFORE: u32 = 2 * IN_FLIGHT;

/// Creates the topics. Each has room for a killed process and its successor at a time.
pub(super) fn create_topics(session: &Session, job: &Job, vertices: u64) -> Result<[Topic; 3], Failure> {
    let topic = |name| session.domain().topic(name).place(session.place);
    let renderers = job.renderers + 1;
    let scene = topic(SCENE).dtype(DType::I32).shape(&[vertices, raster::VERTEX as u64]).depth(IN_FLIGHT + 1);
    // A renderer holds the scene of each frame that its GPU has not drawn.
    let scene = scene.publishers(2).subscribers(renderers).held(IN_FLIGHT + 2).create()?;
    let largest = job.tiles().iter().map(|tile| tile.size.pixels()).max().unwrap_or_default();
    let tiles = topic(TILES).dtype(DType::U32).max_bytes(largest as u64 * 4).depth(TILES_BEFORE * job.renderers + 1);
    // The compositor keeps the tiles of each frame until it is written, and then until its GPU is done with later
    // frames: those of 2 * IN_FLIGHT frames. The rest is for the tile that comes, and for those that it replaces.
    let tiles = tiles.publishers(renderers).subscribers(2).held(2 * (IN_FLIGHT + 1) * job.renderers).create()?;
    let frames = topic(FRAMES).dtype(DType::U32).shape(&job.size.shape()).depth(IN_FLIGHT + 1);
    // The writer holds frames that it checks, and frames that wait for one before them. Subscribers are the writer, its
    // successor, a viewer, and another one that comes and goes.
    let frames = frames.publishers(2).subscribers(4).held(2 * IN_FLIGHT + 2).create()?;
    Ok([scene, tiles, frames])
}

/// Opens a topic, perhaps for use on a GPU, which may be another one than that of the memory.
pub(super) fn open(domain: &Domain, name: &str, gpu: Option<DeviceUuid>) -> Result<Topic, Failure> {
    let topic = domain.topic(name).timeout(TIMEOUT);
    let topic = topic.when_some(gpu, |topic, gpu| topic.device(gpu).allow_peer(true));
    Ok(topic.open()?)
}

/// Opens the mesh, or makes it. It is `kept`, so that the successor of a killed geometry finds it.
pub(super) fn mesh(domain: &Domain, place: Place, source: &Source) -> Result<Segment, Failure> {
    let claim = match domain.open_or_build(MESH, TIMEOUT)? {
        partywall::OpenOrBuild::Opened(segment) => return Ok(segment),
        partywall::OpenOrBuild::Build(claim) => claim,
    };
    let mesh = Mesh::load(source)?;
    let triangles = mesh.colours.len() as u64;
    let vertices = (mesh.vertices.len() / raster::VERTEX) as u64;
    let builder = claim.create(place).kept(true).tensor("vertices", DType::I32, &[vertices, raster::VERTEX as u64]);
    let builder = builder.tensor("indices", DType::U32, &[triangles, 3]).tensor("colours", DType::U32, &[triangles]);
    let mut build = builder.allocate()?;
    build.write("vertices", bytemuck::cast_slice(&mesh.vertices))?;
    build.write("indices", bytemuck::cast_slice(&mesh.indices))?;
    build.write("colours", bytemuck::cast_slice(&mesh.colours))?;
    Ok(build.commit()?)
}

/// Opens the mesh once the geometry has committed it, for use on a GPU as [`open`] does.
pub(super) fn committed_mesh(domain: &Domain, gpu: Option<DeviceUuid>) -> Result<Segment, Failure> {
    let mesh = domain.opener(MESH).timeout(TIMEOUT);
    let mesh = mesh.when_some(gpu, |mesh, gpu| mesh.device(gpu).allow_peer(true));
    Ok(mesh.open()?)
}

/// The header of a sample: words of 64 bits, the first of which are the number of the frame and the time at which its
/// scene was published.
#[derive(Debug, Clone)]
pub(super) struct Header {
    pub(super) frame: u64,
    pub(super) published: Moment,
    /// The camera of a scene; the number, the process and the time of a tile; which tiles of a frame are late, as
    /// bits, and the frame, the process and the time of each of them. Times are in nanoseconds.
    pub(super) more: Vec<u32>,
}

impl Header {
    pub(super) fn write(&self, loan: &mut Loan) -> Result<(), Failure> {
        let words = [self.frame.to_le_bytes(), self.published.nanos().to_le_bytes()];
        let more = self.more.iter().flat_map(|word| word.to_le_bytes());
        Ok(loan.header(&words.into_iter().flatten().chain(more).collect::<Vec<_>>())?)
    }

    /// Reads the header of a sample, which has `more` further words at least.
    pub(super) fn of(sample: &Sample, more: usize) -> Result<Self, Failure> {
        let header = sample.header();
        let read = header.split_first_chunk().and_then(|(frame, rest)| {
            let (published, rest) = rest.split_first_chunk()?;
            let words: Vec<u32> = rest.as_chunks().0.iter().map(|word| u32::from_le_bytes(*word)).collect();
            let published = Moment::at(u64::from_le_bytes(*published));
            (words.len() >= more).then(|| Self { frame: u64::from_le_bytes(*frame), published, more: words })
        });
        read.ok_or_else(|| unexpected("the header of a sample is too short"))
    }
}

/// Returns the elements of a tensor. Those on a GPU are copied.
pub(super) fn tensor<'a, T: Element>(segment: &'a Segment, name: &str) -> Result<Cow<'a, [T]>, Failure> {
    let tensor = segment.tensor(name)?;
    match segment.gpu() {
        None => Ok(tensor.as_slice()?.into()),
        Some(_) => Ok(bytemuck::pod_collect_to_vec(&tensor.to_vec()?).into()),
    }
}

/// Returns the elements of a sample once they are there. Those on a GPU are copied.
pub(super) fn elements<T: Element>(sample: &Sample) -> Result<Cow<'_, [T]>, Failure> {
    let Some(gpu) = sample.gpu() else { return Ok(sample.as_slice()?.into()) };
    let range = sample.device_on(gpu.stream())?;
    let mut elements = zeroed(sample.shape());
    range.copy_to_host(gpu.stream(), bytemuck::cast_slice_mut(&mut elements))?;
    sample.check()?;
    Ok(elements.into())
}

/// Fills a loan: in place in host memory, by a copy on a GPU.
pub(super) fn fill<T: Element>(
    loan: &mut Loan,
    make: impl FnOnce(&mut [T]) -> Result<(), Failure>,
) -> Result<(), Failure> {
    if loan.device().is_err() {
        return make(loan.as_mut_slice()?);
    }
    let mut elements = zeroed(loan.shape());
    make(&mut elements)?;
    let range = loan.device()?;
    Ok(range.copy_from_host(range.gpu().stream(), bytemuck::cast_slice(&elements))?)
}

fn zeroed<T: Element>(shape: &[u64]) -> Vec<T> {
    vec![Zeroable::zeroed(); shape.iter().product::<u64>() as usize]
}

/// Returns `None` if a sample, or one that it rests on, is of a process that died before its GPU had finished.
pub(super) fn valid<T>(result: partywall::Result<T>) -> Result<Option<T>, Failure> {
    use partywall::error::InvalidData::{SampleFailed, SampleTainted};
    match result {
        Ok(value) => Ok(Some(value)),
        Err(Error::InvalidData(SampleFailed { .. } | SampleTainted { .. })) => Ok(None),
        Err(error) => Err(error.into()),
    }
}
