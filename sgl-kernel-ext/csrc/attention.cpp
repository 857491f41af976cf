// Row-invariant attention of ragged groups of rows over lists of KV slots.
//
// A row's KV list is cut into splits of kSplit keys by list index. Each split gives a partial (max,
// sum, unnormalised output) and partials are merged in index order, so a row's bits depend on its
// own query and list only. What a call chooses freely (queries of a tile, splits of a work item,
// who merges) never changes an arithmetic order. sgl_kernel_ext/reference/attention.py has the
// semantics.
#include "attention.h"

#include <cmath>
#include <optional>

#include "attention_plan.h"
#include "ops.h"
#include "parallel.h"

namespace sgl_ext {
namespace {

// Blocks of 16 keys to fetch ahead of the one being packed.
constexpr int kBlocksAhead = 2;

template <class T>
class Worker {
 public:
  explicit Worker(Problem& problem)
      : p_(problem),
        depth_(problem.head_dim / kPair),
        vecs_(ceil_div(problem.head_dim, kLanes)),
        k_size_(kSplit * depth_),
        v_size_(kSplit / kPair * vecs_ * kLanes),
        state_size_(problem.state_size()) {
    const int64_t sizes[] = {
        kUnitQueries * depth_,      p_.head_limit(kPair) * k_size_, p_.head_limit(kPair) * v_size_,
        kLanes * p_.head_dim,       kTileRows * kSplit,             kTileRows * kProbs,
        kUnitQueries * state_size_, kUnitQueries * state_size_};
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
  }

  void run(const Item& item) {
    Unit& unit = p_.units[item.unit];
    fetched_ = item.split_begin * kSplit;
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
  using Rows = const uint8_t*[kSplit];

  // Writes the split's state of every query that sees any of it; returns the first of those.
  int attend(const Unit& unit, int split, float* states) {
    const int begin = split * kSplit;
    const auto seen = [&](int i) { return std::min(kSplit, p_.visible(unit, i) - begin); };
    int first = 0;
    while (first < unit.queries && seen(first) <= 0) ++first;
    const int count = seen(unit.queries - 1);
    const int blocks = ceil_div(count, kLanes);

    int32_t slots[kSplit];
    unit.list.copy(begin, count, slots);
    if (!all_below(slots, count, std::min(p_.k.slots, p_.v.slots))) {
      p_.bad_slot.store(true, std::memory_order_relaxed);
      return unit.queries;
    }
    Rows k_rows[kUnitHeads], v_rows[kUnitHeads];
    for (int h = 0; h < unit.heads; ++h) {
      locate_rows(p_.k, unit.first_head + h, slots, count, k_rows[h]);
      locate_rows(p_.v, unit.first_head + h, slots, count, v_rows[h]);
    }
    for (int b = 0; b < blocks; ++b) {
      prefetch(unit, begin + (b + 1 + kBlocksAhead) * kLanes);
      for (int h = 0; h < unit.heads; ++h) {
        pack_k_block<T>(
            k_rows[h] + b * kLanes, b, blocks, p_.head_dim, k_ + h * k_size_, convert_);
        pack_v_block<T>(
            v_rows[h] + b * kLanes, b, blocks * kLanes / kPair, p_.head_dim, v_ + h * v_size_);
      }
    }
    for (int h = 0; h < unit.heads; ++h) {
      // Memory need not idle meanwhile: fetch the start of the next split.
      prefetch(unit, begin + count + (h + 2) * kBlocksAhead * kLanes);
      const int64_t at = h * unit.queries;
      attend_head(
          unit.queries, first, seen, v_rows[h], q_ + at * depth_, k_ + h * k_size_,
          v_ + h * v_size_, states + at * state_size_);
    }
    return first;
  }

  template <class Seen>
  void attend_head(
      int queries,
      int first,
      const Seen& seen,
      const Rows& v_rows,
      const uint32_t* q,
      const uint32_t* k,
      uint32_t* v,
      float* states) {
    const int count = seen(queries - 1);
    const int blocks = ceil_div(count, kLanes);
    const int v_depth = blocks * kLanes / kPair;
    // A key that only later rows see has probability 0 for a row, yet 0 * NaN is not 0: where such
    // a key is not finite, each row gets its own V.
    const bool row_by_row = !all_finite<T>(v_rows + seen(first), count - seen(first), p_.head_dim);
    const int step = row_by_row ? 1 : kTileRows;
    for (int i = first; i < queries; i += step) {
      const int rows = std::min(step, queries - i);
      if (row_by_row) pack_visible_v(v_rows, seen(i), blocks, v);
      gemm_rows<T>(rows, q + i * depth_, depth_, k, depth_, blocks, scores_, kSplit);
      for (int r = 0; r < rows; ++r) {
        softmax_split<T>(
            scores_ + r * kSplit, seen(i + r), blocks, p_.scale_log2, probs_ + r * kProbs,
            states + (i + r) * state_size_);
      }
      gemm_rows<T>(
          rows, probs_, kProbs, v, v_depth, vecs_, states + i * state_size_ + kStateHeader,
          state_size_);
    }
  }

  // Fetches the rows of the item's keys up to list index `end`, where that was not done before.
  void prefetch(const Unit& unit, int end) {
    end = std::min(end, fetch_end_);
    for (; fetched_ < end; ++fetched_) {
      int32_t slot;
      unit.list.copy(fetched_, 1, &slot);
      for (const KvPool* pool : {&p_.k, &p_.v}) {
        const uint8_t* row = pool->base + slot * pool->slot_stride;
        for (int h = 0; h < unit.heads; ++h) {
          const uint8_t* head = row + (unit.first_head + h) * pool->head_stride;
          for (size_t at = 0; at < p_.head_dim * sizeof(T); at += 64) __builtin_prefetch(head + at);
        }
      }
    }
  }

  void pack_visible_v(const Rows& rows, int visible, int blocks, uint32_t* v) {
    Rows seen;
    std::copy_n(rows, visible, seen);
    std::fill(seen + visible, seen + blocks * kLanes, kZeroRow);
    for (int b = 0; b < blocks; ++b) {
      pack_v_block<T>(seen + b * kLanes, b, blocks * kLanes / kPair, p_.head_dim, v);
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
  const int64_t k_size_, v_size_, state_size_;
  int fetched_, fetch_end_;
  uint32_t *q_, *k_, *v_, *probs_;
  float *convert_, *scores_, *state_, *partial_;
};

template <class T>
void attend_all(Problem& p) {
  parallel_for(p.items.size(), [&](int64_t i) { Worker<T>(p).run(p.items[i]); });
}

int64_t read_index(const at::Tensor& t, int64_t i) {
  return t.scalar_type() == at::kInt ? t.const_data_ptr<int32_t>()[i * t.stride(0)]
                                     : t.const_data_ptr<int64_t>()[i * t.stride(0)];
}

at::Tensor ragged_attention(
    const at::Tensor& q,
    const at::Tensor& k_pool,
    const at::Tensor& v_pool,
    const at::Tensor& req_to_token,
    const at::Tensor& q_indptr,
    const at::Tensor& req_row,
    const at::Tensor& tail_start,
    const at::Tensor& tail_end,
    double scale,
    const std::optional<at::Tensor>& view_indices,
    const std::optional<at::Tensor>& view_start,
    const std::optional<at::Tensor>& view_len,
    const std::optional<at::Tensor>& out,
    const std::optional<at::Tensor>& lse) {
  at::Tensor result = out ? *out : at::empty(q.sizes(), q.options());
  Problem p{};
  p.q = q.const_data_ptr();
  p.q_row_stride = q.stride(0);
  p.q_head_stride = q.stride(1);
  p.k = kv_pool(k_pool);
  p.v = kv_pool(v_pool);
  p.out = result.mutable_data_ptr();
  p.out_row_stride = result.stride(0);
  p.out_head_stride = result.stride(1);
  p.lse = lse ? lse->mutable_data_ptr<float>() : nullptr;
  p.lse_row_stride = lse ? lse->stride(0) : 0;
  p.kv_heads = k_pool.size(1);
  p.gqa = q.size(1) / p.kv_heads;
  p.head_dim = q.size(2);
  p.scale_log2 = scale * M_LOG2E;
  const int limit = q.scalar_type() == at::kBFloat16 ? p.head_limit(Words<c10::BFloat16>::kPair)
                                                     : p.head_limit(1);

  for (int64_t g = 0; g < req_row.size(0); ++g) {
    const int64_t first_row = read_index(q_indptr, g);
    const Group group{first_row, static_cast<int>(read_index(q_indptr, g + 1) - first_row)};
    const int64_t table_row = read_index(req_row, g);
    const int64_t begin = read_index(tail_start, g), end = read_index(tail_end, g);
    TORCH_CHECK_VALUE(
        group.first_row >= 0 && group.rows >= 0 && group.first_row + group.rows <= q.size(0),
        "q_indptr: rows ", group.first_row, " to ", group.first_row + group.rows, " of group ", g,
        " are outside the ", q.size(0), " rows of q");
    if (group.rows == 0) continue;
    TORCH_CHECK_VALUE(
        table_row >= 0 && table_row < req_to_token.size(0), "req_row: ", table_row, " of group ", g,
        " is outside req_to_token with ", req_to_token.size(0), " rows");
    TORCH_CHECK_VALUE(
        begin >= 0 && begin + group.rows <= end && end <= req_to_token.size(1),
        "tail_start, tail_end: ", begin, ":", end, " of group ", g, " must hold its ", group.rows,
        " rows and lie within the ", req_to_token.size(1), " columns of req_to_token");
    KvList list{nullptr, 0,
                req_to_token.const_data_ptr<int32_t>() + table_row * req_to_token.stride(0) + begin,
                static_cast<int>(end - begin)};
    const int64_t lists = view_len ? view_len->size(1) : 1;
    for (int64_t i = 0; i < lists; ++i) {
      if (view_len) {
        const int64_t start = view_start->const_data_ptr<int64_t>()[g * lists + i];
        list.view_len = view_len->const_data_ptr<int32_t>()[g * lists + i];
        list.view = view_indices->const_data_ptr<int32_t>() + start;
        TORCH_CHECK_VALUE(
            list.view_len >= 0 && (list.view_len == 0 || (start >= 0 && start + list.view_len <=
                                                                            view_indices->size(0))),
            "view_start, view_len: ", start, " + ", list.view_len, " of group ", g,
            " is outside view_indices with ", view_indices->size(0), " entries");
      }
      p.add_units(group, list, i, lists == 1 ? p.kv_heads : 1, limit);
    }
  }
  p.plan_items(at::get_num_threads());
  {
    pybind11::gil_scoped_release release;
    if (q.scalar_type() == at::kFloat) {
      attend_all<float>(p);
    } else if (q.scalar_type() == at::kHalf) {
      attend_all<c10::Half>(p);
    } else {
      attend_all<c10::BFloat16>(p);
    }
  }
  TORCH_CHECK_INDEX(
      !p.bad_slot, "req_to_token or view_indices: a slot is outside the pool of ", p.k.slots,
      " slots");
  return result;
}

}  // namespace

void bind_attention(pybind11::module_& m) {
  m.def("ragged_attention", &ragged_attention);
  m.def("key_scores", &key_scores);
}

}  // namespace sgl_ext
