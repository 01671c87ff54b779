#!/usr/bin/env bash
# Builds the libraries with the test kernels and runs the tests. usage: run.sh OUT_DIR [NAME...]
set -eu
here=$(cd "$(dirname "$0")" && pwd)
mkdir -p "$1"
out=$(cd "$1" && pwd)
shift
"$here/../build.sh" "$out" "$here/kernels"
include=${CUDA_HOME:-${CUDA_PATH:-/usr/local/cuda}}/include
make -s -j"${JOBS:-2}" -f "$here/Makefile" OUT="$out" CUDA_INCLUDE="$include"
"$out/build/tests/tests" "$@"
FP8_FAKE_THREADS=1 FP8_FAKE_ORDER=random:7 "$out/build/tests/tests" "$@" | tail -1
