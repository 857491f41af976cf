// Packed rows of K or V, one a slot and KV head: D codes of `bits` bits (the first of a byte in its
// low bits), then scale and zero, fp16, of each group of channels. Element d is
// code * scale + zero: the product is exact in fp32, so there is one rounding on every build.
#pragma once
#include <ATen/core/Tensor.h>

#include "attention_tile.h"

namespace sgl_ext {

constexpr int kMaxHeadDim = 1024;

struct Codec {
  int bits = 0;  // 0: rows are not packed
  int group = kMaxHeadDim;

  int code_bytes(int head_dim) const { return head_dim * bits / 8; }
  int row_bytes(int head_dim) const {
    return code_bytes(head_dim) + 4 * ceil_div(head_dim, group);
  }
};

// As CODECS in sgl_kernel_ext/packed.py; the width of a row tells which one made it.
constexpr Codec kCodecs[] = {{8, kMaxHeadDim}, {4, 32}};

static inline Codec codec_of(const at::Tensor& pool, int head_dim) {
  if (pool.scalar_type() != at::kByte) return {};
  for (const Codec& codec : kCodecs) {
    if (codec.row_bytes(head_dim) == pool.size(2)) return codec;
  }
  TORCH_CHECK_VALUE(false, "packed pool: no codec has rows of ", pool.size(2), " bytes");
}

// body(std::integral_constant) with the bits of a codec.
template <class Body>
static auto dispatch_bits(const Codec& codec, const Body& body) {
  return codec.bits == 8 ? body(std::integral_constant<int, 8>())
                         : body(std::integral_constant<int, 4>());
}

typedef uint8_t NativeU8 __attribute__((vector_size(kNativeLanes)));

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

// Sixteen codes as floats.
template <int Bits>
SGL_INLINE Vec load_codes(const uint8_t* p) {
  static_assert(Bits == 8 || Bits == 4);
  Vec r;
#if defined(__AVX2__)
  __m128i bytes;
  if constexpr (Bits == 8) {
    bytes = _mm_loadu_si128((const __m128i*)p);
  } else {
    const __m128i pairs = _mm_loadl_epi64((const __m128i*)p), low = _mm_set1_epi8(15);
    bytes = _mm_unpacklo_epi8(
        _mm_and_si128(pairs, low), _mm_and_si128(_mm_srli_epi16(pairs, 4), low));
  }
#if defined(__AVX512F__)
  r.part[0] = (NativeF32)_mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(bytes));
#else
  r.part[0] = (NativeF32)_mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(bytes));
  r.part[1] = (NativeF32)_mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_srli_si128(bytes, 8)));
#endif
#else
  float codes[kLanes];
  for (int i = 0; i < kLanes; ++i) codes[i] = Bits == 8 ? p[i] : p[i / 2] >> i % 2 * 4 & 15;
  std::memcpy(&r, codes, sizeof(r));
#endif
  return r;
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

// A packed row -> head_dim elements of T.
template <class T, int Bits>
SGL_INLINE void unpack_row(const uint8_t* row, int head_dim, const Codec& codec, T* out) {
  const uint8_t* params = row + head_dim * Bits / 8;
  for (int d = 0; d < head_dim; params += 4) {
    const auto [scale, zero] = load_params(params);
    const int end = std::min(d + codec.group, head_dim);
    for (; d + kLanes <= end; d += kLanes) {
      store_element16(out + d, fma(load_codes<Bits>(row + d * Bits / 8), scale, zero));
    }
    if (d < end) {
      uint8_t codes[kLanes] = {};
      std::memcpy(codes, row + d * Bits / 8, (end - d) * Bits / 8);
      store_n(out + d, fma(load_codes<Bits>(codes), scale, zero), end - d);
      d = end;
    }
  }
}

}  // namespace sgl_ext
