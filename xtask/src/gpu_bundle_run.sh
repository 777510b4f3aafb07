#!/bin/sh
# Runs the GPU tests of Partywall, and with --bench its benchmarks first. Needs Linux and an NVIDIA
# driver, nothing else. Everything after --bench goes to the tests, such as a part of a test's name.
#
#   OUT=reports ./run.sh [--bench] [NAME]
#
# Reports go to $OUT, else to the current folder. The last line is
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

status=0
if [ "${1:-}" = --bench ]; then
    shift
    "$here/partywall-bench" --gpu --report "$out/gpu-bench.json" || {
        echo "the benchmarks failed, see above" >&2
        status=1
    }
fi
"$here/partywall-gpu-tests" --report "$out/gpu-tests.json" "$@" || status=1
exit $status
