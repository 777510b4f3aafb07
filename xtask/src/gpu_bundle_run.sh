#!/bin/sh
# Runs the GPU tests of Partywall, with --bench after its benchmarks. Needs only Linux and an NVIDIA
# driver. Arguments after --bench are passed to the tests, for example parts of tests' names. With
# --only, no tests run, and only benchmarks with that part in their names; --quick behind it takes fewer
# samples. If Python 3.11 or later is installed with pytest and torch, the Python package is tested too,
# with those of cupy, jax and numba that are installed. With --peers no tests run: the Python package is
# measured against Rust, safetensors and torch.multiprocessing, within nine minutes, which are not enough
# for all; with a part of a name only the matching subjects (peer_topics: tensors, time-sliced and under
# an MPS daemon; peer_table: all installed ways to share memory, in one table with ratios and plots; with
# two GPUs also from one to the other). With --nsys a lab runs under Nsight Systems, and the last lines
# say whether that made a report.
#
#   OUT=reports ./run.sh [--bench] [NAME...]
#   OUT=reports ./run.sh --bench --only NAME [--quick]
#   OUT=reports ./run.sh --peers [NAME [--quick]]
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
unset PARTYWALL_SOCKET PARTYWALL_DOMAIN

# Unpacks the Python package into a folder.
unpack() {
    python3 -m pip install --quiet --disable-pip-version-check --no-index --no-deps --no-compile \
        --target "$1" "$here"/partywall-*.whl
}

# Stops the brokers that an interrupted benchmark has left.
stop_brokers() {
    for socket in "$1"/*/*.sock; do
        [ -S "$socket" ] && "$here/partywall" --socket "$socket" stop --force
    done
}

# Runs the benchmarks with a part in their names. Their waits have timeouts; the time limit here is for a hang.
only() {
    scratch=$(mktemp -d /tmp/partywall-only.XXXXXX) || return 1
    TMPDIR="$scratch" timeout -k 10 580 "$here/partywall-bench" --gpu --report "$out/gpu-bench.json" "$@"
    measured=$?
    [ $measured -eq 124 ] && echo "not all was measured within 580 s" >&2
    stop_brokers "$scratch"
    rm -rf -- "$scratch"
    return $measured
}

# Runs the benchmarks with rival programs that have a part in their names, with an option or without. Their waits have
# timeouts; the time limit here is for a hang.
peers() {
    site=$(mktemp -d) || return 1
    # A model of 14 GiB has to stay in memory, and must not be written to a disk meanwhile.
    folder=${TMPDIR:-/tmp}
    room=$(df -Pk /dev/shm 2>/dev/null | awk 'NR == 2 { print $4 }')
    [ "${room:-0}" -gt $((16 << 20)) ] && folder=/dev/shm
    scratch=$(mktemp -d -p "$folder" partywall-peers.XXXXXX) || return 1
    unpack "$site" &&
        TMPDIR="$scratch" PYTHONPATH="$site${PYTHONPATH:+:$PYTHONPATH}" timeout -k 10 540 \
            "$here/partywall-bench" --gpu --peers --report "$out/gpu-peers.json" --md "$out/gpu-peers.md" \
            --html "$out/gpu-peers.html" "$1" ${2:+"$2"}
    measured=$?
    [ $measured -eq 124 ] && echo "not all was measured within 540 s" >&2
    stop_brokers "$scratch"
    rm -rf -- "$scratch" "$site"
    return $measured
}
if [ "${1:-}" = --peers ]; then
    peers "${2:-peer_}" "${3:-}"
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
        : "${1:?"--only needs a part of a name"}"
        only "$@"
        exit $?
    fi
    "$here/partywall-bench" --gpu --report "$out/gpu-bench.json" || {
        echo "the benchmarks failed, see above" >&2
        status=1
    }
fi
python_tests() {
    python3 -c 'import sys, pytest, torch; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || {
        echo "tests of the Python package: skipped (no Python 3.11 or later with pytest and torch)"
        return 0
    }
    site=$(mktemp -d) || return 1
    unpack "$site" &&
        PYTHONPATH="$site" PYTHONDONTWRITEBYTECODE=1 python3 -m pytest -p no:cacheprovider -ra \
            --junitxml "$out/python-tests.xml" ${1:+-k "$(echo "$*" | sed 's/ / or /g')"} "$here/tests"
    tests=$?
    rm -rf -- "$site"
    # pytest returns 5 if no test has that part in its name.
    [ $tests -eq 0 ] || [ $tests -eq 5 ]
}
python_tests "$@" || {
    echo "the tests of the Python package failed, see above" >&2
    status=1
}
"$here/partywall-gpu-tests" --report "$out/gpu-tests.json" "$@" || status=1
exit $status
