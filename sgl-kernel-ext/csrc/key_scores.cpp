// Attention probabilities summed over rows: split by split the probabilities of every query relative
// to the split's own max, with the dot products of attention.cpp; then, with the max and sum of all
// splits known, their weighted sums. Each thread takes whole splits, so the result does not depend on
// their number.
#include <ATen/ops/empty.h>

#include <cmath>
#include <limits>
#include <vector>

#include "attention_split.h"
#include "kernels.h"
#include "parallel.h"

namespace sgl_ext {
namespace {

struct Scoring {
  KvPool k;
  const int32_t* slots;
  int keys, rows, heads, kv_heads, gqa, head_dim;
  bool causal;
  float scale_log2;
  std::vector<float> queries;  // words, [kv_heads][rows * gqa][depth]: query i is row i / gqa
  std::vector<float> states;   // [splits][kv_heads][rows * gqa][2]: max, sum
  std::vector<float> totals;   // [kv_heads][rows * gqa][2]: of all splits
  float* probs;                // [splits][kv_heads][rows * gqa][kSplit]: exp2(score - split's max)
  float* out;                  // [heads, keys]

  int splits() const { return ceil_div(keys, kSplit); }
  int head_queries() const { return rows * gqa; }
  int64_t index(int64_t split, int64_t kv_head, int64_t query) const {
    return (split * kv_heads + kv_head) * head_queries() + query;
  }
  float* state(int64_t split, int64_t kv_head, int64_t query) {
    return states.data() + 2 * index(split, kv_head, query);
  }
  // Keys of a split that a query sees.
  int seen(int split, int query) const {
    const int visible = causal ? keys - (rows - 1 - query / gqa) : keys;
    return std::clamp(visible - split * kSplit, 0, kSplit);
  }
};

// Calls use(query, scores) with the dot products of every query of a KV head and a split's keys.
template <class T, class Use>
void for_each_query(const Scoring& p, int split, int kv_head, const Use& use) {
  const int64_t depth = p.head_dim / Words<T>::kPair;
  float* scratch = thread_scratch(kTileRows * kSplit + kSplit * depth + kLanes * p.head_dim);
  float* scores = scratch;
  uint32_t* packed = reinterpret_cast<uint32_t*>(scores + kTileRows * kSplit);
  float* convert = scores + kTileRows * kSplit + kSplit * depth;

  const int count = std::min(kSplit, p.keys - split * kSplit);
  const int blocks = ceil_div(count, kLanes);
  const uint8_t* rows[kSplit];
  locate_rows(p.k, kv_head, p.slots + split * kSplit, count, rows);
  for (int b = 0; b < blocks; ++b) {
    pack_k_block<T>(rows + b * kLanes, b, blocks, p.head_dim, packed, convert);
  }
  const uint32_t* q = reinterpret_cast<const uint32_t*>(p.queries.data()) +
                      int64_t{kv_head} * p.head_queries() * depth;
  for (int i = 0; i < p.head_queries(); i += kTileRows) {
    const int tile = std::min(kTileRows, p.head_queries() - i);
    gemm_rows<T>(tile, q + i * depth, depth, packed, depth, blocks, scores, kSplit);
    for (int r = 0; r < tile; ++r) use(i + r, scores + r * kSplit);
  }
}

// Raw dot products -> probabilities relative to their max (zero behind `seen`, up to a whole block),
// with max and sum in state[0] and state[1].
void softmax_scores(float* scores, int seen, float scale_log2, float* probs, float* state) {
  const int blocks = ceil_div(seen, kLanes);
  const Vec scale = splat(scale_log2);
  std::fill(scores + seen, scores + blocks * kLanes, -std::numeric_limits<float>::infinity());
  Vec highest = load16(scores);
  for (int b = 1; b < blocks; ++b) highest = max(load16(scores + b * kLanes), highest);
  const float top = reduce_max(highest) * scale_log2;
  Vec total = {};
  for (int b = 0; b < blocks; ++b) {
    const Vec p = exp2(load16(scores + b * kLanes) * scale - splat(top));
    total = total + p;
    store16(probs + b * kLanes, p);
  }
  state[0] = top;
  state[1] = reduce_sum(total);
}

template <class T>
void score_all(Scoring& p, const at::Tensor& q) {
  const int64_t depth = p.head_dim / Words<T>::kPair;
  p.queries.resize(int64_t{p.heads} * p.rows * depth);
  uint32_t* packed = reinterpret_cast<uint32_t*>(p.queries.data());
  for (int64_t head = 0; head < p.heads; ++head) {
    for (int64_t row = 0; row < p.rows; ++row) {
      const int64_t query = head / p.gqa * p.head_queries() + row * p.gqa + head % p.gqa;
      pack_q_row(
          q.const_data_ptr<T>() + row * q.stride(0) + head * q.stride(1), p.head_dim,
          packed + query * depth);
    }
  }
  p.states.resize(int64_t{p.splits()} * p.heads * p.rows * 2);

  // Kept between calls: fresh pages would cost more than the arithmetic.
  static thread_local std::vector<float> probs;
  probs.resize(std::max<size_t>(probs.size(), p.index(p.splits(), 0, 0) * kSplit));
  p.probs = probs.data();

  parallel_for(p.splits(), [&](int64_t split) {
    for (int head = 0; head < p.kv_heads; ++head) {
      for_each_query<T>(p, split, head, [&](int query, float* scores) {
        const int seen = p.seen(split, query);
        if (seen > 0) {
          float* probs = p.probs + p.index(split, head, query) * kSplit;
          softmax_scores(scores, seen, p.scale_log2, probs, p.state(split, head, query));
        }
      });
    }
  });
  const int64_t queries = int64_t{p.kv_heads} * p.head_queries();
  p.totals.assign(p.states.begin(), p.states.begin() + 2 * queries);
  for (int64_t i = 0; i < queries; ++i) {
    const int head = i / p.head_queries(), query = i % p.head_queries();
    for (int s = 1; s < p.splits() && p.seen(s, query) > 0; ++s) {
      merge_softmax(p.totals.data() + 2 * i, p.state(s, head, query));
    }
  }
  parallel_for(p.splits(), [&](int64_t split) {
    std::vector<float> sums(p.gqa * kSplit);
    for (int head = 0; head < p.kv_heads; ++head) {
      std::fill(sums.begin(), sums.end(), 0.0f);
      for (int query = 0; query < p.head_queries(); ++query) {
        const int seen = p.seen(split, query);
        if (seen == 0) continue;
        const float* total = p.totals.data() + 2 * p.index(0, head, query);
        const float* probs = p.probs + p.index(split, head, query) * kSplit;
        const Vec weight = splat(std::exp2(p.state(split, head, query)[0] - total[0]) / total[1]);
        float* sum = sums.data() + query % p.gqa * kSplit;
        for (int at = 0; at < seen; at += kLanes) {
          store16(sum + at, load16(sum + at) + load16(probs + at) * weight);
        }
      }
      const int count = std::min(kSplit, p.keys - static_cast<int>(split) * kSplit);
      for (int64_t g = 0; g < p.gqa; ++g) {
        std::copy_n(
            sums.data() + g * kSplit, count,
            p.out + (int64_t{head} * p.gqa + g) * p.keys + split * kSplit);
      }
    }
  });
}

}  // namespace

Tensor key_scores(const Tensor& q, const Tensor& k_pool, const Tensor& slots, double scale,
                  bool causal) {
  Scoring p{};
  p.k = kv_pool(k_pool);
  p.slots = slots.const_data_ptr<int32_t>();
  p.keys = slots.size(0);
  p.rows = q.size(0);
  p.heads = q.size(1);
  p.kv_heads = k_pool.size(1);
  p.gqa = p.heads / p.kv_heads;
  p.head_dim = q.size(2);
  p.causal = causal;
  p.scale_log2 = scale * M_LOG2E;
  TORCH_CHECK_INDEX(
      all_below(p.slots, p.keys, p.k.slots), "slots: a slot is outside the pool of ", p.k.slots,
      " slots");
  Tensor out = at::empty({p.heads, p.keys}, q.options().dtype(at::kFloat));
  p.out = out.mutable_data_ptr<float>();
  if (q.scalar_type() == at::kFloat) {
    score_all<float>(p, q);
  } else if (q.scalar_type() == at::kHalf) {
    score_all<c10::Half>(p, q);
  } else {
    score_all<c10::BFloat16>(p, q);
  }
  return out;
}

}  // namespace sgl_ext
