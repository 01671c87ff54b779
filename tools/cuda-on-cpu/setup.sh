#!/usr/bin/env bash
# Puts NVIDIA's compiler and headers (CUDA 13.0, from PyPI) into a folder, and an `env.sh` to source before building with them.
# usage: setup.sh DIR
#
# DIR/lib64, where builds look for libraries, gets the static runtime here; build.sh adds the stand-ins when CUDA_HOME is set.
set -euo pipefail
[ $# -eq 1 ] || { sed -n '2,5s/^# \{0,1\}//p' "$0" >&2; exit 2; }
here=$(cd "$(dirname "$0")" && pwd)
mkdir -p "$1"
dir=$(cd "$1" && pwd)
home=$dir/nvidia/cu13

# Exact versions: the compiler, its host headers, its optimizer, the runtime, and the C++ library of kernels.
wheels=(
  nvidia-cuda-nvcc==13.0.88 nvidia-cuda-crt==13.0.88 nvidia-nvvm==13.0.88
  nvidia-cuda-runtime==13.0.96 nvidia-cuda-cccl==13.0.85
)
if [ ! -e "$home/complete" ]; then
  python3 -m pip install --quiet --disable-pip-version-check --root-user-action=ignore --no-deps --no-compile \
    --only-binary=:all: --upgrade --target "$dir" "${wheels[@]}"
  chmod +x "$home"/bin/* "$home"/nvvm/bin/*
  mkdir -p "$home/lib64"
  # Without a shared one beside it, `-lcudart` takes the static runtime.
  cp "$home/lib/libcudart_static.a" "$home/lib64/libcudart.a"
  touch "$home/complete"
fi

cat >"$dir/env.sh" <<END
export CUDA_HOME=$home CUDA_PATH=$home CUDA_COMPUTE_CAP=90 CUDARC_CUDA_VERSION=13000
export NVCC=$here/nvcc REAL_NVCC=$home/bin/nvcc
export PATH=$home/bin:\$PATH
END
"$home/bin/nvcc" --version | grep release
