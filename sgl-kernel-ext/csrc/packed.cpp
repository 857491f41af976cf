// Encoding of K and V rows into the slots of packed pools; packed.h has the format.
#include "packed.h"

#include <array>
#include <bit>

#include "kernels.h"
#include "rows.h"

namespace sgl_ext {
namespace {

constexpr float kLargestHalf = 65504.0f, kLeastHalf = 0x1p-24f;

// The nearest fp16; +0 for both zeros.
float round_to_half(float x) {
  const c10::Half half = std::clamp(x, -kLargestHalf, kLargestHalf) + 0.0f;
  return static_cast<float>(half);
}

void store_half(uint8_t* p, float x) {
  const c10::Half half = x;
  std::memcpy(p, &half, sizeof(half));
}

// Codes of 16 values in units of `scale` above `zero`; NaN gives 0.
void encode16(Vec x, Vec scale, Vec zero, float levels, uint8_t* codes) {
  const Vec v = max((x - zero) / scale, splat(0.0f));
  const Vec clamped = splat(0.0f) - max(splat(0.0f) - v, splat(-levels));
  const Vec round = splat(12582912.0f);  // 1.5 * 2^23: its low mantissa bits become round(x)
  const Vec shifted = clamped + round;
  SGL_FOR_PARTS {
    const NativeI32 code = (NativeI32)shifted.part[i] - (NativeI32)round.part[i];
    const NativeU8 raw = __builtin_convertvector(code, NativeU8);
    std::memcpy(codes + i * kNativeLanes, &raw, sizeof(raw));
  }
}

struct Range {
  float scale, zero;
};

// Scale and zero of codes up to `levels` for `low` to `high`, as fp16 holds them.
Range range_of(float low, float high, float levels) {
  const float zero = round_to_half(low);
  return {std::max(round_to_half((high - zero) / levels), kLeastHalf), zero};
}

using Codes = std::array<uint8_t, kMaxHeadDim>;

// `x`: head_dim values and room for whole vectors; codes and parameters of a row.
void encode_uniform(float* x, int head_dim, const Codec& codec, Codes& codes, uint8_t* params) {
  const int size = round_up(head_dim, kLanes);
  std::fill(x + head_dim, x + size, x[head_dim - 1]);
  const float levels = (1 << codec.bits) - 1;
  for (int begin = 0; begin < head_dim; begin += codec.group, params += 4) {
    const int end = std::min(begin + codec.group, size);
    Vec highest = load16(x + begin), lowest = splat(0.0f) - highest;
    for (int d = begin + kLanes; d < end; d += kLanes) {
      highest = max(load16(x + d), highest);
      lowest = max(splat(0.0f) - load16(x + d), lowest);
    }
    const auto [scale, zero] = range_of(-reduce_max(lowest), reduce_max(highest), levels);
    store_half(params, scale), store_half(params + 2, zero);
    for (int d = begin; d < end; d += kLanes) {
      encode16(load16(x + d), splat(scale), splat(zero), levels, codes.data() + d);
    }
  }
}

// Sum of products, halves added to each other: as _tree_sum in reference/packed.py.
float dot(const float* a, const float* b, int count) {
  alignas(64) float terms[kMaxHeadDim] = {};
  for (int i = 0; i < count; ++i) terms[i] = a[i] * b[i];
  for (int step = std::bit_ceil(unsigned(count)) / 2; step > 0; step /= 2) {
    for (int i = 0; i < step; ++i) terms[i] += terms[i + step];
  }
  return terms[0];
}

template <int Bits>
void encode_rotated(float* x, int head_dim, Codes& codes, uint8_t* params) {
  const int block = hadamard_block(head_dim);
  for (int d = 0; d < head_dim; ++d) x[d] *= kSigns.value[d];
  std::fill(x + head_dim, x + round_up(head_dim, kLanes), 0.0f);
  dispatch_block(head_dim, [&](auto size) {
    constexpr int kVecs = std::max(1, size / kLanes);
    Vec part[kVecs];
    for (int d = 0; d < head_dim; d += kVecs * kLanes) {
      for (int v = 0; v < kVecs; ++v) part[v] = load16(x + d + v * kLanes);
      hadamard<size>(part);
      for (int v = 0; v < kVecs; ++v) store16(x + d + v * kLanes, part[v]);
    }
  });
  const float* levels = kLevels<Bits>.value;
  const float share = 1.0 / head_dim, unit = std::sqrt(dot(x, x, head_dim) * share);
  std::fill_n(codes.data(), head_dim, uint8_t{0});
  for (int i = 1; i < 1 << Bits; ++i) {
    const float border = unit * static_cast<float>((double{levels[i - 1]} + levels[i]) / 2);
    for (int d = 0; d < head_dim; ++d) codes[d] += x[d] > border;
  }
  alignas(64) float values[kMaxHeadDim];
  for (int d = 0; d < head_dim; ++d) values[d] = levels[codes[d]];
  const float ratio = dot(x, values, head_dim) / dot(values, values, head_dim);
  store_half(params, round_to_half(ratio * static_cast<float>(1.0 / std::sqrt(double(block)))));
}

void store_codes(const Codes& codes, int head_dim, const Codec& codec, uint8_t* row) {
  const int per_byte = 8 / codec.bits;
  for (int i = 0; i < codec.code_bytes(head_dim); ++i) {
    uint8_t byte = 0;
    for (int j = 0; j < per_byte; ++j) byte |= codes[i * per_byte + j] << j * codec.bits;
    row[i] = byte;
  }
}

template <class T>
void pack_row(const T* x, int head_dim, const Codec& codec, uint8_t* row) {
  alignas(64) float values[kMaxHeadDim];
  widen_row(x, head_dim, values);
  uint8_t* params = row + codec.code_bytes(head_dim);
  Codes codes;
  if (codec.scheme == Scheme::kUniform) {
    encode_uniform(values, head_dim, codec, codes, params);
  } else if (codec.bits == 4) {
    encode_rotated<4>(values, head_dim, codes, params);
  } else {
    encode_rotated<2>(values, head_dim, codes, params);
  }
  store_codes(codes, head_dim, codec, row);
}

// `count` rows, `stride` apart; the last one fills up the block.
template <class T>
void pack_channels(
    const T* x, int64_t stride, int count, int head_dim, const Codec& codec, uint8_t* block) {
  alignas(64) float values[kMaxHeadDim], highest[kMaxHeadDim], lowest[kMaxHeadDim];
  const int size = round_up(head_dim, kLanes);
  std::fill(values + head_dim, values + size, 0.0f);
  for (int i = 0; i < count; ++i) {
    widen_row(x + i * stride, head_dim, values);
    for (int d = 0; d < size; d += kLanes) {
      const Vec v = load16(values + d), negated = splat(0.0f) - v;
      store16(highest + d, i == 0 ? v : max(v, load16(highest + d)));
      store16(lowest + d, i == 0 ? negated : max(negated, load16(lowest + d)));
    }
  }
  const float levels = (1 << codec.bits) - 1;
  float *scales = highest, *zeros = lowest;  // in their place
  uint8_t* params = block + codec.tokens * codec.code_bytes(head_dim);
  for (int d = 0; d < size; ++d) {
    const auto [scale, zero] = range_of(-lowest[d], highest[d], levels);
    scales[d] = scale, zeros[d] = zero;
    if (d >= head_dim) continue;
    store_half(params + 2 * d, scale), store_half(params + 2 * (head_dim + d), zero);
  }
  Codes codes;
  for (int i = 0; i < codec.tokens; ++i) {
    if (i < count) {
      widen_row(x + i * stride, head_dim, values);
      for (int d = 0; d < size; d += kLanes) {
        encode16(load16(values + d), load16(scales + d), load16(zeros + d), levels,
                 codes.data() + d);
      }
    }
    store_codes(codes, head_dim, codec, block + i * codec.code_bytes(head_dim));
  }
}

template <class T>
void pack_all(const Tensor& x, const Tensor& pool, const Codec& codec, const int32_t* slots) {
  const int64_t count = x.size(0), heads = x.size(1), dim = x.size(2);
  const T* source = x.const_data_ptr<T>();
  uint8_t* target = pool.mutable_data_ptr<uint8_t>();
  const auto in = x.strides(), out = pool.strides();
  for_rows(ceil_div(count, int64_t{codec.tokens}), heads * dim * codec.tokens, 1 << 14, [&](int64_t b) {
    const int64_t first = b * codec.tokens;
    for (int64_t h = 0; h < heads; ++h) {
      const T* from = source + first * in[0] + h * in[1];
      uint8_t* block = target + slots[first] / codec.tokens * out[0] + h * out[1];
      if (codec.scheme == Scheme::kChannel) {
        const int rows = std::min<int64_t>(codec.tokens, count - first);
        pack_channels(from, in[0], rows, dim, codec, block);
      } else {
        pack_row(from, dim, codec, block);
      }
    }
  });
}

// Nothing is written before all slots are known to be good.
void check_slots(const Tensor& slots, const Tensor& pool, const Codec& codec) {
  const int32_t* slot = slots.const_data_ptr<int32_t>();
  const int64_t limit = pool.size(0) * codec.tokens;
  for (int64_t i = 0; i < slots.size(0); ++i) {
    TORCH_CHECK_INDEX(slot[i] >= 0 && slot[i] < limit, "slots: ", slot[i],
                      " is outside the packed pool of ", limit, " slots");
    const int64_t place = i % codec.tokens;
    TORCH_CHECK_VALUE(slot[i] % codec.tokens == place && slot[i] - place == slot[i - place],
                      "slots: entry ", i, " is ", slot[i], ", which makes no block of ",
                      codec.tokens, " tokens");
  }
}

}  // namespace

void pack_kv(const Tensor& k, const Tensor& v, const KvTensors& pool, const Tensor& slots) {
  const auto& [k_packed, v_packed, k_number, v_number] = pool;
  const Codec &k_codec = codec_of(k_number), &v_codec = codec_of(v_number);
  check_slots(slots, k_packed, k_codec);
  check_slots(slots, v_packed, v_codec);
  const int32_t* slot = slots.const_data_ptr<int32_t>();
  dispatch(k, "k", [&](auto tag) {
    pack_all<decltype(tag)>(k, k_packed, k_codec, slot);
    pack_all<decltype(tag)>(v, v_packed, v_codec, slot);
  });
}

}  // namespace sgl_ext
