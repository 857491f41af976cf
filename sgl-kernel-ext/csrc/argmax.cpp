// The first index of the largest value of each row.
#include <vector>

#include "rows.h"

namespace sgl_ext {
namespace {

constexpr int64_t kChunk = 16 * 1024;

// Whether `x` takes the place of `best`: larger, or the first NaN.
bool beats(float x, float best) { return !(x <= best) && best == best; }

// The first index of the largest of x[begin, end), a NaN counting as larger than any number.
template <class T>
int64_t argmax_range(const T* x, int64_t begin, int64_t end) {
  int64_t i = begin;
  int64_t winner = begin;
  if (end - begin >= 2 * kLanes) {
    Vec best = load16(x + i);
    NativeI32 lane_index[kParts], best_index[kParts];
    for (int p = 0; p < kParts; ++p)
      for (int l = 0; l < kNativeLanes; ++l)
        best_index[p][l] = lane_index[p][l] = p * kNativeLanes + l;
    for (i += kLanes; i + kLanes <= end; i += kLanes) {
      const Vec v = load16(x + i);
      for (int p = 0; p < kParts; ++p) {
        const NativeF32 a = v.part[p], b = best.part[p];
        const NativeI32 take = ~(NativeI32)(a <= b) & (NativeI32)(b == b);
        const NativeI32 at = lane_index[p] + static_cast<int32_t>(i - begin);
        best.part[p] = take ? a : b;
        best_index[p] = take ? at : best_index[p];
      }
    }
    float value[kLanes];
    int32_t index[kLanes];
    std::memcpy(value, &best, sizeof(value));
    std::memcpy(index, best_index, sizeof(index));
    int lane = 0;
    for (int l = 1; l < kLanes; ++l) {
      const bool tie = !beats(value[lane], value[l]) && !beats(value[l], value[lane]);
      if (tie ? index[l] < index[lane] : beats(value[l], value[lane])) lane = l;
    }
    winner = begin + index[lane];
  }
  for (; i < end; ++i)
    if (beats(static_cast<float>(x[i]), static_cast<float>(x[winner]))) winner = i;
  return winner;
}

}  // namespace

Tensor argmax_rows(const Tensor& x) {
  TORCH_CHECK_VALUE(x.dim() == 2 && x.size(1) > 0, "argmax_rows: x must be [M, V] with V > 0");
  Tensor y = at::empty({x.size(0)}, x.options().dtype(at::kLong));
  int64_t* winner = y.mutable_data_ptr<int64_t>();
  dispatch(x, "argmax_rows: x", [&](auto tag) {
    using T = decltype(tag);
    const auto rows = rows_of<T>(x, "argmax_rows: x");
    const int64_t chunks = ceil_div(rows.width, kChunk);
    std::vector<int64_t> partial(rows.count * chunks);
    parallel_for(rows.count * chunks, [&](int64_t i) {
      const int64_t begin = i % chunks * kChunk;
      partial[i] = argmax_range(rows[i / chunks], begin, std::min(rows.width, begin + kChunk));
    });
    for (int64_t row = 0; row < rows.count; ++row) {
      winner[row] = partial[row * chunks];
      for (int64_t c = 1; c < chunks; ++c) {
        const int64_t i = partial[row * chunks + c];
        if (beats(static_cast<float>(rows[row][i]), static_cast<float>(rows[row][winner[row]])))
          winner[row] = i;
      }
    }
  });
  return y;
}

}  // namespace sgl_ext
