// Attention of one work item, panel by panel and merged split by split: a few queries read keys and
// values where they lie, many read them packed, and rows of packed pools are unpacked before either.
#pragma once
#include <cmath>

#include "attention_plan.h"

namespace sgl_ext {

// Packed keys to fetch ahead of the ones being unpacked.
constexpr int kKeysAhead = 8;

template <class T>
class Worker {
 public:
  explicit Worker(Problem& problem)
      : p_(problem),
        depth_(problem.head_dim / kPair),
        vecs_(ceil_div(problem.head_dim, kLanes)),
        state_size_(problem.state_size()) {
    const int64_t sizes[] = {
        kUnitQueries * depth_,      kPanel * depth_,            kPanel / kPair * vecs_ * kLanes,
        kLanes * p_.head_dim,       kUnitQueries * kSplit,      kUnitQueries * kProbs,
        kUnitQueries * state_size_, kUnitQueries * state_size_, kPanel * kUnitHeads * p_.head_dim};
    float* parts[std::size(sizes)];
    int64_t total = 0;
    for (int64_t size : sizes) total += size;
    float* next = thread_scratch(total);
    for (size_t i = 0; i < std::size(sizes); ++i) parts[i] = std::exchange(next, next + sizes[i]);
    q_ = reinterpret_cast<uint32_t*>(parts[0]);
    k_ = reinterpret_cast<uint32_t*>(parts[1]);
    v_ = reinterpret_cast<uint32_t*>(parts[2]);
    convert_ = parts[3];
    scores_ = parts[4];
    probs_ = reinterpret_cast<uint32_t*>(parts[5]);
    state_ = parts[6];
    partial_ = parts[7];
    unpacked_ = reinterpret_cast<uint8_t*>(parts[8]);
  }

  void run(const Item& item) {
    Unit& unit = p_.units[item.unit];
    first_split_ = item.split_begin;
    fetch_end_ = std::min(item.split_end * kSplit, p_.visible(unit, unit.queries - 1));
    for (int h = 0; h < unit.heads; ++h) {
      for (int i = 0; i < unit.queries; ++i) {
        const T* q = static_cast<const T*>(p_.q) + p_.row(unit, i) * p_.q_row_stride +
                     p_.head(unit, h, i) * p_.q_head_stride;
        pack_q_row(q, p_.head_dim, q_ + (h * unit.queries + i) * depth_);
      }
    }
    const int64_t tile = unit.states() * state_size_;
    for (int split = item.split_begin; split < item.split_end; ++split) {
      if (unit.partials != nullptr) {
        attend(unit, split, unit.partials + split * tile);
      } else if (split == 0) {
        attend(unit, split, state_);
      } else {
        const int first = attend(unit, split, partial_);
        for (int h = 0; h < unit.heads; ++h) {
          for (int i = first; i < unit.queries; ++i) {
            const int64_t at = (h * unit.queries + i) * state_size_;
            merge(state_ + at, partial_ + at);
          }
        }
      }
    }
    if (unit.partials == nullptr) {
      finish(unit, state_);
    } else if (std::atomic_ref(unit.items_left).fetch_sub(1, std::memory_order_acq_rel) == 1) {
      merge_splits(unit);
      finish(unit, unit.partials);
    }
  }

 private:
  static constexpr int kPair = Words<T>::kPair;
  static constexpr int kProbs = kSplit / kPair;
  using Rows = const uint8_t*[kPanel];

  // Slots of a split's keys and of some to fetch ahead: the first `elsewhere` of them in another
  // pool than the main one.
  struct SplitKeys {
    int32_t slots[kSplit + kPanel];
    int end, elsewhere, pool;
  };

  // Writes the split's state of every query that sees any of it; returns the first of those.
  int attend(const Unit& unit, int split, float* states) {
    const int begin = split * kSplit;
    const auto seen = [&](int i) { return std::min(kSplit, p_.visible(unit, i) - begin); };
    int first = 0;
    while (first < unit.queries && seen(first) <= 0) ++first;
    const int count = seen(unit.queries - 1), blocks = ceil_div(count, kLanes);
    const int queries = unit.queries - first;

    SplitKeys keys;
    if (!list_keys(unit.list, begin, count, keys)) return unit.queries;
    if (split == first_split_) {  // there was no panel before
      fetch_next(&KvPools::k, unit, keys, 0, count, 1);
      fetch_.step();
    }
    for (int panel = 0; panel < count; panel += kPanel) {
      const int here = std::min(kPanel, count - panel);
      const int steps = unit.heads * score_steps(queries, here);
      unpack_panel(&KvPools::k, unit, keys, panel, here);
      if (panel + kPanel < count) {
        fetch_next(&KvPools::k, unit, keys, panel + kPanel, count, steps);
      } else {
        fetch_next(&KvPools::v, unit, keys, 0, count, steps + unit.heads * queries);
      }
      for (int h = 0; h < unit.heads; ++h) score(unit, h, keys, first, panel, here);
    }
    for (int h = 0; h < unit.heads; ++h) {
      for (int i = first; i < unit.queries; ++i) {
        const int64_t at = h * unit.queries + i;
        softmax_split<T>(
            scores_ + at * kSplit, seen(i), blocks, p_.scale_log2, probs_ + at * kProbs,
            states + at * state_size_);
        fetch_.step();
      }
    }
    for (int panel = 0; panel < count; panel += kPanel) {
      const int here = std::min(kPanel, count - panel);
      const int steps = unit.heads * value_steps(queries, here);
      unpack_panel(&KvPools::v, unit, keys, panel, here);
      if (panel + kPanel < count) {
        fetch_next(&KvPools::v, unit, keys, panel + kPanel, count, steps);
      } else {
        fetch_next(&KvPools::k, unit, keys, count, keys.end, steps);
      }
      for (int h = 0; h < unit.heads; ++h) {
        add_values(unit, h, keys, first, panel, here, seen, states);
      }
    }
    return first;
  }

  bool reads_keys(int queries) const { return kReadsRows<T> && queries <= kFewQueries; }
  bool reads_values(int queries) const {
    return reads_keys(queries) && p_.head_dim % (2 * kLanes) == 0;
  }

  // Steps of `fetch_` while so many queries are multiplied with a panel of one KV head.
  int score_steps(int queries, int keys) const {
    const int blocks = ceil_div(keys, kLanes);
    if (!reads_keys(queries)) return blocks + ceil_div(queries, kTileRows);
    return ceil_div(blocks, kScoreBlocks) * score_tiles(queries) * (depth_ / 4);
  }
  int value_steps(int queries, int keys) const {
    const int blocks = ceil_div(keys, kLanes), tiles = ceil_div(queries, kTileRows);
    if (!reads_values(queries)) return blocks + tiles;
    return tiles * ceil_div(vecs_, kTileCols) * (blocks * kLanes / kPair);
  }

  // Lists `count` keys from `begin` on and those to fetch ahead; false if a slot is out of range.
  bool list_keys(const KvList& list, int begin, int count, SplitKeys& keys) const {
    keys.end = count + std::min(kPanel, fetch_end_ - begin - count);
    keys.pool = list.view_pool;
    keys.elsewhere = keys.pool == 0 ? 0 : list.in_view(begin, keys.end);
    list.copy(begin, keys.end, keys.slots);
    const auto check = [&](int pool, const int32_t* slots, int number) {
      const bool good = all_below(slots, number, p_.pools[pool].slots());
      if (!good) p_.bad_pool.store(pool, std::memory_order_relaxed);
      return good;
    };
    return check(keys.pool, keys.slots, keys.elsewhere) &&
           check(0, keys.slots + keys.elsewhere, keys.end - keys.elsewhere);
  }

  // Unpacks those of `count` keys or values of a split from `panel` on that are packed.
  void unpack_panel(
      KvPool KvPools::* part, const Unit& unit, const SplitKeys& keys, int panel, int count) {
    const int packed = std::clamp(keys.elsewhere - panel, 0, count);
    const KvPool& pool = p_.pools[keys.pool].*part;
    if (packed == 0 || pool.codec.bits == 0) return;
    dispatch_codec(pool.codec, [&](auto number) {
      unpack<number>(
          pool, unit, keys.slots + panel, packed, keys.elsewhere - panel,
          reinterpret_cast<T*>(unpacked_));
    });
  }

  // Addresses of one head's rows of an unpacked panel, zero rows up to a full block of 16.
  void locate(
      KvPool KvPools::* part,
      const Unit& unit,
      int h,
      const SplitKeys& keys,
      int panel,
      int count,
      Rows& rows) const {
    const int32_t* slots = keys.slots + panel;
    const int elsewhere = std::clamp(keys.elsewhere - panel, 0, count);
    if (elsewhere > 0) {
      const KvPool& pool = p_.pools[keys.pool].*part;
      if (pool.codec.bits > 0) {
        const int64_t row_bytes = p_.head_dim * sizeof(T);
        for (int i = 0; i < elsewhere; ++i) rows[i] = unpacked_ + (i * unit.heads + h) * row_bytes;
      } else {
        list_rows(pool, unit.first_head + h, slots, elsewhere, rows);
      }
    }
    list_rows(
        p_.pools[0].*part, unit.first_head + h, slots + elsewhere, count - elsewhere,
        rows + elsewhere);
    std::fill(rows + count, rows + round_up(count, kLanes), kZeroRow);
  }

  // Dot products of one KV head with the `count` keys of a panel.
  void score(
      const Unit& unit, int h, const SplitKeys& keys, int first, int panel, int count) {
    Rows rows;
    locate(&KvPools::k, unit, h, keys, panel, count, rows);
    const int width = ceil_div(count, kLanes), queries = unit.queries - first;
    const int64_t at = h * unit.queries + first;
    const uint32_t* q = q_ + at * depth_;
    float* scores = scores_ + at * kSplit + panel;
    if constexpr (kReadsRows<T>) {
      if (reads_keys(queries)) {
        score_rows<T>(queries, q, depth_, rows, width, scores, kSplit, fetch_);
        return;
      }
    }
    for (int b = 0; b < width; ++b) {
      pack_k_block<T>(rows + b * kLanes, b, width, p_.head_dim, k_, convert_);
      fetch_.step();
    }
    for (int i = 0; i < queries; i += kTileRows) {
      gemm_rows<T>(
          std::min(kTileRows, queries - i), q + i * depth_, depth_, k_, depth_, width,
          scores + i * kSplit, kSplit);
      fetch_.step();
    }
  }

  // Adds probabilities times the `count` values of a panel to the states of one KV head.
  template <class Seen>
  void add_values(
      const Unit& unit,
      int h,
      const SplitKeys& keys,
      int first,
      int panel,
      int count,
      const Seen& seen,
      float* states) {
    Rows rows;
    locate(&KvPools::v, unit, h, keys, panel, count, rows);
    const auto seen_here = [&](int i) { return std::clamp(seen(i) - panel, 0, count); };
    // A key that only later rows see has probability 0 for a row, yet 0 * NaN is not 0: where such
    // a key is not finite, each row gets its own V.
    const int all_see = seen_here(first);
    const bool row_by_row = !all_finite<T>(rows + all_see, count - all_see, p_.head_dim);
    const int width = ceil_div(count, kLanes), depth = width * kLanes / kPair;
    const auto pack = [&](const Rows& from) {
      for (int b = 0; b < width; ++b) {
        pack_v_block<T>(from + b * kLanes, b, depth, p_.head_dim, v_);
        fetch_.step();
      }
    };
    const int64_t at = h * unit.queries;
    if constexpr (kReadsRows<T>) {
      if (!row_by_row && reads_values(unit.queries - first)) {
        add_value_rows<T>(
            unit.queries - first, probs_ + (at + first) * kProbs + panel / kPair, kProbs, rows,
            depth, vecs_, states + (at + first) * state_size_ + kStateHeader, state_size_,
            panel > 0, fetch_);
        return;
      }
    }
    if (!row_by_row) pack(rows);
    const int step = row_by_row ? 1 : kTileRows;
    for (int i = first; i < unit.queries; i += step) {
      if (row_by_row) {
        Rows own;
        std::copy_n(rows, seen_here(i), own);
        std::fill(own + seen_here(i), own + width * kLanes, kZeroRow);
        pack(own);
      }
      gemm_rows<T>(
          std::min(step, unit.queries - i), probs_ + (at + i) * kProbs + panel / kPair, kProbs, v_,
          depth, vecs_, states + (at + i) * state_size_ + kStateHeader, state_size_, panel > 0);
      fetch_.step();
    }
  }

  // Has `fetch_` fetch keys `begin` to `end` of a split, or as many as a panel holds, within so many
  // steps. Packed ones are not fetched: unpacking takes longer than reading.
  void fetch_next(
      KvPool KvPools::* part,
      const Unit& unit,
      const SplitKeys& keys,
      int begin,
      int end,
      int steps) {
    end = std::min(end, begin + kPanel);
    const int middle = std::clamp(keys.elsewhere, begin, end);
    const KvPool &other = p_.pools[keys.pool].*part, &main = p_.pools[0].*part;
    const int64_t bytes = p_.head_dim * sizeof(T);
    const bool dense = other.head_stride == bytes && main.head_stride == bytes;
    const int spans = dense ? 1 : unit.heads;
    const int64_t size = dense ? unit.heads * bytes : bytes;
    fetch_.count = fetch_.piece = fetch_.line = 0;
    const auto add = [&](const KvPool& pool, int from, int to) {
      if (pool.codec.bits > 0) return;
      for (int span = 0; span < spans; ++span) {
        list_rows(
            pool, unit.first_head + span, keys.slots + from, to - from,
            fetch_.pieces + fetch_.count);
        fetch_.count += to - from;
      }
    };
    add(other, begin, middle);
    add(main, middle, end);
    fetch_.lines = ceil_div(size, kLine) + (size % kLine != 0);  // such a piece may straddle
    fetch_.share = ceil_div(fetch_.count * fetch_.lines, steps);
  }

  // Unpacks `count` rows of a packed pool, those of the unit's heads side by side.
  template <int Number>
  void unpack(
      const KvPool& pool, const Unit& unit, const int32_t* slots, int count, int end, T* out) const {
    constexpr Codec codec = kCodecs[Number];
    constexpr uint32_t tokens = codec.tokens;
    const uint8_t* base = pool.base + unit.first_head * pool.head_stride;
    const int size = codec.code_bytes(p_.head_dim);
    // The parameters of a block of several tokens are seldom new.
    const int bytes = size + (tokens == 1 ? codec.param_bytes(p_.head_dim) : 0);
    for (int i = 0; i < count; ++i) {
      const uint32_t slot = slots[i], next = slots[std::min(i + kKeysAhead, end - 1)];
      const uint8_t* block = base + slot / tokens * pool.slot_stride;
      const uint8_t* later = base + next / tokens * pool.slot_stride + next % tokens * size;
      for (int h = 0; h < unit.heads; ++h, out += p_.head_dim) {
        for (int at = 0; at < bytes; at += kLine) fetch_line(later + h * pool.head_stride + at);
        unpack_row<T, Number>(block + h * pool.head_stride, slot % tokens, p_.head_dim, out);
      }
    }
  }

  void merge(float* into, const float* from) const {
    const MergeWeights w = merge_softmax(into, from);
    for (int d = kStateHeader; d < state_size_; d += kLanes) {
      store16(into + d, fma(load16(from + d), splat(w.from), load16(into + d) * splat(w.into)));
    }
  }

  void merge_splits(const Unit& unit) const {
    const int64_t tile = unit.states() * state_size_;
    for (int h = 0; h < unit.heads; ++h) {
      for (int i = 0; i < unit.queries; ++i) {
        float* into = unit.partials + (h * unit.queries + i) * state_size_;
        const int splits = ceil_div(p_.visible(unit, i), kSplit);
        for (int s = 1; s < splits; ++s) merge(into, into + s * tile);
      }
    }
  }

  void finish(const Unit& unit, const float* state) const {
    for (int h = 0; h < unit.heads; ++h) {
      for (int i = 0; i < unit.queries; ++i, state += state_size_) {
        const int64_t row = p_.row(unit, i), head = p_.head(unit, h, i);
        T* out = static_cast<T*>(p_.out) + row * p_.out_row_stride + head * p_.out_head_stride;
        const Vec inverse = splat(1.0f / state[1]);
        for (int d = 0; d < p_.head_dim; d += kLanes) {
          // Neutral keys may turn a -0 sum into +0: + 0 makes every zero the same.
          const Vec x = fma(load16(state + kStateHeader + d), inverse, splat(0.0f));
          store_n(out + d, x, p_.head_dim - d);
        }
        if (p_.lse != nullptr) {
          p_.lse[row * p_.lse_row_stride + head] = (state[0] + std::log2(state[1])) * float(M_LN2);
        }
      }
    }
  }

  Problem& p_;
  const int64_t depth_;
  const int vecs_;
  const int64_t state_size_;
  int first_split_, fetch_end_;
  uint32_t *q_, *k_, *v_, *probs_;
  float *convert_, *scores_, *state_, *partial_;
  uint8_t* unpacked_;
  Fetch fetch_;
};

}  // namespace sgl_ext
