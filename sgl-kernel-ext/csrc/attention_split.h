// One split of a KV list: its rows in the pool, its softmax, and the merging of splits.
#pragma once
#include <ATen/core/Tensor.h>

#include <algorithm>
#include <limits>
#include <vector>

#include "packed.h"

namespace sgl_ext {

// A state is max, sum, padding to a vector, then the unnormalised output. Scores are in base 2.
constexpr int kStateHeader = kLanes;

// K or V of one layer, [slots, kv_heads, head_dim], or packed, [blocks, kv_heads, block bytes], with
// the last contiguous; strides in bytes, `slot_stride` that of a block.
struct KvPool {
  const uint8_t* base;
  int64_t slots, slot_stride, head_stride;
  Codec codec;
};

struct KvPools {
  KvPool k, v;

  int64_t slots() const { return std::min(k.slots, v.slots); }
};

static inline KvPool kv_pool(const at::Tensor& t, const Codec& codec = {}) {
  const int64_t size = t.element_size();
  return {static_cast<const uint8_t*>(t.const_data_ptr()), t.size(0) * codec.tokens,
          t.stride(0) * size, t.stride(1) * size, codec};
}

alignas(64) static const uint8_t kZeroRow[kMaxHeadDim * sizeof(float)] = {};

static inline bool all_below(const int32_t* slots, int count, int64_t limit) {
  uint32_t largest = 0;
  for (int i = 0; i < count; ++i) largest = std::max(largest, static_cast<uint32_t>(slots[i]));
  return largest < limit;
}

// Addresses of one head's rows of `slots`.
static inline void list_rows(
    const KvPool& pool, int64_t head, const int32_t* slots, int count, const uint8_t** rows) {
  const uint8_t* base = pool.base + head * pool.head_stride;
  for (int i = 0; i < count; ++i) rows[i] = base + slots[i] * pool.slot_stride;
}

// The same, with zero rows up to a full block of 16.
static inline void locate_rows(
    const KvPool& pool, int64_t head, const int32_t* slots, int count, const uint8_t** rows) {
  list_rows(pool, head, slots, count, rows);
  std::fill(rows + count, rows + round_up(count, kLanes), kZeroRow);
}

// Whether `count` rows hold neither infinities nor NaN.
template <class T>
static bool all_finite(const uint8_t* const* rows, int count, int head_dim) {
  for (int r = 0; r < count; ++r) {
    const T* row = reinterpret_cast<const T*>(rows[r]);
    Vec zero = {};
    for (int d = 0; d < head_dim; d += kLanes) {
      const Vec x = load_n(row + d, head_dim - d);
      zero = zero + (x - x);  // 0 if finite, else NaN
    }
    if (!(reduce_sum(zero) == 0.0f)) return false;
  }
  return true;
}

// Raw dot products of one query -> probabilities relative to the split's max (as words, zero from
// key `visible` on), with max and sum in state[0] and state[1].
template <class T>
static void softmax_split(
    float* scores, int visible, int blocks, float scale_log2, uint32_t* probs, float* state) {
  constexpr float kMasked = -std::numeric_limits<float>::infinity();
  constexpr int kBlockWords = kLanes / Words<T>::kPair;
  const int seen_blocks = ceil_div(visible, kLanes);
  const Vec scale = splat(scale_log2);
  Vec highest = splat(kMasked);
  for (int b = 0; b < seen_blocks; ++b) {
    float* block = scores + b * kLanes;
    store16(block, load16(block) * scale);
    if (visible - b * kLanes < kLanes) std::fill(scores + visible, block + kLanes, kMasked);
    highest = max(load16(block), highest);
  }
  const float top = reduce_max(highest);
  Vec total = {};
  for (int b = 0; b < seen_blocks; ++b) {
    const Vec p = exp2(load16(scores + b * kLanes) - splat(top));
    total = total + p;
    Words<T>::store_probs(probs + b * kBlockWords, p);
  }
  std::fill(probs + seen_blocks * kBlockWords, probs + blocks * kBlockWords, 0u);
  state[0] = top;
  state[1] = reduce_sum(total);
}

struct MergeWeights {
  float into, from;
};

// Merges max and sum of the next split into those of the splits before it.
static inline MergeWeights merge_softmax(float* into, const float* from) {
  const float top = std::max(into[0], from[0]);
  float w[kLanes] = {into[0] - top, from[0] - top};
  store16(w, exp2(load16(w)));
  into[0] = top;
  into[1] = into[1] * w[0] + from[1] * w[1];
  return {w[0], w[1]};
}

// 64-byte aligned floats this thread keeps between calls; a second call ends the first's use.
static inline float* thread_scratch(int64_t floats) {
  struct alignas(64) Line {
    float x[16];
  };
  static thread_local std::vector<Line> lines;
  const size_t needed = (floats + 15) / 16;
  if (lines.size() < needed) lines.resize(needed);
  return lines.data()->x;
}

}  // namespace sgl_ext
