//! Vulkan draws tiles by compute shaders. The loader is opened at run time.

use partywall_vulkan::{Buffer, Error as VulkanError, Gpu as Device, ImportedMemory, ash::vk::BufferUsageFlags};

use super::{
    compute::{Drawing, Rasteriser},
    raster::Camera,
    *,
};

const STORAGE: BufferUsageFlags = BufferUsageFlags::STORAGE_BUFFER;

/// The shaders of one renderer, and the memory that it shares with others, imported once.
pub(super) struct Shaders {
    indices: Buffer,
    colours: Buffer,
    scenes: Arc<ImportedMemory>,
    tiles: Arc<ImportedMemory>,
    rasteriser: Rasteriser,
}

/// Fails unless Vulkan can draw in memory at this place.
pub(super) fn require(place: Place) -> Result<(), VulkanError> {
    Rasteriser::require(&*Device::open(place.gpu())?)
}

impl Shaders {
    pub(super) fn new(domain: &Domain, scenes: &Topic, tiles: &Topic, tile: Tile) -> Result<Self, VulkanError> {
        let gpu = Device::open(scenes.place().gpu())?;
        let mesh = gpu.import(domain.descriptors(objects::MESH, TIMEOUT)?)?;
        let vertices = scenes.max_bytes() / (4 * raster::VERTEX as u64);
        Ok(Self {
            indices: mesh.buffer("indices", STORAGE)?,
            colours: mesh.buffer("colours", STORAGE)?,
            scenes: gpu.import(scenes.descriptors()?)?,
            tiles: gpu.import(tiles.descriptors()?)?,
            rasteriser: Rasteriser::new(&gpu, vertices, tile.size.pixels() as u64)?,
        })
    }

    /// Draws a complete scene into a loan, and waits for that.
    pub(super) fn draw(
        &mut self,
        scene: &Sample,
        loan: &mut Loan,
        camera: &Camera,
        size: Size,
        tile: Tile,
        look: Look,
    ) -> Result<(), VulkanError> {
        let vertices = self.scenes.sample(scene, STORAGE)?;
        let pixels = self.tiles.loan(loan, STORAGE)?;
        let drawing = Drawing {
            indices: &self.indices,
            colours: &self.colours,
            vertices: &vertices,
            camera,
            size: [size.width, size.height],
            tile: tile.sides(),
            tint: look.tint,
            tag: look.tag,
            pixels: &pixels,
        };
        self.rasteriser.draw(&drawing)
    }
}

/// Returns the failure of the lab.
pub(super) fn failed(error: VulkanError) -> Failure {
    match error {
        VulkanError::Partywall(error) => error.into(),
        error => Failure::new(
            ErrorKind::Device,
            format!("cannot draw by Vulkan: {error}"),
            "draw with --renderer cpu, or with --renderer cuda on a GPU",
        ),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The kind's exit code is 6; see `missing_vulkan_is_a_sentence_and_a_code` for the same of a missing driver.
    #[test]
    fn missing_loader_or_extension_is_a_failure_of_the_device_with_advice() {
        let device = "a device".to_owned();
        let missing = "VK_KHR_external_memory_fd";
        for error in [
            VulkanError::NoLoader("libvulkan.so.1 is missing".to_owned()),
            VulkanError::Unsupported { device, missing, what: "an import of GPU memory" },
        ] {
            let failure = failed(error);
            assert_eq!(failure.kind, ErrorKind::Device);
            assert!(failure.message.starts_with("cannot draw by Vulkan: "), "{}", failure.message);
            assert!(failure.advice.contains("--renderer cpu"), "{}", failure.advice);
        }
    }
}
