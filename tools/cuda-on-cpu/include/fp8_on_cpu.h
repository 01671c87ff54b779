// Included before every kernel source that is compiled for the CPU.
//
// NVIDIA's headers come first, as for a host compiler: they bring the vector types and the 8- and 16-bit
// floating point types with software conversions. Then come the words and functions that only nvcc knows.
#pragma once
#include <algorithm>
#include <cassert>
#include <climits>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <limits>
#include <type_traits>
#include <utility>

#include <cuda_runtime.h>

#include <cuda_fp16.h>

#include <cuda_bf16.h>

#include <cuda_fp8.h>

#undef __global__
#undef __device__
#undef __host__
#undef __constant__
#undef __shared__
#undef __launch_bounds__
#undef __forceinline__
#undef __noinline__
#undef __grid_constant__
#undef __managed__
// The first three words are left for the build script, which lists the kernels and rewrites shared memory.
#define __global__ COC_GLOBAL
#define __shared__ COC_SHARED
#define __launch_bounds__(...)
#define __device__
#define __host__
#define __constant__
#define __grid_constant__
#define __managed__
#define __forceinline__ inline __attribute__((always_inline))
#define __noinline__ __attribute__((noinline))

#define FP8_ON_CPU 1
#ifndef COC_ARCH
#define COC_ARCH 900
#endif
#define __CUDA_ARCH__ COC_ARCH
#define __CUDACC_VER_MAJOR__ 13
#define __CUDACC_VER_MINOR__ 0

#include "coc/runtime.h"

#include "coc/builtins.h"
#include "coc/math.h"
#include "coc/half.h"
#include "coc/atomics.h"
#include "coc/warp.h"
#include "coc/trampoline.h"
