// Sixteen fp32 lanes on every instruction set, built from the widest native vector.
//
// Every function has one fixed arithmetic order, so a kernel written with it gives the same bits
// for a value wherever the value sits. Builds for different sets may differ from each other (fma).
// Everything is `static inline`: several builds of this header live in one process.
#pragma once
#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>

#include <bit>
#include <cstdint>
#include <cstring>
#if defined(__SSE2__)
#include <immintrin.h>
#endif

#define SGL_INLINE static inline __attribute__((always_inline))
#define SGL_FOR_PARTS _Pragma("GCC unroll 4") for (int i = 0; i < kParts; ++i)

namespace sgl_ext {

// Bytes of a cache line.
constexpr int kLine = 64;

// NOTE: GCC drops loops that only hold __builtin_prefetch from functions it finds free of effects.
SGL_INLINE void fetch_line(const void* p) {
#if defined(__x86_64__)
  asm volatile("prefetcht0 %0" : : "m"(*static_cast<const char*>(p)));
#else
  __builtin_prefetch(p);
#endif
}

constexpr int kLanes = 16;
#if defined(__AVX512F__)
constexpr int kNativeLanes = 16;
#elif defined(__AVX2__)
constexpr int kNativeLanes = 8;
#else
constexpr int kNativeLanes = 4;
#endif
constexpr int kParts = kLanes / kNativeLanes;

typedef float NativeF32 __attribute__((vector_size(4 * kNativeLanes)));
typedef int32_t NativeI32 __attribute__((vector_size(4 * kNativeLanes)));
typedef uint32_t NativeU32 __attribute__((vector_size(4 * kNativeLanes)));
typedef uint16_t NativeU16 __attribute__((vector_size(2 * kNativeLanes)));

struct Vec {
  NativeF32 part[kParts];
};

SGL_INLINE Vec splat(float x) {
  Vec r;
  SGL_FOR_PARTS r.part[i] = x - NativeF32{};  // x - 0 keeps the sign of zero
  return r;
}

SGL_INLINE Vec operator+(Vec a, Vec b) {
  SGL_FOR_PARTS a.part[i] += b.part[i];
  return a;
}

SGL_INLINE Vec operator-(Vec a, Vec b) {
  SGL_FOR_PARTS a.part[i] -= b.part[i];
  return a;
}

SGL_INLINE Vec operator*(Vec a, Vec b) {
  SGL_FOR_PARTS a.part[i] *= b.part[i];
  return a;
}

SGL_INLINE Vec operator/(Vec a, Vec b) {
  SGL_FOR_PARTS a.part[i] /= b.part[i];
  return a;
}

// a > b ? a : b per lane: a NaN in `a` yields b.
SGL_INLINE Vec max(Vec a, Vec b) {
  SGL_FOR_PARTS a.part[i] = a.part[i] > b.part[i] ? a.part[i] : b.part[i];
  return a;
}

// a * b + c; one rounding where the instruction set has fma.
SGL_INLINE Vec fma(Vec a, Vec b, Vec c) {
#if defined(__AVX512F__)
  return Vec{{(NativeF32)_mm512_fmadd_ps(
      (__m512)a.part[0], (__m512)b.part[0], (__m512)c.part[0])}};
#elif defined(__FMA__)
  SGL_FOR_PARTS c.part[i] = (NativeF32)_mm256_fmadd_ps(
      (__m256)a.part[i], (__m256)b.part[i], (__m256)c.part[i]);
  return c;
#else
  return a * b + c;
#endif
}

// Halving tree of an operation: lane l with lane l+8, then +4, +2, +1.
template <class Op>
SGL_INLINE float reduce(Vec a, const Op& op) {
#if defined(__AVX512F__)
  // GCC takes the loop below through memory, one store to load after another.
  typedef float F8 __attribute__((vector_size(32)));
  typedef float F4 __attribute__((vector_size(16)));
  const __m512 v = (__m512)a.part[0];
  const F8 eight = op((F8)_mm512_castps512_ps256(v), (F8)_mm512_extractf32x8_ps(v, 1));
  const F4 four = op(
      (F4)_mm256_castps256_ps128((__m256)eight), (F4)_mm256_extractf128_ps((__m256)eight, 1));
  const F4 two = op(four, (F4)_mm_movehl_ps((__m128)four, (__m128)four));
  return op(two, (F4)_mm_movehdup_ps((__m128)two))[0];
#else
  float x[kLanes];
  std::memcpy(x, &a, sizeof(x));
  for (int step = kLanes / 2; step > 0; step /= 2) {
    for (int l = 0; l < step; ++l) x[l] = op(x[l], x[l + step]);
  }
  return x[0];
#endif
}

SGL_INLINE float reduce_sum(Vec a) {
  return reduce(a, [](auto x, auto y) { return x + y; });
}

SGL_INLINE float reduce_max(Vec a) {
  return reduce(a, [](auto x, auto y) { return x > y ? x : y; });
}

// 2^x to 1e-7 relative; exp2(0) == 1 and exp2(-inf) == 0 exactly, NaN stays NaN.
SGL_INLINE Vec exp2(Vec x) {
  Vec f, n;
#if defined(__AVX512DQ__)
  f.part[0] = (NativeF32)_mm512_reduce_ps((__m512)x.part[0], _MM_FROUND_TO_NEAREST_INT);
  n = x - f;
#else
  SGL_FOR_PARTS {
    NativeF32 lo = NativeF32{} - 127.0f, hi = NativeF32{} + 128.0f;
    NativeF32 v = x.part[i];
    v = v < lo ? lo : v;
    v = v > hi ? hi : v;
    x.part[i] = v;
  }
  const Vec round = splat(12582912.0f);  // 1.5 * 2^23: its low mantissa bits become round(x)
  const Vec shifted = x + round;
  f = x - (shifted - round);
#endif
  // Minimax on [-0.5, 0.5] with the constant term held at 1.
  Vec p = splat(0x1.5bba14p-10f);
  p = fma(p, f, splat(0x1.3cea88p-7f));
  p = fma(p, f, splat(0x1.c6b752p-5f));
  p = fma(p, f, splat(0x1.ebf9bcp-3f));
  p = fma(p, f, splat(0x1.62e42ap-1f));
  p = fma(p, f, splat(1.0f));
#if defined(__AVX512DQ__)
  p.part[0] = (NativeF32)_mm512_scalef_ps((__m512)p.part[0], (__m512)n.part[0]);
  return p;
#else
  SGL_FOR_PARTS {
    NativeI32 e = (NativeI32)shifted.part[i] - (std::bit_cast<int32_t>(12582912.0f) - 127);
    n.part[i] = (NativeF32)(e << 23);
  }
  return p * n;
#endif
}

// Part by part: GCC 12 copies a whole Vec of several parts through memory.
SGL_INLINE Vec load16(const float* p) {
  Vec r;
  SGL_FOR_PARTS std::memcpy(&r.part[i], p + i * kNativeLanes, sizeof(r.part[i]));
  return r;
}

SGL_INLINE Vec load16(const c10::BFloat16* p) {
  NativeU16 raw[kParts];
  std::memcpy(raw, p, sizeof(raw));
  Vec r;
  SGL_FOR_PARTS r.part[i] = (NativeF32)(__builtin_convertvector(raw[i], NativeU32) << 16);
  return r;
}

SGL_INLINE Vec load16(const c10::Half* p) {
  Vec r;
#if defined(__AVX512F__)
  r.part[0] = (NativeF32)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p));
#elif defined(__F16C__)
  SGL_FOR_PARTS r.part[i] = (NativeF32)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p + i));
#else
  float x[kLanes];
  for (int l = 0; l < kLanes; ++l) x[l] = static_cast<float>(p[l]);
  std::memcpy(&r, x, sizeof(r));
#endif
  return r;
}

SGL_INLINE void store16(float* p, Vec v) {
  SGL_FOR_PARTS std::memcpy(p + i * kNativeLanes, &v.part[i], sizeof(v.part[i]));
}

// Round to nearest even, denormals kept, NaN made quiet: the bits of torch's conversion.
SGL_INLINE void store16(c10::BFloat16* p, Vec v) {
  NativeU16 raw[kParts];
  SGL_FOR_PARTS {
    const NativeU32 x = (NativeU32)v.part[i];
    const NativeU32 rounded = (x + 0x7fff + ((x >> 16) & 1)) >> 16;
    const NativeU32 nan = (NativeU32)(v.part[i] != v.part[i]);
    raw[i] = __builtin_convertvector((nan & 0x7fc0) | (~nan & rounded), NativeU16);
  }
  std::memcpy(p, raw, sizeof(raw));
}

SGL_INLINE void store16(c10::Half* p, Vec v) {
#if defined(__AVX512F__)
  _mm256_storeu_si256(
      (__m256i*)p, _mm512_cvtps_ph((__m512)v.part[0], _MM_FROUND_TO_NEAREST_INT));
#elif defined(__F16C__)
  SGL_FOR_PARTS _mm_storeu_si128(
      (__m128i*)p + i, _mm256_cvtps_ph((__m256)v.part[i], _MM_FROUND_TO_NEAREST_INT));
#else
  float x[kLanes];
  std::memcpy(x, &v, sizeof(v));
  for (int l = 0; l < kLanes; ++l) p[l] = static_cast<c10::Half>(x[l]);
#endif
}

// First n of 16 lanes; the others load as zero and are not stored.
template <class T>
SGL_INLINE Vec load_n(const T* p, int n) {
  if (n >= kLanes) return load16(p);
  alignas(64) uint8_t raw[kLanes * sizeof(T)] = {};
  std::memcpy(raw, p, n * sizeof(T));
  return load16(reinterpret_cast<const T*>(raw));
}

template <class T>
SGL_INLINE void store_n(T* p, Vec v, int n) {
  if (n >= kLanes) return store16(p, v);
  alignas(64) uint8_t raw[kLanes * sizeof(T)];
  store16(reinterpret_cast<T*>(raw), v);
  std::memcpy(p, raw, n * sizeof(T));
}

// acc[l] + a[2l] * b[2l] + a[2l+1] * b[2l+1], lanes of a and b holding bf16 pairs.
SGL_INLINE Vec dot_bf16(Vec acc, Vec a, Vec b) {
#if defined(__AVX512BF16__)
  acc.part[0] = (NativeF32)_mm512_dpbf16_ps(
      (__m512)acc.part[0], (__m512bh)a.part[0], (__m512bh)b.part[0]);
  return acc;
#else
  Vec a_lo, b_lo;
  SGL_FOR_PARTS {
    a_lo.part[i] = (NativeF32)((NativeU32)a.part[i] << 16);
    b_lo.part[i] = (NativeF32)((NativeU32)b.part[i] << 16);
    a.part[i] = (NativeF32)((NativeU32)a.part[i] & 0xffff0000u);
    b.part[i] = (NativeF32)((NativeU32)b.part[i] & 0xffff0000u);
  }
  return fma(a, b, fma(a_lo, b_lo, acc));
#endif
}

}  // namespace sgl_ext
