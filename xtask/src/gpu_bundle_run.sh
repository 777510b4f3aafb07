#!/bin/sh
# Runs the GPU tests of Partywall, and with --bench its benchmarks first. Needs Linux and an NVIDIA
# driver, nothing else. Everything after --bench goes to the tests, such as a part of a test's name;
# with --only, nothing is tested, and only what has that part in its name is measured. Where Python
# 3.11 or later is, with pytest and torch, the Python package is tested too, with whichever of cupy,
# jax and numba are there. With --peers nothing is tested: the Python package is measured beside
# Rust, safetensors and torch.multiprocessing, within seven minutes; with a part of their names only
# those, within two (peer_topics: streams of tensors, time-sliced and under an MPS daemon of its own).
#
#   OUT=reports ./run.sh [--bench] [NAME]
#   OUT=reports ./run.sh --bench --only NAME
#   OUT=reports ./run.sh --peers [NAME]
#
# Reports go to $OUT, else to the current folder. After tests the last line is
# `N passed, N failed, N skipped`; the exit status is 0 unless something failed.
set -u

here=$(CDPATH='' cd -- "$(dirname -- "$0")" && pwd) || exit 1
out=${OUT:-.}
mkdir -p -- "$out" || exit 1

# The tests start the program of this bundle, not one that happens to be installed, and the reports
# name the commit that all of it was built from.
export PARTYWALL_BIN="$here/partywall"
export PARTYWALL_COMMIT="@COMMIT@"
unset PARTYWALL_SOCKET PARTYWALL_DOMAIN

# Unpacks the Python package into a folder.
unpack() {
    python3 -m pip install --quiet --disable-pip-version-check --no-index --no-deps --no-compile \
        --target "$1" "$here"/partywall-*.whl
}

# Those of a benchmark that was ended.
stop_brokers() {
    for socket in "$1"/*/*.sock; do
        [ -S "$socket" ] && "$here/partywall" --socket "$socket" stop --force
    done
}

# Benchmarks with a part in their names. What they wait for has its own limits; the one here is for what breaks these.
only() {
    scratch=$(mktemp -d /tmp/partywall-only.XXXXXX) || return 1
    TMPDIR="$scratch" timeout -k 10 580 "$here/partywall-bench" --gpu --report "$out/gpu-bench.json" "$1"
    measured=$?
    [ $measured -eq 124 ] && echo "not all was measured within 580 s" >&2
    stop_brokers "$scratch"
    rm -rf -- "$scratch"
    return $measured
}

# Benchmarks with programs of others that have a part in their names, within so many seconds. Each of them has its own limits;
# the one here is for what breaks these.
peers() {
    site=$(mktemp -d) || return 1
    # A model of 14 GiB is to stay in memory, and not to be written to a disk meanwhile.
    folder=${TMPDIR:-/tmp}
    room=$(df -Pk /dev/shm 2>/dev/null | awk 'NR == 2 { print $4 }')
    [ "${room:-0}" -gt $((16 << 20)) ] && folder=/dev/shm
    scratch=$(mktemp -d -p "$folder" partywall-peers.XXXXXX) || return 1
    unpack "$site" &&
        TMPDIR="$scratch" PYTHONPATH="$site${PYTHONPATH:+:$PYTHONPATH}" timeout -k 10 "$2" \
            "$here/partywall-bench" --gpu --peers --report "$out/gpu-peers.json" --md "$out/gpu-peers.md" "$1"
    measured=$?
    [ $measured -eq 124 ] && echo "not all was measured within $2 s" >&2
    stop_brokers "$scratch"
    rm -rf -- "$scratch" "$site"
    return $measured
}
if [ "${1:-}" = --peers ]; then
    if [ -n "${2:-}" ]; then peers "$2" 120; else peers peer_ 400; fi
    exit $?
fi

status=0
if [ "${1:-}" = --bench ]; then
    shift
    if [ "${1:-}" = --only ]; then
        only "${2:?"--only needs a part of a name"}"
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
            --junitxml "$out/python-tests.xml" ${1:+-k "$1"} "$here/tests"
    tests=$?
    rm -rf -- "$site"
    # 5: none has that part in its name.
    [ $tests -eq 0 ] || [ $tests -eq 5 ]
}
python_tests "$@" || {
    echo "the tests of the Python package failed, see above" >&2
    status=1
}
"$here/partywall-gpu-tests" --report "$out/gpu-tests.json" "$@" || status=1
exit $status
