// Rotary embedding and KV-pool writes, alone or in one call.
#include <cstring>

#include "rows.h"

namespace sgl_ext {
namespace {

constexpr int64_t kRopeGrain = 32 * 1024;
constexpr int64_t kCopyGrain = 128 * 1024;

// int64 [rows] of indices, each checked to be in [0, limit): nothing is written on a bad one.
Tensor checked_index(const Tensor& t, int64_t rows, int64_t limit, const char* name) {
  TORCH_CHECK_VALUE(t.dim() == 1 && t.size(0) == rows && at::isIntegralType(t.scalar_type(), false),
                    name, " must be an integer [", rows, "], got ", t.sizes());
  const Tensor index = t.to(at::kLong).contiguous();
  const int64_t* i = index.const_data_ptr<int64_t>();
  for (int64_t row = 0; row < rows; ++row)
    TORCH_CHECK_INDEX(i[row] >= 0 && i[row] < limit, name, "[", row, "] = ", i[row],
                      " is outside [0, ", limit, ")");
  return index;
}

// One head in place. SGLang's native op casts cos and sin to the type of x and rounds after every
// operation; so does this.
template <class T, class C>
void rotate_head(T* x, const C* cos, const C* sin, int64_t half, bool is_neox) {
  for (int64_t i = 0; i < half; i += kLanes) {
    const int n = static_cast<int>(std::min<int64_t>(kLanes, half - i));
    const Vec c = round_to<T>(load_n(cos + i, n)), s = round_to<T>(load_n(sin + i, n));
    T first[kLanes] = {}, second[kLanes] = {};
    T *a = x + i, *b = x + half + i;
    if (!is_neox) {
      a = first, b = second;
      for (int l = 0; l < n; ++l) a[l] = x[2 * (i + l)], b[l] = x[2 * (i + l) + 1];
    }
    const Vec va = load_n(a, n), vb = load_n(b, n);
    store_n(a, round_to<T>(va * c) - round_to<T>(vb * s), n);
    store_n(b, round_to<T>(vb * c) + round_to<T>(va * s), n);
    if (!is_neox)
      for (int l = 0; l < n; ++l) x[2 * (i + l)] = a[l], x[2 * (i + l) + 1] = b[l];
  }
}

// Rotates one row of q or k.
template <class T>
class Rotary {
 public:
  Rotary(const Tensor& positions, int64_t rows, int64_t head_size, const Tensor& cache,
         bool is_neox)
      : cache_(cache), head_size_(head_size), dim_(cache.size(-1)), is_neox_(is_neox) {
    TORCH_CHECK_VALUE(
        cache.dim() == 2 && cache.is_contiguous() && dim_ % 2 == 0 && dim_ <= head_size,
        "rotary: cos_sin_cache must be [positions, rotary_dim <= head_size]");
    fp32_cache_ = cache.scalar_type() == at::kFloat;
    TORCH_CHECK_VALUE(fp32_cache_ || cache.scalar_type() == c10::CppTypeToScalarType<T>::value,
                      "rotary: cos_sin_cache must be float32 or of the dtype of q");
    index_ = checked_index(positions, rows, cache.size(0), "rotary: positions");
    position_ = index_.const_data_ptr<int64_t>();
  }

  void rotate(T* x, int64_t width, int64_t row) const {
    if (fp32_cache_)
      rotate_row(x, width, cache_.const_data_ptr<float>() + position_[row] * dim_);
    else
      rotate_row(x, width, cache_.const_data_ptr<T>() + position_[row] * dim_);
  }

 private:
  template <class C>
  void rotate_row(T* x, int64_t width, const C* cos) const {
    for (int64_t i = 0; i < width; i += head_size_)
      rotate_head(x + i, cos, cos + dim_ / 2, dim_ / 2, is_neox_);
  }

  Tensor cache_, index_;
  const int64_t* position_;
  int64_t head_size_, dim_;
  bool is_neox_, fp32_cache_;
};

template <class T>
Rows<T> head_rows(const Tensor& t, int64_t head_size, const char* name) {
  const auto rows = rows_of<T>(t, name);
  TORCH_CHECK_VALUE(head_size > 0 && rows.width % head_size == 0, name, " has rows of ", rows.width,
                    " elements, not a multiple of head_size ", head_size);
  return rows;
}

// Rows as bytes, for ops that only move them.
Rows<char> byte_rows(const Tensor& t, const char* name) {
  Rows<char> bytes{};
  dispatch(t, name, [&](auto tag) {
    using T = decltype(tag);
    const auto rows = rows_of<T>(t, name);
    bytes = {reinterpret_cast<char*>(rows.data), rows.count,
             static_cast<int64_t>(rows.stride * sizeof(T)),
             static_cast<int64_t>(rows.width * sizeof(T))};
  });
  return bytes;
}

// Where the rows of one of K and V go.
struct Store {
  Rows<char> from, pool;

  Store(const Tensor& rows, const Tensor& into, const char* name)
      : from(byte_rows(rows, name)), pool(byte_rows(into, name)) {
    TORCH_CHECK_VALUE(rows.scalar_type() == into.scalar_type() && from.width == pool.width, name,
                      ": rows ", rows.sizes(), " ", rows.scalar_type(), " do not fit the pool ",
                      into.sizes(), " ", into.scalar_type());
  }

  void copy(int64_t row, int64_t slot) const { std::memcpy(pool[slot], from[row], from.width); }
};

}  // namespace

void store_kv(const Tensor& k, const Tensor& v, const Tensor& k_pool, const Tensor& v_pool,
              const Tensor& loc) {
  const Store ks(k, k_pool, "store_kv: k"), vs(v, v_pool, "store_kv: v");
  const int64_t slots = std::min(ks.pool.count, vs.pool.count);
  const Tensor index = checked_index(loc, ks.from.count, slots, "store_kv: loc");
  TORCH_CHECK_VALUE(ks.from.count == vs.from.count, "store_kv: k and v differ in rows");
  const int64_t* slot = index.const_data_ptr<int64_t>();
  for_rows(ks.from.count, ks.from.width, kCopyGrain, [&](int64_t row) {
    ks.copy(row, slot[row]);
    vs.copy(row, slot[row]);
  });
}

void rotary(const Tensor& positions, const Tensor& q, const Tensor& k, int64_t head_size,
            const Tensor& cache, bool is_neox) {
  dispatch(q, "rotary: q", [&](auto tag) {
    using T = decltype(tag);
    const auto qs = head_rows<T>(q, head_size, "rotary: q");
    const auto ks = head_rows<T>(k, head_size, "rotary: k");
    TORCH_CHECK_VALUE(qs.count == ks.count, "rotary: q and k differ in rows");
    const Rotary<T> rope(positions, qs.count, head_size, cache, is_neox);
    for_rows(qs.count, qs.width + ks.width, kRopeGrain, [&](int64_t row) {
      rope.rotate(qs[row], qs.width, row);
      rope.rotate(ks[row], ks.width, row);
    });
  });
}

void rope_store_kv(const Tensor& positions, const Tensor& q, const Tensor& k, const Tensor& v,
                   int64_t head_size, const Tensor& cache, bool is_neox, const Tensor& k_pool,
                   const Tensor& v_pool, const Tensor& loc) {
  dispatch(q, "rope_store_kv: q", [&](auto tag) {
    using T = decltype(tag);
    const auto qs = head_rows<T>(q, head_size, "rope_store_kv: q");
    const auto ks = head_rows<T>(k, head_size, "rope_store_kv: k");
    const Store k_store(k, k_pool, "rope_store_kv: k"), v_store(v, v_pool, "rope_store_kv: v");
    TORCH_CHECK_VALUE(qs.count == ks.count && qs.count == v_store.from.count,
                      "rope_store_kv: q, k and v differ in rows");
    const Rotary<T> rope(positions, qs.count, head_size, cache, is_neox);
    const int64_t slots = std::min(k_store.pool.count, v_store.pool.count);
    const Tensor index = checked_index(loc, qs.count, slots, "rope_store_kv: loc");
    const int64_t* slot = index.const_data_ptr<int64_t>();
    for_rows(qs.count, qs.width + 2 * ks.width, kRopeGrain, [&](int64_t row) {
      rope.rotate(qs[row], qs.width, row);
      rope.rotate(ks[row], ks.width, row);
      k_store.copy(row, slot[row]);
      v_store.copy(row, slot[row]);
    });
  });
}

void copy_rows(const Tensor& source, const Tensor& source_index, const Tensor& out,
               const Tensor& out_index) {
  const Rows<char> from = byte_rows(source, "copy_rows: source");
  const Rows<char> to = byte_rows(out, "copy_rows: out");
  TORCH_CHECK_VALUE(from.width == to.width && source.scalar_type() == out.scalar_type(),
                    "copy_rows: rows of source and out differ in size or dtype");
  const int64_t count = source_index.numel();
  const Tensor read = checked_index(source_index, count, from.count, "copy_rows: source_index");
  const Tensor write = checked_index(out_index, count, to.count, "copy_rows: out_index");
  const int64_t* r = read.const_data_ptr<int64_t>();
  const int64_t* w = write.const_data_ptr<int64_t>();
  // On the calling thread: it runs beside a forward pass, which has the others.
  for (int64_t i = 0; i < count; ++i) std::memcpy(to[w[i]], from[r[i]], to.width);
}

}  // namespace sgl_ext
