// Register tiles of the row-invariant linear.
//
// Every output is one fp32 chain over k = 0..K-1 that starts at zero. The shape of a tile decides
// only which outputs are computed together, never the order inside a chain, so a row's bits depend
// on neither the number of rows, nor its position, nor the threads.
//
// Packed weights: [blocks][ceil(K / kPair)][kBlock][kPair], blocks of kBlock output columns, padded
// with zeros. kPair is 2 for bf16 (what vdpbf16ps consumes) and 1 otherwise.
#pragma once
#include <algorithm>
#include <type_traits>

#include "rows.h"

namespace sgl_ext {

constexpr int kBlock = 32;
constexpr int kVecsPerBlock = kBlock / kLanes;

template <class T>
constexpr bool kIsBf16 = std::is_same_v<T, c10::BFloat16>;
template <class T>
constexpr int64_t kPair = kIsBf16<T> ? 2 : 1;

// What a tile reads rows as: converting fp16 once a call is cheaper than once a tile.
template <class T>
using Input = std::conditional_t<std::is_same_v<T, c10::Half>, float, T>;

// Rows of the largest tile and vectors of columns in a tile of R rows, so that accumulators and
// operands fit the register file. Few rows leave registers free: more columns then give enough
// independent chains to hide the latency of one.
#if defined(__AVX512F__)
constexpr int kTileRows = 8;
template <int R>
constexpr int kTileVecs = R == 1   ? 8
                          : R <= 4 ? 4
                                   : 2;
#else
constexpr int kTileRows = kNativeLanes == 8 ? 6 : 2;
template <int R>
constexpr int kTileVecs = R == 1   ? kNativeLanes / 2
                          : R == 2 ? kNativeLanes / 4
                                   : 1;
#endif

// Elements in one packed block of columns.
template <class T>
int64_t block_size(int64_t K) {
  return ceil_div(K, kPair<T>) * kPair<T> * kBlock;
}

template <class T>
struct LinearArgs {
  const Input<T>* x;
  int64_t x_stride;
  const T* w;     // packed
  const T* bias;  // or null
  T* out;
  int64_t out_stride;
  int64_t M, N, K;
};

// A pair of bf16 in every lane; `n` is 1 for the last of an odd K, whose other half is not ours to
// read (and would not vanish against the zero weight if it held a NaN).
SGL_INLINE Vec splat_pair(const c10::BFloat16* p, int n) {
  uint32_t pair = 0;
  std::memcpy(&pair, p, n * sizeof(*p));
  return splat(std::bit_cast<float>(pair));
}

// Outputs of R rows x V vectors of columns; the first is column `vec` * kLanes of row `row`.
template <class T, int R, int V>
void linear_tile(const LinearArgs<T>& p, int64_t row, int64_t vec) {
  const Input<T>* x = p.x + row * p.x_stride;
  const T* w[V];
#pragma GCC unroll 8
  for (int v = 0; v < V; ++v)
    w[v] = p.w + (vec + v) / kVecsPerBlock * block_size<T>(p.K) +
           (vec + v) % kVecsPerBlock * kLanes * kPair<T>;

  Vec acc[R][V];
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
    for (int v = 0; v < V; ++v) acc[r][v] = splat(0.0f);

  const auto step = [&](int64_t k, int n) __attribute__((always_inline)) {
    Vec b[V];
#pragma GCC unroll 8
    for (int v = 0; v < V; ++v) {
      if constexpr (kIsBf16<T>)
        b[v] = load16(reinterpret_cast<const float*>(w[v] + k * kBlock));  // pairs as they are
      else
        b[v] = load16(w[v] + k * kBlock);
    }
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
      Vec a;
      if constexpr (kIsBf16<T>)
        a = splat_pair(x + r * p.x_stride + k, n);
      else
        a = splat(x[r * p.x_stride + k]);
#pragma GCC unroll 8
      for (int v = 0; v < V; ++v)
        acc[r][v] = kIsBf16<T> ? dot_bf16(acc[r][v], a, b[v]) : fma(a, b[v], acc[r][v]);
    }
  };
  int64_t k = 0;
  for (; k + kPair<T> <= p.K; k += kPair<T>) step(k, kPair<T>);
  if (k < p.K) step(k, 1);

#pragma GCC unroll 8
  for (int v = 0; v < V; ++v) {
    const int64_t col = (vec + v) * kLanes;
    const int cols = static_cast<int>(std::clamp<int64_t>(p.N - col, 0, kLanes));
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
      const Vec sum = p.bias ? acc[r][v] + load_n(p.bias + col, cols) : acc[r][v];
      store_n(p.out + (row + r) * p.out_stride + col, sum, cols);
    }
  }
}

// R rows, vectors of columns [begin, end), an even number of them: wide tiles first.
template <class T, int R>
void linear_tiles(const LinearArgs<T>& p, int64_t row, int64_t begin, int64_t end) {
  constexpr int V = kTileVecs<R>;
  for (; begin + V <= end; begin += V) linear_tile<T, R, V>(p, row, begin);
  if constexpr (V > kVecsPerBlock)
    for (; begin < end; begin += kVecsPerBlock) linear_tile<T, R, kVecsPerBlock>(p, row, begin);
}

// The same for a number of rows, 1..kTileRows, known at run time.
template <class T, int R = kTileRows>
void linear_tiles_of(int64_t rows, const LinearArgs<T>& p, int64_t row, int64_t begin,
                     int64_t end) {
  if (rows == R) return linear_tiles<T, R>(p, row, begin, end);
  if constexpr (R > 1) linear_tiles_of<T, R - 1>(rows, p, row, begin, end);
}

}  // namespace sgl_ext
