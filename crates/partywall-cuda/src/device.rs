//! The devices of this process and what they can do.
#![allow(unsafe_code)] // driver calls

use std::ffi::{CStr, c_char, c_int};

use crate::abi::{P2P_ATTRIBUTE_PERFORMANCE_RANK, RawDevice};
use crate::result::none_if;
use crate::{CuResult, CudaError, DeviceUuid, Driver};

/// A GPU as this process sees it: an ordinal that `CUDA_VISIBLE_DEVICES` decides. Its identity across processes is
/// [`Device::uuid`].
///
/// A plain number with the driver it belongs to: free to copy, `Send` and `Sync`, needs no context.
#[derive(Clone, Copy, Debug)]
pub struct Device {
    driver: &'static Driver,
    raw: RawDevice,
}

/// A property of a device, by its number in `cuda.h` (`CU_DEVICE_ATTRIBUTE_…`). Others than the constants may be
/// made from their number.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct DeviceAttribute(pub u32);

impl DeviceAttribute {
    /// How many multiprocessors it has.
    pub const MULTIPROCESSOR_COUNT: Self = Self(16);
    /// Whether it has no memory of its own but shares the host's, as on Jetson.
    pub const INTEGRATED: Self = Self(18);
    /// See [`ComputeMode`].
    pub const COMPUTE_MODE: Self = Self(20);
    /// 9 in compute capability 9.0.
    pub const COMPUTE_CAPABILITY_MAJOR: Self = Self(75);
    /// 0 in compute capability 9.0.
    pub const COMPUTE_CAPABILITY_MINOR: Self = Self(76);
    /// Whether `cuMemCreate` and its companions work.
    pub const VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED: Self = Self(102);
    /// Whether such memory can be exported as a file descriptor.
    pub const HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED: Self = Self(103);
    /// Whether [memory operations](crate::memop) take 64-bit words. The proof is to do one.
    pub const CAN_USE_64_BIT_STREAM_MEM_OPS: Self = Self(122);
    /// Whether [events](crate::IpcEvent) can be shared between processes.
    pub const IPC_EVENT_SUPPORTED: Self = Self(125);
    /// Whether this process is a client of MPS.
    pub const MPS_ENABLED: Self = Self(133);
    /// The NUMA node that is closest to it; −1 where the driver names none.
    pub const HOST_NUMA_ID: Self = Self(134);
    /// Whether `cuMemCreate` makes memory of a NUMA node.
    pub const HOST_NUMA_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED: Self = Self(141);
}

/// Which processes may use a device (`CUcomputemode`): a number, because a newer driver may have more modes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct ComputeMode(pub u32);

impl ComputeMode {
    /// Any number of processes.
    pub const DEFAULT: Self = Self(0);
    /// No process: creating a context fails (`CUDA_ERROR_DEVICE_UNAVAILABLE`).
    pub const PROHIBITED: Self = Self(2);
    /// One process at a time: sharing between processes needs MPS.
    pub const EXCLUSIVE_PROCESS: Self = Self(3);
}

impl Device {
    /// Returns every device that this process may use, in the order of their ordinals. Initialises CUDA.
    ///
    /// # Errors
    /// CUDA cannot be initialised (`CUDA_ERROR_NO_DEVICE` where there is no GPU).
    pub fn all(driver: &'static Driver) -> Result<Vec<Self>, CudaError> {
        driver.initialize()?;
        let mut count: c_int = 0;
        // SAFETY: the pointer is to a live c_int.
        unsafe { driver.device_get_count(&mut count) }?;
        (0..count.unsigned_abs()).map(|ordinal| Self::open(driver, ordinal)).collect()
    }

    /// Returns the device with this ordinal. Initialises CUDA.
    ///
    /// # Errors
    /// `CUDA_ERROR_INVALID_DEVICE` if there are not so many; CUDA cannot be initialised.
    pub fn by_ordinal(driver: &'static Driver, ordinal: u32) -> Result<Self, CudaError> {
        driver.initialize()?;
        Self::open(driver, ordinal)
    }

    /// Returns the device with this UUID, or `None` if it is not visible to this process. Initialises CUDA.
    ///
    /// # Errors
    /// CUDA cannot be initialised.
    pub fn by_uuid(driver: &'static Driver, uuid: DeviceUuid) -> Result<Option<Self>, CudaError> {
        for device in Self::all(driver)? {
            if device.uuid()? == uuid {
                return Ok(Some(device));
            }
        }
        Ok(None)
    }

    /// Returns the device of the context that is current on the calling thread, or nothing if none is: where the
    /// caller's own CUDA code would run.
    ///
    /// # Errors
    /// CUDA cannot be initialised, or the current context is lost.
    pub fn current(driver: &'static Driver) -> Result<Option<Self>, CudaError> {
        driver.initialize()?;
        let mut context = 0;
        // SAFETY: the pointer is to a live handle.
        unsafe { driver.ctx_get_current(&mut context) }?;
        if context == 0 {
            return Ok(None);
        }
        let mut raw = 0;
        // SAFETY: the pointer is to a live device number; a context is current.
        unsafe { driver.ctx_get_device(&mut raw) }?;
        Ok(Some(Self { driver, raw }))
    }

    /// Returns the identity of the device, the same in every process.
    ///
    /// # Errors
    /// The driver's error.
    pub fn uuid(&self) -> Result<DeviceUuid, CudaError> {
        let mut uuid = [0; 16];
        // SAFETY: the pointer is to 16 live bytes; `raw` came from the driver.
        unsafe { self.driver.device_get_uuid(&mut uuid, self.raw) }?;
        Ok(DeviceUuid(uuid))
    }

    /// Returns the marketing name, such as `NVIDIA H200`.
    ///
    /// # Errors
    /// The driver's error.
    pub fn name(&self) -> Result<String, CudaError> {
        let mut name = [0_u8; 256];
        // SAFETY: the pointer is to as many live bytes as the length says; `raw` came from the driver.
        unsafe { self.driver.device_get_name(name.as_mut_ptr().cast::<c_char>(), name.len() as c_int, self.raw) }?;
        // The driver ends the name with a NUL; without one the whole array is the name.
        let name = CStr::from_bytes_until_nul(&name).map_or(&name[..], CStr::to_bytes);
        Ok(String::from_utf8_lossy(name).into_owned())
    }

    /// Returns the compute capability as (major, minor).
    ///
    /// # Errors
    /// The driver's error.
    pub fn compute_capability(&self) -> Result<(u32, u32), CudaError> {
        let major = self.attribute(DeviceAttribute::COMPUTE_CAPABILITY_MAJOR)?;
        let minor = self.attribute(DeviceAttribute::COMPUTE_CAPABILITY_MINOR)?;
        Ok((major.unsigned_abs(), minor.unsigned_abs()))
    }

    /// Returns the size of the device's memory in bytes.
    ///
    /// # Errors
    /// The driver's error.
    pub fn total_memory(&self) -> Result<u64, CudaError> {
        let mut bytes = 0;
        // SAFETY: the pointer is to a live usize; `raw` came from the driver.
        unsafe { self.driver.device_total_mem(&mut bytes, self.raw) }?;
        Ok(bytes as u64)
    }

    /// Returns which processes may use the device.
    ///
    /// # Errors
    /// The driver's error.
    pub fn compute_mode(&self) -> Result<ComputeMode, CudaError> {
        Ok(ComputeMode(self.attribute(DeviceAttribute::COMPUTE_MODE)?.unsigned_abs()))
    }

    /// Returns one attribute as the driver's number.
    ///
    /// # Errors
    /// `CUDA_ERROR_INVALID_VALUE` for an attribute that this driver does not know.
    pub fn attribute(&self, attribute: DeviceAttribute) -> Result<i32, CudaError> {
        let mut value: c_int = 0;
        // SAFETY: the pointer is to a live c_int; `raw` came from the driver.
        unsafe { self.driver.device_get_attribute(&mut value, attribute.0, self.raw) }
            .map_err(|error| error.with_context(format!("attribute {} of device {}", attribute.0, self.raw)))?;
        Ok(value)
    }

    /// Returns whether the device reports the VMM calls. WSL reports them and then refuses: only creating memory proves
    /// them.
    ///
    /// # Errors
    /// The driver's error.
    pub fn supports_vmm(&self) -> Result<bool, CudaError> {
        self.capability(DeviceAttribute::VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED)
    }

    /// Returns whether it says that VMM memory can be exported as a file descriptor. The same caution as for
    /// [`Device::supports_vmm`].
    ///
    /// # Errors
    /// The driver's error.
    pub fn supports_posix_fd(&self) -> Result<bool, CudaError> {
        self.capability(DeviceAttribute::HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED)
    }

    /// Returns whether it says that the driver can make [memory of a NUMA node](crate::NodeMemory). The same caution as
    /// for [`Device::supports_vmm`].
    ///
    /// # Errors
    /// The driver's error.
    pub fn supports_node_memory(&self) -> Result<bool, CudaError> {
        self.capability(DeviceAttribute::HOST_NUMA_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED)
    }

    /// Returns the NUMA node that is closest to the device: 0 where the driver names none.
    ///
    /// # Errors
    /// The driver's error.
    pub fn numa_node(&self) -> Result<u32, CudaError> {
        // A driver that does not know the attribute names no node.
        let node = none_if(self.attribute(DeviceAttribute::HOST_NUMA_ID), CuResult::INVALID_VALUE)?;
        Ok(node.and_then(|node| u32::try_from(node).ok()).unwrap_or(0))
    }

    /// Returns whether it says that [memory operations](crate::memop) work on it, in both widths. The proof is
    /// [`probe_device_word`](crate::memop::probe_device_word).
    ///
    /// # Errors
    /// The driver's error.
    pub fn supports_memory_operations(&self) -> Result<bool, CudaError> {
        self.capability(DeviceAttribute::CAN_USE_64_BIT_STREAM_MEM_OPS)
    }

    /// Returns whether kernels on this device can reach memory of `peer`; true for the device itself.
    ///
    /// # Errors
    /// The driver's error.
    pub fn can_access_peer(&self, peer: &Self) -> Result<bool, CudaError> {
        if self.raw == peer.raw {
            return Ok(true); // the driver answers no for a device and itself
        }
        let mut can: c_int = 0;
        // SAFETY: the pointer is to a live c_int; both numbers came from the driver.
        unsafe { self.driver.device_can_access_peer(&mut can, self.raw, peer.raw) }?;
        Ok(can != 0)
    }

    /// Returns the rank of the link from this device to the memory of `peer` among the links of the machine: 0 is the
    /// fastest, higher is slower (`CU_DEVICE_P2P_ATTRIBUTE_PERFORMANCE_RANK`).
    ///
    /// # Errors
    /// `CUDA_ERROR_INVALID_DEVICE` for a device and itself.
    pub fn peer_performance_rank(&self, peer: &Self) -> Result<u32, CudaError> {
        let mut rank: c_int = 0;
        // SAFETY: the pointer is to a live c_int; both numbers came from the driver.
        unsafe { self.driver.device_get_p2p_attribute(&mut rank, P2P_ATTRIBUTE_PERFORMANCE_RANK, self.raw, peer.raw) }?;
        Ok(rank.unsigned_abs())
    }

    /// Returns whether this process already has the device's primary context: retaining it is then cheap, else it costs
    /// about 290 ms and some hundred MB of device memory (measured).
    ///
    /// # Errors
    /// The driver's error.
    pub fn primary_context_active(&self) -> Result<bool, CudaError> {
        let mut flags = 0;
        let mut active = 0;
        // SAFETY: both pointers are to live numbers; `raw` came from the driver.
        unsafe { self.driver.primary_ctx_get_state(self.raw, &mut flags, &mut active) }?;
        Ok(active != 0)
    }

    /// Returns the ordinal of the device in this process.
    #[must_use]
    pub fn ordinal(&self) -> u32 {
        self.raw.unsigned_abs()
    }

    /// Returns the driver of the device.
    #[must_use]
    pub fn driver(&self) -> &'static Driver {
        self.driver
    }

    pub(crate) fn raw(&self) -> RawDevice {
        self.raw
    }

    fn capability(&self, attribute: DeviceAttribute) -> Result<bool, CudaError> {
        // A driver that does not know the attribute lacks the feature.
        Ok(none_if(self.attribute(attribute), CuResult::INVALID_VALUE)?.is_some_and(|value| value != 0))
    }

    fn open(driver: &'static Driver, ordinal: u32) -> Result<Self, CudaError> {
        let mut raw = 0;
        let number = c_int::try_from(ordinal).unwrap_or(c_int::MAX);
        // SAFETY: the pointer is to a live device number.
        unsafe { driver.device_get(&mut raw, number) }
            .map_err(|error| error.with_context(format!("device {ordinal}")))?;
        Ok(Self { driver, raw })
    }
}
