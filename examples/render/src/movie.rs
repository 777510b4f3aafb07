//! Pictures as files: PNG, frames of a GIF, frames of a Y4M stream.

use gif::{DisposalMethod, Encoder, Frame, Repeat};
use image::{ImageFormat, RgbImage};

use super::{raster::Size, *};

/// Where the pictures go.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) enum Output {
    /// Nowhere: they are only checked.
    Nothing,
    /// PNG files in a folder.
    Folder(PathBuf),
    Gif(PathBuf),
    Y4m(PathBuf),
    /// Y4M on standard output.
    Stream,
}

impl FromStr for Output {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let path = PathBuf::from(text);
        match path.extension().and_then(|extension| extension.to_str()) {
            _ if text == "-" => Ok(Self::Stream),
            // `movies/` and `holiday.2026/` are folders.
            None => Ok(Self::Folder(path)),
            _ if text.ends_with('/') => Ok(Self::Folder(path)),
            Some("gif") => Ok(Self::Gif(path)),
            Some("y4m") => Ok(Self::Y4m(path)),
            Some(other) => Err(format!(
                "no movie has the extension .{other} here: use a folder, FILE.gif, FILE.y4m, or - for Y4M on standard \
                 output; a folder whose name has a dot ends with /"
            )),
        }
    }
}

/// Returns the name of the file of a frame in a folder.
pub(super) fn file_name(frame: u64) -> String {
    format!("frame-{frame:05}.png")
}

/// Returns whether a file of a folder has the name of a frame.
pub(super) fn is_frame(name: &str) -> bool {
    name.strip_prefix("frame-").is_some_and(|rest| rest.ends_with(".png"))
}

pub(super) fn png(pixels: &[u32], size: Size) -> Result<Vec<u8>, Failure> {
    let bytes = pixels.iter().flat_map(|pixel| rgb(*pixel)).collect();
    let image =
        RgbImage::from_raw(size.width, size.height, bytes).ok_or_else(|| unexpected("a frame has too few pixels"))?;
    let mut file = std::io::Cursor::new(Vec::new());
    image.write_to(&mut file, ImageFormat::Png).map_err(|error| unexpected(error.to_string()))?;
    Ok(file.into_inner())
}

/// Makes the parts of a movie file, one for each frame. Their writer needs to know only whether a part is the first
/// one, so another process can continue a movie.
pub(super) struct Movie {
    size: Size,
    fps: u32,
    is_gif: bool,
    /// The frame before. A GIF contains what differs from it.
    before: Option<Vec<u32>>,
}

impl Movie {
    pub(super) fn new(size: Size, fps: u32, is_gif: bool) -> Self {
        Self { size, fps, is_gif, before: None }
    }

    /// Returns the part of a frame.
    pub(super) fn part(&mut self, pixels: Vec<u32>, is_first: bool) -> Result<Vec<u8>, Failure> {
        if !self.is_gif {
            return Ok(self.y4m(&pixels, is_first));
        }
        let part = self.gif(&pixels, is_first).map_err(|error| unexpected(error.to_string()));
        self.before = Some(pixels);
        part
    }

    fn y4m(&self, pixels: &[u32], is_first: bool) -> Vec<u8> {
        let Size { width, height } = self.size;
        let head = if is_first {
            format!("YUV4MPEG2 W{width} H{height} F{}:1 Ip A1:1 C444\n", self.fps)
        } else {
            String::new()
        };
        let mut part = [head.as_bytes(), b"FRAME\n"].concat();
        // BT.601, in the range that players expect.
        for [red, green, blue, middle] in [[66, 129, 25, 16], [-38, -74, 112, 128], [112, -94, -18, 128]] {
            part.extend(pixels.iter().map(|pixel| {
                let [r, g, b] = rgb(*pixel).map(i32::from);
                (((red * r + green * g + blue * b + 128) >> 8) + middle) as u8
            }));
        }
        part
    }

    fn gif(&self, pixels: &[u32], is_first: bool) -> Result<Vec<u8>, gif::EncodingError> {
        let [width, height] = [self.size.width, self.size.height].map(|side| side as u16);
        let mut encoder = Encoder::new(Vec::new(), width, height, &[])?;
        encoder.set_repeat(Repeat::Infinite)?;
        if !is_first {
            // The head of the file is in the part of the first frame.
            encoder.get_mut().clear();
        }
        let (palette, buffer) = indexed(pixels, self.before.as_deref());
        encoder.write_frame(&Frame {
            width,
            height,
            // In 1/100 s. Browsers slow down a movie with less than 2.
            delay: (100 / self.fps).clamp(2, 100) as u16,
            dispose: DisposalMethod::Keep,
            transparent: Some(0),
            palette: Some(palette),
            buffer: buffer.into(),
            ..Frame::default()
        })?;
        Ok(std::mem::take(encoder.get_mut()))
    }
}

/// The end of a GIF file.
pub(super) const END_OF_GIF: &[u8] = &[0x3b];

/// Returns a palette and its indices for the pixels. Index 0 stands for a pixel that is as before. With more than 255
/// colours the lowest bits are dropped until there are no more.
fn indexed(pixels: &[u32], before: Option<&[u32]>) -> (Vec<u8>, Vec<u8>) {
    let is_same = |index: usize, pixel: u32| before.is_some_and(|before| before.get(index) == Some(&pixel));
    for bits in (1..=8).rev() {
        let mask = 0x0001_0101 * ((255 << (8 - bits)) & 255);
        let mut places = HashMap::new();
        let mut palette = vec![0; 3];
        let mut buffer = Vec::with_capacity(pixels.len());
        for (index, pixel) in pixels.iter().enumerate() {
            let colour = pixel & mask;
            if is_same(index, *pixel) {
                buffer.push(0);
                continue;
            }
            let place = *places.entry(colour).or_insert_with(|| {
                palette.extend(rgb(colour));
                palette.len() / 3 - 1
            });
            buffer.push(place as u8);
        }
        if palette.len() <= 256 * 3 {
            return (palette, buffer);
        }
    }
    unreachable!("with one bit for each channel there are eight colours")
}

fn rgb(pixel: u32) -> [u8; 3] {
    let [red, green, blue, _] = pixel.to_le_bytes();
    [red, green, blue]
}

#[cfg(test)]
mod tests {
    use super::*;

    const SIZE: Size = Size { width: 20, height: 16 };

    fn frames(count: u32) -> Vec<Vec<u32>> {
        let pixel = |frame: u32, index: u32| (index * 0x0001_0203 + frame * (index / 100) * 0x0102) & 0x00ff_ffff;
        (0..count).map(|frame| (0..SIZE.pixels() as u32).map(|index| pixel(frame, index % 200)).collect()).collect()
    }

    /// Makes a movie of frames, of which another process writes all from `second` on.
    fn movie(frames: &[Vec<u32>], second: usize, is_gif: bool) -> Vec<u8> {
        let mut movies = [Movie::new(SIZE, 25, is_gif), Movie::new(SIZE, 25, is_gif)];
        let part = |(index, frame): (usize, &Vec<u32>)| {
            movies[usize::from(index >= second)].part(frame.clone(), index == 0).unwrap()
        };
        frames.iter().enumerate().flat_map(part).chain(if is_gif { END_OF_GIF } else { &[] }.iter().copied()).collect()
    }

    #[test]
    fn gif_decodes_to_its_frames_even_if_its_writer_was_replaced() {
        let frames = frames(5);
        for second in [0, 2, 9] {
            let movie = movie(&frames, second, true);
            let mut options = gif::DecodeOptions::new();
            options.set_color_output(gif::ColorOutput::RGBA);
            let mut decoder = options.read_info(movie.as_slice()).unwrap();
            let mut canvas = vec![0; SIZE.pixels()];
            for frame in &frames {
                let read = decoder.read_next_frame().unwrap().unwrap();
                assert_eq!(read.delay, 4);
                for (pixel, colour) in canvas.iter_mut().zip(read.buffer.chunks_exact(4)) {
                    if colour[3] != 0 {
                        *pixel = u32::from_le_bytes([colour[0], colour[1], colour[2], 0]);
                    }
                }
                assert!(canvas == *frame);
            }
            assert!(decoder.read_next_frame().unwrap().is_none());
        }
    }

    #[test]
    fn gif_with_too_many_colours_drops_the_lowest_bits() {
        let pixels: Vec<u32> = (0..SIZE.pixels() as u32).map(|index| (index * 0x0001_0101 / 2) & 0x00ff_ffff).collect();
        let (palette, buffer) = indexed(&pixels, None);
        assert!(palette.len() <= 256 * 3);
        for (pixel, place) in pixels.iter().zip(buffer) {
            let colour = &palette[usize::from(place) * 3..][..3];
            assert!(rgb(*pixel).iter().zip(colour).all(|(channel, near)| channel.abs_diff(*near) < 4));
        }
    }

    #[test]
    fn y4m_has_a_header_and_three_planes_for_each_frame() {
        let frames = frames(3);
        let movie = movie(&frames, 1, false);
        let head = b"YUV4MPEG2 W20 H16 F25:1 Ip A1:1 C444\n";
        assert_eq!(&movie[..head.len()], head);
        let parts = &movie[head.len()..];
        assert_eq!(parts.len(), 3 * (6 + 3 * SIZE.pixels()));
        assert!(parts.chunks_exact(6 + 3 * SIZE.pixels()).all(|part| part.starts_with(b"FRAME\n")));
        let white = Movie::new(SIZE, 25, false).y4m(&[0x00ff_ffff, 0], false);
        assert_eq!(white[6..], [235, 16, 128, 128, 128, 128]);
    }

    #[test]
    fn png_keeps_each_colour() {
        let frame = &frames(1)[0];
        let read = image::load_from_memory(&png(frame, SIZE).unwrap()).unwrap().into_rgb8();
        assert!(read.pixels().zip(frame).all(|(read, pixel)| read.0 == rgb(*pixel)));
    }

    #[test]
    fn output_is_chosen_by_the_extension() {
        let output = |text: &str| text.parse::<Output>();
        assert_eq!(output("-"), Ok(Output::Stream));
        assert_eq!(output("a/b.gif"), Ok(Output::Gif("a/b.gif".into())));
        assert_eq!(output("b.y4m"), Ok(Output::Y4m("b.y4m".into())));
        for folder in ["movies", "a.b/c", "holiday.2026/"] {
            assert_eq!(output(folder), Ok(Output::Folder(folder.into())));
        }
        assert!(output("movie.mp4").unwrap_err().contains("extension .mp4"));
        assert_eq!(file_name(7), "frame-00007.png");
        assert!(is_frame(&file_name(7)) && is_frame(&file_name(1_000_000)) && !is_frame("frame-notes.txt"));
    }
}
