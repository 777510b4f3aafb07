//! What is drawn: the bundled torus, or a Wavefront OBJ file; and how it turns.

use std::{
    fmt,
    fs::{self, File},
    io::BufReader,
    str::FromStr,
};

use super::{
    raster::{Camera, MOST_TRIANGLES, UNIT},
    *,
};

/// Where the mesh comes from.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) enum Source {
    /// The bundled torus, with this number of triangles.
    Torus(u32),
    File(PathBuf),
}

impl FromStr for Source {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let Some(triangles) = text.strip_prefix("torus:") else { return Ok(Self::File(text.into())) };
        let triangles = triangles.parse().ok().filter(|triangles| (LEAST_TORUS..=LARGEST_TORUS).contains(triangles));
        let range = || format!("a torus has {LEAST_TORUS} to {LARGEST_TORUS} triangles: torus:8192");
        triangles.map(Self::Torus).ok_or_else(range)
    }
}

impl fmt::Display for Source {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Torus(triangles) => write!(f, "torus:{triangles}"),
            Self::File(path) => write!(f, "{}", path.display()),
        }
    }
}

/// Triangles around the origin, with a farthest vertex at distance 1.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Mesh {
    /// [`VERTEX`](super::raster::VERTEX) words for each vertex, as in a scene.
    pub(super) vertices: Vec<i32>,
    /// Three for each triangle.
    pub(super) indices: Vec<u32>,
    /// One for each triangle.
    pub(super) colours: Vec<u32>,
}

impl Mesh {
    pub(super) fn load(source: &Source) -> Result<Self, Failure> {
        match source {
            Source::Torus(triangles) => Ok(torus(*triangles)),
            Source::File(path) => read(path).map_err(|Refused(kind, why)| {
                let advice = "pass a Wavefront OBJ file with triangles or polygons, or leave --scene out";
                Failure::new(kind, format!("cannot draw {}: {why}", path.display()), advice)
            }),
        }
    }
}

/// Why a file is not drawn.
struct Refused(ErrorKind, String);

impl Refused {
    fn new(why: impl Into<String>) -> Self {
        Self(ErrorKind::CheckFailed, why.into())
    }
}

impl From<std::io::Error> for Refused {
    fn from(error: std::io::Error) -> Self {
        Self(kind_of(&error), error.to_string())
    }
}

/// Reads an OBJ file. Its objects get colours in turn, and its normals are made from its triangles.
fn read(path: &Path) -> Result<Mesh, Refused> {
    // Before the file is opened, because opening a pipe waits for its writer.
    let metadata = fs::metadata(path)?;
    if !metadata.is_file() {
        return Err(Refused::new("it is not a regular file"));
    }
    let file = File::open(path)?;
    if metadata.len() > LARGEST_FILE {
        return Err(Refused::new(format!("it has {} bytes, and a scene has at most {LARGEST_FILE}", metadata.len())));
    }
    let options =
        tobj::LoadOptions { triangulate: true, ignore_lines: true, ignore_points: true, ..Default::default() };
    // Files of materials, which it may name at any path, are not opened.
    let (models, _) = tobj::load_obj_buf(&mut BufReader::new(file), &options, |_| Ok(Default::default())).map_err(
        |error| match error {
            tobj::LoadError::ReadError => Refused::new("it is not text"),
            other => Refused::new(other.to_string()),
        },
    )?;
    let mut positions: Vec<[f64; 3]> = Vec::new();
    let mut indices = Vec::new();
    let mut colours = Vec::new();
    for (number, model) in models.iter().enumerate() {
        let first = positions.len() as u32;
        let mesh = &model.mesh;
        positions.extend(mesh.positions.chunks_exact(3).map(|at| [at[0], at[1], at[2]].map(f64::from)));
        let end = positions.len() as u32;
        let own = mesh.indices.iter().map(|index| index.checked_add(first).filter(|index| *index < end));
        let own: Option<Vec<u32>> = own.collect();
        let own =
            own.ok_or_else(|| Refused::new(format!("a face of {:?} names a vertex that is not there", model.name)))?;
        if !own.len().is_multiple_of(3) {
            return Err(Refused::new(format!("a face of {:?} is no polygon", model.name)));
        }
        colours.extend(std::iter::repeat_n(COLOURS[number % COLOURS.len()], own.len() / 3));
        indices.extend(own);
    }
    match indices.len() / 3 {
        0 => return Err(Refused::new("it has no faces")),
        triangles if triangles > MOST_TRIANGLES => {
            return Err(Refused::new(format!(
                "it has {triangles} triangles, and a scene has at most {MOST_TRIANGLES}"
            )));
        }
        _ => {}
    }
    if positions.iter().flatten().any(|coordinate| !coordinate.is_finite()) {
        return Err(Refused::new("a coordinate is not a finite number"));
    }
    fit(&mut positions)?;
    let normals = normals(&positions, &indices);
    Ok(Mesh { vertices: words(&positions, &normals), indices, colours })
}

/// Moves the middle of the vertices to the origin, and the farthest one to distance 1.
fn fit(positions: &mut [[f64; 3]]) -> Result<(), Refused> {
    let [mut least, mut most] = [[f64::INFINITY; 3], [f64::NEG_INFINITY; 3]];
    for position in &*positions {
        for axis in 0..3 {
            least[axis] = least[axis].min(position[axis]);
            most[axis] = most[axis].max(position[axis]);
        }
    }
    for position in &mut *positions {
        for axis in 0..3 {
            position[axis] -= (least[axis] + most[axis]) / 2.0;
        }
    }
    let farthest = positions.iter().map(|position| length(*position)).fold(0.0, f64::max);
    if farthest == 0.0 {
        return Err(Refused::new("all of its vertices are at one point"));
    }
    positions.iter_mut().flatten().for_each(|coordinate| *coordinate /= farthest);
    Ok(())
}

/// Returns the normals of vertices: the mean of those of their triangles, weighted by area.
fn normals(positions: &[[f64; 3]], indices: &[u32]) -> Vec<[f64; 3]> {
    let mut sums = vec![[0.0; 3]; positions.len()];
    for triangle in indices.chunks_exact(3) {
        let [a, b, c] = [0, 1, 2].map(|corner| positions[triangle[corner] as usize]);
        let [u, v] = [0, 1].map(|side| [0, 1, 2].map(|axis: usize| [b, c][side][axis] - a[axis]));
        let cross = [u[1] * v[2] - u[2] * v[1], u[2] * v[0] - u[0] * v[2], u[0] * v[1] - u[1] * v[0]];
        for corner in triangle {
            for (sum, coordinate) in sums[*corner as usize].iter_mut().zip(cross) {
                *sum += coordinate;
            }
        }
    }
    let unit = |normal: [f64; 3]| match length(normal) {
        0.0 => [0.0, 0.0, -1.0],
        length => normal.map(|coordinate| coordinate / length),
    };
    sums.into_iter().map(unit).collect()
}

fn length(vector: [f64; 3]) -> f64 {
    vector.into_iter().map(|coordinate| coordinate * coordinate).sum::<f64>().sqrt()
}

/// Returns the words of vertices.
fn words(positions: &[[f64; 3]], normals: &[[f64; 3]]) -> Vec<i32> {
    let vertex = |(position, normal): (&[f64; 3], &[f64; 3])| {
        let position = position.map(|coordinate| (coordinate * 65536.0).round() as i32);
        let normal = normal.map(|coordinate| (coordinate * UNIT as f64).round() as i32);
        [position, normal].concat()
    };
    positions.iter().zip(normals).flat_map(vertex).collect()
}

/// Returns a torus of about as many triangles, in sectors of four colours.
fn torus(triangles: u32) -> Mesh {
    let around = (triangles / 2).isqrt().max(3);
    let along = (triangles / 2 / around).max(3);
    let [mut positions, mut normals] = [Vec::new(), Vec::new()];
    let [mut indices, mut colours] = [Vec::new(), Vec::new()];
    for i in 0..along {
        let [sine, cosine] = sine_and_cosine(i, along);
        for j in 0..around {
            let [up, out] = sine_and_cosine(j, around);
            let radius = 0.7 + 0.3 * out;
            positions.push([radius * cosine, radius * sine, 0.3 * up]);
            normals.push([out * cosine, out * sine, up]);
            let [next_i, next_j] = [(i + 1) % along, (j + 1) % around];
            let [a, b] = [i * around + j, i * around + next_j];
            let [c, d] = [next_i * around + j, next_i * around + next_j];
            indices.extend([a, c, b, b, c, d]);
            colours.extend([COLOURS[(8 * i / along) as usize % COLOURS.len()]; 2]);
        }
    }
    Mesh { vertices: words(&positions, &normals), indices, colours }
}

/// Returns sine and cosine of a part of a whole turn. Made of sums and products alone, which every machine rounds
/// alike, as its own functions would not.
fn sine_and_cosine(part: u32, whole: u32) -> [f64; 2] {
    let quarters = u64::from(part) * 4;
    let quarter = quarters / u64::from(whole) % 4;
    let rest = (quarters % u64::from(whole)) as f64 / f64::from(whole) * std::f64::consts::FRAC_PI_2;
    let series = |first: f64, start: u32| {
        let term = |(sum, term): (f64, f64), n: u32| {
            let next = -term * rest * rest / f64::from(n * (n + 1));
            (sum + next, next)
        };
        (start..start + 24).step_by(2).fold((first, first), term).0
    };
    let [sine, cosine] = [series(rest, 2), series(1.0, 1)];
    match quarter {
        0 => [sine, cosine],
        1 => [cosine, -sine],
        2 => [-sine, -cosine],
        _ => [-cosine, sine],
    }
}

/// Returns the matrix that turns the mesh of a frame, in 1/2^30.
pub(super) fn rotation(frame: u64) -> [[i64; 3]; 3] {
    // Half a turn in 60 frames, at the end of which a torus looks as at its beginning.
    let [sine, cosine] = sine_and_cosine((frame % TURN) as u32, TURN as u32);
    let [lean, upright] = sine_and_cosine(1, 10);
    let rows = [[cosine, 0.0, sine], [lean * sine, upright, -lean * cosine], [-upright * sine, lean, upright * cosine]];
    rows.map(|row| row.map(|element| (element * f64::from(1 << 30)).round() as i64))
}

/// Writes the vertices of a frame: the mesh, turned.
pub(super) fn turn(vertices: &[i32], frame: u64, turned: &mut [i32]) {
    let rows = rotation(frame);
    for (vertex, turned) in vertices.chunks_exact(3).zip(turned.chunks_exact_mut(3)) {
        let [x, y, z] = [0, 1, 2].map(|axis| i64::from(vertex[axis]));
        for (row, turned) in rows.iter().zip(turned) {
            *turned = ((row[0] * x + row[1] * y + row[2] * z) >> 30) as i32;
        }
    }
}

/// The camera, which looks at the origin.
pub(super) const CAMERA: Camera = [65536, 0, 0, 0, 0, 65536, 0, 0, 0, 0, 65536, 225_000];

/// Frames of a whole turn, after which the mesh is drawn as before.
pub(super) const TURN: u64 = 120;

/// The colours of renderers, and of parts of a mesh: blue, orange, green, purple.
pub(super) const COLOURS: [u32; 4] = [0x00ff_a040, 0x0030_90ff, 0x0070_d050, 0x00ff_70c0];

const LEAST_TORUS: u32 = 18;
const LARGEST_TORUS: u32 = 4_000_000;

/// Bytes of the largest file, with some ten million triangles.
const LARGEST_FILE: u64 = 256 << 20;

#[cfg(test)]
mod tests {
    use super::*;

    use rustix::fs::{CWD, Mode, mkfifoat};

    use crate::raster::VERTEX;

    fn load(text: &str) -> Result<Mesh, String> {
        let file = tempfile::NamedTempFile::new().unwrap();
        fs::write(file.path(), text).unwrap();
        Mesh::load(&Source::File(file.path().into())).map_err(|failure| failure.message)
    }

    #[test]
    fn quads_become_triangles_with_normals() {
        let mesh = load("o one\nv -2 0 0\nv 2 0 0\nv 2 1 0\nv -2 1 0\nf 1 2 3 4\no two\nf -1 -2 -3\n").unwrap();
        assert_eq!(mesh.indices.len(), 9);
        assert_eq!(mesh.colours, [COLOURS[0], COLOURS[0], COLOURS[1]]);
        let first = &mesh.vertices[..VERTEX];
        assert!(first[0] < -60_000 && first[0] > -65_536, "{first:?}");
        assert_eq!(first[3..], [0, 0, 16_384]);
        let square: i64 = first[..3].iter().map(|word| i64::from(*word) * i64::from(*word)).sum();
        assert!((square - (1 << 32)).abs() < 1 << 17, "the farthest vertex is at distance 1");
    }

    #[test]
    fn obj_that_lies_is_refused_by_a_sentence() {
        let triangle = "v 0 0 0\nv 1 0 0\nv 0 1 0\n";
        for (text, why) in [
            ("", "it has no faces"),
            ("v 0 0 0\n", "it has no faces"),
            (&format!("{triangle}f 1 2\n"), "it has no faces"),
            (&format!("{triangle}f 1 2 4\n"), "out of bounds"),
            (&format!("{triangle}f 1 2 99999999999999999999\n"), "face"),
            (&format!("{triangle}f 1 2 -9\n"), "face"),
            (&format!("{triangle}f 0 1 2\n"), "face"),
            (&format!("{triangle}f 1 2 x\n"), "face"),
            ("v 0 0\nf 1 1 1\n", "position"),
            ("v 0 zero 0\nf 1 1 1\n", "position"),
            ("v 0 0 nan\nv 1 0 0\nv 0 1 0\nf 1 2 3\n", "not a finite number"),
            ("v 0 0 1e999\nv 1 0 0\nv 0 1 0\nf 1 2 3\n", "not a finite number"),
            ("v 1 1 1\nv 1 1 1\nv 1 1 1\nf 1 2 3\n", "at one point"),
            (&format!("mtllib /dev/zero\nusemtl none\n{triangle}f 1 2 9\n"), "out of bounds"),
            ("\u{0}\u{1}\u{2}", "it has no faces"),
        ] {
            let refused = load(text).unwrap_err();
            assert!(refused.starts_with("cannot draw /") && refused.contains(why), "{text:?}: {refused}");
        }
        assert!(load(&format!("mtllib /dev/zero\nusemtl none\n{triangle}f 1 2 3\n")).is_ok(), "materials are not read");
        let of = |path: &str| Mesh::load(&Source::File(path.into())).unwrap_err();
        let folder = tempfile::tempdir().unwrap();
        let pipe = folder.path().join("pipe");
        mkfifoat(CWD, &pipe, Mode::RUSR).unwrap();
        for special in ["/dev/zero", "/", pipe.to_str().unwrap()] {
            assert!(of(special).message.contains("not a regular file"), "{special}");
        }
        assert_eq!(of("/nonexistent.obj").kind, ErrorKind::NotFound);
        let sparse = tempfile::NamedTempFile::new().unwrap();
        sparse.as_file().set_len(LARGEST_FILE + 1).unwrap();
        assert!(of(sparse.path().to_str().unwrap()).message.contains("a scene has at most"));
    }

    #[test]
    fn torus_has_the_wanted_triangles_and_closes() {
        for (wanted, triangles) in [(18, 18), (131_072, 131_072), (1000, 968)] {
            let mesh = torus(wanted);
            assert_eq!((mesh.indices.len() / 3, mesh.colours.len()), (triangles, triangles));
            // In a closed surface each edge has two triangles.
            let vertices = mesh.vertices.len() / VERTEX;
            assert_eq!(vertices * 2, triangles);
            assert!(mesh.indices.iter().all(|index| (*index as usize) < vertices));
        }
        assert_eq!("torus:18".parse(), Ok(Source::Torus(18)));
        assert!("torus:17".parse::<Source>().unwrap_err().contains("18 to 4000000"));
        assert_eq!("a.obj".parse(), Ok(Source::File("a.obj".into())));
    }

    #[test]
    fn sines_are_those_of_the_library() {
        for part in 0..720 {
            let angle = f64::from(part) / 360.0 * std::f64::consts::TAU;
            let [sine, cosine] = sine_and_cosine(part, 360);
            assert!((sine - angle.sin()).abs() < 1e-12 && (cosine - angle.cos()).abs() < 1e-12, "{part}");
        }
    }
}
