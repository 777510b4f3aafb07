//! What cannot be written, and what a failed write leaves.

use std::{
    fs::{self, OpenOptions},
    io::{self, Write},
    path::Path,
};

use partywall::files::{FileError, FileProblem, Format, TensorInfo, write_to};
use partywall_shm::DType;

use super::{Memory, folder, get, go, info, load, model, names, noise, put, write_path};

#[test]
fn formats_refuse_unsupported_tensors() {
    for dtype in DType::ALL {
        let memory = Memory::with(vec![(info("t", *dtype, &[8], &[1]), noise(dtype.bits() as usize, 1))]);
        let lacks = |format| {
            matches!(
                get(&memory, None, format),
                Err(FileError { problem: FileProblem::FormatLacksElements { .. }, .. })
            )
        };
        let small = dtype.name().contains("_e");
        assert_eq!(lacks(Format::Npy), small || *dtype == DType::BF16, "{dtype}");
        assert_eq!(lacks(Format::SafeTensors), *dtype == DType::C128, "{dtype}");
        assert!(get(&memory, None, Format::Raw).is_ok());
    }
    let bf16 = Memory::with(vec![(info("t", DType::BF16, &[8], &[1]), noise(16, 1))]);
    let error = get(&bf16, None, Format::Npy).unwrap_err();
    assert!(
        error.to_string().contains(".npy has no bfloat16") && error.problem.advice().contains(".safetensors"),
        "{error}"
    );

    let fortran = Memory::with(vec![(info("t", DType::F32, &[2, 3], &[1, 2]), noise(24, 1))]);
    let error = get(&fortran, None, Format::SafeTensors).unwrap_err();
    assert!(
        matches!(error.problem, FileProblem::FormatLacksStrides { .. }) && error.problem.advice().contains(".npy"),
        "{error}"
    );
    let gaps = TensorInfo { bytes: 36, ..info("t", DType::F32, &[2, 3], &[6, 1]) };
    let gaps = Memory::with(vec![(gaps, noise(36, 1))]);
    assert!(matches!(
        get(&gaps, None, Format::Npy),
        Err(FileError { problem: FileProblem::FormatLacksStrides { .. }, .. })
    ));
    assert_eq!(get(&gaps, None, Format::Raw).unwrap(), noise(36, 1));

    let reserved = Memory::with(vec![(info("__metadata__", DType::U8, &[8], &[1]), noise(8, 1))]);
    assert!(matches!(
        get(&reserved, None, Format::SafeTensors),
        Err(FileError { problem: FileProblem::ReservedName { .. }, .. })
    ));
    let none = Memory::default();
    assert!(matches!(
        get(&none, None, Format::Raw),
        Err(FileError { problem: FileProblem::NotOneTensor { count: 0, .. }, .. })
    ));
}

#[test]
fn failed_write_leaves_only_the_target() {
    let dir = folder();
    let target = put(&dir, "t.safetensors", b"precious");
    let mut memory = load(&put(&dir, "m.safetensors", &model()));
    memory.unreadable = memory.tensors.iter().position(|t| t.name == "fp8");
    let error = write_path(&memory, None, &target).unwrap_err();
    assert!(matches!(error.problem, FileProblem::Content { .. }), "{error}");
    assert_eq!(fs::read(&target).unwrap(), b"precious");
    assert_eq!(names(&dir), ["m.safetensors", "t.safetensors"]);
    memory.unreadable = None;
    write_path(&memory, None, &target).unwrap();
    assert_eq!(fs::read(&target).unwrap(), model());

    assert!(matches!(
        write_path(&memory, None, dir.path()),
        Err(FileError { problem: FileProblem::NotOneTensor { .. }, .. })
    ));
    assert!(matches!(
        write_path(&memory, Some("fp8"), dir.path()),
        Err(FileError { problem: FileProblem::IsFolder, .. })
    ));
    let nowhere = dir.path().join("none/t.safetensors");
    assert!(matches!(write_path(&memory, None, &nowhere), Err(FileError { problem: FileProblem::Write(_), .. })));
    assert_eq!(names(&dir), ["m.safetensors", "t.safetensors"]);
}

#[test]
fn links_and_permissions_of_a_target_stay() {
    use std::os::unix::fs::{PermissionsExt, symlink};
    let dir = folder();
    let real = put(&dir, "real.bin", b"old");
    fs::set_permissions(&real, fs::Permissions::from_mode(0o640)).unwrap();
    let link = dir.path().join("link.bin");
    symlink(&real, &link).unwrap();
    let memory = Memory::with(vec![(info("t", DType::U8, &[3], &[1]), b"new".to_vec())]);
    write_path(&memory, None, &link).unwrap();
    assert_eq!(fs::read_link(&link).unwrap(), real);
    assert_eq!(fs::read(&real).unwrap(), b"new");
    assert_eq!(fs::metadata(&real).unwrap().permissions().mode() & 0o777, 0o640);
}

#[test]
fn full_disk_and_closed_pipe_are_different_errors() {
    let memory = Memory::with(vec![(info("t", DType::U8, &[3 << 20], &[1]), noise(3 << 20, 1))]);
    let error = write_path(&memory, None, Path::new("/dev/full")).unwrap_err();
    assert!(matches!(error.problem, FileProblem::Full(_)), "{error}");
    assert!(!fs::metadata("/dev/full").unwrap().is_file(), "the device is still there");
    write_path(&memory, None, Path::new("/dev/null")).unwrap();
    assert!(!fs::metadata("/dev/null").unwrap().is_file(), "the device is still there");
    let mut full = OpenOptions::new().write(true).open("/dev/full").unwrap();
    let error = write_to(&memory, None, Format::Raw, &mut full, &|_| (), &go()).unwrap_err();
    assert!(matches!(error.problem, FileProblem::Full(_)), "{error}");

    let (reader, mut writer) = io::pipe().unwrap();
    drop(reader);
    let error = write_to(&memory, None, Format::Raw, &mut writer, &|_| (), &go()).unwrap_err();
    assert!(matches!(error.problem, FileProblem::ClosedPipe(_)), "{error}");
}

/// Makes what follows root of a mount namespace of its own.
const NAMESPACE: [&str; 4] = ["unshare", "--user", "--map-root-user", "--mount"];

/// Set in the process that runs in such a namespace.
const IN_NAMESPACE: &str = "PARTYWALL_TEST_IN_NAMESPACE";

#[test]
fn needs_namespaces_full_file_system_leaves_only_the_target() {
    let launch = |arguments: &[&std::ffi::OsStr]| {
        let mut command = std::process::Command::new(NAMESPACE[0]);
        command.args(&NAMESPACE[1..]).args(arguments).env(IN_NAMESPACE, "1").output()
    };
    let can = launch(&["true".as_ref()]).is_ok_and(|output| output.status.success());
    assert!(can, "this machine does not let us make namespaces");
    let program = std::env::current_exe().unwrap();
    let output = launch(&[program.as_os_str(), "--exact".as_ref(), "writing::in_a_namespace".as_ref()]).unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stdout));
}

/// Runs the process that the test above starts. It is no test itself.
#[test]
fn in_a_namespace() {
    if std::env::var_os(IN_NAMESPACE).is_none() {
        return;
    }
    let dir = folder();
    let mut mount = std::process::Command::new("mount");
    let status = mount.args(["-t", "tmpfs", "-o", "size=1m", "none"]).arg(dir.path()).status().unwrap();
    assert!(status.success(), "{mount:?}");
    let target = put(&dir, "t.bin", b"precious");
    let memory = Memory::with(vec![(info("t", DType::U8, &[3 << 20], &[1]), noise(3 << 20, 1))]);
    let error = write_path(&memory, None, &target).unwrap_err();
    assert!(matches!(error.problem, FileProblem::Full(_)), "{error}");
    assert_eq!((&fs::read(&target).unwrap()[..], names(&dir)), (&b"precious"[..], vec!["t.bin".to_owned()]));
}

/// A writer that notices a failure late must not get the report that everything is written.
#[test]
fn failed_flush_is_an_error() {
    struct Late;
    impl Write for Late {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            Ok(bytes.len())
        }
        fn flush(&mut self) -> io::Result<()> {
            Err(io::ErrorKind::StorageFull.into())
        }
    }
    let memory = Memory::with(vec![(info("t", DType::U8, &[3], &[1]), noise(3, 1))]);
    assert!(matches!(
        write_to(&memory, None, Format::Raw, &mut Late, &|_| (), &go()),
        Err(FileError { problem: FileProblem::Full(_), .. })
    ));
}
