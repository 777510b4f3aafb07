//! PNG and JPEG files.

use std::io::Cursor;

use image::{DynamicImage, ImageFormat, ImageReader, Rgba, RgbaImage};
use partywall::files::write_file;

use super::*;

/// An image, row by row, with four bytes per pixel.
#[derive(Debug)]
pub(super) struct Picture {
    pub(super) size: Size,
    pub(super) pixels: Vec<u8>,
}

/// Returns the images of a folder that are not hidden, sorted by name.
pub(super) fn list(folder: &Path) -> Result<Vec<PathBuf>, Failure> {
    let unreadable = |error: std::io::Error| failed(folder, &error.to_string());
    let mut files = Vec::new();
    for entry in fs::read_dir(folder).map_err(unreadable)? {
        let path = entry.map_err(unreadable)?.path();
        // macOS puts a `._NAME` that is no image beside a file, where the file system cannot hold its attributes.
        let is_hidden = path.file_name().unwrap_or_default().as_encoded_bytes().starts_with(b".");
        if !is_hidden && path.is_file() && format_of(&path).is_some() {
            files.push(path);
        }
    }
    files.sort_unstable();
    if files.is_empty() { Err(failed(folder, "it contains neither PNG nor JPEG files")) } else { Ok(files) }
}

/// Returns the size of an image without decoding it.
pub(super) fn size(path: &Path) -> Result<Size, Failure> {
    let size = ImageReader::open(path).map_err(image::ImageError::IoError).and_then(ImageReader::into_dimensions);
    let (width, height) = size.map_err(|error| failed(path, &error.to_string()))?;
    Ok(Size { width, height })
}

pub(super) fn decode(path: &Path) -> Result<Picture, Failure> {
    let image = image::open(path).map_err(|error| failed(path, &error.to_string()))?.into_rgba8();
    Ok(Picture { size: Size { width: image.width(), height: image.height() }, pixels: image.into_raw() })
}

/// Encodes an image in the format of the extension of `path`.
pub(super) fn encode(path: &Path, picture: Picture) -> Result<Vec<u8>, Failure> {
    let Picture { size, pixels } = picture;
    let format = format_of(path).ok_or_else(|| failed(path, "it is neither a PNG nor a JPEG file"))?;
    let image = RgbaImage::from_raw(size.width, size.height, pixels).map(DynamicImage::ImageRgba8);
    let image = image.ok_or_else(|| failed(path, "there are fewer bytes than pixels"))?;
    // JPEG has no transparency.
    let image = if format == ImageFormat::Jpeg { DynamicImage::ImageRgb8(image.into_rgb8()) } else { image };
    let mut file = Cursor::new(Vec::new());
    image.write_to(&mut file, format).map_err(|error| failed(path, &error.to_string()))?;
    Ok(file.into_inner())
}

/// Writes a file atomically: it is complete or absent.
pub(super) fn write(path: &Path, bytes: &[u8]) -> Result<(), Failure> {
    write_file(path, bytes, true).map_err(|error| failed(path, &error.to_string()))
}

/// Paints the lab's own images.
pub(super) fn paint(folder: &Path) -> Result<(), Failure> {
    for number in 0..PAINTED {
        let image = RgbaImage::from_fn(PAINTED_SIZE.width, PAINTED_SIZE.height, |x, y| {
            let [dx, dy] = [x, y].map(|at| at as i32 - 100 * number as i32 % 400);
            let inside = dx * dx + dy * dy < 150 * 150;
            let board = if (x / 20 + y / 20) % 2 == 0 { 230 } else { 40 };
            Rgba(if inside {
                [200, (x % 256) as u8, (y % 256) as u8, 255]
            } else {
                [board, board, (x % 256) as u8, 255]
            })
        });
        let name = format!("image-{number}.{}", if number % 2 == 0 { "png" } else { "jpg" });
        let path = folder.join(name);
        write(&path, &encode(&path, Picture { size: PAINTED_SIZE, pixels: image.into_raw() })?)?;
    }
    Ok(())
}

const PAINTED: u32 = 8;
const PAINTED_SIZE: Size = Size { width: 640, height: 480 };

fn format_of(path: &Path) -> Option<ImageFormat> {
    ImageFormat::from_path(path).ok().filter(|format| matches!(format, ImageFormat::Png | ImageFormat::Jpeg))
}

fn failed(path: &Path, why: &str) -> Failure {
    Failure::new(
        ErrorKind::NotFound,
        format!("{}: {why}", path.display()),
        "pass a folder with PNG or JPEG files, or leave the option out: the lab then paints images",
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn painted_images_are_listed_and_read() {
        let folder = tempfile::tempdir().unwrap();
        assert!(list(folder.path()).unwrap_err().message.contains("neither PNG nor JPEG"));
        paint(folder.path()).unwrap();
        fs::write(folder.path().join("notes.txt"), "").unwrap();
        fs::write(folder.path().join("._image-0.png"), "Mac OS X").unwrap();
        let files = list(folder.path()).unwrap();
        assert_eq!(files.len(), PAINTED as usize);
        let picture = decode(&files[0]).unwrap();
        assert_eq!((picture.size, size(&files[1]).unwrap()), (PAINTED_SIZE, PAINTED_SIZE));
        assert_eq!(picture.pixels.len() as u64, picture.size.bytes());
        // PNG loses nothing.
        let again = encode(&files[0], Picture { pixels: picture.pixels.clone(), ..picture }).unwrap();
        assert_eq!(again, fs::read(&files[0]).unwrap());
        assert!(encode(&files[0], Picture { size: PAINTED_SIZE, pixels: Vec::new() }).is_err());
        fs::write(&files[0], "no image").unwrap();
        assert!(decode(&files[0]).is_err());
    }
}
