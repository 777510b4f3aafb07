//! `partywall lab pipeline`: three processes decode, filter and encode images, and one of them is killed.
//!
//! | role | process | does |
//! |---|---|---|
//! | decode | child | reads PNG and JPEG files, and publishes frames |
//! | filter | child | shrinks and blurs frames, by kernels on a GPU or by the CPU, and publishes them |
//! | encode | child | writes the results to files |
//! | watcher | `partywall lab pipeline` | starts a broker and the stages, kills one and restarts it; concludes |

mod files;
mod pixels;
mod stages;
mod watcher;

use clap::ValueEnum;
use partywall::Loan;

use self::{
    files::Picture,
    pixels::{Size, blur, resize},
};
use crate::prelude::*;

pub(super) static LAB: Lab = Lab {
    name: "pipeline",
    title: "three processes decode, blur and encode images, and one may be killed",
    on_host: true,
    broker: true,
    traced: true,
    kills_by: &["--kill", "filter", "--frames", "40"],
    options: Order::augment_args,
    roles: &[
        Role::hidden("decode", |session| stages::play(Stage::Decode, session)),
        Role::hidden("filter", |session| stages::play(Stage::Filter, session)),
        Role::hidden("encode", |session| stages::play(Stage::Encode, session)),
    ],
    observer: Role::hidden("watcher", watcher::play),
    beliefs: BELIEFS,
    ..Lab::DEFAULT
};

#[derive(Debug, Args)]
struct Order {
    /// A folder with PNG and JPEG files [default: the lab paints some]
    #[arg(long, value_name = "FOLDER")]
    images: Option<PathBuf>,
    /// Folder for the results, under the names of the images [default: a temporary one, which is deleted]
    #[arg(long, value_name = "FOLDER")]
    out: Option<PathBuf>,
    /// How many frames to process; the images are repeated
    #[arg(long, value_name = "N", default_value_t = 120, value_parser = number_in::<u64>(1..=u64::MAX))]
    frames: u64,
    /// The maximum width of results, in pixels
    #[arg(long, value_name = "PIXELS", default_value_t = 320, value_parser = number_in::<u32>(1..=8192))]
    width: u32,
    /// The radius of the blur, in pixels
    #[arg(long, value_name = "PIXELS", default_value_t = 3, value_parser = number_in::<u32>(0..=64))]
    radius: u32,
    /// Kill this stage (SIGKILL) in the middle, and restart it
    #[arg(long, value_name = "STAGE")]
    kill: Option<Stage>,
}

/// A process of the pipeline.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Stage {
    /// Reads files
    Decode,
    /// Shrinks and blurs
    Filter,
    /// Writes files
    Encode,
}

impl Stage {
    const ALL: [Self; 3] = [Self::Decode, Self::Filter, Self::Encode];

    fn name(self) -> &'static str {
        LAB.roles[self as usize].name
    }
}

/// The task of a stage.
#[derive(Debug, Clone, Serialize, Deserialize)]
struct Job {
    files: Vec<PathBuf>,
    out: PathBuf,
    frames: u64,
    width: u32,
    radius: u32,
    /// The first frame whose result is not written yet.
    unwritten: u64,
}

impl Job {
    /// Returns the file of a frame.
    fn file(&self, frame: u64) -> &PathBuf {
        &self.files[(frame % self.files.len() as u64) as usize]
    }
}

/// The topics, and the depth of each.
const FRAMES: &str = "frames";
const RESULTS: &str = "results";
const DEPTH: u32 = 4;

beliefs! {
    FALLS = "falls": "A pipeline fails with any of its stages.",
    AGAIN = "again": "The frame that a killed stage was working on is processed again.",
    PIXELS = "pixels": "A GPU and a CPU compute different pixels.",
}

/// Creates a topic for images of at most this many bytes.
fn create(session: &Session, name: &str, bytes: u64) -> Result<Topic, Failure> {
    let topic = session.domain().topic(name).max_bytes(bytes).dtype(DType::U8).depth(DEPTH).place(session.place);
    Ok(topic.publishers(2).subscribers(2).create()?)
}

/// Subscribes, starting with the samples that are still in the ring.
fn subscribe(topic: &Topic) -> Result<Subscriber, Failure> {
    Ok(topic.subscribe(Policy::Block).history(DEPTH).join()?)
}

/// Returns the frame after the newest one of a topic, where a restarted stage continues.
fn next_frame(topic: &Topic) -> Result<u64, Failure> {
    let newest = topic.subscribe(Policy::Latest).history(1).join()?.try_recv()?;
    newest.map_or(Ok(0), |sample| Ok(frame_of(&sample)? + 1))
}

fn frame_of(sample: &Sample) -> Result<u64, Failure> {
    sample.header().try_into().map(u64::from_le_bytes).map_err(|_| unexpected("a frame has no number"))
}

fn size_of(sample: &Sample) -> Result<Size, Failure> {
    Size::of(sample.shape()).ok_or_else(|| unexpected("a frame is not an image"))
}
