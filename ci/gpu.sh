#!/usr/bin/env bash
# Every kernel on a real GPU: the tests of tests/kernels on it, then the time of every launch.
#
#     ci/gpu.sh OUT [PYTEST ARGUMENT...]      e.g. ci/gpu.sh gpu-report -k growth
#
# Writes OUT/tests.log, OUT/timings.json and OUT/timings.md; exit code 1 if anything failed. Takes under 8 minutes,
# by force if need be. Needs no installation, only a Python (PYTHON, default python3) with torch and triton for the
# GPU, pytest, hypothesis, pytest-timeout, numpy and safetensors; pytest-xdist if it is there.
# SPECPLUG_KERNEL_DEVICE=cpu rehearses it without a GPU: the interpreter, tiny shapes, meaningless times.
set -uo pipefail
if [ $# -lt 1 ]; then
    echo "usage: ci/gpu.sh OUT [PYTEST ARGUMENT...]" >&2
    exit 2
fi
mkdir -p "$1" && out=$(cd "$1" && pwd) || exit 2
shift
cd "$(dirname "$0")/.."
export SPECPLUG_KERNEL_DEVICE="${SPECPLUG_KERNEL_DEVICE:-cuda}"
export PYTHONPATH="$PWD:$PWD/kernels:$PWD/ci/rig${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1
python=${PYTHON:-python3}
processes=$("$python" -c 'import os, xdist; print("-n", min(8, len(os.sched_getaffinity(0))))' 2>/dev/null)
failed=0
echo "== tests on $SPECPLUG_KERNEL_DEVICE"
# shellcheck disable=SC2086  # $processes is two words, or none
timeout 285 "$python" -m pytest -q $processes --durations=5 tests/kernels "$@" 2>&1 | tee "$out/tests.log" || failed=1
echo "== timings on $SPECPLUG_KERNEL_DEVICE"
timeout 180 "$python" ci/gpu/time_kernels.py "$out" --seconds 165 || failed=1
exit $failed
