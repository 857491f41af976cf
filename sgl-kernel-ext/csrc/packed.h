// Packed blocks of K or V, the tokens of one KV head that share what decodes them: codes of `bits`
// bits (the first of a byte in its low bits), then parameters in fp16. sgl_kernel_ext/packed.py has
// the formats. Every build decodes to the same bits: products are exact in fp32 or come last, and
// sums have one order.
#pragma once
#include <ATen/core/Tensor.h>

#include <cmath>

#include "attention_tile.h"

namespace sgl_ext {

constexpr int kMaxHeadDim = 1024;

enum class Scheme { kPlain, kUniform, kRotated, kChannel };

struct Codec {
  int number = 0;
  Scheme scheme = Scheme::kPlain;
  int bits = 0;  // 0: rows are not packed
  int group = kMaxHeadDim;
  int tokens = 1;

  constexpr int code_bytes(int head_dim) const { return head_dim * bits / 8; }
  constexpr int param_bytes(int head_dim) const {
    const int pairs = scheme == Scheme::kUniform ? ceil_div(head_dim, group) : head_dim;
    return scheme == Scheme::kRotated ? 2 : 4 * pairs;
  }
};

// As in sgl_kernel_ext/packed.py.
constexpr Codec kCodecs[] = {
    {},
    {1, Scheme::kUniform, 8},
    {2, Scheme::kUniform, 4, 32},
    {3, Scheme::kRotated, 4},
    {4, Scheme::kRotated, 2},
    {5, Scheme::kUniform, 2, 32},
    {6, Scheme::kChannel, 4, kMaxHeadDim, 32},
    {7, Scheme::kChannel, 2, kMaxHeadDim, 32},
};

static inline const Codec& codec_of(int64_t number) {
  TORCH_CHECK_VALUE(number >= 0 && number < static_cast<int64_t>(std::size(kCodecs)),
                    "packed pool: no codec is number ", number);
  return kCodecs[number];
}

// body(std::integral_constant) with the number of a codec that packs.
template <class Body>
static void dispatch_codec(const Codec& codec, const Body& body) {
  [&]<int... I>(std::integer_sequence<int, I...>) {
    ((codec.number == I + 1 ? body(std::integral_constant<int, I + 1>()) : void()), ...);
  }(std::make_integer_sequence<int, std::size(kCodecs) - 1>());
}

typedef uint8_t NativeU8 __attribute__((vector_size(kNativeLanes)));

// Sixteen values, one for each of the codes 0 to 15; those of fewer bits repeat.
struct Table {
  alignas(64) float value[kLanes];
};

// What the codes of kUniform count.
template <int Bits>
constexpr Table make_counts() {
  Table table{};
  for (int i = 0; i < kLanes; ++i) table.value[i] = i % (1 << Bits);
  return table;
}

// What the codes of kRotated stand for; see levels in packed.py.
template <int Bits>
constexpr Table make_levels() {
  constexpr int kHalf = 1 << (Bits - 1);
  constexpr float positive[2][8] = {{0.4527800f, 1.5104176f},
                                    {0.1283950f, 0.3880483f, 0.6567591f, 0.9423405f, 1.2562312f,
                                     1.6180464f, 2.0690172f, 2.7325896f}};
  static_assert(Bits == 2 || Bits == 4);
  Table table{};
  for (int i = 0; i < kLanes; ++i) {
    const int code = i % (2 * kHalf);
    table.value[i] = code < kHalf ? -positive[Bits / 4][kHalf - 1 - code]
                                  : positive[Bits / 4][code - kHalf];
  }
  return table;
}

template <int Bits>
constexpr Table kCounts = make_counts<Bits>();
template <int Bits>
constexpr Table kLevels = make_levels<Bits>();

// Of sixteen codes the values in a table.
template <int Bits>
SGL_INLINE Vec look_up(const uint8_t* p, const Table& table) {
  static_assert(Bits == 2 || Bits == 4);
  Vec r;
#if defined(__AVX512F__)
  // Only the low four bits of an index count, so that codes need no mask.
  __m512i words, shifts;
  if constexpr (Bits == 4) {
    const __m512i halves = _mm512_set_epi32(1, 1, 1, 1, 1, 1, 1, 1, 0, 0, 0, 0, 0, 0, 0, 0);
    words = _mm512_permutexvar_epi32(
        halves, _mm512_castsi128_si512(_mm_loadl_epi64((const __m128i*)p)));
    shifts = _mm512_set_epi32(28, 24, 20, 16, 12, 8, 4, 0, 28, 24, 20, 16, 12, 8, 4, 0);
  } else {
    int32_t word;
    std::memcpy(&word, p, sizeof(word));
    words = _mm512_set1_epi32(word);
    shifts = _mm512_set_epi32(30, 28, 26, 24, 22, 20, 18, 16, 14, 12, 10, 8, 6, 4, 2, 0);
  }
  r.part[0] = (NativeF32)_mm512_permutexvar_ps(
      _mm512_srlv_epi32(words, shifts), _mm512_load_ps(table.value));
#elif defined(__AVX2__)
  const __m256 low = _mm256_load_ps(table.value), high = _mm256_load_ps(table.value + 8);
  SGL_FOR_PARTS {
    int32_t word;
    std::memcpy(&word, p + (Bits == 4 ? 4 * i : 0), sizeof(word));
    const __m256i shifts = Bits == 4 ? _mm256_set_epi32(28, 24, 20, 16, 12, 8, 4, 0)
                           : i == 0  ? _mm256_set_epi32(14, 12, 10, 8, 6, 4, 2, 0)
                                     : _mm256_set_epi32(30, 28, 26, 24, 22, 20, 18, 16);
    const __m256i index = _mm256_srlv_epi32(_mm256_set1_epi32(word), shifts);
    __m256 x = _mm256_permutevar8x32_ps(low, index);
    if constexpr (Bits == 4) {
      const __m256 upper = _mm256_castsi256_ps(_mm256_slli_epi32(index, 28));
      x = _mm256_blendv_ps(x, _mm256_permutevar8x32_ps(high, index), upper);
    }
    r.part[i] = (NativeF32)x;
  }
#else
  float values[kLanes];
  for (int i = 0; i < kLanes; ++i) {
    values[i] = table.value[p[i * Bits / 8] >> i * Bits % 8 & ((1 << Bits) - 1)];
  }
  std::memcpy(&r, values, sizeof(r));
#endif
  return r;
}

// Sixteen codes as floats.
template <int Bits>
SGL_INLINE Vec load_codes(const uint8_t* p) {
  if constexpr (Bits < 8) {
    return look_up<Bits>(p, kCounts<Bits>);
  } else {
    Vec r;
#if defined(__AVX512F__)
    r.part[0] = (NativeF32)_mm512_cvtepi32_ps(
        _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)p)));
#elif defined(__AVX2__)
    SGL_FOR_PARTS {
      r.part[i] = (NativeF32)_mm256_cvtepi32_ps(
          _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)(p + 8 * i))));
    }
#else
    float codes[kLanes];
    for (int i = 0; i < kLanes; ++i) codes[i] = p[i];
    std::memcpy(&r, codes, sizeof(r));
#endif
    return r;
  }
}

template <class T>
SGL_INLINE void store_element16(T* p, Vec v) {
#if defined(__AVX512BF16__)
  // One instruction; it would flush denormals, which no codec yields.
  if constexpr (std::is_same_v<T, c10::BFloat16>) {
    _mm256_storeu_si256((__m256i*)p, (__m256i)_mm512_cvtneps_pbh((__m512)v.part[0]));
    return;
  }
#endif
  store16(p, v);
}

struct Params {
  Vec scale, zero;
};

SGL_INLINE Params load_params(const uint8_t* p) {
#if defined(__AVX512F__)
  int32_t both;
  std::memcpy(&both, p, sizeof(both));
  const __m128 pair = _mm_cvtph_ps(_mm_cvtsi32_si128(both));
  return {{{(NativeF32)_mm512_broadcastss_ps(pair)}},
          {{(NativeF32)_mm512_broadcastss_ps(_mm_movehdup_ps(pair))}}};
#else
  c10::Half halves[2];
  std::memcpy(halves, p, sizeof(halves));
  return {splat(halves[0]), splat(halves[1])};
#endif
}

template <class T, int Number>
SGL_INLINE void unpack_uniform(const uint8_t* row, int head_dim, T* out) {
  constexpr Codec codec = kCodecs[Number];
  constexpr int kBits = codec.bits;
  const uint8_t* params = row + codec.code_bytes(head_dim);
  for (int d = 0; d < head_dim; params += 4) {
    const auto [scale, zero] = load_params(params);
    const int end = std::min(d + codec.group, head_dim);
    for (; d + kLanes <= end; d += kLanes) {
      store_element16(out + d, fma(load_codes<kBits>(row + d * kBits / 8), scale, zero));
    }
    if (d < end) {
      uint8_t codes[kLanes] = {};
      std::memcpy(codes, row + d * kBits / 8, (end - d) * kBits / 8);
      store_n(out + d, fma(load_codes<kBits>(codes), scale, zero), end - d);
      d = end;
    }
  }
}

// 1 and -1 of each channel, as signs in reference/packed.py.
struct Signs {
  alignas(64) float value[kMaxHeadDim];
};

constexpr Signs kSigns = [] {
  Signs signs{};
  for (uint32_t d = 0; d < kMaxHeadDim; ++d) {
    uint32_t x = d * 2654435761u;
    x = (x ^ x >> 15) * 739982445u;
    signs.value[d] = x >> 31 ? -1.0f : 1.0f;
  }
  return signs;
}();

// Sums and differences of lanes that are `Step` apart, the sum in the lower one.
template <int Step>
SGL_INLINE Vec butterfly(Vec x) {
  Vec other, sign;
  if constexpr (Step < kNativeLanes) {
    const auto of_lanes = []<int... L>(std::integer_sequence<int, L...>) {
      return std::pair(NativeI32{(L ^ Step)...}, NativeF32{(L & Step ? -1.0f : 1.0f)...});
    };
    const auto [order, signs] = of_lanes(std::make_integer_sequence<int, kNativeLanes>());
    SGL_FOR_PARTS {
      other.part[i] = __builtin_shuffle(x.part[i], order);
      sign.part[i] = signs;
    }
  } else {
    SGL_FOR_PARTS {
      const bool upper = i & Step / kNativeLanes;
      other.part[i] = x.part[i ^ Step / kNativeLanes];
      sign.part[i] = NativeF32{} + (upper ? -1.0f : 1.0f);
    }
  }
  return fma(x, sign, other);
}

// Every `Block` elements of `x` times the Hadamard matrix, sums growing from neighbours outwards.
template <int Block>
SGL_INLINE void hadamard(Vec* x) {
  constexpr int kVecs = std::max(1, Block / kLanes);
  for (int v = 0; v < kVecs; ++v) {
    if constexpr (Block > 1) x[v] = butterfly<1>(x[v]);
    if constexpr (Block > 2) x[v] = butterfly<2>(x[v]);
    if constexpr (Block > 4) x[v] = butterfly<4>(x[v]);
    if constexpr (Block > 8) x[v] = butterfly<8>(x[v]);
  }
  for (int step = 1; step < kVecs; step *= 2) {
    for (int v = 0; v < kVecs; ++v) {
      if (v & step) continue;
      const Vec first = x[v], second = x[v + step];
      x[v] = first + second, x[v + step] = first - second;
    }
  }
}

// Channels that a rotation mixes: the largest power of two that divides the head.
constexpr int hadamard_block(int head_dim) { return head_dim & -head_dim; }

// body(std::integral_constant) with the block of a head: 8 to kMaxHeadDim.
template <class Body>
static void dispatch_block(int head_dim, const Body& body) {
  switch (hadamard_block(head_dim)) {
    case 8: return body(std::integral_constant<int, 8>());
    case 16: return body(std::integral_constant<int, 16>());
    case 32: return body(std::integral_constant<int, 32>());
    case 64: return body(std::integral_constant<int, 64>());
    case 128: return body(std::integral_constant<int, 128>());
    case 256: return body(std::integral_constant<int, 256>());
    case 512: return body(std::integral_constant<int, 512>());
    default: return body(std::integral_constant<int, 1024>());
  }
}

template <class T, int Bits>
SGL_INLINE void unpack_rotated(const uint8_t* row, int head_dim, T* out) {
  dispatch_block(head_dim, [&](auto block) {
    constexpr int kVecs = std::max(1, block / kLanes);
    c10::Half scale;
    std::memcpy(&scale, row + head_dim * Bits / 8, sizeof(scale));
    const Vec weight = splat(scale * static_cast<float>(1.0 / std::sqrt(double{block})));
    Vec x[kVecs];
    for (int d = 0; d < head_dim; d += kVecs * kLanes) {
      const uint8_t* codes = row + d * Bits / 8;
      uint8_t rest[kLanes] = {};
      if (head_dim - d < kLanes) {
        std::memcpy(rest, codes, (head_dim - d) * Bits / 8);
        codes = rest;
      }
      for (int v = 0; v < kVecs; ++v) {
        x[v] = look_up<Bits>(codes + v * kLanes * Bits / 8, kLevels<Bits>);
      }
      hadamard<block>(x);
      for (int v = 0, at = d; v < kVecs; ++v, at += kLanes) {
        const Vec y = x[v] * (weight * load16(kSigns.value + at));
        if (head_dim - at < kLanes) {
          store_n(out + at, y, head_dim - at);
        } else {
          store_element16(out + at, y);
        }
      }
    }
  });
}

// `params`: all scales, then all zeros.
template <class T, int Bits>
SGL_INLINE void unpack_channels(
    const uint8_t* row, const uint8_t* params, int head_dim, T* out) {
  const c10::Half* scale = reinterpret_cast<const c10::Half*>(params);
  const c10::Half* zero = scale + head_dim;
  int d = 0;
  for (; d + kLanes <= head_dim; d += kLanes) {
    const Vec codes = load_codes<Bits>(row + d * Bits / 8);
    store_element16(out + d, fma(codes, load16(scale + d), load16(zero + d)));
  }
  if (const int rest = head_dim - d; rest > 0) {
    uint8_t codes[kLanes] = {};
    std::memcpy(codes, row + d * Bits / 8, rest * Bits / 8);
    const Vec x = fma(load_codes<Bits>(codes), load_n(scale + d, rest), load_n(zero + d, rest));
    store_n(out + d, x, rest);
  }
}

// Token `index` of a block -> head_dim elements of T.
template <class T, int Number>
SGL_INLINE void unpack_row(const uint8_t* block, int index, int head_dim, T* out) {
  constexpr Codec codec = kCodecs[Number];
  if constexpr (codec.scheme == Scheme::kUniform) {
    unpack_uniform<T, Number>(block, head_dim, out);
  } else if constexpr (codec.scheme == Scheme::kRotated) {
    unpack_rotated<T, codec.bits>(block, head_dim, out);
  } else {
    const int size = codec.code_bytes(head_dim);
    unpack_channels<T, codec.bits>(
        block + index * size, block + codec.tokens * size, head_dim, out);
  }
}

}  // namespace sgl_ext
