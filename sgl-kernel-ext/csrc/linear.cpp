// Row-invariant linear: linear_tile.h fixes the order of operations, this file packs the weights
// and shares the tiles out over threads.

#include "linear_tile.h"
#include "rows.h"

namespace sgl_ext {
namespace {

// Rows that stay in a core's L2 while the columns pass by.
constexpr int64_t kRowChunkBytes = 256 * 1024;
constexpr int64_t kMaxRowChunk = 16 * kTileRows;
// Below this many multiply-adds, waking a second thread costs more than it saves.
constexpr int64_t kSerialMacs = 100 * 1000;

template <class T>
void run(const LinearArgs<T>& p) {
  const int64_t threads = at::get_num_threads();
  const int64_t blocks = ceil_div(p.N, kBlock);
  const bool one_tile = p.M <= kTileRows;

  const int64_t fitting = kRowChunkBytes / (p.K * sizeof(Input<T>)) / kTileRows * kTileRows;
  const int64_t rows = std::clamp<int64_t>(fitting, kTileRows, kMaxRowChunk);
  const int64_t row_chunks = ceil_div(p.M, rows);
  int64_t cols = blocks / (4 * threads);
  cols = one_tile ? std::max<int64_t>(cols / 4 * 4, 4) : std::clamp<int64_t>(cols, 1, 4);
  if (p.M * p.N * p.K < kSerialMacs) cols = blocks;

  parallel_for(row_chunks * ceil_div(blocks, cols), [&](int64_t task) {
    // Row chunks vary fastest: a chunk of weights is used up while it is in the cache.
    const int64_t row_begin = task % row_chunks * rows;
    const int64_t row_end = std::min(p.M, row_begin + rows);
    // Tiles of even height: 9 rows run faster as 5 + 4 than as 8 + 1.
    const int64_t height = ceil_div(row_end - row_begin, ceil_div(row_end - row_begin, kTileRows));
    int64_t block = task / row_chunks * cols;
    const int64_t block_end = std::min(blocks, block + cols);
    while (block < block_end) {
      // Several row tiles reuse one block; a single one takes all blocks, in wide tiles.
      const int64_t next = one_tile ? block_end : block + 1;
      for (int64_t row = row_begin; row < row_end; row += height)
        linear_tiles_of<T>(std::min(height, row_end - row), p, row, block * kVecsPerBlock,
                           next * kVecsPerBlock);
      block = next;
    }
  });
}

template <class T>
void pack_block(const T* w, int64_t row_stride, int64_t rows, int64_t K, T* packed) {
  std::fill_n(packed, block_size<T>(K), T(0));
  for (int64_t c = 0; c < rows; ++c)
    for (int64_t k = 0; k < K; ++k)
      packed[(k / kPair<T> * kBlock + c) * kPair<T> + k % kPair<T>] = w[c * row_stride + k];
}

}  // namespace

Tensor pack_weight(const Tensor& w) {
  TORCH_CHECK_VALUE(w.dim() == 2, "pack_weight: the weight must be [N, K], got ", w.sizes());
  Tensor packed;
  dispatch(w, "pack_weight: the weight", [&](auto tag) {
    using T = decltype(tag);
    const auto from = rows_of<T>(w, "pack_weight: the weight");
    const int64_t blocks = ceil_div(from.count, kBlock), size = block_size<T>(from.width);
    packed = at::empty({blocks * size}, w.options());
    T* to = packed.mutable_data_ptr<T>();
    parallel_for(blocks, [&](int64_t b) {
      const int64_t rows = std::min<int64_t>(kBlock, from.count - b * kBlock);
      pack_block(from[b * kBlock], from.stride, rows, from.width, to + b * size);
    });
  });
  return packed;
}

Tensor linear(const Tensor& x, const Tensor& packed, int64_t N, const MaybeTensor& bias,
              const MaybeTensor& out) {
  TORCH_CHECK_VALUE(x.dim() == 2, "linear: x must be [M, K], got ", x.sizes());
  const int64_t M = x.size(0), K = x.size(1);
  const Tensor y = out ? *out : at::empty({M, N}, x.options());
  TORCH_CHECK_VALUE(y.dim() == 2 && y.size(0) == M && y.size(1) == N, "linear: out must be [", M,
                    ", ", N, "], got ", y.sizes());
  dispatch(x, "linear: x", [&](auto tag) {
    using T = decltype(tag);
    TORCH_CHECK_VALUE(packed.scalar_type() == x.scalar_type() &&
                          packed.numel() == ceil_div(N, kBlock) * block_size<T>(K),
                      "linear: the packed weight is not ", x.scalar_type(), " [", N, ", ", K, "]");
    TORCH_CHECK_VALUE(!bias || (bias->scalar_type() == x.scalar_type() && bias->numel() == N &&
                                bias->is_contiguous()),
                      "linear: bias must be ", x.scalar_type(), " [", N, "]");
    const Tensor input = x.to(c10::CppTypeToScalarType<Input<T>>::value);
    const auto xs = rows_of<Input<T>>(input, "linear: x");
    const auto ys = rows_of<T>(y, "linear: out");
    run(LinearArgs<T>{xs.data, xs.stride, packed.const_data_ptr<T>(),
                      bias ? bias->const_data_ptr<T>() : nullptr, ys.data, ys.stride, M, N, K});
  });
  return y;
}

}  // namespace sgl_ext
