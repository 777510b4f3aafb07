//! The kernels of `kernels/render.cu`, as the simulated driver runs them.

use std::sync::atomic::Ordering;

use partywall_simcuda::{Code, Kernel, Runner, Want};

pub(super) static KERNELS: [Kernel; 6] = [
    Kernel { name: "pw_turn", parameters: &[8; 12], run: turn },
    Kernel {
        name: "pw_project",
        parameters: &[8, 8, 8, 4, 4, 4, 4, 4, 4, 4, 4, 4, 4, 4, 4, 4, 4],
        run: |runner, parameters| {
            let [vertices, corners, count, width, height, camera @ ..] = parameters else {
                return Err(Code::INVALID_VALUE);
            };
            let vertices = runner.memory(*vertices, *count, 24, Want::Read)?;
            let corners = runner.memory(*corners, *count, 16, Want::Write)?;
            let camera: Vec<i64> = camera.iter().map(|element| signed(*element as u32)).collect();
            for (vertex, corner) in vertices.words32().chunks_exact(6).zip(corners.words32().chunks_exact(4)) {
                let vertex: Vec<i64> = vertex.iter().map(|word| signed(word.load(Ordering::Relaxed))).collect();
                let projected = project(&vertex, &camera, *width as i64, *height as i64).unwrap_or([0; 4]);
                for (word, value) in corner.iter().zip(projected) {
                    word.store(value as u32, Ordering::Relaxed);
                }
            }
            Ok(())
        },
    },
    Kernel {
        name: "pw_cover",
        parameters: &[8, 8, 8, 8, 8, 4, 4, 4, 4],
        run: |runner, parameters| {
            let [corners, count, indices, triangles, fragments, x, y, width, height] = *parameters else {
                return Err(Code::INVALID_VALUE);
            };
            let corners = runner.memory(corners, count, 16, Want::Read)?;
            let indices = runner.memory(indices, triangles, 12, Want::Read)?;
            let pixels = width.checked_mul(height).ok_or(Code::ILLEGAL_ADDRESS)?;
            let fragments = runner.memory(fragments, pixels, 8, Want::Write)?;
            let [x, y, width, height] = [x, y, width, height].map(|side| side as i64);
            let corner = |index: u32| {
                let words = corners.words32().get(index as usize * 4..index as usize * 4 + 4)?;
                Some([0, 1, 2, 3].map(|word: usize| signed(words[word].load(Ordering::Relaxed))))
            };
            for (number, triangle) in (0_u64..).zip(indices.words32().chunks_exact(3)) {
                if number % 1024 == 0 {
                    runner.between()?;
                }
                let [a, b, c] = [0, 1, 2].map(|index: usize| corner(triangle[index].load(Ordering::Relaxed)));
                let (Some(a), Some(b), Some(c)) = (a, b, c) else { continue };
                let Some(triangle) = Triangle::new(a, b, c) else { continue };
                for row in triangle.span(1, y, height) {
                    for column in triangle.span(0, x, width) {
                        if let Some(fragment) = triangle.fragment(column * 256 + 128, row * 256 + 128) {
                            let fragment = fragment | number << 8;
                            let place = ((row - y) * width + column - x) as usize;
                            fragments.words64()[place].fetch_max(fragment, Ordering::Relaxed);
                        }
                    }
                }
            }
            Ok(())
        },
    },
    Kernel {
        name: "pw_shade",
        parameters: &[8, 8, 8, 8, 8, 4, 4, 4],
        run: |runner, parameters| {
            let [fragments, colours, triangles, pixels, count, tinted, tint, tag] = *parameters else {
                return Err(Code::INVALID_VALUE);
            };
            let fragments = runner.memory(fragments, count, 8, Want::Read)?;
            let colours = runner.memory(colours, triangles, 4, Want::Read)?;
            let pixels = runner.memory(pixels, count, 4, Want::Write)?;
            for (fragment, pixel) in fragments.words64().iter().zip(pixels.words32()) {
                let fragment = fragment.load(Ordering::Relaxed);
                let own = || colours.words32().get((fragment >> 8) as usize & 0x00ff_ffff);
                let own = || own().map_or(BACKGROUND, |colour| colour.load(Ordering::Relaxed));
                let colour = match fragment {
                    0 => BACKGROUND,
                    _ => lit(if tinted == 0 { own() } else { tint as u32 }, (fragment & 255) as u32),
                };
                pixel.store(colour & 0x00ff_ffff | (tag as u32) << 24, Ordering::Relaxed);
            }
            Ok(())
        },
    },
    Kernel { name: "pw_place", parameters: &[8, 8, 4, 4, 4, 4, 4], run: place },
    Kernel { name: "pw_check", parameters: &[8, 4, 4, 4, 4, 8, 8, 8], run: check },
];

/// Turns vectors of three words by a matrix.
fn turn(runner: &mut Runner, parameters: &[u64]) -> Result<(), Code> {
    let [vectors, turned, count, matrix @ ..] = parameters else { return Err(Code::INVALID_VALUE) };
    let vectors = runner.memory(*vectors, *count, 12, Want::Read)?;
    let turned = runner.memory(*turned, *count, 12, Want::Write)?;
    for (vector, turned) in vectors.words32().chunks_exact(3).zip(turned.words32().chunks_exact(3)) {
        let vector = [0, 1, 2].map(|axis: usize| signed(vector[axis].load(Ordering::Relaxed)));
        for (row, word) in matrix.chunks_exact(3).zip(turned) {
            let product = |axis: usize| row[axis].cast_signed().wrapping_mul(vector[axis]);
            let sum = product(0).wrapping_add(product(1)).wrapping_add(product(2));
            word.store((sum >> 30) as u32, Ordering::Relaxed);
        }
    }
    Ok(())
}

/// Copies a tile to its place in a picture.
fn place(runner: &mut Runner, parameters: &[u64]) -> Result<(), Code> {
    let [pixels, picture, picture_width, x, y, width, height] = *parameters else { return Err(Code::INVALID_VALUE) };
    let count = width.checked_mul(height).ok_or(Code::ILLEGAL_ADDRESS)?;
    let pixels = runner.memory(pixels, count, 4, Want::Read)?;
    let picture = runner.memory(picture, picture_width * (y + height), 4, Want::Write)?;
    for (row, pixels) in (y..).zip(pixels.words32().chunks_exact(width as usize)) {
        let first = (row * picture_width + x) as usize;
        let places = picture.words32().get(first..first + pixels.len()).ok_or(Code::ILLEGAL_ADDRESS)?;
        for (pixel, place) in pixels.iter().zip(places) {
            place.store(pixel.load(Ordering::Relaxed), Ordering::Relaxed);
        }
    }
    Ok(())
}

/// Counts the pixels that have not the fourth byte of their tile, and sums up the picture.
fn check(runner: &mut Runner, parameters: &[u64]) -> Result<(), Code> {
    let [picture, width, height, columns, rows, tags_low, tags_high, result] = *parameters else {
        return Err(Code::INVALID_VALUE);
    };
    let picture = runner.memory(picture, width * height, 4, Want::Read)?;
    let result = runner.memory(result, 2, 8, Want::Write)?;
    let tags = [tags_low, tags_high].map(u64::to_le_bytes).concat();
    let part = |place: u64, parts: u64, length: u64| ((place + 1) * parts - 1) / length;
    let [mut torn, mut sum] = [0_u64; 2];
    for (index, pixel) in (0_u64..).zip(picture.words32()) {
        let pixel = pixel.load(Ordering::Relaxed);
        let tile = part(index / width, rows, height) * columns + part(index % width, columns, width);
        let tag = tags.get(tile as usize).copied().ok_or(Code::INVALID_VALUE)?;
        torn += u64::from((pixel >> 24) as u8 != tag);
        let mixed = (index << 24 | u64::from(pixel & 0x00ff_ffff)).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        let mixed = (mixed ^ mixed >> 32).wrapping_mul(0xd6e8_feb8_6659_fd93);
        sum = sum.wrapping_add(mixed ^ mixed >> 29);
    }
    for (word, value) in result.words64().iter().zip([torn, sum]) {
        word.fetch_add(value, Ordering::Relaxed);
    }
    Ok(())
}

fn signed(word: u32) -> i64 {
    word.cast_signed().into()
}

/// Returns where a vertex is on the screen, its depth and its light.
fn project(vertex: &[i64], camera: &[i64], width: i64, height: i64) -> Option<[i64; 4]> {
    let row = |row: usize| {
        let product = |column: usize| camera[4 * row + column].wrapping_mul(vertex[column]);
        (product(0).wrapping_add(product(1)).wrapping_add(product(2)) >> 16) + camera[4 * row + 3]
    };
    let [right, up, away] = [row(0), row(1), row(2)];
    if !(1 << 15..=FAR).contains(&away) || right.abs() > FAR || up.abs() > FAR {
        return None;
    }
    let x = width * 128 + right * height * 384 / away;
    let y = height * 128 - up * height * 384 / away;
    let cosine = ((vertex[3] * 6144 + vertex[4] * 9216 - vertex[5] * 11_878) >> 14).clamp(0, 1 << 14);
    let light = AMBIENT + ((cosine * (BRIGHTEST - AMBIENT)) >> 14);
    (x.abs() <= GUARD && y.abs() <= GUARD).then_some([x, y, (1 << 39) / away, light])
}

/// A triangle with its corners in clockwise order.
struct Triangle {
    corners: [[i64; 4]; 3],
    area: i64,
}

impl Triangle {
    fn new(a: [i64; 4], b: [i64; 4], c: [i64; 4]) -> Option<Self> {
        let area = (b[0] - a[0]) * (c[1] - a[1]) - (c[0] - a[0]) * (b[1] - a[1]);
        let corners = if area < 0 { [a, c, b] } else { [a, b, c] };
        let is_seen = corners.iter().all(|corner| corner[2] != 0);
        (is_seen && area != 0).then_some(Self { corners, area: area.abs() })
    }

    /// Returns the pixels of a tile, along an axis, whose centres may lie within.
    fn span(&self, axis: usize, start: i64, length: i64) -> std::ops::Range<i64> {
        let along = self.corners.map(|corner| corner[axis]);
        let least = along[0].min(along[1]).min(along[2]);
        let most = along[0].max(along[1]).max(along[2]);
        ((least + 127) >> 8).max(start)..(((most - 128) >> 8) + 1).min(start + length)
    }

    /// Returns depth and level at a place, if the triangle covers it.
    fn fragment(&self, x: i64, y: i64) -> Option<u64> {
        let is_inside = |edge: usize| {
            let [from, to] = [self.corners[edge], self.corners[(edge + 1) % 3]];
            let [dx, dy] = [to[0] - from[0], to[1] - from[1]];
            let side = dx * (y - from[1]) - dy * (x - from[0]);
            side > 0 || side == 0 && (dy < 0 || dy == 0 && dx > 0)
        };
        if !(is_inside(0) && is_inside(1) && is_inside(2)) {
            return None;
        }
        Some(self.value(2, x, y) << 32 | self.value(3, x, y) >> 8)
    }

    /// Returns a value of the corners at a place, with 14 fractional bits in between.
    fn value(&self, which: usize, x: i64, y: i64) -> u64 {
        let [a, b, c] = self.corners;
        let [second, third] = [b[which] - a[which], c[which] - a[which]];
        let right = ((second * (c[1] - a[1]) - third * (b[1] - a[1])) << 14) / self.area;
        let down = ((third * (b[0] - a[0]) - second * (c[0] - a[0])) << 14) / self.area;
        let change = right.wrapping_mul(x - a[0]).wrapping_add(down.wrapping_mul(y - a[1]));
        let value = (a[which] << 14).wrapping_add(change) >> 14;
        let [least, most] = [a[which].min(b[which]).min(c[which]), a[which].max(b[which]).max(c[which])];
        value.clamp(least, most) as u64
    }
}

fn lit(colour: u32, level: u32) -> u32 {
    let channel = |shift: u32| ((((colour >> shift) & 255) * (3 * level + 34)) >> 7) << shift;
    channel(0) | channel(8) | channel(16)
}

const BACKGROUND: u32 = 0x0022_1812;
const FAR: i64 = 1 << 22;
const GUARD: i64 = 1 << 21;
const AMBIENT: i64 = 2 << 8;
const BRIGHTEST: i64 = (32 << 8) - 1;
