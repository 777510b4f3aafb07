#!/bin/sh
# Runs the GPU tests of Partywall, with --bench after its benchmarks. Needs only Linux and an NVIDIA
# driver. Arguments after --bench are passed to the tests, for example parts of tests' names. With
# --only, no tests run, and only the named benchmarks (`./partywall bench --list`); --quick behind them takes
# fewer samples. If Python 3.11 or later is installed with pytest and torch, the Python package is tested too,
# with those of cupy, jax and numba that are installed. If gcc is installed, the programs in C and C++ run, too (c.sh, which
# says more). With --peers no tests run: the Python package is
# measured against Rust, safetensors and torch.multiprocessing, within nine minutes, which are not enough
# for all; with names only these subjects (peer_topics peer_topics_mps: tensors, time-sliced and under an MPS
# daemon; peer_table_host peer_table_gpu: all installed ways to share memory, with ratios and plots; with two
# GPUs peer_table_gpus from one to the other). With --nsys a lab runs under Nsight Systems, and the last lines
# say whether that made a report.
#
#   OUT=reports ./run.sh [--bench] [NAME...]
#   OUT=reports ./run.sh --bench --only NAME... [--quick]
#   OUT=reports ./run.sh --peers [NAME... [--quick]]
#   OUT=reports ./run.sh --nsys
#
# Reports go to $OUT, else to the current folder. After tests the last line is
# `N passed, N failed, N skipped`; the exit status is 0 unless something failed.
set -u

here=$(CDPATH='' cd -- "$(dirname -- "$0")" && pwd) || exit 1
out=${OUT:-.}
mkdir -p -- "$out" || exit 1

# The tests start the program of this bundle, not an installed one, and the reports name the commit
# that the bundle was built from.
export PARTYWALL_BIN="$here/partywall"
export PARTYWALL_COMMIT="@COMMIT@"
export PARTYWALL_ICEORYX2="$here/partywall-peer-iceoryx2"
export PARTYWALL_HOSTILE="$here/partywall-hostile"
unset PARTYWALL_SOCKET PARTYWALL_DOMAIN

# Unpacks the Python package into a folder.
unpack() {
    python3 -m pip install --quiet --disable-pip-version-check --no-index --no-deps --no-compile \
        --target "$1" "$here"/partywall-*.whl
}

# Runs benchmarks on the GPU within a number of seconds, and writes the report into a folder after each of them. Their
# waits have timeouts; the time limit is for a hang. An interrupted benchmark leaves nothing.
bench() {
    limit=$1
    folder=$2
    shift 2
    timeout -k 10 "$limit" "$here/partywall" bench --device cuda --out "$folder" --force --save-each "$@"
    measured=$?
    [ $measured -eq 124 ] && echo "not all was measured within $limit s" >&2
    return $measured
}

# Runs the benchmarks that have rival programs, or those with the names.
peers() {
    site=$(mktemp -d) || return 1
    # A model of 14 GiB has to stay in memory, and must not be written to a disk meanwhile.
    folder=${TMPDIR:-/tmp}
    room=$(df -Pk /dev/shm 2>/dev/null | awk 'NR == 2 { print $4 }')
    [ "${room:-0}" -gt $((16 << 20)) ] && folder=/dev/shm
    scratch=$(mktemp -d -p "$folder" partywall-peers.XXXXXX) || return 1
    unpack "$site" &&
        TMPDIR="$scratch" PYTHONPATH="$site${PYTHONPATH:+:$PYTHONPATH}" bench 540 "$out/gpu-peers" --peers "$@"
    measured=$?
    rm -rf -- "$scratch" "$site"
    return $measured
}
if [ "${1:-}" = --peers ]; then
    shift
    [ $# -eq 0 ] && set -- peers
    peers "$@"
    exit $?
fi

# Profiles a lab without what needs permission: samples of processors, and their switches between threads. The report
# `nsys.nsys-rep` needs the folder `host-linux-x64` of an installation; without it only `nsys.qdstrm` is there.
if [ "${1:-}" = --nsys ]; then
    command -v nsys || {
        echo "there is no nsys in PATH" >&2
        exit 1
    }
    rm -f -- "$out"/nsys.*
    nsys --version
    timeout -k 10 300 nsys profile --sample=none --cpuctxsw=none -t cuda,nvtx --force-overwrite=true -o "$out/nsys" \
        "$here/partywall" lab events
    installed=$(dirname -- "$(dirname -- "$(readlink -f -- "$(command -v nsys)")")")
    importer=$(find "$installed" -name QdstrmImporter | head -n 1)
    echo "importer: ${importer:-none below $installed}"
    # An importer that nsys has not found.
    [ -n "$importer" ] && [ ! -f "$out/nsys.nsys-rep" ] && "$importer" -i "$out/nsys.qdstrm"
    ls -l "$out"/nsys.*
    [ -f "$out/nsys.nsys-rep" ] && nsys stats --force-export=true --report cuda_api_sum "$out/nsys.nsys-rep"
    exit $?
fi

status=0
if [ "${1:-}" = --bench ]; then
    shift
    if [ "${1:-}" = --only ]; then
        shift
        : "${1:?"--only needs names of benchmarks"}"
        bench 580 "$out/gpu-bench" "$@"
        exit $?
    fi
    bench 3600 "$out/gpu-bench" all floors || {
        echo "the benchmarks failed, see above" >&2
        status=1
    }
fi
# pytest_of NAME OPTIONS [PART...] -- FILE...: tests of these files with a part in their names
pytest_of() {
    report="$out/python-tests-$1.xml" options=$2 parts=
    shift 2
    while [ "$1" != -- ]; do
        parts="${parts:+$parts or }$1"
        shift
    done
    shift
    # shellcheck disable=SC2086 # several words
    PYTHONPATH="$site" PYTHONDONTWRITEBYTECODE=1 python3 -m pytest -p no:cacheprovider -ra $options \
        --junitxml "$report" ${parts:+-k "$parts"} "$@"
    ended=$?
    # pytest returns 5 if no test has that part in its name.
    [ $ended -eq 0 ] || [ $ended -eq 5 ]
}
python_tests() {
    python3 -c 'import sys, pytest, torch; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || {
        echo "tests of the Python package: skipped (no Python 3.11 or later with pytest and torch)"
        return 0
    }
    site=$(mktemp -d) || return 1
    unpack "$site" || return 1
    # Tests that fill the GPU, or measure how much of it is free, have it to themselves. The others run side by side.
    tests=0
    # shellcheck disable=SC2046 # several words
    pytest_of alone "" "$@" -- $(grep -lr mem_get_info --include 'test_*.py' "$here/tests") || tests=1
    # shellcheck disable=SC2046 # several words
    pytest_of beside "$(python3 -c 'import xdist' 2>/dev/null && echo ' -n 3 --dist loadfile')" "$@" -- \
        $(grep -Lr mem_get_info --include 'test_*.py' "$here/tests") || tests=1
    rm -rf -- "$site"
    return $tests
}
python_tests "$@" || {
    echo "the tests of the Python package failed, see above" >&2
    status=1
}
# They have no names that are parts of tests' names.
if [ $# -eq 0 ]; then
    OUT="$out" "$here/c.sh" || {
        echo "programs in C or C++ failed, see above" >&2
        status=1
    }
fi
"$here/partywall-gpu-tests" --report "$out/gpu-tests.json" "$@" || status=1
exit $status
