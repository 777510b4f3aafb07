//! `partywall lab render`: processes render one picture into shared memory, and one of them is killed.
//!
//! An example of programs that use Partywall: memory, streams and timelines are those of the crates `partywall` and
//! `partywall-vulkan`, as everybody has them. `partywall lab render` starts it, so it presents itself as the labs do:
//! its command line, its processes and their connections, and its report are the runner of `partywall-lab`, instead of
//! a second one.
//!
//! | role | process | does |
//! |---|---|---|
//! | geometry | child | commits the mesh; turns it, and publishes the vertices of each frame |
//! | renderer | child, one for each tile | draws its tile of each frame |
//! | compositor | child | puts the tiles of a frame together |
//! | writer | child | checks each frame and encodes it |
//! | viewer | child | sees the latest frame, and no process waits for it; others come and go in mid-run |
//! | watcher | `partywall lab render` | starts a broker and the others, kills one and restarts it; keeps the movie; concludes |
//!
//! ```text
//!              segment mesh (kept)
//!                   │ read in place
//! geometry ─scene─► renderers ─tiles─► compositor ─frames─► writer (Block), viewers (Latest)
//!    ▲                                                        │
//!    └───────────────── timeline written ◄────────────────────┘
//! ```
//!
//! At most [`IN_FLIGHT`] frames are published and not written, and each topic keeps as many for a late subscriber. So
//! the successor of any killed process finds everything that its predecessor had not finished.
//!
//! A tile is a block of its own, although one picture that all renderers write into would save the compositor's copy. A
//! killed renderer may still be writing, under MPS: its block then waits in quarantine, and a picture could not.
//!
//! | module | holds |
//! |---|---|
//! | `geometry`, `renderer`, `compositor`, `writer`, `viewer`, `watcher` | the roles; `player` is what they have in common |
//! | `objects` | the names, sizes and headers of what they share |
//! | `mesh`, `raster` | what is drawn, and how the CPU draws it |
//! | `rasteriser`, `kernels` | how kernels draw it (`kernels/render.cu`), and the stream of a role |
//! | `compute`, `shaders` | how Vulkan draws it (`kernels/render.comp`) |
//! | `emulation` | what the kernels do on a GPU that is simulated |
//! | `movie`, `label`, `sink` | pictures and movies |
//! | `alone`, `plain`, `words` | the same frames without the library, for comparison |
//! | `outcome`, `times` | the steps of the report |

mod alone;
mod compositor;
#[allow(unsafe_code, reason = "calls of Vulkan")]
mod compute;
mod emulation;
mod geometry;
mod kernels;
mod label;
mod mesh;
mod movie;
mod objects;
mod outcome;
mod plain;
mod player;
mod raster;
#[allow(unsafe_code, reason = "launches with parameters that match the kernels")]
mod rasteriser;
mod renderer;
mod shaders;
mod sink;
mod times;
mod viewer;
mod watcher;
#[allow(unsafe_code, reason = "a mapping of memory that processes share")]
mod words;
mod writer;

use std::{
    collections::HashMap,
    fs,
    os::fd::AsFd,
    path::{Path, PathBuf},
    process::ExitCode,
    str::FromStr,
    sync::Arc,
    thread,
    time::{Duration, Instant},
};

use clap::{ArgMatches, Args, ValueEnum};
use partywall::{
    DType, DeviceChoice, DeviceUuid, Domain, Error, ErrorKind, Gpu, Loan, Place, Policy, Publisher, Sample, Segment,
    Subscriber, Timeline, TimelineWriter, Topic,
    cuda::{
        Access, CuResult, DeviceBuffer, DeviceSlice, IpcMapping, IpcMemoryHandle, Mapping, PhysicalMemory, Stream,
        StreamRef,
    },
};
use partywall_lab::{
    Doing, Failure, Lab, MOMENT, Moment, Peer, Role, Session, Step, TIMEOUT, beliefs, kind_of, millis, number_in,
    short, spread, unexpected,
};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use self::{
    kernels::Kernels,
    mesh::{Mesh, Source},
    movie::Output,
    player::Player,
    raster::{Look, Raster, Scene, Size, Tile},
};

fn main() -> ExitCode {
    partywall_simcuda::add_kernels(&emulation::KERNELS);
    partywall_lab::main(LABS)
}

/// The labs of this program.
static LABS: &[&Lab] = &[&LAB];

static LAB: Lab = Lab {
    options: Order::augment_args,
    takes_standard_output,
    roles: &[
        Role::new("geometry", "Commit the mesh, and publish the vertices of each frame", geometry::play),
        Role::new("renderer", "Draw one tile of each frame", renderer::play),
        Role::new("compositor", "Put the tiles of each frame together", compositor::play),
        Role::new("writer", "Check each frame and encode it", writer::play),
        Role::new("viewer", "See the latest frame; no process waits for it", viewer::play),
        Role::new("plain", "Play a stage of the pipelines that the lab is compared with", plain::play),
    ],
    observer: Role::new(
        "watcher",
        "Start the missing roles, kill one, and report which beliefs are refuted",
        watcher::play,
    ),
    farewell: Some("The watcher has all frames, and reports which beliefs are refuted."),
    beliefs: BELIEFS,
    elsewhere: None,
    ..partywall_lab::RENDER
};

#[derive(Debug, Args)]
struct Order {
    /// How many frames to render
    #[arg(long, global = true, value_name = "N", default_value_t = 30, value_parser = number_in::<u32>(1..=1_000_000))]
    frames: u32,
    /// The size of the picture, in pixels, 16x16 to 4096x4096
    #[arg(long, global = true, value_name = "WxH", default_value = "480x270")]
    size: Size,
    /// The number of renderers, 1 to 16; each draws a tile
    #[arg(long, global = true, value_name = "N", default_value_t = 4, value_parser = number_in::<u32>(1..=MOST_RENDERERS))]
    renderers: u32,
    /// What draws: kernels, the CPU or Vulkan, to the same pixels [default: cuda on a GPU, cpu in host memory]
    #[arg(long, global = true, value_name = "BY")]
    renderer: Option<Brush>,
    /// The GPUs that draw by kernels, in turn: tile 0 the first one, tile 1 the next one [default: the GPU that has the
    /// memory]
    #[arg(long, global = true, value_name = "N|UUID,…", value_delimiter = ',', value_parser = partywall_lab::parse_gpu)]
    devices: Vec<DeviceChoice>,
    /// A Wavefront OBJ file, or the bundled torus with N triangles
    #[arg(long, global = true, value_name = "FILE|torus:N", default_value = "torus:8192")]
    scene: Source,
    /// A folder without earlier frames for frame-00000.png and so on, FILE.gif or FILE.y4m, or - for
    /// Y4M on standard output [default: the frames are checked and not kept]
    #[arg(long, global = true, value_name = "PATH", allow_hyphen_values = true)]
    out: Option<Output>,
    /// Replace FILE.gif or FILE.y4m if it exists
    #[arg(long, global = true, requires = "out")]
    force: bool,
    /// Frames a second, 1 to 240 [default: as fast as possible; with --live 30; a movie plays with 25]
    #[arg(long, global = true, value_name = "N", value_parser = number_in::<u32>(1..=240))]
    fps: Option<u32>,
    /// Compose at a fixed rate, whatever is there: a tile that is late by 0.4 s is grey, and each has the pid of its
    /// process
    #[arg(long, global = true)]
    live: bool,
    /// Kill this role (SIGKILL) in the middle of a frame, when it has finished a third of the frames, and restart it
    #[arg(long, global = true, value_name = "ROLE")]
    kill: Option<Victim>,
}

/// What draws the tiles.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum, Serialize, Deserialize)]
enum Brush {
    /// Kernels on a GPU
    Cuda,
    /// The CPU, which copies scenes and tiles if they are on a GPU
    Cpu,
    /// Vulkan's compute shaders, on the GPU that has the memory; in host memory on any device that imports it
    Vulkan,
}

/// A process that can be killed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Victim {
    /// The renderer of the last tile
    Renderer,
    /// The source of the vertices
    Geometry,
    /// The process between renderers and writer
    Compositor,
    /// The process that encodes
    Writer,
    /// The broker, which its supervisor restarts
    Broker,
}

impl FromStr for Size {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let side = |text: &str| text.parse().ok().filter(|side| (SHORTEST..=raster::LONGEST).contains(side));
        let sides = text.split_once('x').and_then(|(width, height)| Some((side(width)?, side(height)?)));
        let (width, height) = sides.ok_or_else(|| {
            format!("use WIDTHxHEIGHT in pixels, each from {SHORTEST} to {}: 480x270", raster::LONGEST)
        })?;
        Ok(Self { width, height })
    }
}

/// Returns whether standard output is for the movie, so that the report goes to standard error.
fn takes_standard_output(arguments: &ArgMatches) -> bool {
    matches!(arguments.try_get_one::<Output>("out"), Ok(Some(Output::Stream)))
}

/// The task of a role.
#[derive(Debug, Clone, Serialize, Deserialize)]
struct Job {
    source: Source,
    size: Size,
    frames: u64,
    renderers: u32,
    /// Which tile a renderer draws.
    tile: u32,
    brush: Brush,
    /// The GPUs that draw, in turn, as UUIDs. Empty for the one that has the memory.
    devices: Vec<String>,
    /// Frames a second, if the rate is fixed.
    rate: Option<u32>,
    live: bool,
    output: Output,
    /// Frames a second of a movie.
    fps: u32,
    /// The first frame that is not written yet.
    unwritten: u64,
    /// Whether a viewer joins when the watcher says so, and not at once.
    joins_late: bool,
    /// In the middle of the frame after this many the process says so, and waits to be killed.
    strike: Option<u64>,
}

impl Job {
    fn tiles(&self) -> Vec<Tile> {
        Tile::all(self.size, self.renderers)
    }

    /// Returns the GPU that draws a tile, if it was chosen.
    fn device(&self, tile: u32) -> Result<Option<DeviceUuid>, Failure> {
        let Some(chosen) = self.devices.get(tile as usize % self.devices.len().max(1)) else { return Ok(None) };
        chosen.parse().map(Some).map_err(|_| unexpected("the UUID of a GPU cannot be read"))
    }

    /// Returns how a renderer's tile looks: in `--live` each has a colour.
    fn look(&self, tile: u32, frame: u64) -> Look {
        let colour = || mesh::COLOURS[tile as usize % mesh::COLOURS.len()];
        Look { tint: self.live.then(colour), tag: frame as u8 }
    }
}

/// What a role says to the watcher.
#[derive(Debug, Serialize, Deserialize)]
enum Report {
    /// It has everything that it needs.
    Ready,
    /// It is in the middle of a frame and waits to be killed.
    Struck,
    /// A viewer has seen another frame. Only with `--live`, whose rate is limited.
    Viewed,
    /// A viewer that joined late leaves. It has seen this many frames.
    Left(u64),
    /// The writer has a frame. The descriptor of its part of the movie comes with it.
    Written(Written),
    /// It has ended, and reported its step.
    Done,
}

/// A frame that the writer has checked.
#[derive(Debug, Serialize, Deserialize)]
struct Written {
    frame: u64,
    /// Whether pixels of another frame were in it.
    torn: bool,
    /// For each tile the frame in which it was drawn, and the process.
    tiles: Vec<Drawn>,
    /// Which tiles are late, and therefore grey, as bits.
    late: u32,
    /// Frames before it that rested on a killed process and were not written.
    tainted: u64,
    /// A number that differs for different pictures.
    hash: u64,
    /// When the geometry published its scene.
    published: Moment,
    /// When it was written.
    at: Moment,
    has_part: bool,
}

/// When, by which process and how fast a tile was drawn.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
struct Drawn {
    frame: u32,
    pid: u32,
    /// How long it took: the kernels on the GPU by events, else the host. Of kernels it is the time of the last tile
    /// before that was finished, or 0.
    nanos: u32,
}

/// The shortest side of a picture: every tile has pixels.
const SHORTEST: u32 = 16;

const MOST_RENDERERS: u32 = 16;

/// How many frames are published and not written: what a topic of depth 8 keeps for a late subscriber. One more is in
/// the making.
const IN_FLIGHT: u32 = 7;

beliefs! {
    FALLS = "falls": "A rendering pipeline ends with any of its processes.",
    LOST = "lost": "The frames that a killed process was working on are lost.",
    TORN = "torn": "A half-written frame of a killed process can be seen.",
    PIXELS = "pixels": "A GPU and a CPU draw different pixels.",
    TILES = "tiles": "Pictures that several processes draw differ from those that one process draws.",
}

#[cfg(test)]
mod tests {
    use super::*;

    // Holds 326.
    #[test]
    fn lab_that_is_listed_without_this_program_is_this_one() {
        let roles = |lab: &Lab| lab.roles.iter().chain([&lab.observer]).map(|role| role.name).collect::<Vec<_>>();
        assert_eq!(roles(&partywall_lab::RENDER), roles(&LAB));
        assert_eq!(partywall_lab::RENDER.elsewhere.map(|program| program.name), Some(env!("CARGO_BIN_NAME")));
    }
}
