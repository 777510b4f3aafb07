//! The rasteriser, in integer arithmetic: kernels and CPUs draw the same picture to the bit.
//!
//! | step | arithmetic |
//! |---|---|
//! | vertex stage | positions in 1/65,536, screen coordinates in 1/256 pixel, quotients rounded towards zero |
//! | coverage | edge functions at the centres of pixels, with the top-left rule: two triangles with a common edge cover each pixel of it once |
//! | depth, light | planes with 14 fractional bits; the nearest fragment wins, then the triangle with the highest number, so that the order of triangles does not matter |
//! | shading | the colour of the triangle times one of [`LEVELS`] levels of light |
//!
//! No input makes it panic: vertices and indices come from other processes.

use std::ops::Range;

use serde::{Deserialize, Serialize};

use super::rasteriser::Checks;

/// The size of a picture, in pixels. Neither side is longer than [`LONGEST`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Size {
    pub(super) width: u32,
    pub(super) height: u32,
}

impl Size {
    pub(super) fn pixels(self) -> usize {
        self.width as usize * self.height as usize
    }

    /// Returns the size as the shape of a tensor.
    pub(super) fn shape(self) -> [u64; 2] {
        [self.height.into(), self.width.into()]
    }
}

/// A rectangle of a picture.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Tile {
    pub(super) x: u32,
    pub(super) y: u32,
    pub(super) size: Size,
}

impl Tile {
    /// Divides a picture into `count` tiles, row by row, as square as `count` allows.
    pub(super) fn all(size: Size, count: u32) -> Vec<Self> {
        let count = count.max(1);
        let [columns, rows] = Self::grid(count);
        let cut = |length: u32, parts: u32, part: u32| (u64::from(length) * u64::from(part) / u64::from(parts)) as u32;
        let tile = |number: u32| {
            let [column, row] = [number % columns, number / columns];
            let x = cut(size.width, columns, column);
            let y = cut(size.height, rows, row);
            let width = cut(size.width, columns, column + 1) - x;
            let height = cut(size.height, rows, row + 1) - y;
            Self { x, y, size: Size { width, height } }
        };
        (0..count).map(tile).collect()
    }

    /// Returns how many of `count` tiles are beside each other, and how many below each other.
    pub(super) fn grid(count: u32) -> [u32; 2] {
        let divides = |rows: &u32| count.is_multiple_of(*rows);
        let rows = (1..=count).take_while(|rows| rows * rows <= count).filter(divides).last().unwrap_or(1);
        [count / rows, rows]
    }

    /// Returns where its rows are among the pixels of a picture of this width.
    pub(super) fn rows(self, width: u32) -> impl Iterator<Item = Range<usize>> {
        let first = move |row| (row * width + self.x) as usize;
        (self.y..self.y + self.size.height).map(move |row| first(row)..first(row) + self.size.width as usize)
    }

    /// Copies its pixels to its place in a picture of this width.
    pub(super) fn copy(self, drawn: &[u32], pixels: &mut [u32], width: u32) {
        for (row, drawn) in self.rows(width).zip(drawn.chunks_exact(self.size.width as usize)) {
            pixels[row].copy_from_slice(drawn);
        }
    }

    /// Returns its left upper corner, its width and its height.
    pub(super) fn sides(self) -> [u32; 4] {
        [self.x, self.y, self.size.width, self.size.height]
    }
}

/// Where the camera is: the rows of a matrix of three rows and four columns, in 1/65,536.
pub(super) type Camera = [i32; 12];

/// Words of a vertex: its position in 1/65,536, and its normal, where [`UNIT`] is the length 1.
pub(super) const VERTEX: usize = 6;

/// What is drawn.
#[derive(Debug, Clone, Copy)]
pub(super) struct Scene<'a> {
    /// Three vertices of each triangle.
    pub(super) indices: &'a [u32],
    /// The colour of each triangle, as a pixel has it.
    pub(super) colours: &'a [u32],
    /// [`VERTEX`] words for each vertex.
    pub(super) vertices: &'a [i32],
    pub(super) camera: &'a Camera,
}

/// How the pixels of a tile look.
#[derive(Debug, Clone, Copy)]
pub(super) struct Look {
    /// Replaces the colours of all triangles.
    pub(super) tint: Option<u32>,
    /// The fourth byte of each pixel.
    pub(super) tag: u8,
}

/// A vertex on the screen.
#[derive(Debug, Clone, Copy)]
struct Corner {
    /// In 1/256 pixel.
    x: i32,
    y: i32,
    /// The larger, the nearer. 0: the vertex is behind the camera or far beside the picture, and its triangles are left
    /// out.
    depth: u32,
    /// In 1/256 level.
    light: i32,
}

/// The memory of one renderer, which frames share.
#[derive(Debug, Default)]
pub(super) struct Raster {
    corners: Vec<Corner>,
    /// For each pixel of the tile its nearest fragment: depth, triangle, level; 0 where there is none.
    fragments: Vec<u64>,
}

impl Raster {
    /// Draws one tile of a picture of `size`. `pixels` has as many elements as the tile has pixels.
    pub(super) fn draw(&mut self, scene: &Scene<'_>, size: Size, tile: Tile, look: Look, pixels: &mut [u32]) {
        self.corners.clear();
        let vertices = scene.vertices.chunks_exact(VERTEX);
        self.corners.extend(vertices.map(|vertex| corner(vertex, scene.camera, size)));
        self.fragments.clear();
        self.fragments.resize(tile.size.pixels(), 0);
        for (number, triangle) in scene.indices.chunks_exact(3).take(MOST_TRIANGLES).enumerate() {
            let at = |index: usize| self.corners.get(triangle[index] as usize).copied();
            if let (Some(a), Some(b), Some(c)) = (at(0), at(1), at(2))
                && let Some(triangle) = Triangle::new([a, b, c])
            {
                triangle.cover(tile, number as u64, &mut self.fragments);
            }
        }
        for (pixel, fragment) in pixels.iter_mut().zip(&self.fragments) {
            *pixel = shade(*fragment, scene.colours, look);
        }
    }
}

/// The vertex stage: projects a vertex and lights it.
fn corner(vertex: &[i32], camera: &Camera, size: Size) -> Corner {
    let [x, y, z, normal_x, normal_y, normal_z] = [0, 1, 2, 3, 4, 5].map(|word| i64::from(vertex[word]));
    let row = |row: usize| {
        let [a, b, c, d] = [0, 1, 2, 3].map(|column| i64::from(camera[4 * row + column]));
        let sum = a.wrapping_mul(x).wrapping_add(b.wrapping_mul(y)).wrapping_add(c.wrapping_mul(z));
        (sum >> 16).wrapping_add(d)
    };
    let [right, up, away] = [row(0), row(1), row(2)];
    let out = Corner { x: 0, y: 0, depth: 0, light: 0 };
    // Farther beside the camera than away from it by this factor is outside of every picture.
    if !(NEAR..=FAR).contains(&away) || right.abs() > FAR || up.abs() > FAR {
        return out;
    }
    let focal = i64::from(size.height) * FOCAL;
    let x = i64::from(size.width) * 128 + right * focal / away;
    let y = i64::from(size.height) * 128 - up * focal / away;
    if x.abs() > GUARD || y.abs() > GUARD {
        return out;
    }
    let [light_x, light_y, light_z] = LIGHT;
    let cosine = (normal_x * light_x + normal_y * light_y + normal_z * light_z) >> 14;
    let light = AMBIENT + ((cosine.clamp(0, UNIT) * (BRIGHTEST - AMBIENT)) >> 14);
    Corner { x: x as i32, y: y as i32, depth: (DEPTH / away) as u32, light: light as i32 }
}

/// A triangle on the screen, with its corners in clockwise order.
struct Triangle {
    x: [i64; 3],
    y: [i64; 3],
    depth: Plane,
    light: Plane,
}

/// A quantity that changes linearly over a triangle.
struct Plane {
    /// At the first corner, and by how much it changes in 1/256 pixel, with 14 fractional bits.
    first: i64,
    right: i64,
    down: i64,
    /// Rounding must not leave the range of the corners.
    least: i64,
    most: i64,
}

impl Plane {
    fn new(values: [i64; 3], x: [i64; 3], y: [i64; 3], area: i64) -> Self {
        let [second, third] = [values[1] - values[0], values[2] - values[0]];
        let [x1, x2] = [x[1] - x[0], x[2] - x[0]];
        let [y1, y2] = [y[1] - y[0], y[2] - y[0]];
        // Values have at most 24 bits and differences of coordinates 23, so this takes at most 62.
        let right = ((second * y2 - third * y1) << FRACTION) / area;
        let down = ((third * x1 - second * x2) << FRACTION) / area;
        let [a, b, c] = values;
        Self { first: a << FRACTION, right, down, least: a.min(b).min(c), most: a.max(b).max(c) }
    }

    /// Returns the value at a place relative to the first corner. The products of a sliver may overflow; their sum at a
    /// place within the triangle does not.
    fn at(&self, right: i64, down: i64) -> i64 {
        let sum = self.right.wrapping_mul(right).wrapping_add(self.down.wrapping_mul(down));
        self.first.wrapping_add(sum)
    }

    fn rounded(&self, value: i64) -> u64 {
        (value >> FRACTION).clamp(self.least, self.most) as u64
    }
}

impl Triangle {
    /// Returns `None` if the triangle covers nothing. Both of its sides are drawn.
    fn new([a, b, c]: [Corner; 3]) -> Option<Self> {
        if a.depth == 0 || b.depth == 0 || c.depth == 0 {
            return None;
        }
        let area = |b: Corner, c: Corner| {
            let [x1, y1, x2, y2] = [b.x - a.x, b.y - a.y, c.x - a.x, c.y - a.y].map(i64::from);
            x1 * y2 - x2 * y1
        };
        let [b, c] = if area(b, c) < 0 { [c, b] } else { [b, c] };
        let area = area(b, c);
        if area == 0 {
            return None;
        }
        let corners = [a, b, c];
        let x = corners.map(|corner| i64::from(corner.x));
        let y = corners.map(|corner| i64::from(corner.y));
        let depth = Plane::new(corners.map(|corner| corner.depth.into()), x, y, area);
        let light = Plane::new(corners.map(|corner| corner.light.into()), x, y, area);
        Some(Self { x, y, depth, light })
    }

    /// Puts the fragments of the triangle into a tile.
    fn cover(&self, tile: Tile, number: u64, fragments: &mut [u64]) {
        let columns = span(self.x, tile.x, tile.size.width);
        let rows = span(self.y, tile.y, tile.size.height);
        if columns.is_empty() || rows.is_empty() {
            return;
        }
        let first = [columns.start * 256 + 128, rows.start * 256 + 128];
        let mut edges = [0, 1, 2].map(|edge| self.edge(edge, first));
        let steps = [0, 1, 2].map(|edge| {
            let next = (edge + 1) % 3;
            [(self.y[edge] - self.y[next]) * 256, (self.x[next] - self.x[edge]) * 256]
        });
        for row in rows {
            let line = (row - i64::from(tile.y)) * i64::from(tile.size.width) - i64::from(tile.x);
            let mut inside = edges;
            let [right, down] = [first[0] - self.x[0], row * 256 + 128 - self.y[0]];
            let mut depth = self.depth.at(right, down);
            let mut light = self.light.at(right, down);
            for column in columns.clone() {
                if (inside[0] | inside[1] | inside[2]) >= 0 {
                    let fragment = self.depth.rounded(depth) << 32 | number << 8 | self.light.rounded(light) >> 8;
                    let nearest = &mut fragments[(line + column) as usize];
                    *nearest = fragment.max(*nearest);
                }
                for (inside, step) in inside.iter_mut().zip(steps) {
                    *inside += step[0];
                }
                depth = depth.wrapping_add(self.depth.right.wrapping_mul(256));
                light = light.wrapping_add(self.light.right.wrapping_mul(256));
            }
            for (edge, step) in edges.iter_mut().zip(steps) {
                *edge += step[1];
            }
        }
    }

    /// Returns the edge function at a place: not negative on the inner side of the edge. A place on the edge itself
    /// belongs to the triangle if this is its left or top edge.
    fn edge(&self, edge: usize, [x, y]: [i64; 2]) -> i64 {
        let next = (edge + 1) % 3;
        let [dx, dy] = [self.x[next] - self.x[edge], self.y[next] - self.y[edge]];
        let is_top_or_left = dy < 0 || (dy == 0 && dx > 0);
        dx * (y - self.y[edge]) - dy * (x - self.x[edge]) - i64::from(!is_top_or_left)
    }
}

/// Returns the pixels of a tile, in one direction, whose centres may lie within a triangle.
fn span(corners: [i64; 3], start: u32, length: u32) -> Range<i64> {
    let [a, b, c] = corners;
    let start = i64::from(start);
    let first = (a.min(b).min(c) - 128 + 255) >> 8;
    let last = (a.max(b).max(c) - 128) >> 8;
    first.max(start)..(last + 1).min(start + i64::from(length))
}

/// Returns the pixel of a fragment.
fn shade(fragment: u64, colours: &[u32], look: Look) -> u32 {
    let colour = match fragment {
        0 => BACKGROUND,
        _ => {
            let triangle = (fragment >> 8) as usize & (MOST_TRIANGLES - 1);
            let colour = look.tint.or_else(|| colours.get(triangle).copied()).unwrap_or(BACKGROUND);
            lit(colour, (fragment & 255) as u32)
        }
    };
    colour & 0x00ff_ffff | u32::from(look.tag) << 24
}

/// Returns a number that differs for different pictures. Fourth bytes do not count. [`Checks`] returns the same of
/// pictures on a GPU.
pub(super) fn hash(pixels: &[u32]) -> u64 {
    (0..).zip(pixels).fold(0, |sum: u64, (place, pixel)| sum.wrapping_add(Checks::mixed(place, *pixel)))
}

/// Returns a colour in one of the levels of light, of which the brightest leaves it as it is.
fn lit(colour: u32, level: u32) -> u32 {
    let channel = |shift: u32| (((colour >> shift & 255) * (3 * level + 34)) >> 7) << shift;
    channel(0) | channel(8) | channel(16)
}

/// The levels of light.
pub(super) const LEVELS: u32 = 32;

/// The longest side of a picture, in pixels.
pub(super) const LONGEST: u32 = 4096;

/// The most triangles of a scene: a fragment has 24 bits for the number of its triangle.
pub(super) const MOST_TRIANGLES: usize = 1 << 24;

/// The length of a normal.
pub(super) const UNIT: i64 = 1 << 14;

/// The pixels without a triangle.
pub(super) const BACKGROUND: u32 = 0x0022_1812;

/// How far away from the camera a vertex may be, in 1/65,536.
const NEAR: i64 = 1 << 15;
const FAR: i64 = 1 << 22;

/// The distance of the screen from the camera: 1.5 times the height of the picture, in 1/256 of it.
const FOCAL: i64 = 384;

/// How far from the origin of the picture a corner may be, in 1/256 pixel: twice as far as any picture reaches.
const GUARD: i64 = 1 << 21;

/// The depth of a vertex is this, divided by its distance; at most 2^24.
const DEPTH: i64 = 1 << 39;

/// The fractional bits of planes.
const FRACTION: u32 = 14;

/// The direction towards the light.
const LIGHT: [i64; 3] = [6144, 9216, -11_878];

/// The least and the most light of a vertex, in 1/256 level.
const AMBIENT: i64 = 2 << 8;
const BRIGHTEST: i64 = ((LEVELS as i64) << 8) - 1;

#[cfg(test)]
mod tests {
    use super::*;

    const SIZE: Size = Size { width: 40, height: 30 };
    const WHOLE: Tile = Tile { x: 0, y: 0, size: SIZE };
    const CAMERA: Camera = [65536, 0, 0, 0, 0, 65536, 0, 0, 0, 0, 65536, 3 * 65536];
    const PLAIN: Look = Look { tint: None, tag: 7 };

    /// Numbers that look random, the same in each run.
    struct Random(u64);

    impl Random {
        fn below(&mut self, limit: u64) -> u64 {
            self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (self.0 >> 33) % limit
        }

        /// Triangles in and beside the picture, without common vertices.
        fn triangles(&mut self, count: usize) -> (Vec<i32>, Vec<u32>, Vec<u32>) {
            let word = |random: &mut Self, spread: u64| random.below(spread) as i32 - (spread / 2) as i32;
            let vertices =
                (0..count * 3 * VERTEX).map(|index| word(self, if index % 6 < 3 { 260_000 } else { 32_768 }));
            let vertices = vertices.collect();
            let colours = (0..count).map(|_| self.below(1 << 24) as u32).collect();
            (vertices, (0..count as u32 * 3).collect(), colours)
        }
    }

    fn picture(vertices: &[i32], indices: &[u32], colours: &[u32], tile: Tile) -> Vec<u32> {
        let scene = Scene { indices, colours, vertices, camera: &CAMERA };
        let mut pixels = vec![0; tile.size.pixels()];
        Raster::default().draw(&scene, SIZE, tile, PLAIN, &mut pixels);
        pixels
    }

    fn corner(x: i32, y: i32) -> Corner {
        Corner { x, y, depth: 1000, light: 0 }
    }

    /// The number of fragments that triangles put on each pixel.
    fn counts(triangles: &[[Corner; 3]]) -> Vec<u32> {
        let mut counts = vec![0; SIZE.pixels()];
        for corners in triangles {
            let mut fragments = vec![0; SIZE.pixels()];
            if let Some(triangle) = Triangle::new(*corners) {
                triangle.cover(WHOLE, 0, &mut fragments);
            }
            for (count, fragment) in counts.iter_mut().zip(fragments) {
                *count += u32::from(fragment != 0);
            }
        }
        counts
    }

    #[test]
    fn pixel_of_a_common_edge_is_covered_once() {
        let mut random = Random(1);
        for round in 0..300 {
            // Corners at centres of pixels now and then, so that edges run through centres.
            let grid = if round % 2 == 0 { 1 } else { 128 };
            let mut inside = || (2560 + random.below(5000) as i32) / grid * grid;
            let middle = corner(inside(), inside());
            let frame = [corner(0, 0), corner(10_240, 0), corner(10_240, 7_680), corner(0, 7_680)];
            let fan: Vec<_> = (0..4).map(|side| [middle, frame[side], frame[(side + 1) % 4]]).collect();
            assert!(counts(&fan).into_iter().all(|count| count == 1), "round {round}, around {middle:?}");
        }
    }

    #[test]
    fn corner_on_a_centre_follows_the_top_left_rule() {
        // The centres of pixels (1, 1), (3, 1), (1, 3): the right and lower sides do not belong to the square.
        let at = |x: i32, y: i32| corner(x * 256 + 128, y * 256 + 128);
        let square = [[at(1, 1), at(3, 1), at(3, 3)], [at(1, 1), at(3, 3), at(1, 3)]];
        let counts = counts(&square);
        let covered: Vec<_> =
            (0..SIZE.pixels()).filter(|pixel| counts[*pixel] == 1).map(|pixel| (pixel % 40, pixel / 40)).collect();
        assert_eq!(covered, [(1, 1), (2, 1), (1, 2), (2, 2)]);
        assert!(counts.into_iter().all(|count| count <= 1));
    }

    #[test]
    fn order_of_triangles_does_not_matter() {
        let (vertices, indices, _) = Random(2).triangles(200);
        let same = vec![0x0080_8080; 200];
        let forwards = picture(&vertices, &indices, &same, WHOLE);
        let backwards: Vec<u32> = indices.chunks_exact(3).rev().flatten().copied().collect();
        assert!(forwards.iter().any(|pixel| *pixel & 0x00ff_ffff != BACKGROUND));
        assert_eq!(forwards, picture(&vertices, &backwards, &same, WHOLE));
    }

    #[test]
    fn tiles_together_are_the_whole_picture() {
        let (vertices, indices, colours) = Random(3).triangles(100);
        let whole = picture(&vertices, &indices, &colours, WHOLE);
        for count in 1..=16 {
            let mut together = vec![0; SIZE.pixels()];
            for tile in Tile::all(SIZE, count) {
                let pixels = picture(&vertices, &indices, &colours, tile);
                for (row, pixels) in (tile.y..).zip(pixels.chunks_exact(tile.size.width as usize)) {
                    let first = (row * SIZE.width + tile.x) as usize;
                    together[first..first + pixels.len()].copy_from_slice(pixels);
                }
            }
            assert_eq!(whole, together, "{count} tiles");
        }
    }

    #[test]
    fn nearest_fragment_wins() {
        let far = [[-9000, -9000, 60_000], [9000, -9000, 60_000], [0, 9000, 60_000]];
        let near = far.map(|[x, y, _]| [x / 2, y / 2, -60_000]);
        let vertices: Vec<i32> =
            far.iter().chain(&near).flat_map(|at| [at.as_slice(), &[0, 0, -16384]].concat()).collect();
        let middle = SIZE.pixels() / 2 + SIZE.width as usize / 2;
        for (indices, colours) in [([0, 1, 2, 3, 4, 5], [255, 65_280]), ([3, 4, 5, 0, 1, 2], [65_280, 255])] {
            let pixels = picture(&vertices, &indices, &colours, WHOLE);
            assert_eq!(pixels[middle] & 255, 0, "the far one is red");
            assert_ne!(pixels[middle] & 65_280, 0, "the near one is green");
        }
    }

    #[test]
    fn golden_picture() {
        let (vertices, indices, colours) = Random(4).triangles(300);
        let pixels = picture(&vertices, &indices, &colours, WHOLE);
        assert!(pixels.iter().all(|pixel| pixel >> 24 == 7));
        assert_eq!(hash(&pixels), GOLDEN);
    }

    #[test]
    fn words_of_other_processes_do_not_harm() {
        let mut random = Random(5);
        for _ in 0..200 {
            let mut word = || match random.below(8) {
                0 => i32::MIN,
                1 => i32::MAX,
                2 => 0,
                _ => (random.below(1 << 32) as u32).cast_signed(),
            };
            let vertices: Vec<i32> = (0..60).map(|_| word()).collect();
            let camera: Camera = std::array::from_fn(|_| word());
            let indices: Vec<u32> = (0..60).map(|_| random.below(14) as u32).chain([u32::MAX; 4]).collect();
            for camera in [&camera, &CAMERA] {
                let scene = Scene { indices: &indices, colours: &[1, 2], vertices: &vertices, camera };
                let mut pixels = vec![0; SIZE.pixels()];
                Raster::default().draw(&scene, SIZE, WHOLE, PLAIN, &mut pixels);
            }
        }
        // Slivers across the largest picture, whose planes overflow beside them.
        for count in 1..200 {
            let ends = [corner(-GUARD as i32, -GUARD as i32), corner(GUARD as i32, GUARD as i32 - count)];
            let sliver = [ends[0], ends[1], Corner { depth: 1 << 24, ..corner(count, count + 1) }];
            let mut fragments = vec![0; SIZE.pixels()];
            Triangle::new(sliver).unwrap().cover(WHOLE, 3, &mut fragments);
            let depths = fragments.into_iter().filter(|fragment| *fragment != 0).map(|fragment| fragment >> 32);
            assert!(depths.into_iter().all(|depth| (1000..=1 << 24).contains(&depth)));
        }
    }

    #[test]
    fn tiles_divide_a_picture() {
        assert_eq!(Tile::all(SIZE, 4)[3], Tile { x: 20, y: 15, size: Size { width: 20, height: 15 } });
        assert_eq!(Tile::all(SIZE, 5)[4], Tile { x: 32, y: 0, size: Size { width: 8, height: 30 } });
        assert_eq!(Tile::all(SIZE, 6)[5].size, Size { width: 14, height: 15 });
    }

    const GOLDEN: u64 = 17_849_906_899_902_369_673;
}
