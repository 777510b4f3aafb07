//! Probes of the GPUs: their kinds, which processes may use them, and how they reach each other.

use std::path::Path;

use partywall_cuda::{ComputeMode, CuResult, CudaError, Device, DeviceAttribute, Driver};

use super::{Trouble, chosen};
use crate::{
    doctor::{
        Scope,
        finding::{Finding, Outcome},
    },
    error::bytes,
    gpu, mps,
};

/// The oldest supported compute capability.
const CAPABILITY: (u32, u32) = (7, 0);

/// Lists the GPUs and judges them.
pub(in crate::doctor) fn devices(scope: Scope) -> Finding {
    let chosen = match chosen(scope) {
        Ok(chosen) if chosen.is_empty() => return none_visible("it shows none"),
        Ok(chosen) => chosen,
        Err(Trouble::Cuda(error)) if error.code == CuResult::NO_DEVICE => return none_visible(&explained(&error)),
        Err(trouble) => {
            return Finding::failed(trouble.to_string())
                .means("the driver is there and shows no such GPU")
                .fix("`nvidia-smi` must work first");
        }
    };
    let facts: Vec<_> = chosen.iter().map(|device| (device.ordinal(), DeviceFacts::of(device))).collect();
    judge(&facts)
}

/// Returns an answer of the driver, with the device nodes that this process lacks.
fn explained(answer: &CudaError) -> String {
    Driver::load().map_or_else(|_| answer.to_string(), |driver| gpu::unusable(driver, answer))
}

fn none_visible(why: &str) -> Finding {
    let mask = std::env::var("CUDA_VISIBLE_DEVICES").map(|mask| format!("; CUDA_VISIBLE_DEVICES={mask}"));
    Finding::skipped(format!("{why}{}", mask.unwrap_or_default()))
        .means("the driver shows this process no GPU: GPU memory cannot be shared here; host memory can")
        .fix("look at CUDA_VISIBLE_DEVICES, and start a container with --gpus all, if there should be one")
}

/// The facts that the driver reports about a GPU.
#[derive(Debug, Clone)]
struct DeviceFacts {
    uuid: String,
    name: String,
    capability: (u32, u32),
    memory: u64,
    mode: ComputeMode,
    mps: bool,
    integrated: bool,
}

impl DeviceFacts {
    fn of(device: &Device) -> Result<Self, CudaError> {
        Ok(Self {
            uuid: device.uuid()?.to_string(),
            name: device.name()?,
            capability: device.compute_capability()?,
            memory: device.total_memory()?,
            mode: device.compute_mode()?,
            mps: mps::is_client(device) == Some(true),
            integrated: device.attribute(DeviceAttribute::INTEGRATED)? != 0,
        })
    }

    fn line(&self) -> String {
        let (major, minor) = self.capability;
        let mode = match self.mode {
            ComputeMode::DEFAULT => "default".to_owned(),
            ComputeMode::PROHIBITED => "prohibited".to_owned(),
            ComputeMode::EXCLUSIVE_PROCESS => "exclusive".to_owned(),
            ComputeMode(other) => other.to_string(),
        };
        let kind = match (self.is_mig(), self.is_vgpu(), self.integrated) {
            (true, _, _) => ", a MIG instance",
            (_, true, _) => ", a virtual GPU (vGPU)",
            (_, _, true) => ", integrated",
            _ => "",
        };
        let Self { uuid, name, memory, .. } = self;
        format!("{uuid} {name}{kind}, compute capability {major}.{minor}, {}, compute mode {mode}", bytes(*memory))
    }

    /// The driver appends the profile to the name: `NVIDIA A100-SXM4-40GB MIG 1g.5gb`.
    fn is_mig(&self) -> bool {
        self.name.contains(" MIG ")
    }

    /// Names of virtual GPUs begin with `GRID` or end with their profile: `NVIDIA A40-48Q` (vendor's documentation).
    fn is_vgpu(&self) -> bool {
        let profile = self.name.rsplit('-').next().unwrap_or_default();
        let digits = profile.trim_end_matches(['A', 'B', 'C', 'Q']);
        let is_profile = digits.len() + 1 == profile.len()
            && !digits.is_empty()
            && digits.bytes().all(|byte| byte.is_ascii_digit())
            && self.name.contains('-');
        self.name.starts_with("GRID ") || is_profile
    }

    /// Returns the outcome, its meaning, and what to do.
    fn judgement(&self) -> (Outcome, &'static str, &'static str) {
        if self.capability < CAPABILITY {
            let means = "a GPU of compute capability below 7.0 is not supported";
            return (Outcome::Failed, means, "hide it with CUDA_VISIBLE_DEVICES");
        }
        if self.mode == ComputeMode::PROHIBITED {
            return (Outcome::Failed, "no process may use that GPU", "nvidia-smi -c DEFAULT, as root");
        }
        if self.mode == ComputeMode::EXCLUSIVE_PROCESS && !self.mps {
            let means = "one process at a time may use that GPU, so sharing its memory needs MPS";
            return (Outcome::Warning, means, "nvidia-smi -c DEFAULT, as root; or start MPS");
        }
        if self.is_vgpu() {
            let means = "virtual GPUs refuse to share memory unless their profile allows it: what fails below falls \
                back to host memory";
            return (Outcome::Warning, means, "what fails below needs a whole GPU, passed through");
        }
        if self.is_mig() {
            let means = "memory is shared within one GPU instance of a MIG device, never between two";
            return (Outcome::Ok, means, "");
        }
        (Outcome::Ok, "", "")
    }
}

fn judge(facts: &[(u32, Result<DeviceFacts, CudaError>)]) -> Finding {
    let mut lines = Vec::new();
    let mut outcome = Outcome::Ok;
    let mut means = Vec::new();
    let mut fixes = Vec::new();
    for (ordinal, facts) in facts {
        let (line, (its, mean, fix)) = match facts {
            Ok(facts) => (facts.line(), facts.judgement()),
            Err(error) => {
                let judgement = (Outcome::Failed, "that GPU does not answer", "look into the kernel's log (dmesg)");
                (error.to_string(), judgement)
            }
        };
        lines.push(format!("cuda:{ordinal} {line}"));
        outcome = match (outcome, its) {
            (Outcome::Failed, _) | (_, Outcome::Failed) => Outcome::Failed,
            (Outcome::Warning, _) | (_, Outcome::Warning) => Outcome::Warning,
            _ => Outcome::Ok,
        };
        for (list, text) in [(&mut means, mean), (&mut fixes, fix)] {
            if !text.is_empty() && !list.contains(&text) {
                list.push(text);
            }
        }
    }
    Finding::new(outcome, lines.join("\n")).means(means.join("\n")).fix(fixes.join("\n"))
}

/// Probes whether GPUs are shared by time slices or by MPS.
pub(in crate::doctor) fn mps(scope: Scope) -> Finding {
    let pipes = mps::pipes();
    match chosen(scope) {
        Ok(devices) => {
            let is_client = devices.iter().any(|device| mps::is_client(device) == Some(true));
            sharing(mps::is_served(&pipes), is_client, &pipes)
        }
        Err(trouble) => silent(&trouble),
    }
}

fn sharing(listens: bool, client: bool, pipes: &Path) -> Finding {
    let pipes = pipes.display();
    match (listens, client) {
        (_, true) => Finding::ok(format!("this process is a client of MPS ({pipes})")).means(
            "a hand-off between kernels of two processes takes 5.6 µs on an H200 instead of 143, and a fault or a kill in a \
             long kernel takes the neighbours down; what a killed process held stays unproven",
        ),
        (false, false) => Finding::ok("time slicing (no MPS)")
            .means(
                "processes do not share faults, and a hand-off between kernels takes 143 µs on an H200; under MPS 5.6 µs \
                 (`partywall run --mps COMMAND`), and a fault or a kill in a long kernel takes neighbours along",
            ),
        (true, false) => Finding::warning(format!("MPS listens at {pipes}, and this process is no client of it"))
            .means("processes under MPS and others take turns on the GPU: a hand-off between them takes 143 µs")
            .fix("start all of them with one CUDA_MPS_PIPE_DIRECTORY, as one user, or none"),
    }
}

/// Probes which GPU reaches the memory of which. Only asks the driver; allocates no memory.
pub(in crate::doctor) fn peers(scope: Scope) -> Finding {
    let ask = || -> Result<Finding, Trouble> {
        let from = chosen(scope)?;
        let all = Device::all(Driver::load()?)?;
        let mut links = Vec::new();
        for device in &from {
            for peer in all.iter().filter(|peer| peer.ordinal() != device.ordinal()) {
                let rank =
                    if device.can_access_peer(peer)? { Some(device.peer_performance_rank(peer).ok()) } else { None };
                links.push(PeerLink { from: device.ordinal(), to: peer.ordinal(), rank });
            }
        }
        Ok(reach(&links))
    };
    ask().unwrap_or_else(|trouble| silent(&trouble))
}

fn silent(trouble: &Trouble) -> Finding {
    Finding::failed(trouble.to_string())
        .means("the driver does not answer a question about a GPU")
        .fix("look into the kernel's log (dmesg), and at `nvidia-smi`")
}

/// The connection from one GPU to the memory of another.
#[derive(Debug, Clone, Copy)]
struct PeerLink {
    from: u32,
    to: u32,
    /// `None` if there is no connection; else the driver's rank, if it has one. 0 is the fastest.
    rank: Option<Option<u32>>,
}

fn reach(links: &[PeerLink]) -> Finding {
    if links.is_empty() {
        return Finding::ok("one GPU is visible, so there is nothing to reach");
    }
    let line = |link: &PeerLink| match link.rank {
        Some(Some(rank)) => format!("cuda:{} reaches cuda:{} (rank {rank}, 0 is the fastest)", link.from, link.to),
        Some(None) => format!("cuda:{} reaches cuda:{}", link.from, link.to),
        None => format!("cuda:{} does not reach cuda:{}", link.from, link.to),
    };
    let detail = links.iter().map(line).collect::<Vec<_>>().join("\n");
    if links.iter().all(|link| link.rank.is_some()) {
        return Finding::ok(detail).means(
            "memory of another GPU is opened with `allow_peer`; over NVLink it was read at 374 GB/s instead of 4,434",
        );
    }
    Finding::warning(detail)
        .means("a process on one GPU cannot map the memory of one that it does not reach; what falls back is a copy")
        .fix("`nvidia-smi topo -p2p r` says why (PCIe ACS, a virtual machine, MIG)")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn gpu(name: &str) -> DeviceFacts {
        DeviceFacts {
            uuid: "GPU-0".into(),
            name: name.into(),
            capability: (9, 0),
            memory: 1 << 30,
            mode: ComputeMode::DEFAULT,
            mps: false,
            integrated: false,
        }
    }

    #[test]
    fn instances_and_virtual_gpus_are_known_by_their_names() {
        for name in ["NVIDIA H200", "NVIDIA A100-SXM4-80GB", "Tesla T4", "NVIDIA H100 PCIe", "Quadro P2000"] {
            assert!(!gpu(name).is_vgpu() && !gpu(name).is_mig(), "{name}");
        }
        for name in ["GRID T4-16Q", "NVIDIA A40-48Q", "NVIDIA H100-20C", "NVIDIA A100-1-5C"] {
            assert!(gpu(name).is_vgpu(), "{name}");
        }
        assert!(gpu("NVIDIA A100-SXM4-40GB MIG 1g.5gb").is_mig());
        let found = judge(&[(0, Ok(gpu("NVIDIA A40-48Q"))), (1, Ok(gpu("NVIDIA H200 MIG 1g.18gb")))]);
        assert_eq!(found.outcome, Outcome::Warning);
        assert!(found.detail.contains("a virtual GPU (vGPU)") && found.detail.contains("a MIG instance"));
        assert!(found.meaning.contains("host memory") && found.meaning.contains("never between two"), "{found:?}");
    }

    #[test]
    fn compute_modes_say_which_processes_may_share() {
        let exclusive = DeviceFacts { mode: ComputeMode::EXCLUSIVE_PROCESS, ..gpu("NVIDIA H200") };
        let found = judge(&[(0, Ok(exclusive.clone()))]);
        assert_eq!(found.outcome, Outcome::Warning);
        assert!(found.meaning.contains("needs MPS") && found.fix.contains("nvidia-smi -c DEFAULT"));
        assert_eq!(judge(&[(0, Ok(DeviceFacts { mps: true, ..exclusive.clone() }))]).outcome, Outcome::Ok);
        let prohibited = DeviceFacts { mode: ComputeMode::PROHIBITED, ..gpu("NVIDIA H200") };
        let found = judge(&[(0, Ok(prohibited)), (1, Ok(exclusive))]);
        assert_eq!((found.outcome, found.meaning.lines().count()), (Outcome::Failed, 2));
        let old = DeviceFacts { capability: (6, 1), ..gpu("Quadro P2000") };
        assert!(judge(&[(0, Ok(old))]).meaning.contains("below 7.0"));
    }

    #[test]
    fn mps_is_distinguished_from_time_slices_and_foreign_daemons() {
        let pipes = Path::new("/tmp/nvidia-mps");
        assert!(sharing(false, false, pipes).detail.contains("time slicing"));
        assert!(sharing(true, true, pipes).meaning.contains("5.6 µs"));
        let found = sharing(true, false, pipes);
        assert_eq!(found.outcome, Outcome::Warning);
        assert!(found.fix.contains("CUDA_MPS_PIPE_DIRECTORY"));
    }

    #[test]
    fn unreachable_peer_is_a_warning() {
        let link = |to, rank| PeerLink { from: 0, to, rank };
        assert_eq!(reach(&[]).outcome, Outcome::Ok);
        let found = reach(&[link(1, Some(Some(0))), link(2, Some(None))]);
        assert_eq!((found.outcome, found.detail.lines().count()), (Outcome::Ok, 2));
        let found = reach(&[link(1, Some(Some(0))), link(2, None)]);
        assert_eq!(found.outcome, Outcome::Warning);
        assert!(found.detail.contains("cuda:0 does not reach cuda:2") && found.meaning.contains("a copy"));
    }
}
