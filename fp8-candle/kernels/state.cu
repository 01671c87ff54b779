// The scaling-state table: cells that casts record into, and the update of all rows in one launch.
#include "scales.cuh"

// Merges the amaxes of one cast into the cell of its row: the largest finite one if `keep`, and one count if any is not
// finite. One block. Magnitudes have the order of their bits, so the maximum of integers is that of the floats.
extern "C" __global__ void fp8_record_amax(const float* amaxes, uint64_t len, float* cell, uint32_t* count,
                                           uint32_t keep) {
  float largest = 0.0f;
  float seen = 0.0f;
  for (uint64_t i = threadIdx.x; i < len; i += blockDim.x) {
    if (magnitude_bits(amaxes[i]) < 0x7F800000u)
      largest = fmaxf(largest, amaxes[i]);
    else
      seen = 1.0f;
  }
  largest = block_reduce<Max>(largest, 0.0f);
  __syncthreads();
  seen = block_reduce<Max>(seen, 0.0f);
  if (threadIdx.x == 0) {
    if (keep) atomicMax(reinterpret_cast<uint32_t*>(cell), __float_as_uint(largest));
    if (seen > 0.0f) atomicAdd(count, 1u);
  }
}

// Shortens `amaxes` for `fp8_record_amax`, whose one block takes milliseconds to read millions of them. Each block writes the largest
// finite amax it has seen, and behind those of all blocks infinity if it has seen one that is not finite; recording these gives the same.
// `amaxes` is aligned to 16 bytes.
extern "C" __global__ void fp8_gather_amaxes(const float* amaxes, uint64_t len, float* gathered) {
  constexpr int N = 4, AT_ONCE = 4;
  uint32_t largest = 0, other = 0;
  const auto see = [&](float amax) {
    const uint32_t bits = magnitude_bits(amax);
    if (bits < 0x7F800000u)
      largest = max(largest, bits);
    else
      other = 0x7F800000u;
  };
  const uint64_t packs = len / N, step = global_threads();
  for (uint64_t i = global_thread(); i < packs; i += AT_ONCE * step) {
    Pack<float, N> read[AT_ONCE];
    // What lies beyond the end is read from this thread's first place again.
#pragma unroll
    for (int j = 0; j < AT_ONCE; j++) read[j] = load_pack<N>(amaxes + (i + j * step < packs ? i + j * step : i) * N);
#pragma unroll
    for (int j = 0; j < AT_ONCE; j++)
#pragma unroll
      for (int k = 0; k < N; k++) see(read[j].v[k]);
  }
  for (uint64_t i = packs * N + global_thread(); i < len; i += step) see(amaxes[i]);
  largest = block_reduce<Max>(largest, 0u);
  other = block_reduce<Max>(other, 0u);
  if (threadIdx.x == 0) {
    gathered[blockIdx.x] = __uint_as_float(largest);
    gathered[gridDim.x + blockIdx.x] = __uint_as_float(other);
  }
}

// Moves the cells of the rows selected by `which` out; the other cells keep their values, and their rows get 0.
extern "C" __global__ void fp8_take_cells(float* cells, uint32_t* counts, const uint8_t* which, float* amaxes,
                                          uint32_t* taken, uint64_t rows) {
  for (uint64_t row = global_thread(); row < rows; row += global_threads()) {
    const bool take = which[row] != 0;
    amaxes[row] = take ? cells[row] : 0.0f;
    taken[row] = take ? counts[row] : 0u;
    if (take) {
      cells[row] = 0.0f;
      counts[row] = 0u;
    }
  }
}

// Merges amaxes and counts into cells that may already hold some.
extern "C" __global__ void fp8_merge_cells(const float* amaxes, const uint32_t* more, float* cells, uint32_t* counts,
                                           uint64_t rows) {
  for (uint64_t row = global_thread(); row < rows; row += global_threads()) {
    cells[row] = fmaxf(cells[row], amaxes[row]);
    counts[row] = counts[row] > 0xFFFFFFFFu - more[row] ? 0xFFFFFFFFu : counts[row] + more[row];
  }
}

enum RowFlags : uint32_t { UPDATE = 1, MOST_RECENT = 2, POWER_OF_TWO = 4, REMAKE = 8 };

// A block per row of histories [rows, len]. An amax of 0 or one that is not finite leaves history and scale unchanged,
// unless the scale has to be made for another format. `max_values` are those of the formats times 2^-margin.
extern "C" __global__ void fp8_update_columns(const float* old_scales, const float* old_dequant_scales,
                                              const float* old_histories,
                                              const uint32_t* old_counts, const float* amaxes, const uint32_t* more,
                                              const float* max_values, const uint32_t* windows, const uint32_t* flags,
                                              float* quant_scales, float* dequant_scales, float* histories,
                                              uint32_t* counts, uint64_t len) {
  const uint64_t row = blockIdx.x;
  const uint32_t flag = flags[row];
  const float* history = old_histories + row * len;
  const float previous = old_scales[row];
  const float amax = amaxes[row];
  const bool used = (flag & UPDATE) && amax > 0.0f && magnitude_bits(amax) < 0x7F800000u;
  const uint64_t window = (flag & UPDATE) ? windows[row] : len;
  float largest = used ? amax : 0.0f;
  for (uint64_t i = threadIdx.x; i < len; i += blockDim.x) {
    float value = !used ? history[i] : i == 0 ? amax : history[i - 1];
    if (i >= window) value = 0.0f;
    histories[row * len + i] = value;
    // fmaxf drops NaN.
    largest = fmaxf(largest, value);
  }
  largest = block_reduce<Max>(largest, 0.0f);
  if (threadIdx.x == 0) {
    const float newest = used ? amax : window > 0 ? history[0] : 0.0f;
    const float reduced = (flag & MOST_RECENT) ? newest : largest;
    float scale = previous;
    if ((used || (flag & REMAKE)) && reduced > 0.0f && magnitude_bits(reduced) < 0x7F800000u) {
      // A subnormal scale might have no finite reciprocal.
      scale = fmaxf(finite_quotient(max_values[row], reduced, previous), 1.175494351e-38f);
      if (flag & POWER_OF_TWO) scale = floor_to_power_of_two(scale);
    } else if ((flag & REMAKE) && largest == 0.0f) {
      scale = 1.0f;
    }
    quant_scales[row] = scale;
    // A scale that stays keeps its dequant_scale, which need not be its rounded reciprocal after calibration.
    dequant_scales[row] = __float_as_uint(scale) == __float_as_uint(previous) ? old_dequant_scales[row]
                                                                               : __fdiv_rn(1.0f, scale);
    counts[row] = old_counts[row] > 0xFFFFFFFFu - more[row] ? 0xFFFFFFFFu : old_counts[row] + more[row];
  }
}
