// Warp collectives. Every lane hands over a small struct; the last one to arrive computes for all.
#pragma once

namespace coc {

enum class Shuffle { Index, Up, Down, Xor };

template <class T> struct ShuffleLane {
  T value;
  T result;
  int operand;
  int width;
};

template <class T, Shuffle kind> void shuffle_op(void* const* lanes, unsigned mask) {
  for (unsigned rest = mask; rest; rest &= rest - 1) {
    int lane = __builtin_ctz(rest);
    auto* own = static_cast<ShuffleLane<T>*>(lanes[lane]);
    int first = lane & ~(own->width - 1), last = first + own->width - 1, from;
    switch (kind) {
      case Shuffle::Index: from = first | (own->operand & (own->width - 1)); break;
      case Shuffle::Up: from = lane - own->operand < first ? lane : lane - own->operand; break;
      case Shuffle::Down: from = lane + own->operand > last ? lane : lane + own->operand; break;
      case Shuffle::Xor: from = (lane ^ own->operand) > last ? lane : lane ^ own->operand; break;
    }
    if (!(mask >> from & 1)) coc_fail("a shuffle of lane %d reads lane %d, which is not in the mask 0x%08x", lane, from, mask);
    own->result = static_cast<ShuffleLane<T>*>(lanes[from])->value;
  }
}

template <class T, Shuffle kind> inline T shuffle(unsigned mask, T value, int operand, int width, const char* what) {
  static_assert(sizeof(T) <= 8 && std::is_trivially_copyable_v<T>);
  if (width < 1 || width > 32 || (width & (width - 1))) coc_fail("%s: width %d", what, width);
  ShuffleLane<T> own{value, value, operand, width};
  coc_warp_collective(mask, shuffle_op<T, kind>, &own, what);
  return own.result;
}

// Gives every lane fold(values of all lanes in the mask, in order).
template <class T, class R> struct FoldLane {
  T value;
  R result;
};

template <class T, class R, R (*fold)(const T*, unsigned)> void fold_op(void* const* lanes, unsigned mask) {
  T values[32]{};
  for (unsigned rest = mask; rest; rest &= rest - 1) {
    int lane = __builtin_ctz(rest);
    values[lane] = static_cast<FoldLane<T, R>*>(lanes[lane])->value;
  }
  R result = fold(values, mask);
  for (unsigned rest = mask; rest; rest &= rest - 1) static_cast<FoldLane<T, R>*>(lanes[__builtin_ctz(rest)])->result = result;
}

template <class T, class R, R (*fold)(const T*, unsigned)> inline R fold_lanes(unsigned mask, T value, const char* what) {
  FoldLane<T, R> own{value, R{}};
  coc_warp_collective(mask, fold_op<T, R, fold>, &own, what);
  return own.result;
}

inline unsigned ballot(const int* values, unsigned) {
  unsigned set = 0;
  for (int i = 0; i < 32; i++) set |= unsigned(values[i] != 0) << i;
  return set;
}

enum class Fold { Add, Min, Max, And, Or, Xor };
template <class T, Fold kind> T reduce(const T* values, unsigned mask) {
  T result = values[__builtin_ctz(mask)];
  for (unsigned rest = mask & (mask - 1); rest; rest &= rest - 1) {
    T v = values[__builtin_ctz(rest)];
    switch (kind) {
      case Fold::Add: result += v; break;
      case Fold::Min: result = v < result ? v : result; break;
      case Fold::Max: result = result < v ? v : result; break;
      case Fold::And: result &= v; break;
      case Fold::Or: result |= v; break;
      case Fold::Xor: result ^= v; break;
    }
  }
  return result;
}

inline void nothing(void* const*, unsigned) {}

}  // namespace coc

template <class T> inline T __shfl_sync(unsigned mask, T value, int lane, int width = 32) {
  return coc::shuffle<T, coc::Shuffle::Index>(mask, value, lane, width, "__shfl_sync");
}
template <class T> inline T __shfl_up_sync(unsigned mask, T value, unsigned delta, int width = 32) {
  return coc::shuffle<T, coc::Shuffle::Up>(mask, value, int(delta), width, "__shfl_up_sync");
}
template <class T> inline T __shfl_down_sync(unsigned mask, T value, unsigned delta, int width = 32) {
  return coc::shuffle<T, coc::Shuffle::Down>(mask, value, int(delta), width, "__shfl_down_sync");
}
template <class T> inline T __shfl_xor_sync(unsigned mask, T value, int lanes, int width = 32) {
  return coc::shuffle<T, coc::Shuffle::Xor>(mask, value, lanes, width, "__shfl_xor_sync");
}

inline unsigned __ballot_sync(unsigned mask, int p) {
  return coc::fold_lanes<int, unsigned, coc::ballot>(mask, p, "__ballot_sync");
}
inline int __any_sync(unsigned mask, int p) { return coc::fold_lanes<int, unsigned, coc::ballot>(mask, p, "__any_sync") != 0; }
inline int __all_sync(unsigned mask, int p) {
  return coc::fold_lanes<int, unsigned, coc::ballot>(mask, p, "__all_sync") == mask;
}
inline unsigned __activemask() { return coc_active_mask(); }
inline void __syncwarp(unsigned mask = ~0u) { coc_warp_collective(mask, coc::nothing, nullptr, "__syncwarp"); }

#define COC_REDUCE(T, name, kind) \
  inline T name(unsigned mask, T v) { return coc::fold_lanes<T, T, coc::reduce<T, coc::Fold::kind>>(mask, v, #name); }
COC_REDUCE(int, __reduce_add_sync, Add)
COC_REDUCE(int, __reduce_min_sync, Min)
COC_REDUCE(int, __reduce_max_sync, Max)
COC_REDUCE(unsigned, __reduce_add_sync, Add)
COC_REDUCE(unsigned, __reduce_min_sync, Min)
COC_REDUCE(unsigned, __reduce_max_sync, Max)
COC_REDUCE(unsigned, __reduce_and_sync, And)
COC_REDUCE(unsigned, __reduce_or_sync, Or)
COC_REDUCE(unsigned, __reduce_xor_sync, Xor)
#undef COC_REDUCE
