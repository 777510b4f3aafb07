//! `partywall topic pub`. With `--json`, at the end: `name`, `samples`, `bytes` (of the samples), `seconds`.

use std::{
    io::Read,
    path::{Path, PathBuf},
    sync::atomic::AtomicBool,
    time::{Duration, Instant},
};

use partywall::{
    DType, ErrorKind, Publisher, Topic, bytes,
    files::{FileProblem, Plan, TensorInfo},
};
use serde_json::json;

use super::{
    NameCheck, TIMEOUT,
    making::{Audience, Numbers, Type},
    parse_rate, sleep_until, values,
};
use crate::{
    Context,
    failure::Failure,
    output::Output,
    signals,
    text::{count, parse_count},
};

/// The arguments of the command.
#[derive(Debug, clap::Args)]
pub(super) struct Arguments {
    /// The topic. It is created if it does not exist
    name: String,
    /// A .npy file or one-tensor .safetensors file, which is one sample; or any other file, or `-` for standard input,
    /// whose bytes are cut into samples. Without a file, each sample is filled with its number
    file: Option<PathBuf>,
    /// Samples per second [default: 10 without a file, else as fast as subscribers receive]
    #[arg(long, value_name = "N", value_parser = parse_rate)]
    rate: Option<f64>,
    /// End after this many samples; a file is repeated [default: the file once, numbers until Ctrl-C]
    #[arg(long, value_name = "N", value_parser = parse_count)]
    count: Option<u64>,
    /// A header of up to 256 bytes for each sample
    #[arg(long, value_name = "TEXT")]
    header: Option<String>,
    #[command(flatten)]
    audience: Audience,
    #[command(flatten)]
    samples: Type,
    #[command(flatten)]
    numbers: Numbers,
}

/// Where samples come from.
enum Source {
    /// A file of one tensor.
    Tensor(TensorInfo, Vec<u8>),
    /// A file of bytes.
    Bytes(PathBuf, Vec<u8>),
    /// Standard input.
    Stdin,
    /// The numbers of the samples.
    Numbers,
}

/// Runs the command.
pub(super) fn run(context: &Context, arguments: &Arguments) -> Result<(), Failure> {
    partywall::check_name(&arguments.name)?;
    // Checked first, so that a missing or damaged file starts no broker.
    let source = arguments.source()?;
    let stop = signals::cancel_flag()?;
    let domain = context.options().connect()?;
    let options = arguments.samples.of(domain.topic(&arguments.name));
    let has_size = arguments.samples.shape.is_some() || arguments.samples.max_bytes.is_some();
    let topic = arguments.numbers.open_or_create(context, options, |options| match &source {
        Source::Tensor(tensor, _) if !has_size => options.dtype(tensor.dtype).shape(&tensor.shape),
        Source::Bytes(_, bytes) if !has_size => {
            options.dtype(arguments.samples.dtype.unwrap_or(DType::U8)).max_bytes(bytes.len() as u64)
        }
        _ => options,
    })?;
    let publisher = topic.publisher()?;
    if !arguments.audience.wait_for(context, &topic, &stop)? {
        return Ok(());
    }
    let mut sender = Sender {
        arguments,
        output: context.output(),
        topic: &topic,
        publisher,
        name_check: NameCheck::new(),
        stop: &stop,
        start: Instant::now(),
        samples: 0,
        bytes: 0,
    };
    let sent = sender.send_all(&source);
    let Sender { publisher, start, samples, bytes: total, .. } = sender;
    sent?;
    publisher.drain(TIMEOUT)?;
    let took = start.elapsed().as_secs_f64();
    let output = context.output();
    let samples_text = count(samples, "sample");
    let name = &arguments.name;
    output.line(format!("published {samples_text} to {name}: {} in {took:.1} s", bytes(total)));
    output.value(&json!({ "name": name, "samples": samples, "bytes": total, "seconds": took }));
    Ok(())
}

impl Arguments {
    fn source(&self) -> Result<Source, Failure> {
        let Some(path) = &self.file else { return Ok(Source::Numbers) };
        if path == Path::new("-") {
            return Ok(Source::Stdin);
        }
        let plan = Plan::from_path(path).map_err(partywall::Error::from)?;
        let [tensor] = plan.tensors() else {
            let what = format!("{} has {}", path.display(), count(plan.tensors().len() as u64, "tensor"));
            return Err(Failure::new(ErrorKind::Usage, what, "publish a file with one tensor: a sample is one tensor"));
        };
        let is_typed = ["npy", "safetensors"]
            .iter()
            .any(|suffix| path.extension().is_some_and(|has| has.eq_ignore_ascii_case(suffix)));
        let bytes = plan.read_tensor(0).map_err(partywall::Error::from)?;
        Ok(if is_typed { Source::Tensor(tensor.clone(), bytes) } else { Source::Bytes(path.clone(), bytes) })
    }
}

struct Sender<'a> {
    arguments: &'a Arguments,
    output: Output,
    topic: &'a Topic,
    publisher: Publisher,
    name_check: NameCheck,
    stop: &'a AtomicBool,
    start: Instant,
    samples: u64,
    bytes: u64,
}

impl Sender<'_> {
    fn send_all(&mut self, source: &Source) -> Result<(), Failure> {
        match source {
            Source::Tensor(tensor, bytes) => {
                for _ in 0..self.arguments.count.unwrap_or(1) {
                    if !self.send(tensor.dtype, &tensor.shape, bytes)? {
                        break;
                    }
                }
                Ok(())
            }
            Source::Bytes(path, bytes) => self.send_file(path, bytes),
            Source::Stdin => self.send_stream(&mut std::io::stdin().lock()),
            Source::Numbers => self.send_numbers(),
        }
    }

    /// Publishes samples filled with their own numbers.
    fn send_numbers(&mut self) -> Result<(), Failure> {
        let (dtype, shape) = match (self.topic.dtype(), self.topic.shape()) {
            (Some(dtype), Some(shape)) => (dtype, shape.iter().map(|extent| extent.unwrap_or(1)).collect::<Vec<_>>()),
            (dtype, _) => {
                let dtype = dtype.unwrap_or(DType::U8);
                (dtype, vec![self.topic.max_bytes() * 8 / dtype.bits()])
            }
        };
        let elements: u64 = shape.iter().product();
        let length = dtype.bytes_for(elements).unwrap_or(0) as usize;
        while self.arguments.count.is_none_or(|count| self.samples < count) {
            let element = values::element(dtype, self.samples);
            let mut bytes = element.repeat(length.div_ceil(element.len()));
            bytes.truncate(length);
            if !self.send(dtype, &shape, &bytes)? {
                break;
            }
        }
        Ok(())
    }

    /// Publishes the bytes of a file, cut into samples.
    fn send_file(&mut self, path: &Path, bytes: &[u8]) -> Result<(), Failure> {
        let (dtype, shape, length) = self.cut(bytes.len())?;
        if length == 0 || !bytes.len().is_multiple_of(length) {
            let has = format!("{} has {} bytes", path.display(), bytes.len());
            let what = format!("{has}, which is not a multiple of {length}, the size of a sample");
            return Err(Failure::new(ErrorKind::Usage, what, "give the --dtype and --shape of the file"));
        }
        let once = bytes.len() / length;
        let count = self.arguments.count.unwrap_or(once as u64);
        for sample in bytes.chunks(length).cycle().take(usize::try_from(count).unwrap_or(usize::MAX)) {
            if !self.send(dtype, &shape, sample)? {
                break;
            }
        }
        Ok(())
    }

    /// Publishes standard input as it arrives.
    fn send_stream(&mut self, stream: &mut impl Read) -> Result<(), Failure> {
        let failed = |source| partywall::Error::from(FileProblem::Read(source).of("-"));
        let is_fixed = self.topic.shape().is_some_and(|shape| !shape.contains(&None)) && self.topic.dtype().is_some();
        let mut sample = Vec::new();
        if !is_fixed {
            let most = self.topic.max_bytes();
            stream.take(most.saturating_add(1)).read_to_end(&mut sample).map_err(failed)?;
            let (dtype, shape, _) = self.cut(sample.len())?;
            return self.send(dtype, &shape, &sample).map(drop);
        }
        let (dtype, shape, length) = self.cut(0)?;
        while self.arguments.count.is_none_or(|count| self.samples < count) {
            sample.clear();
            let read = stream.take(length as u64).read_to_end(&mut sample).map_err(failed)?;
            if read == 0 {
                break;
            }
            if read < length {
                let what = format!("standard input ends within a sample, after {read} of {length} bytes");
                let advice = "check the program that writes it; the earlier samples were published";
                return Err(Failure::new(ErrorKind::Usage, what, advice));
            }
            if !self.send(dtype, &shape, &sample)? {
                break;
            }
        }
        Ok(())
    }

    /// Returns the type, shape and size in bytes of the samples into which `length` bytes are cut. If the topic's type
    /// fixes them, they are the topic's; otherwise all bytes become one sample.
    fn cut(&self, length: usize) -> Result<(DType, Vec<u64>, usize), Failure> {
        let dtype = self.topic.dtype().unwrap_or(DType::U8);
        let fixed = self.topic.shape().and_then(|shape| shape.iter().copied().collect::<Option<Vec<u64>>>());
        if let (Some(dtype), Some(shape)) = (self.topic.dtype(), fixed) {
            let bytes = dtype.bytes_for(shape.iter().product()).unwrap_or(0);
            return Ok((dtype, shape, bytes as usize));
        }
        let elements = length as u64 * 8 / dtype.bits();
        let mut shape = vec![elements];
        // If only one dimension may have any length, it is derived from the others.
        if let Some(extents) = self.topic.shape() {
            let others: u64 = extents.iter().flatten().product();
            if extents.iter().filter(|extent| extent.is_none()).count() == 1 && others > 0 {
                shape = extents.iter().map(|extent| extent.unwrap_or(elements / others)).collect();
            }
        }
        if dtype.bytes_for(shape.iter().product()) != Some(length as u64) {
            let what = format!("{length} bytes are not a sample of {}", self.topic.sample_type());
            return Err(Failure::new(ErrorKind::Usage, what, "publish as many bytes as one sample has"));
        }
        Ok((dtype, shape, length))
    }

    /// Publishes a sample when it is due. Returns false if Ctrl-C interrupted it.
    fn send(&mut self, dtype: DType, shape: &[u64], bytes: &[u8]) -> Result<bool, Failure> {
        let rate = self.arguments.rate.or_else(|| self.arguments.file.is_none().then_some(RATE));
        let due = rate.map_or(Duration::ZERO, |rate| Duration::from_secs_f64(self.samples as f64 / rate));
        if !sleep_until(self.start, due, self.stop) {
            return Ok(false);
        }
        self.name_check.update(self.output, &self.publisher);
        let header = self.arguments.header.as_deref().unwrap_or_default().as_bytes();
        let published = super::publish(&self.publisher, (dtype, shape), bytes, header, self.stop)?;
        self.samples += u64::from(published);
        self.bytes += if published { bytes.len() as u64 } else { 0 };
        Ok(published)
    }
}

/// The default rate of generated samples, per second.
const RATE: f64 = 10.0;
