// Few queries: keys and values are multiplied where they lie, transposed in registers for every tile
// anew. Packing them first costs more stores than few queries are worth. Same chains, same bits.
#pragma once
#include "attention_tile.h"

namespace sgl_ext {

// Most queries of a KV head that are few: three tiles of scores, then packing is as fast (D = 64).
constexpr int kFewQueries = 30;
// Most KV heads of a unit of work.
constexpr int kUnitHeads = 8;

// Whether words can be taken from rows of T in registers.
template <class T>
constexpr bool kReadsRows = kParts == 1 && !Words<T>::kConvert;

// What to fetch into a cache, some lines at every step, so that memory does not rest while something
// else is multiplied.
struct Fetch {
  const uint8_t* pieces[kPanel * kUnitHeads];
  int count = 0, lines = 0;  // pieces; lines of each
  int share = 0;             // lines of a step
  int piece = 0, line = 0;   // the next one

  __attribute__((always_inline)) void step() {
    for (int i = 0; i < share && piece < count; ++i) {
      fetch_line(pieces[piece] + line * kLine);
      if (++line == lines) line = 0, ++piece;
    }
  }
};

// Largest register tile of queries and blocks of 16 keys (fp32 spills one accumulator).
constexpr int kScoreRows = 10, kScoreBlocks = 2;

// R queries times C blocks of 16 keys.
template <class T, int R, int C>
static void score_tile(
    const uint32_t* q,
    int64_t depth,
    const uint8_t* const* rows,
    float* scores,
    int64_t stride,
    Fetch& fetch) {
  Vec acc[R][C] = {};
  for (int k = 0; k < depth; k += 4) {
    Vec words[C][4];
#pragma GCC unroll 2
    for (int j = 0; j < C; ++j) transpose_16x4(rows + j * kLanes, int64_t{k} * 4, words[j]);
    fetch.step();
#pragma GCC unroll 10
    for (int r = 0; r < R; ++r) {
#pragma GCC unroll 4
      for (int w = 0; w < 4; ++w) {
        const Vec query = splat_word(q[r * depth + k + w]);
#pragma GCC unroll 2
        for (int j = 0; j < C; ++j) acc[r][j] = Words<T>::step(acc[r][j], query, words[j][w]);
      }
    }
  }
  store_tile<R, C>(scores, stride, acc);
}

constexpr int score_tiles(int queries) { return ceil_div(queries, kScoreRows); }

// Dot products of a few queries, `depth` words each, with `blocks` blocks of 16 keys.
template <class T>
static void score_rows(
    int queries,
    const uint32_t* q,
    int64_t depth,
    const uint8_t* const* rows,
    int blocks,
    float* scores,
    int64_t stride,
    Fetch& fetch) {
  static_assert(kReadsRows<T>);
  using Tile = void (*)(const uint32_t*, int64_t, const uint8_t* const*, float*, int64_t, Fetch&);
  static constexpr auto kTiles = []<int... I>(std::integer_sequence<int, I...>) {
    return std::array<Tile, sizeof...(I)>{
        score_tile<T, I / kScoreBlocks + 1, I % kScoreBlocks + 1>...};
  }(std::make_integer_sequence<int, kScoreRows * kScoreBlocks>{});
  const int tiles = score_tiles(queries);
  for (int b = 0; b < blocks; b += kScoreBlocks) {
    const int width = std::min(kScoreBlocks, blocks - b);
    for (int tile = 0; tile < tiles; ++tile) {
      const int i = queries * tile / tiles, end = queries * (tile + 1) / tiles;
      kTiles[(end - i - 1) * kScoreBlocks + width - 1](
          q + i * depth, depth, rows + b * kLanes, scores + i * stride + b * kLanes, stride, fetch);
    }
  }
}

// Values of the keys of a word, C vectors from byte `at` of their rows on.
template <class T, int C>
SGL_INLINE void load_values(const uint8_t* const* rows, int64_t at, Vec (&words)[C]) {
  if constexpr (Words<T>::kPair == 1) {
    const float* row = reinterpret_cast<const float*>(rows[0] + at);
#pragma GCC unroll 4
    for (int j = 0; j < C; ++j) words[j] = load16(row + j * kLanes);
  } else {
#if defined(__AVX512BF16__)
#pragma GCC unroll 2
    for (int j = 0; j < C; j += 2) {
      const int64_t here = at + j * kLanes * sizeof(T);
      interleave_32(rows[0] + here, rows[1] + here, words[j], words[j + 1]);
    }
#endif
  }
}

// As gemm_tile, B being the values of `rows` from byte `at` on.
template <class T, int R, int C>
static void value_tile(
    const uint32_t* probs,
    int64_t ldp,
    const uint8_t* const* rows,
    int64_t at,
    int depth,
    float* c,
    int64_t ldc,
    bool resume,
    Fetch& fetch) {
  Vec acc[R][C];
  load_tile<R, C>(c, ldc, resume, acc);
  for (int k = 0; k < depth; ++k, rows += Words<T>::kPair) {
    Vec words[C];
    load_values<T, C>(rows, at, words);
    fetch.step();
    multiply_tile<T, R, C>(probs + k, ldp, words, acc);
  }
  store_tile<R, C>(c, ldc, acc);
}

// Adds a few queries' probabilities times values to `c`; `vecs`, of a value, is even.
template <class T>
static void add_value_rows(
    int queries,
    const uint32_t* probs,
    int64_t ldp,
    const uint8_t* const* rows,
    int depth,
    int vecs,
    float* c,
    int64_t ldc,
    bool resume,
    Fetch& fetch) {
  static_assert(kReadsRows<T>);
  using Tile = void (*)(
      const uint32_t*, int64_t, const uint8_t* const*, int64_t, int, float*, int64_t, bool, Fetch&);
  constexpr int kPairs = kTileCols / 2;
  static constexpr auto kTiles = []<int... I>(std::integer_sequence<int, I...>) {
    return std::array<Tile, sizeof...(I)>{value_tile<T, I / kPairs + 1, (I % kPairs + 1) * 2>...};
  }(std::make_integer_sequence<int, kTileRows * kPairs>{});
  for (int i = 0; i < queries; i += kTileRows) {
    const int rows_here = std::min(kTileRows, queries - i);
    for (int v = 0; v < vecs; v += kTileCols) {
      const int width = std::min(kTileCols, vecs - v);
      const int64_t at = int64_t{v} * kLanes * 4 / Words<T>::kPair;
      kTiles[(rows_here - 1) * kPairs + width / 2 - 1](
          probs + i * ldp, ldp, rows, at, depth, c + i * ldc + v * kLanes, ldc, resume, fetch);
    }
  }
}

}  // namespace sgl_ext
