// The forward pass of attention with the sums of the values in FP8, for Hopper: P is rounded by rows to the values of FP8 codes.
//
// A block goes over the keys twice. First it finds the log-sum-exp of each query and its largest logit, from which the scale of its row of
// P follows. Then it computes the logits again, and from them P itself, which needs no rescaling on the way. As in
// attention_forward_wgmma.cu one warpgroup copies tiles, and the others have 64 queries each.
#include "attention_fp8.cuh"
#include "attention_forward_wgmma.cuh"

struct Fp8ForwardGroups {
  // Warpgroups with queries, queries per block, keys per step.
  static constexpr int GROUPS = 2, QUERIES = 64 * GROUPS, KEYS = 128;
  // A tile of keys or values in each slot. A warpgroup waits for two of them before it gives the first one back.
  using Tiles = Ring<GROUPS, 4, 2>;
  static constexpr int THREADS = Tiles::THREADS;
  // Registers of a thread that copies, and of one with queries: together those of a multiprocessor.
  static constexpr int COPY_REGISTERS = 24, QUERY_REGISTERS = 240;
};

#ifdef FP8_WGMMA

// The order of tiles: all keys, then keys and values in the order of attention_forward_wgmma.cu.
struct TwoPasses {
  int steps;

  __device__ __forceinline__ int places() const { return 3 * steps; }
  __device__ __forceinline__ int keys(int step) const { return steps + place_of_keys(step); }
  __device__ __forceinline__ int values(int step) const { return steps + place_of_values(step, steps); }
};

// What the warpgroup that copies does: queries, then all tiles.
template <int D>
__device__ __forceinline__ void copy_twice(__nv_bfloat16* q_tile, const Heads<const __nv_bfloat16>& q,
                                           const Heads<const __nv_bfloat16>& k, const Heads<const __nv_bfloat16>& v, int first,
                                           int steps, const Problem& problem) {
  using Groups = Fp8ForwardGroups;
  using Tiles = Groups::Tiles;
  __nv_bfloat16* const tiles = q_tile + Groups::QUERIES * D;
  copy_panels<D, Groups::QUERIES>(q_tile, q, first, problem.queries, problem.head_dim);
  Tiles::fill(3 * steps, [&](int place) {
    // The place in the second pass, below 0 in the first one.
    const int second = place - steps;
    const bool last = second + 1 == 2 * steps, keys = second <= 0 || (second % 2 == 1 && !last);
    const int step = second < 0 ? place : keys ? (second + 1) / 2 : last ? steps - 1 : second / 2 - 1;
    const Heads<const __nv_bfloat16> x = {keys ? k.data : v.data, 0, 0, keys ? k.row_stride : v.row_stride};
    copy_panels<D, Groups::KEYS>(tiles + Tiles::slot(place) * Groups::KEYS * D, x, step * Groups::KEYS, problem.keys,
                                 problem.head_dim);
  });
}

// What a warpgroup with queries does; `group` is its number.
template <int D>
__device__ __forceinline__ void attend_twice(const __nv_bfloat16* q_tile, const Results& results, uint32_t batch, uint32_t head,
                                             float* lse_row, int group, int first, int steps, const Problem& problem,
                                             float softmax_scale_log2, const Steps& format) {
  using Groups = Fp8ForwardGroups;
  using Tiles = Groups::Tiles;
  constexpr int KEYS = Groups::KEYS, N = KEYS / 8;
  constexpr uint32_t TILE_BYTES = KEYS * D * sizeof(__nv_bfloat16);
  const uint32_t tiles = shared_address(q_tile + Groups::QUERIES * D);
  const TwoPasses order{steps};

  const int lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
  // The warp's first query.
  const int row = first + 64 * group + 16 * (threadIdx.x / 32 % 4);
  float s[N][4];

  // Queries arrive with the first tile.
  Tiles::await(0, group);
  const LeftPanels<D, Groups::QUERIES, true> q(q_tile, 64 * group);
  const auto tile = [&](int place) { return tiles + Tiles::slot(place) * TILE_BYTES; };
  const auto start_logits = [&](int place) {
    q.template multiply<KEYS>(s, tile(place));
    wgmma_commit();
  };
  // Each step of the first pass has a turn, and each but the first of the second one.
  const int turns = 2 * steps - 1;
  Turns<Tiles>::begin(group);

  float lse[2], least[2];
  {
    RunningSoftmax softmax;
    float factor[2];
#pragma unroll 1
    for (int step = 0; step < steps; step++) {
      Turns<Tiles>::await(group);
      wgmma_fence();
      start_logits(step);
      Turns<Tiles>::pass_on(group, step + 1 == turns);
      wgmma_wait<0>();
      wgmma_done(s);
      Tiles::give_back(step, order.places());
      hide(s, problem, row, step * KEYS, -INFINITY);
      softmax.update(s, softmax_scale_log2, factor);
      // The next keys, which after the last ones are the first ones again.
      Tiles::await(step + 1, group);
    }
#pragma unroll
    for (int half = 0; half < 2; half++) {
      const float largest = softmax.largest[half] * softmax_scale_log2;
      lse[half] = largest + log2f(row_sum(softmax.sum[half]));
      least[half] = format.least(exp2_approximate(largest - lse[half]));
      const int query = row + 8 * half + g;
      if (t == 0 && query < statistics_row(problem.queries)) lse_row[query] = query < problem.queries ? lse[half] : 0.0f;
    }
  }

  float out[1][D / 8][4];
  uint32_t p[N / 2][4];
  clear(out);
  const auto start_values = [&](int place) {
    add_results<KEYS>(out[0], p, tile(place));
    wgmma_commit();
  };
  const auto probabilities = [&](int step) {
    hide(s, problem, row, step * KEYS, -INFINITY);
#pragma unroll
    for (int n = 0; n < N; n++)
#pragma unroll
      for (int e = 0; e < 4; e++) {
        const float x = exp2_approximate(fmaf(s[n][e], softmax_scale_log2, -lse[e >> 1]));
        s[n][e] = nearest(x, least[e >> 1], format.to_large);
      }
  };
  wgmma_fence();
  start_logits(order.keys(0));
  wgmma_wait<0>();
  wgmma_done(s);
  Tiles::give_back(order.keys(0), order.places());
  probabilities(0);
  round_results(p, s);
#pragma unroll 1
  for (int step = 1; step < steps; step++) {
    const int keys = order.keys(step), values = order.values(step - 1);
    Tiles::await(keys, group);
    Turns<Tiles>::await(group);
    wgmma_fence();
    start_logits(keys);
    Tiles::await(values, group);
    start_values(values);
    Turns<Tiles>::pass_on(group, steps + step == turns);
    wgmma_wait<1>();
    wgmma_done(s);
    Tiles::give_back(keys, order.places());
    probabilities(step);
    computed_here(all_bits(s));
    wgmma_wait<0>();
    wgmma_done(out[0]);
    wgmma_done(p);
    Tiles::give_back(values, order.places());
    round_results(p, s);
  }
  const int values = order.values(steps - 1);
  Tiles::await(values, group);
  wgmma_fence();
  start_values(values);
  wgmma_wait<0>();
  wgmma_done(out[0]);
  results.store<D>(batch, head, row, problem.queries, problem.head_dim, out, 1.0f);
}

#endif

// A block per tile of queries and head, for a `softmax_scale_log2` above 0. `lse` is that of attention_forward.
template <int D>
__device__ __forceinline__ void attention_forward_fp8(const Heads<const __nv_bfloat16>& all_q, const Heads<const __nv_bfloat16>& all_k,
                                                      const Heads<const __nv_bfloat16>& all_v, const Results& results,
                                                      float* __restrict__ all_lse, const Problem& problem,
                                                      float softmax_scale_log2, const Steps& format) {
#ifdef FP8_WGMMA
  using Groups = Fp8ForwardGroups;
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
    copy_twice<D>(q_tile, all_q.at(batch, head), all_k.at(batch, head / problem.group), all_v.at(batch, head / problem.group),
                  first, steps, problem);
  } else {
    more_registers<Groups::QUERY_REGISTERS>();
    attend_twice<D>(q_tile, results, batch, head, all_lse + (uint64_t)pair * statistics_row(problem.queries), group, first, steps,
                    problem, softmax_scale_log2, format);
  }
#endif
}

#define FORWARD(D)                                                                                                         \
  extern "C" __global__ void __launch_bounds__(Fp8ForwardGroups::THREADS, 1) fp8_attention_forward_fp8_d##D(              \
      const __nv_bfloat16* q, const __nv_bfloat16* k, const __nv_bfloat16* v, void* out, float* lse, uint64_t q_batch,      \
      uint64_t q_head, uint64_t q_row, uint64_t k_batch, uint64_t k_head, uint64_t k_row, uint64_t v_batch, uint64_t v_head, \
      uint64_t v_row, uint64_t out_batch, uint64_t out_head, uint64_t out_row, int heads, int group, int queries, int keys, \
      int head_dim, int causal, float softmax_scale_log2, int wide, float most, float least_normal, float to_large) {       \
    attention_forward_fp8<D>({q, q_batch, q_head, q_row}, {k, k_batch, k_head, k_row}, {v, v_batch, v_head, v_row},         \
                             {out, out_batch, out_head, out_row, wide}, lse, {heads, group, queries, keys, head_dim, causal}, \
                             softmax_scale_log2, {most, least_normal, to_large});                                           \
  }
FORWARD(64)
FORWARD(128)
