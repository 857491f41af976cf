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

SGL_INLINE float half_at(const uint8_t* p) {
  c10::Half half;
  std::memcpy(&half, p, sizeof(half));
#if defined(__F16C__)
  return _cvtsh_ss(half.x);
#else
  return static_cast<float>(half);
#endif
}

// Sixteen codes as floats.
template <int Bits>
SGL_INLINE Vec load_codes(const uint8_t* p) {
  static_assert(Bits == 8 || Bits == 4);
  uint8_t bytes[kLanes];
  if constexpr (Bits == 8) {
    std::memcpy(bytes, p, kLanes);
  } else {
#if defined(__SSE2__)
    const __m128i pairs = _mm_loadl_epi64((const __m128i*)p), low = _mm_set1_epi8(15);
    _mm_storeu_si128(
        (__m128i*)bytes, _mm_unpacklo_epi8(_mm_and_si128(pairs, low),
                                           _mm_and_si128(_mm_srli_epi16(pairs, 4), low)));
#else
    for (int i = 0; i < kLanes; ++i) bytes[i] = p[i / 2] >> i % 2 * 4 & 15;
#endif
  }
  Vec r;
  SGL_FOR_PARTS {
    NativeU8 raw;
    std::memcpy(&raw, bytes + i * kNativeLanes, sizeof(raw));
    r.part[i] = __builtin_convertvector(__builtin_convertvector(raw, NativeI32), NativeF32);
  }
  return r;
}

// A packed row -> head_dim elements of T.
template <class T, int Bits>
SGL_INLINE void unpack_row(const uint8_t* row, int head_dim, const Codec& codec, T* out) {
  const uint8_t* params = row + head_dim * Bits / 8;
  Vec scale, zero;
  for (int d = 0; d < head_dim; d += kLanes) {
    if (d % codec.group == 0) {
      const uint8_t* group = params + d / codec.group * 4;
      scale = splat(half_at(group)), zero = splat(half_at(group + 2));
    }
    const uint8_t* codes = row + d * Bits / 8;
    const int count = std::min(kLanes, head_dim - d);
    uint8_t padded[kLanes] = {};
    if (count < kLanes) codes = std::copy_n(codes, count * Bits / 8, padded) - count * Bits / 8;
    store_n(out + d, fma(load_codes<Bits>(codes), scale, zero), count);
  }
}

}  // namespace sgl_ext
