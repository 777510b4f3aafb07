//! What `--live` draws over a tile: the pid of its process, and grey if it is out of date.

use super::raster::{Size, Tile};

/// Labels a tile of a picture with the process that drew it. A tile that is `stale` loses its colours.
pub(super) fn label(pixels: &mut [u32], size: Size, tile: Tile, pid: u32, stale: bool) {
    for y in tile.y..tile.y + tile.size.height {
        for x in tile.x..tile.x + tile.size.width {
            let pixel = &mut pixels[(y * size.width + x) as usize];
            if x == tile.x || y == tile.y {
                *pixel = BORDER;
            } else if stale {
                *pixel = grey(*pixel);
            }
        }
    }
    let text = format!("pid {pid}{}", if stale { " gone" } else { "" });
    // A sixth of the tile's height, in whole pixels of a letter.
    let scale = (tile.size.height / (6 * (HEIGHT + 2))).clamp(1, 8);
    let mut left = tile.x + 4 * scale;
    for letter in text.chars() {
        for (row, bits) in (0..).zip(glyph(letter)) {
            for column in (0..WIDTH).filter(|column| bits >> (WIDTH - 1 - column) & 1 == 1) {
                fill(pixels, size, tile, [left + column * scale, tile.y + (4 + row) * scale], scale);
            }
        }
        left += (WIDTH + 1) * scale;
    }
}

/// Fills a square of a letter, as much of it as lies in the tile.
fn fill(pixels: &mut [u32], size: Size, tile: Tile, [left, top]: [u32; 2], side: u32) {
    for y in top..(top + side).min(tile.y + tile.size.height) {
        for x in left..(left + side).min(tile.x + tile.size.width) {
            pixels[(y * size.width + x) as usize] = LETTERS;
        }
    }
}

fn grey(pixel: u32) -> u32 {
    let [red, green, blue, _] = pixel.to_le_bytes().map(u32::from);
    // In 16 levels, which leaves room for colours in a palette.
    (((red * 3 + green * 6 + blue) / 14) & 0xf0) * 0x0001_0101
}

const fn glyph(letter: char) -> [u8; HEIGHT as usize] {
    match letter {
        '0' => [0b01110, 0b10001, 0b10011, 0b10101, 0b11001, 0b10001, 0b01110],
        '1' => [0b00100, 0b01100, 0b00100, 0b00100, 0b00100, 0b00100, 0b01110],
        '2' => [0b01110, 0b10001, 0b00001, 0b00010, 0b00100, 0b01000, 0b11111],
        '3' => [0b11111, 0b00010, 0b00100, 0b00010, 0b00001, 0b10001, 0b01110],
        '4' => [0b00010, 0b00110, 0b01010, 0b10010, 0b11111, 0b00010, 0b00010],
        '5' => [0b11111, 0b10000, 0b11110, 0b00001, 0b00001, 0b10001, 0b01110],
        '6' => [0b00110, 0b01000, 0b10000, 0b11110, 0b10001, 0b10001, 0b01110],
        '7' => [0b11111, 0b00001, 0b00010, 0b00100, 0b01000, 0b01000, 0b01000],
        '8' => [0b01110, 0b10001, 0b10001, 0b01110, 0b10001, 0b10001, 0b01110],
        '9' => [0b01110, 0b10001, 0b10001, 0b01111, 0b00001, 0b00010, 0b01100],
        'd' => [0b00001, 0b00001, 0b01101, 0b10011, 0b10001, 0b10001, 0b01111],
        'e' => [0b00000, 0b00000, 0b01110, 0b10001, 0b11111, 0b10000, 0b01110],
        'g' => [0b00000, 0b01111, 0b10001, 0b10001, 0b01111, 0b00001, 0b01110],
        'i' => [0b00100, 0b00000, 0b01100, 0b00100, 0b00100, 0b00100, 0b01110],
        'n' => [0b00000, 0b00000, 0b10110, 0b11001, 0b10001, 0b10001, 0b10001],
        'o' => [0b00000, 0b00000, 0b01110, 0b10001, 0b10001, 0b10001, 0b01110],
        'p' => [0b00000, 0b00000, 0b11110, 0b10001, 0b11110, 0b10000, 0b10000],
        _ => [0; HEIGHT as usize],
    }
}

/// The size of a letter.
const WIDTH: u32 = 5;
const HEIGHT: u32 = 7;

const LETTERS: u32 = 0x00ff_ffff;
const BORDER: u32 = 0x0058_4c44;

#[cfg(test)]
mod tests {
    use super::*;

    const SIZE: Size = Size { width: 200, height: 60 };

    #[test]
    fn stale_tile_is_grey_and_its_neighbour_is_not() {
        let mut pixels = vec![0x0020_80c0; SIZE.pixels()];
        let tiles = Tile::all(SIZE, 2);
        label(&mut pixels, SIZE, tiles[0], 1_234_567, true);
        let is_grey =
            |pixel: &u32| matches!(pixel.to_le_bytes(), [red, green, blue, _] if red == green && green == blue);
        let bottom = &pixels[SIZE.width as usize * 50..][..200];
        assert!(bottom[1..100].iter().all(is_grey) && bottom[100..].iter().all(|pixel| *pixel == 0x0020_80c0));
        assert!(pixels.contains(&LETTERS));
    }

    #[test]
    fn letters_stay_in_a_tile_of_any_size() {
        for [width, height] in [[1, 1], [3, 200], [200, 3], [40, 40]] {
            let size = Size { width, height };
            let mut pixels = vec![0; size.pixels()];
            label(&mut pixels, size, Tile { x: 0, y: 0, size }, u32::MAX, false);
        }
    }
}
