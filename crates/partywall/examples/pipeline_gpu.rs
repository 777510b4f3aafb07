//! Camera → detector → writer on a GPU: `cargo run --release -p partywall --example pipeline_gpu [FRAMES]`. Kernels draw
//! the frames and find their brightest pixels; no host waits for a kernel, and no pixel leaves the GPU. It is
//! `examples/c/pipeline.cu` in Rust, with the same topics, so that each role may run in either language:
//! `pipeline_gpu camera|detector|writer FRAMES`.
#![allow(clippy::print_stdout, reason = "an example talks to its reader")]
#![allow(unsafe_code)] // launches with parameters that match the kernels

use std::{
    env,
    error::Error,
    ffi::{CStr, c_void},
    process::Command,
    time::{Duration, Instant},
};

use partywall::{
    DType, DeviceChoice, Domain, Place, Policy, Subscriber, Topic,
    cuda::{Context, CudaError, Function, LaunchConfig, Module, Stream, StreamRef},
    gpu,
};

const HEIGHT: u64 = 1080;
const WIDTH: u64 = 1920;
const PIXELS: u32 = (HEIGHT * WIDTH) as u32;
const THREADS: u32 = 256;
const TIMEOUT: Duration = Duration::from_secs(60);

/// A role ends with this, or without.
type Outcome<T = ()> = Result<T, Box<dyn Error>>;

fn main() -> Outcome {
    let arguments: Vec<_> = env::args().skip(1).collect();
    let (role, frames) = match &arguments[..] {
        [role, frames] => (role.as_str(), frames.as_str()),
        [frames] => ("all", frames.as_str()),
        _ => ("all", "1000"),
    };
    let start = |role| Command::new(env::current_exe()?).args([role, frames]).spawn();
    let children = if role == "all" { vec![start("camera")?, start("detector")?] } else { Vec::new() };

    let frames = frames.parse()?;
    let (place, _) = gpu::resolve(DeviceChoice::Cuda(0))?;
    let uuid = place.gpu().ok_or("cuda:0 is a GPU")?;
    let domain = Domain::connect()?;
    let gpu = domain.gpu(uuid)?;
    let stream = Stream::new(gpu.context())?;
    // Kernels are loaded before a stream waits for another process: loading one waits for the streams.
    let kernels = Kernels::load(gpu.context())?;
    let topics = Topics::open(&domain, place)?;
    match role {
        "camera" => camera(&topics, &kernels, stream.as_ref(), frames)?,
        "detector" => detector(&topics, &kernels, stream.as_ref())?,
        _ => writer(&topics, frames)?,
    }
    for mut child in children {
        if !child.wait()?.success() {
            return Err("the camera or the detector has failed".into());
        }
    }
    Ok(())
}

struct Topics {
    frames: Topic,
    spots: Topic,
}

impl Topics {
    fn open(domain: &Domain, place: Place) -> partywall::Result<Self> {
        let open = |name, dtype, shape: &[u64]| {
            domain.topic(name).dtype(dtype).shape(shape).depth(8).place(place).open_or_create()
        };
        let frames = open("examples/gpu/frames", DType::U8, &[HEIGHT, WIDTH])?;
        Ok(Self { frames, spots: open("examples/gpu/spots", DType::U32, &[1])? })
    }
}

/// The kernels of `kernels/pipeline.cu`.
struct Kernels {
    draw: Function,
    detect: Function,
}

impl Kernels {
    fn load(context: &Context) -> Result<Self, CudaError> {
        const PTX: &str = concat!(include_str!("../kernels/pipeline.ptx"), "\0");
        let module = Module::from_ptx(context, CStr::from_bytes_with_nul(PTX.as_bytes()).unwrap_or_default())?;
        Ok(Self { draw: module.function(c"pw_draw")?, detect: module.function(c"pw_detect")? })
    }

    fn draw(&self, stream: StreamRef<'_>, mut pixels: u64, mut spot: u32) -> Result<(), CudaError> {
        let mut n = PIXELS;
        // SAFETY: the parameters are those of the kernel, which writes the pixels of a frame.
        unsafe { launch(&self.draw, stream, &mut [value(&mut pixels), value(&mut n), value(&mut spot)]) }
    }

    fn detect(&self, stream: StreamRef<'_>, mut pixels: u64, mut spot: u64) -> Result<(), CudaError> {
        let mut n = PIXELS;
        // SAFETY: the parameters are those of the kernel, which reads the pixels of a frame and writes a number.
        unsafe { launch(&self.detect, stream, &mut [value(&mut pixels), value(&mut n), value(&mut spot)]) }
    }
}

/// Returns the address of a parameter.
fn value<T>(value: &mut T) -> *mut c_void {
    (&raw mut *value).cast()
}

/// Launches a kernel with one thread for each pixel.
///
/// # Safety
/// As for [`Function::launch`].
unsafe fn launch(kernel: &Function, stream: StreamRef<'_>, values: &mut [*mut c_void]) -> Result<(), CudaError> {
    let config = LaunchConfig { grid: [PIXELS.div_ceil(THREADS), 1, 1], block: [THREADS, 1, 1], shared_bytes: 0 };
    // SAFETY: the caller's promise.
    unsafe { kernel.launch(stream, config, values) }
}

fn spot_of(frame: u32) -> u32 {
    frame.wrapping_mul(7919) % PIXELS
}

fn until_idle(topic: &Topic) -> partywall::Result<Subscriber> {
    topic.subscribe(Policy::Block).until_idle(true).join()
}

fn camera(topics: &Topics, kernels: &Kernels, stream: StreamRef<'_>, frames: u32) -> Outcome {
    let publisher = topics.frames.publisher()?;
    publisher.wait_for_subscribers(1, TIMEOUT)?;
    for frame in 0..frames {
        let loan = publisher.loan(DType::U8, &[HEIGHT, WIDTH], TIMEOUT)?;
        kernels.draw(stream, loan.device()?.device_ptr(), spot_of(frame))?;
        loan.filled().publish_on(stream, TIMEOUT)?;
    }
    Ok(publisher.drain(TIMEOUT)?)
}

fn detector(topics: &Topics, kernels: &Kernels, stream: StreamRef<'_>) -> Outcome {
    let publisher = topics.spots.publisher()?;
    let frames = until_idle(&topics.frames)?;
    publisher.wait_for_subscribers(1, TIMEOUT)?;
    for frame in &frames {
        let frame = frame?;
        let mut loan = publisher.loan(DType::U32, &[1], TIMEOUT)?;
        loan.rests_on(&frame)?;
        let pixels = frame.device_on(stream)?.device_ptr();
        kernels.detect(stream, pixels, loan.device()?.device_ptr())?;
        loan.filled().publish_on(stream, TIMEOUT)?;
        frame.release_on(stream)?;
    }
    Ok(publisher.drain(TIMEOUT)?)
}

fn writer(topics: &Topics, frames: u32) -> Outcome {
    let mut right = 0;
    let mut number = 0;
    let spots = until_idle(&topics.spots)?;
    let start = Instant::now();
    for sample in &spots {
        let sample = sample?;
        sample.wait(TIMEOUT)?;
        let mut spot = [0; 4];
        sample.read_at(0, &mut spot)?;
        sample.check()?;
        right += u32::from(u32::from_ne_bytes(spot) == spot_of(number));
        number += 1;
    }
    let rate = f64::from(number) / start.elapsed().as_secs_f64();
    println!("{right} of {number} spots are right, {rate:.0} frames a second");
    if right == frames { Ok(()) } else { Err("a spot is wrong, or missing".into()) }
}
