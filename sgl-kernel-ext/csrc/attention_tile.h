// The inner products of attention: packing of K and V rows, and one register tile for both.
//
// Operands are 32-bit words, one fp32 or (bf16 with a dot product) a pair along the reduction. Both
// products have the form C[r][n] = sum_k A[r][k] * B[k][n], every C one fp32 chain over k = 0, 1,
// ... starting at zero: the tile shape decides what is computed together, never an order. B is
// packed in panels of kTileCols vectors: panel p holds [depth][width][kLanes] words, width being
// kTileCols except for a narrower last panel.
#pragma once
#include <algorithm>
#include <array>
#include <type_traits>
#include <utility>

#include "vec.h"

namespace sgl_ext {

// Keys in a split of a KV list: softmax partials are formed per split, by list index.
constexpr int kSplit = 256;

// The largest register tile: kTileRows x kTileCols accumulators and their operands.
#if defined(__AVX512F__)
constexpr int kTileRows = 6, kTileCols = 4;
#elif defined(__AVX2__)
constexpr int kTileRows = 6, kTileCols = 1;
#else
constexpr int kTileRows = 2, kTileCols = 1;
#endif

// Keys that are multiplied together.
constexpr int kPanel = kTileCols * kLanes;

SGL_INLINE Vec load_words(const uint32_t* p) {
  Vec r;
  std::memcpy(&r, p, sizeof(r));
  return r;
}

SGL_INLINE void store_words(uint32_t* p, Vec v) { std::memcpy(p, &v, sizeof(v)); }

// Elements of T a word holds, and the multiply-add of two vectors of words.
template <class T>
struct Words {
  static constexpr int kPair = 1;
  static constexpr bool kConvert = !std::is_same_v<T, float>;
  SGL_INLINE Vec step(Vec acc, Vec a, Vec b) { return fma(a, b, acc); }
  SGL_INLINE void store_probs(uint32_t* words, Vec p) { store_words(words, p); }
};
#if defined(__AVX512BF16__)
template <>
struct Words<c10::BFloat16> {
  static constexpr int kPair = 2;
  static constexpr bool kConvert = false;
  SGL_INLINE Vec step(Vec acc, Vec a, Vec b) { return dot_bf16(acc, a, b); }
  SGL_INLINE void store_probs(uint32_t* words, Vec p) {
    _mm256_storeu_si256((__m256i*)words, (__m256i)_mm512_cvtneps_pbh((__m512)p.part[0]));
  }
};
#endif

constexpr int ceil_div(int a, int b) { return (a + b - 1) / b; }
constexpr int round_up(int a, int b) { return ceil_div(a, b) * b; }

SGL_INLINE Vec splat_word(uint32_t x) {
  Vec r;
  SGL_FOR_PARTS r.part[i] = (NativeF32)(NativeU32{} + x);
  return r;
}

// `resume` continues the chains that `c` holds.
template <int R, int C>
SGL_INLINE void load_tile(const float* c, int64_t ldc, bool resume, Vec (&acc)[R][C]) {
#pragma GCC unroll 6
  for (int r = 0; r < R; ++r) {
#pragma GCC unroll 4
    for (int j = 0; j < C; ++j) acc[r][j] = resume ? load16(c + r * ldc + j * kLanes) : Vec{};
  }
}

template <int R, int C>
SGL_INLINE void store_tile(float* c, int64_t ldc, const Vec (&acc)[R][C]) {
#pragma GCC unroll 10
  for (int r = 0; r < R; ++r) {
#pragma GCC unroll 4
    for (int j = 0; j < C; ++j) store16(c + r * ldc + j * kLanes, acc[r][j]);
  }
}

// One step of every chain: the words `a` of R rows times those of C vectors.
template <class T, int R, int C>
SGL_INLINE void multiply_tile(
    const uint32_t* a, int64_t lda, const Vec (&col)[C], Vec (&acc)[R][C]) {
#pragma GCC unroll 6
  for (int r = 0; r < R; ++r) {
    const Vec row = splat_word(a[r * lda]);
#pragma GCC unroll 4
    for (int j = 0; j < C; ++j) acc[r][j] = Words<T>::step(acc[r][j], row, col[j]);
  }
}

template <class T, int R, int C>
static void gemm_tile(
    const uint32_t* a,
    int64_t lda,
    const uint32_t* b,
    int depth,
    float* c,
    int64_t ldc,
    bool resume) {
  Vec acc[R][C];
  load_tile<R, C>(c, ldc, resume, acc);
  for (int k = 0; k < depth; ++k, b += C * kLanes) {
    Vec col[C];
#pragma GCC unroll 4
    for (int j = 0; j < C; ++j) col[j] = load_words(b + j * kLanes);
    multiply_tile<T, R, C>(a + k, lda, col, acc);
  }
  store_tile<R, C>(c, ldc, acc);
}

// One row tile (rows <= kTileRows) times every panel of B; `vecs` is the width of B in vectors.
template <class T>
static void gemm_rows(
    int rows,
    const uint32_t* a,
    int64_t lda,
    const uint32_t* b,
    int depth,
    int vecs,
    float* c,
    int64_t ldc,
    bool resume = false) {
  using Tile = void (*)(const uint32_t*, int64_t, const uint32_t*, int, float*, int64_t, bool);
  static constexpr auto kTiles = []<int... I>(std::integer_sequence<int, I...>) {
    return std::array<Tile, sizeof...(I)>{gemm_tile<T, I / kTileCols + 1, I % kTileCols + 1>...};
  }(std::make_integer_sequence<int, kTileRows * kTileCols>{});
  for (int v = 0; v < vecs; v += kTileCols) {
    const int width = std::min(kTileCols, vecs - v);
    kTiles[(rows - 1) * kTileCols + width - 1](
        a, lda, b + int64_t{v} * kLanes * depth, depth, c + v * kLanes, ldc, resume);
  }
}

// Four words of 16 rows -> four vectors, vector w holding word w of rows 0..15.
SGL_INLINE void transpose_16x4(const uint8_t* const* rows, int64_t offset, Vec (&out)[4]) {
#if defined(__AVX2__)
  const auto load = [&](int row) {
    return _mm_loadu_ps(reinterpret_cast<const float*>(rows[row] + offset));
  };
#if defined(__AVX512F__)
#define SGL_MM(op) _mm512_##op
  const auto quads = [&](int first, int) {
    __m512 v = _mm512_castps128_ps512(load(first));
    v = _mm512_insertf32x4(v, load(first + 4), 1);
    v = _mm512_insertf32x4(v, load(first + 8), 2);
    return _mm512_insertf32x4(v, load(first + 12), 3);
  };
#else
#define SGL_MM(op) _mm256_##op
  const auto quads = [&](int first, int part) {
    return _mm256_insertf128_ps(
        _mm256_castps128_ps256(load(first + 8 * part)), load(first + 8 * part + 4), 1);
  };
#endif
  for (int part = 0; part < kParts; ++part) {
    const auto r0 = quads(0, part), r1 = quads(1, part), r2 = quads(2, part), r3 = quads(3, part);
    const auto a = SGL_MM(unpacklo_ps)(r0, r1), b = SGL_MM(unpackhi_ps)(r0, r1);
    const auto c = SGL_MM(unpacklo_ps)(r2, r3), d = SGL_MM(unpackhi_ps)(r2, r3);
    out[0].part[part] = (NativeF32)SGL_MM(shuffle_ps)(a, c, 0x44);
    out[1].part[part] = (NativeF32)SGL_MM(shuffle_ps)(a, c, 0xee);
    out[2].part[part] = (NativeF32)SGL_MM(shuffle_ps)(b, d, 0x44);
    out[3].part[part] = (NativeF32)SGL_MM(shuffle_ps)(b, d, 0xee);
  }
#undef SGL_MM
#else
  float words[4][kLanes];
  for (int row = 0; row < kLanes; ++row) {
    float quad[4];
    std::memcpy(quad, rows[row] + offset, sizeof(quad));
    for (int w = 0; w < 4; ++w) words[w][row] = quad[w];
  }
  for (int w = 0; w < 4; ++w) out[w] = load16(words[w]);
#endif
}

template <class T>
static void widen_row(const T* row, int head_dim, float* out) {
  for (int d = 0; d < head_dim; d += kLanes) {
    store_n(out + d, load_n(row + d, head_dim - d), head_dim - d);
  }
}

// One block of 16 K rows into its columns of the packed K^T (depth = head_dim / kPair words, one
// column a key). `convert` has room for 16 fp32 rows.
template <class T>
static void pack_k_block(
    const uint8_t* const* rows,
    int block,
    int blocks,
    int head_dim,
    uint32_t* packed,
    float* convert) {
  const int depth = head_dim / Words<T>::kPair;
  const int panel = block / kTileCols * kTileCols;
  const int64_t step = std::min(kTileCols, blocks - panel) * kLanes;
  uint32_t* out = packed + int64_t{panel} * kLanes * depth + (block - panel) * kLanes;
  const uint8_t* converted[kLanes];
  if constexpr (Words<T>::kConvert) {
    for (int r = 0; r < kLanes; ++r) {
      widen_row(reinterpret_cast<const T*>(rows[r]), head_dim, convert + r * head_dim);
      converted[r] = reinterpret_cast<const uint8_t*>(convert + r * head_dim);
    }
    rows = converted;
  }
  for (int k = 0; k < depth; k += 4, out += 4 * step) {
    Vec words[4];
    transpose_16x4(rows, int64_t{k} * 4, words);
    for (int w = 0; w < 4; ++w) store_words(out + w * step, words[w]);
  }
}

#if defined(__AVX512BF16__)
// 32 bf16 of two rows -> two vectors of 16 words, word d holding element d of both.
SGL_INLINE void interleave_32(const void* first, const void* second, Vec& low, Vec& high) {
  alignas(64) static constexpr auto kOrder = [] {
    std::array<uint16_t, 64> order{};
    for (int d = 0; d < 32; ++d) order[2 * d] = d, order[2 * d + 1] = 32 + d;
    return order;
  }();
  const __m512i a = _mm512_loadu_si512(first), b = _mm512_loadu_si512(second);
  const __m512i lower = _mm512_load_si512(kOrder.data());
  const __m512i upper = _mm512_load_si512(kOrder.data() + 32);
  low.part[0] = (NativeF32)_mm512_permutex2var_epi16(a, lower, b);
  high.part[0] = (NativeF32)_mm512_permutex2var_epi16(a, upper, b);
}
#endif

// One block of 16 V rows into its rows of the packed V (`depth` words of keys in all, one column a
// dimension, the last vector padded with zeros).
template <class T>
static void pack_v_block(
    const uint8_t* const* rows, int block, int depth, int head_dim, uint32_t* packed) {
  constexpr int kPair = Words<T>::kPair;
  const int vecs = ceil_div(head_dim, kLanes);
  const auto place = [&](int v) {
    const int panel = v / kTileCols * kTileCols;
    const int64_t step = std::min(kTileCols, vecs - panel) * kLanes;
    uint32_t* out = packed + int64_t{panel} * kLanes * depth + (v - panel) * kLanes +
                    block * (kLanes / kPair) * step;
    return std::pair(out, step);
  };
  int v = 0;
#if defined(__AVX512BF16__)
  static_assert(kTileCols % 2 == 0);
  if constexpr (kPair == 2) {
    for (; (v + 2) * kLanes <= head_dim; v += 2) {
      auto [out, step] = place(v);
      const int64_t at = int64_t{v} * kLanes * sizeof(T);
#pragma GCC unroll 8
      for (int r = 0; r < kLanes; r += 2, out += step) {
        Vec low, high;
        interleave_32(rows[r] + at, rows[r + 1] + at, low, high);
        store_words(out, low);
        store_words(out + kLanes, high);
      }
    }
  }
#endif
  for (; v < vecs; ++v) {
    auto [out, step] = place(v);
    const int d = v * kLanes;
    for (int r = 0; r < kLanes; r += kPair, out += step) {
      const Vec first = load_n(reinterpret_cast<const T*>(rows[r]) + d, head_dim - d);
      if constexpr (kPair == 1) {
        store_words(out, first);
      } else {
        // load16 leaves a bf16 in the upper half of its lane.
        const Vec second = load_n(reinterpret_cast<const T*>(rows[r + 1]) + d, head_dim - d);
        Vec both;
        SGL_FOR_PARTS both.part[i] = (NativeF32)(((NativeU32)first.part[i] >> 16) |
                                                 (NativeU32)second.part[i]);
        store_words(out, both);
      }
    }
  }
}

// Rows of Q as words, [rows][head_dim / kPair].
template <class T>
static void pack_q_row(const T* q, int head_dim, uint32_t* packed) {
  if constexpr (Words<T>::kConvert) {
    widen_row(q, head_dim, reinterpret_cast<float*>(packed));
  } else {
    std::memcpy(packed, q, head_dim * sizeof(T));
  }
}

}  // namespace sgl_ext
