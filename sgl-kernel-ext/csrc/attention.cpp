// Row-invariant attention of ragged groups of rows over lists of KV slots.
//
// A row's KV list is cut into splits of kSplit keys by list index. Each split gives a partial (max,
// sum, unnormalised output) and partials are merged in index order, so a row's bits depend on its
// own query and list only. What a call chooses freely (queries of a tile, splits of a work item,
// who merges) never changes an arithmetic order. sgl_kernel_ext/reference/attention.py has the
// semantics.
#include <ATen/ops/empty.h>

#include <cmath>

#include "attention_worker.h"
#include "kernels.h"
#include "parallel.h"

namespace sgl_ext {
namespace {

template <class T>
void attend_all(Problem& p) {
  parallel_for(p.items.size(), [&](int64_t i) { Worker<T>(p).run(p.items[i]); });
}

int64_t read_index(const at::Tensor& t, int64_t i) {
  return t.scalar_type() == at::kInt ? t.const_data_ptr<int32_t>()[i * t.stride(0)]
                                     : t.const_data_ptr<int64_t>()[i * t.stride(0)];
}

}  // namespace

Tensor ragged_attention(const Tensor& q, const Tensor& k_pool, const Tensor& v_pool,
                        const Tensor& req_to_token, const Tensor& q_indptr, const Tensor& req_row,
                        const Tensor& tail_start, const Tensor& tail_end, double scale,
                        const MaybeTensor& view_indices, const MaybeTensor& view_start,
                        const MaybeTensor& view_len, const std::vector<KvTensors>& view_pools,
                        const MaybeTensor& view_pool, const MaybeTensor& out,
                        const MaybeTensor& lse) {
  Tensor result = out ? *out : at::empty(q.sizes(), q.options());
  Problem p{};
  p.q = q.const_data_ptr();
  p.q_row_stride = q.stride(0);
  p.q_head_stride = q.stride(1);
  p.pools.push_back({kv_pool(k_pool), kv_pool(v_pool)});
  for (const auto& [k, v, k_codec, v_codec] : view_pools) {
    p.pools.push_back({kv_pool(k, codec_of(k_codec)), kv_pool(v, codec_of(v_codec))});
  }
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
    const int64_t pool = view_pool ? read_index(*view_pool, g) : 0;
    TORCH_CHECK_VALUE(
        pool >= 0 && pool <= static_cast<int64_t>(view_pools.size()), "view_pool: ", pool,
        " of group ", g, " is not in 0..", view_pools.size(), " for ", view_pools.size(),
        " view_pools");
    KvList list{nullptr, 0, static_cast<int>(pool),
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
  if (q.scalar_type() == at::kFloat) {
    attend_all<float>(p);
  } else if (q.scalar_type() == at::kHalf) {
    attend_all<c10::Half>(p);
  } else {
    attend_all<c10::BFloat16>(p);
  }
  const int bad = p.bad_pool;
  TORCH_CHECK_INDEX(
      bad != 0, "req_to_token or view_indices: a slot is outside the pool of ", p.pools[0].slots(),
      " slots");
  TORCH_CHECK_INDEX(
      bad < 0, "view_indices: a slot is outside view_pools[", bad - 1, "] of ",
      p.pools[bad].slots(), " slots");
  return result;
}

}  // namespace sgl_ext
