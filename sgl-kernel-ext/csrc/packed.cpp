// Encoding of K and V rows into the slots of packed pools; packed.h has the format.
#include "packed.h"

#include <array>

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
void encode16(Vec x, float scale, float zero, float levels, uint8_t* codes) {
  const Vec v = max((x - splat(zero)) / splat(scale), splat(0.0f));
  const Vec clamped = splat(0.0f) - max(splat(0.0f) - v, splat(-levels));
  const Vec round = splat(12582912.0f);  // 1.5 * 2^23: its low mantissa bits become round(x)
  const Vec shifted = clamped + round;
  SGL_FOR_PARTS {
    const NativeI32 code = (NativeI32)shifted.part[i] - (NativeI32)round.part[i];
    const NativeU8 raw = __builtin_convertvector(code, NativeU8);
    std::memcpy(codes + i * kNativeLanes, &raw, sizeof(raw));
  }
}

template <class T>
void pack_row(const T* x, int head_dim, const Codec& codec, uint8_t* row) {
  const int size = round_up(head_dim, kLanes);
  alignas(64) float values[kMaxHeadDim];
  widen_row(x, head_dim, values);
  std::fill(values + head_dim, values + size, values[head_dim - 1]);
  const float levels = (1 << codec.bits) - 1;
  uint8_t* params = row + codec.code_bytes(head_dim);
  std::array<uint8_t, kMaxHeadDim> codes;
  for (int begin = 0; begin < head_dim; begin += codec.group, params += 4) {
    const int end = std::min(begin + codec.group, size);
    Vec highest = load16(values + begin), lowest = splat(0.0f) - highest;
    for (int d = begin + kLanes; d < end; d += kLanes) {
      highest = max(load16(values + d), highest);
      lowest = max(splat(0.0f) - load16(values + d), lowest);
    }
    const float zero = round_to_half(-reduce_max(lowest));
    const float step = round_to_half((reduce_max(highest) - zero) / levels);
    const float scale = std::max(step, kLeastHalf);
    store_half(params, scale), store_half(params + 2, zero);
    for (int d = begin; d < end; d += kLanes) {
      encode16(load16(values + d), scale, zero, levels, codes.data() + d);
    }
  }
  const int per_byte = 8 / codec.bits;
  for (int i = 0; i < codec.code_bytes(head_dim); ++i) {
    uint8_t byte = 0;
    for (int j = 0; j < per_byte; ++j) byte |= codes[i * per_byte + j] << j * codec.bits;
    row[i] = byte;
  }
}

}  // namespace

void pack_kv(const Tensor& k, const Tensor& v, const Tensor& k_packed, const Tensor& v_packed,
             const Tensor& slots) {
  const int64_t count = k.size(0), heads = k.size(1), dim = k.size(2);
  const int64_t limit = std::min(k_packed.size(0), v_packed.size(0));
  const int32_t* slot = slots.const_data_ptr<int32_t>();
  for (int64_t i = 0; i < count; ++i) {
    TORCH_CHECK_INDEX(slot[i] >= 0 && slot[i] < limit, "slots: ", slot[i],
                      " is outside the packed pool of ", limit, " slots");
  }
  dispatch(k, "k", [&](auto tag) {
    using T = decltype(tag);
    for (const auto& [from, to] : {std::tie(k, k_packed), std::tie(v, v_packed)}) {
      const Codec codec = codec_of(to, dim);
      const T* source = from.template const_data_ptr<T>();
      uint8_t* target = to.template mutable_data_ptr<uint8_t>();
      const auto in = from.strides(), out = to.strides();
      for_rows(count, heads * dim, 1 << 14, [&](int64_t i) {
        for (int64_t h = 0; h < heads; ++h) {
          pack_row(source + i * in[0] + h * in[1], dim, codec,
                   target + slot[i] * out[0] + h * out[1]);
        }
      });
    }
  });
}

}  // namespace sgl_ext
