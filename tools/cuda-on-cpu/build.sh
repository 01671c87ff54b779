#!/usr/bin/env bash
# Builds the libraries and the kernels into a folder that works as CUDA_LIB_DIR or in LD_LIBRARY_PATH.
#
# usage: build.sh OUT_DIR [KERNEL_DIR...]
#
# Without kernel folders: this repository's kernels and those of the candle-kernels crate in cargo's registry.
# CUDA_HOME (or CUDA_PATH) must hold NVIDIA's headers. JOBS sets the number of compilers that run at once.
# Where the crate cudarc is in cargo's registry, functions that it declares and the stand-ins lack go into libmissing.so, and
# a CUDA_HOME made by setup.sh gets names under which programs link to all of these.
set -eu
here=$(cd "$(dirname "$0")" && pwd)
[ $# -ge 1 ] || { sed -n '2,9s/^# \{0,1\}//p' "$0" >&2; exit 2; }
mkdir -p "$1"
out=$(cd "$1" && pwd)
shift

cuda=${CUDA_HOME:-${CUDA_PATH:-/usr/local/cuda}}
[ -f "$cuda/include/cuda_fp8.h" ] || { echo "no cuda_fp8.h in $cuda/include: set CUDA_HOME" >&2; exit 1; }

if [ $# -eq 0 ]; then
  own=$here/../../fp8-candle/kernels
  [ -d "$own" ] && set -- "$own"
  for d in "${CARGO_HOME:-$HOME/.cargo}"/registry/src/*/candle-kernels-0.11.1/src; do
    [ -d "$d" ] && set -- "$@" "$d" && break
  done
fi

# Files of candle-kernels that are about GGUF quantization and mixtures of experts.
skip='quantized|mmvq_gguf|mmq_.*|moe_.*'
kernels=()
tags=" "
for dir in "$@"; do
  dir=$(cd "$dir" && pwd)
  tag=$(basename "$(dirname "$dir")")_$(basename "$dir")
  # Folders of the same name in two places.
  [[ $tags == *" $tag "* ]] && tag=${tag}_$(echo "$dir" | cksum | cut -d' ' -f1)
  tags+="$tag "
  for file in "$dir"/*.cu; do
    [ -f "$file" ] || continue
    name=$(basename "$file" .cu)
    [[ $name =~ ^($skip)$ ]] && continue
    kernels+=("$(echo "${tag}_$name" | tr -c 'A-Za-z0-9_\n' '_')=$file")
  done
done

# Kernels whose source is gone.
for old in "$out"/kernels_*.so; do
  [ -e "$old" ] || continue
  name=$(basename "$old" .so)
  [[ " ${kernels[*]-} " == *" ${name#kernels_}="* ]] || rm -f "$old"
done

make -s -j"${JOBS:-2}" -k -f "$here/Makefile" OUT="$out" CUDA_INCLUDE="$cuda/include" KERNELS="${kernels[*]-}"

cudarc=$(ls -d "${CARGO_HOME:-$HOME/.cargo}"/registry/src/*/cudarc-0.19.* 2>/dev/null | sort -V | tail -1)
[ -n "$cudarc" ] || exit 0
libraries=("$out"/libcuda.so.1 "$out"/libcublas.so.13 "$out"/libcublasLt.so.13 "$out"/libcurand.so.10 "$out"/libnvrtc.so.13)
python3 "$here/missing.py" "$cudarc" "$out/build/missing.c" "${libraries[@]}"
"${CC:-cc}" -O1 -fPIC -shared -Wl,-soname,libmissing.so -o "$out/libmissing.so" "$out/build/missing.c"
[ -e "$cuda/complete" ] || exit 0
for library in "${libraries[@]}"; do
  name=$(basename "$library")
  # A script of the linker.
  echo "INPUT($library $out/libmissing.so)" >"$cuda/lib64/${name%.so*}.so"
done
