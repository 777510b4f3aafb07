#!/bin/sh
# Runs the GPU tests of Partywall, and with --bench its benchmarks first. Needs Linux and an NVIDIA
# driver, nothing else. Everything after --bench goes to the tests, such as a part of a test's name.
# Where Python 3.11 or later is, with pytest and torch, the Python package is tested too, with
# whichever of cupy, jax and numba are there.
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
python_tests() {
    python3 -c 'import sys, pytest, torch; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || {
        echo "tests of the Python package: skipped (no Python 3.11 or later with pytest and torch)"
        return 0
    }
    site=$(mktemp -d) || return 1
    python3 -m pip install --quiet --disable-pip-version-check --no-index --no-deps --no-compile \
        --target "$site" "$here"/partywall-*.whl &&
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
