#!/bin/sh
# Compiles the tests and examples in C and C++ with the compilers that are here, and runs them on the GPU: each in host
# memory or on the GPU as it is written, and a topic there between C++, Rust and Python, from each to each. `run.sh`
# calls it; alone it is
#
#   OUT=reports ./c.sh
#
# Each program has a broker of its own. It prints a line for each: passed, skipped with the reason, or FAILED with the
# end of its output, which is in $OUT/c. The last line is `N passed, N failed, N skipped`; the exit status is 0 unless
# one failed.
set -u

here=$(CDPATH='' cd -- "$(dirname -- "$0")" && pwd) || exit 1
mkdir -p -- "${OUT:-.}/c" || exit 1
out=$(CDPATH='' cd -- "${OUT:-.}/c" && pwd) || exit 1
work=$(mktemp -d) || exit 1
trap 'rm -rf -- "$work"' EXIT
# Programs look for the library by its SONAME, linkers by another name.
ln -s "$here/libpartywall.so.0" "$work/libpartywall.so.0"
ln -s libpartywall.so.0 "$work/libpartywall.so"
export LD_LIBRARY_PATH="$work${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}"
export PARTYWALL_BIN="$here/partywall"
export PARTYWALL_LIBCUDA="${PARTYWALL_LIBCUDA:-libcuda.so.1}"
unset PARTYWALL_DOMAIN

passed=0
failed=0
skipped=0
skip() {
    skipped=$((skipped + 1))
    echo "c $1: skipped ($2)"
}
# Counts the program $1 as the status $2 says.
verdict() {
    if [ "$2" -eq 0 ]; then
        passed=$((passed + 1))
        echo "c $1: passed"
    else
        failed=$((failed + 1))
        echo "c $1: FAILED (status $2)"
        tail -n 5 -- "$out/$1.txt" | sed 's/^/    /'
    fi
}
# Gives the program $1 a broker of its own, and another one.
new_broker() {
    PARTYWALL_SOCKET="$work/$1.d/c.sock"
    PARTYWALL_OTHER_SOCKET="$work/$1.d/other.sock"
    export PARTYWALL_SOCKET PARTYWALL_OTHER_SOCKET
}
end_broker() {
    for socket in "$PARTYWALL_SOCKET" "$PARTYWALL_OTHER_SOCKET"; do
        "$here/partywall" --socket "$socket" stop --force >/dev/null 2>&1
    done
}
# Compiles the source $3 by the command $2 as $1.
compile() {
    # The command has words.
    # shellcheck disable=SC2086
    $2 -I "$here/c/include" "$3" -o "$work/$1" -L "$work" -lpartywall -lm -ldl >"$out/$1.txt" 2>&1
}
# Compiles and runs the program $1 by the compiler's command $2 from the source $3; the rest are its arguments.
program() {
    name=$1
    compiler=$2
    source=$3
    shift 3
    if ! command -v "${compiler%% *}" >/dev/null; then
        skip "$name" "there is no ${compiler%% *}"
    elif compile "$name" "$compiler" "$source"; then
        new_broker "$name"
        # The limit is for hangs.
        timeout -k 10 120 env PARTYWALL_LIBCUDA="$driver" "$work/$name" "$@" >>"$out/$name.txt" 2>&1
        status=$?
        end_broker
        verdict "$name" $status
    else
        verdict "$name" 1
    fi
}
# As `program`, for what needs a GPU.
gpu_program() {
    if [ -n "$gpu" ]; then program "$@"; else skip "$1" "there is no GPU"; fi
}
# Has the program $1 publish 300 frames in memory of the GPU to the program $2; each is a language.
pair() {
    name="$1-to-$2"
    new_broker "$name"
    # The commands have words.
    # shellcheck disable=SC2046
    timeout -k 10 120 $(command_of "$1") publish 300 cuda:0 >"$out/$name.txt" 2>&1 &
    publisher=$!
    # shellcheck disable=SC2046
    timeout -k 10 120 $(command_of "$2") subscribe cuda:0 >"$out/$name.said.txt" 2>>"$out/$name.txt"
    wait $publisher
    status=$?
    end_broker
    cat -- "$out/$name.said.txt" >>"$out/$name.txt"
    [ $status -eq 0 ] && [ "$(cat -- "$out/$name.said.txt")" != "300 frames, 300 of them right" ] && status=1
    verdict "$name" $status
}
command_of() {
    case $1 in
    cpp) echo "$work/frames" ;;
    rust) echo "$here/partywall-gpu-tests --role frames" ;;
    python) echo "python3 $here/examples/frames.py" ;;
    esac
}

c="gcc -std=c11 -D_GNU_SOURCE -Wall -Wextra -Wpedantic -Werror -pthread"
cpp="g++ -std=c++17 -Wall -Wextra -Wpedantic -Werror -pthread"
gpu=
if [ -e /dev/nvidiactl ] || [ "$PARTYWALL_LIBCUDA" != libcuda.so.1 ]; then gpu=yes; fi

for source in "$here"/c/tests/c/*.c "$here"/c/tests/cpp/*.cpp; do
    name=$(basename -- "$source")
    compiler=$c
    [ "$name" = "${name%.cpp}" ] || compiler=$cpp
    driver=$PARTYWALL_LIBCUDA
    case $name in
    # The library that has its crash points is not here.
    crash.c) ;;
    gpu.c | gpu.cpp) gpu_program "$name" "$compiler" "$source" ;;
    # They test what there is without a GPU.
    order.c | queue.c)
        driver=/absent/libcuda.so.1
        program "$name" "$compiler" "$source"
        ;;
    *) program "$name" "$compiler" "$source" ;;
    esac
done

driver=$PARTYWALL_LIBCUDA
for name in epoll textbook; do
    program "$name" "$c" "$here/c/examples/$name.c"
done
gpu_program textbook-gpu "$c" "$here/c/examples/textbook.c" cuda:0
for name in pipeline ring square_roots semaphore crash; do
    program "$name" "$cpp" "$here/c/examples/$name.cpp"
done
gpu_program pipeline-gpu "nvcc -std=c++17 -O2" "$here/c/examples/pipeline.cu" 20000

command -v g++ >/dev/null && compile frames "$cpp" "$here/c/examples/frames.cpp"
if python3 -c 'import sys, numpy; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
    python3 -m pip install --quiet --disable-pip-version-check --no-index --no-deps --no-compile \
        --target "$work/site" "$here"/partywall-*.whl
fi
export PYTHONPATH="$work/site${PYTHONPATH:+:$PYTHONPATH}"
for by in cpp rust python; do
    for to in cpp rust python; do
        case " $by $to " in
        *" cpp "*) [ -x "$work/frames" ] || { skip "$by-to-$to" "frames.cpp was not compiled" && continue; } ;;
        esac
        case " $by $to " in
        *" python "*) [ -d "$work/site" ] || { skip "$by-to-$to" "no Python 3.11 or later with numpy" && continue; } ;;
        esac
        if [ -n "$gpu" ]; then pair "$by" "$to"; else skip "$by-to-$to" "there is no GPU"; fi
    done
done

echo "$passed passed, $failed failed, $skipped skipped"
[ "$failed" -eq 0 ]
