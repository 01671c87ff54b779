// The forward pass of attention_forward.cu for Hopper and bf16, on products of warpgroups.
//
// One warpgroup of a block copies tiles of keys and values into shared memory, the others have 64 queries each. These start the
// product of a tile of keys together with that of the values before it, and take the exponentials of the one while the other
// runs.
//
// Source: Shah et al., "FlashAttention-3: Fast and Accurate Attention with Asynchrony and Low-precision", arXiv:2407.08608.
#include "attention_forward_wgmma.cuh"

template <int D> struct ForwardGroups {
  // Warpgroups with queries, queries per block, keys per step.
  static constexpr int GROUPS = D == 64 ? 3 : 2, QUERIES = 64 * GROUPS, KEYS = 128;
  // A tile of keys or values in each slot. A warpgroup waits for two of them before it gives the first one back.
  using Tiles = Ring<GROUPS, 4, 2>;
  static constexpr int THREADS = Tiles::THREADS;
  // Registers of a thread that copies, and of one with queries: together those of a multiprocessor.
  static constexpr int COPY_REGISTERS = D == 64 ? 32 : 24, QUERY_REGISTERS = D == 64 ? 160 : 240;
  // Whether there are registers for the queries too, and barriers for turns.
  static constexpr bool HELD = D == 128, IN_TURNS = D == 128;
};

#ifdef FP8_WGMMA

// What the warpgroup that copies does: queries, then all tiles of keys and values.
template <int D>
__device__ __forceinline__ void copy_all(__nv_bfloat16* q_tile, const Heads<const __nv_bfloat16>& q,
                                         const Heads<const __nv_bfloat16>& k, const Heads<const __nv_bfloat16>& v, int first,
                                         int steps, const Problem& problem) {
  using Groups = ForwardGroups<D>;
  using Tiles = typename Groups::Tiles;
  __nv_bfloat16* const tiles = q_tile + Groups::QUERIES * D;
  copy_panels<D, Groups::QUERIES>(q_tile, q, first, problem.queries, problem.head_dim);
  Tiles::fill(2 * steps, [&](int place) {
    const bool last = place + 1 == 2 * steps, keys = place == 0 || (place % 2 == 1 && !last);
    const int step = keys ? (place + 1) / 2 : last ? steps - 1 : place / 2 - 1;
    const Heads<const __nv_bfloat16> x = {keys ? k.data : v.data, 0, 0, keys ? k.row_stride : v.row_stride};
    copy_panels<D, Groups::KEYS>(tiles + Tiles::slot(place) * Groups::KEYS * D, x, step * Groups::KEYS, problem.keys,
                                 problem.head_dim);
  });
}

// What a warpgroup with queries does; `group` is its number.
template <int D>
__device__ __forceinline__ void attend(const __nv_bfloat16* q_tile, const Heads<__nv_bfloat16>& out_rows, float* lse, int group,
                                       int first, int steps, const Problem& problem, float softmax_scale_log2) {
  using Groups = ForwardGroups<D>;
  using Tiles = typename Groups::Tiles;
  constexpr int KEYS = Groups::KEYS, N = KEYS / 8;
  constexpr uint32_t TILE_BYTES = KEYS * D * sizeof(__nv_bfloat16);
  const uint32_t tiles = shared_address(q_tile + Groups::QUERIES * D);

  const int lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
  // The warp's first query.
  const int row = first + 64 * group + 16 * (threadIdx.x / 32 % 4);
  float s[N][4], out[1][D / 8][4], factor[2];
  uint32_t p[N / 2][4];
  RunningSoftmax softmax;
  clear(out);

  // Queries arrive with the first tile.
  Tiles::await(place_of_keys(0), group);
  const LeftPanels<D, Groups::QUERIES, Groups::HELD> q(q_tile, 64 * group);
  const auto tile = [&](int place) { return tiles + Tiles::slot(place) * TILE_BYTES; };
  const auto start_logits = [&](int place) {
    q.template multiply<KEYS>(s, tile(place));
    wgmma_commit();
  };
  const auto start_values = [&](int place) {
    add_results<KEYS>(out[0], p, tile(place));
    wgmma_commit();
  };
  const auto mask = [&](int step) { hide(s, problem, row, step * KEYS, -INFINITY); };
  wgmma_fence();
  start_logits(place_of_keys(0));
  wgmma_wait<0>();
  wgmma_done(s);
  Tiles::give_back(place_of_keys(0), 2 * steps);
  mask(0);
  softmax.update(s, softmax_scale_log2, factor);
  round_results(p, s);
  if constexpr (Groups::IN_TURNS) {
    if (steps > 1) Turns<Tiles>::begin(group);
  }
#pragma unroll 1
  for (int step = 1; step < steps; step++) {
    const int keys = place_of_keys(step), values = place_of_values(step - 1, steps);
    Tiles::await(keys, group);
    if constexpr (Groups::IN_TURNS) Turns<Tiles>::await(group);
    wgmma_fence();
    start_logits(keys);
    Tiles::await(values, group);
    start_values(values);
    if constexpr (Groups::IN_TURNS) Turns<Tiles>::pass_on(group, step + 1 == steps);
    wgmma_wait<1>();
    wgmma_done(s);
    Tiles::give_back(keys, 2 * steps);
    mask(step);
    softmax.update(s, softmax_scale_log2, factor);
    computed_here(__float_as_int(softmax.sum[0] + softmax.sum[1]));
    wgmma_wait<0>();
    wgmma_done(out[0]);
    wgmma_done(p);
    Tiles::give_back(values, 2 * steps);
#pragma unroll
    for (int n = 0; n < D / 8; n++)
#pragma unroll
      for (int e = 0; e < 4; e++) out[0][n][e] *= factor[e >> 1];
    round_results(p, s);
  }
  const int values = place_of_values(steps - 1, steps);
  Tiles::await(values, group);
  wgmma_fence();
  start_values(values);
  wgmma_wait<0>();
  wgmma_done(out[0]);

  float inverse[1][2];
#pragma unroll
  for (int half = 0; half < 2; half++) {
    float total = softmax.sum[half];
    total += __shfl_xor_sync(ALL_LANES, total, 1);
    total += __shfl_xor_sync(ALL_LANES, total, 2);
    const int query = row + 8 * half + g;
    if (t == 0 && query < statistics_row(problem.queries))
      lse[query] = query < problem.queries ? softmax.largest[half] * softmax_scale_log2 + log2f(total) : 0.0f;
    inverse[0][half] = 1.0f / total;
  }
  store_rows<D>(out_rows, row, problem.queries, problem.head_dim, out, inverse);
}

#endif

// As attention_forward, for a `softmax_scale_log2` above 0.
template <int D>
__device__ __forceinline__ void attention_forward_wgmma(const Heads<const __nv_bfloat16>& all_q,
                                                        const Heads<const __nv_bfloat16>& all_k,
                                                        const Heads<const __nv_bfloat16>& all_v,
                                                        const Heads<__nv_bfloat16>& all_out, float* __restrict__ all_lse,
                                                        const Problem& problem, float softmax_scale_log2) {
#ifdef FP8_WGMMA
  using Groups = ForwardGroups<D>;
  extern __shared__ __align__(1024) uint8_t shared[];
  __nv_bfloat16* const q_tile = reinterpret_cast<__nv_bfloat16*>(shared);

  const int tiles = (problem.queries + Groups::QUERIES - 1) / Groups::QUERIES;
  const uint32_t pair = blockIdx.x / tiles, tile = blockIdx.x % tiles;
  const uint32_t batch = pair / problem.heads, head = pair % problem.heads;
  // The longest rows of a causal mask start first.
  const int first = Groups::QUERIES * (problem.causal ? tiles - 1 - tile : tile);
  const int steps = max(1, (problem.visible(first + Groups::QUERIES - 1) + Groups::KEYS - 1) / Groups::KEYS);
  const int group = warpgroup();
  if (group == Groups::GROUPS) {
    fewer_registers<Groups::COPY_REGISTERS>();
    copy_all<D>(q_tile, all_q.at(batch, head), all_k.at(batch, head / problem.group), all_v.at(batch, head / problem.group),
                first, steps, problem);
  } else {
    more_registers<Groups::QUERY_REGISTERS>();
    attend<D>(q_tile, all_out.at(batch, head), all_lse + (uint64_t)pair * statistics_row(problem.queries), group, first, steps,
              problem, softmax_scale_log2);
  }
#endif
}

#define FORWARD(D)                                                                                                       \
  extern "C" __global__ void __launch_bounds__(ForwardGroups<D>::THREADS, 1) fp8_attention_forward_wgmma_d##D##_bf16(    \
      const __nv_bfloat16* q, const __nv_bfloat16* k, const __nv_bfloat16* v, __nv_bfloat16* out, float* lse,             \
      uint64_t q_batch, uint64_t q_head, uint64_t q_row, uint64_t k_batch, uint64_t k_head, uint64_t k_row,               \
      uint64_t v_batch, uint64_t v_head, uint64_t v_row, uint64_t out_batch, uint64_t out_head, uint64_t out_row,         \
      int heads, int group, int queries, int keys, int head_dim, int causal, float softmax_scale_log2) {                  \
    attention_forward_wgmma<D>({q, q_batch, q_head, q_row}, {k, k_batch, k_head, k_row}, {v, v_batch, v_head, v_row},     \
                               {out, out_batch, out_head, out_row}, lse, {heads, group, queries, keys, head_dim, causal}, \
                               softmax_scale_log2);                                                                       \
  }
FORWARD(64)
FORWARD(128)
