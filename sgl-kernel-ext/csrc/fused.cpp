// RMSNorm (with residual add) and SiLU-and-multiply. Each rounds where SGLang's torch-native op
// does, so that bf16 results agree with it.
#include <cmath>
#include <vector>

#include "rows.h"

namespace sgl_ext {
namespace {

constexpr int64_t kNormGrain = 48 * 1024;
constexpr int64_t kSiluGrain = 16 * 1024;

int lanes_left(int64_t n, int64_t i) { return static_cast<int>(std::min<int64_t>(kLanes, n - i)); }

// Mean of squares in the order of torch.mean, whose kernel keeps four ways of eight partial sums
// (here two vectors) and sets them aside every 16 rounds.
float mean_square(const float* x, int64_t n) {
  constexpr int kRound = 2 * kLanes, kWay = 8, kRounds = 16;
  const auto square = [x](int64_t i) {
    const Vec v = load16(x + i);
    return v * v;
  };
  Vec low = splat(0.0f), high = low, low_aside = low, high_aside = low;
  int64_t i = 0;
  for (; i + kRound <= n; i += kRound) {
    low = low + square(i);
    high = high + square(i + kLanes);
    if (i / kRound % kRounds != kRounds - 1) continue;
    low_aside = low_aside + low;
    high_aside = high_aside + high;
    low = high = splat(0.0f);
  }
  float ways[4 * kWay];
  store16(ways, low + low_aside);
  store16(ways + kLanes, high + high_aside);
  for (; i + kWay <= n; i += kWay)
    for (int l = 0; l < kWay; ++l) ways[l] += x[i + l] * x[i + l];
  float total = 0.0f;
  for (; i < n; ++i) total += x[i] * x[i];
  for (int l = 0; l < kWay; ++l)
    total += ways[l] + ways[kWay + l] + ways[2 * kWay + l] + ways[3 * kWay + l];
  return total / static_cast<float>(n);
}

template <class T>
void norm_row(const float* x, const T* weight, int64_t n, float eps, T* out) {
  const Vec scale = splat(1.0f / std::sqrt(mean_square(x, n) + eps));
  for (int64_t i = 0; i < n; i += kLanes) {
    const int left = lanes_left(n, i);
    store_n(out + i, load_n(x + i, left) * scale * load_n(weight + i, left), left);
  }
}

void check_norm(const Tensor& x, const Tensor& weight) {
  TORCH_CHECK_VALUE(weight.dim() == 1 && weight.is_contiguous() && x.dim() >= 2 &&
                        x.size(-1) == weight.size(0) && x.scalar_type() == weight.scalar_type(),
                    "rmsnorm: weight must be a vector over the last dim of x ", x.sizes(), " ",
                    x.scalar_type(), ", got ", weight.sizes(), " ", weight.scalar_type());
}

// For each group of n elements: body(the group in fp32 as `load` gives it, row, column).
template <class T, class Load, class Body>
void for_norm_groups(const Rows<T>& x, int64_t n, const Load& load, const Body& body) {
  for_rows(x.count, x.width, kNormGrain, [&](int64_t row) {
    static thread_local std::vector<float> scratch;
    scratch.resize(n + kLanes);
    for (int64_t col = 0; col < x.width; col += n) {
      for (int64_t i = 0; i < n; i += kLanes)
        store16(scratch.data() + i, load(row, col + i, lanes_left(n, i)));
      body(scratch.data(), row, col);
    }
  });
}

// e^-x = 2^n * e^r to 2 ulp; beyond [-87, 100] whatever 1 + e^-x cannot tell apart.
Vec exp_neg(Vec x) {
  const Vec zero = splat(0.0f);
  const Vec y = max(zero - max(x, splat(-100.0f)), splat(-87.0f));
  const Vec t = zero - max(y * splat(-0x1.715476p+0f), splat(-127.0f));
  const float rounder = 12582912.0f;  // 1.5 * 2^23: the low bits of t + rounder are round(t)
  const Vec shifted = t + splat(rounder), n = shifted - splat(rounder);
  // n times the short high part of ln 2 is exact, with or without fma.
  const Vec r = fma(n, splat(-0x1.7f7d1cp-20f), fma(n, splat(-0x1.62e4p-1f), y));
  // Minimax of (e^r - 1 - r) / r^2 on |r| <= ln(2) / 2.
  Vec p = splat(0x1.6a23cep-10f);
  p = fma(p, r, splat(0x1.123a20p-7f));
  p = fma(p, r, splat(0x1.5558f2p-5f));
  p = fma(p, r, splat(0x1.555492p-3f));
  p = fma(p, r, splat(0x1.fffffcp-2f));
  p = fma(p, r * r, r) + splat(1.0f);
  Vec power;
  SGL_FOR_PARTS {
    const NativeI32 exponent = (NativeI32)shifted.part[i] - (std::bit_cast<int32_t>(rounder) - 127);
    power.part[i] = (NativeF32)(exponent << 23);
  }
  return p * power;
}

}  // namespace

Tensor rmsnorm(const Tensor& x, const Tensor& weight, double eps, const MaybeTensor& out) {
  check_norm(x, weight);
  Tensor y = out ? *out : at::empty(x.sizes(), x.options());
  TORCH_CHECK_VALUE(y.sizes() == x.sizes(), "rmsnorm: out must have the sizes of x");
  dispatch(x, "rmsnorm: x", [&](auto tag) {
    using T = decltype(tag);
    const auto from = rows_of<T>(x, "rmsnorm: x"), to = rows_of<T>(y, "rmsnorm: out");
    const T* w = weight.const_data_ptr<T>();
    const int64_t n = weight.size(0);
    for_norm_groups(
        from, n, [&](int64_t row, int64_t col, int left) { return load_n(from[row] + col, left); },
        [&](const float* group, int64_t row, int64_t col) {
          norm_row(group, w, n, static_cast<float>(eps), to[row] + col);
        });
  });
  return y;
}

void fused_add_rmsnorm(const Tensor& x, const Tensor& residual, const Tensor& weight, double eps) {
  check_norm(x, weight);
  TORCH_CHECK_VALUE(x.sizes() == residual.sizes(),
                    "fused_add_rmsnorm: x and residual must have equal sizes");
  dispatch(x, "fused_add_rmsnorm: x", [&](auto tag) {
    using T = decltype(tag);
    const auto xs = rows_of<T>(x, "fused_add_rmsnorm: x");
    const auto sums = rows_of<T>(residual, "fused_add_rmsnorm: residual");
    const T* w = weight.const_data_ptr<T>();
    const int64_t n = weight.size(0);
    for_norm_groups(
        xs, n,
        [&](int64_t row, int64_t col, int left) {
          T* sum = sums[row] + col;
          const Vec exact = load_n(xs[row] + col, left) + load_n(sum, left);
          store_n(sum, exact, left);
          return exact;
        },
        [&](const float* group, int64_t row, int64_t col) {
          norm_row(group, w, n, static_cast<float>(eps), xs[row] + col);
        });
  });
}

Tensor silu_and_mul(const Tensor& x, const MaybeTensor& out) {
  TORCH_CHECK_VALUE(x.dim() == 2 && x.size(1) % 2 == 0, "silu_and_mul: x must be [M, 2N], got ",
                    x.sizes());
  const int64_t n = x.size(1) / 2;
  Tensor y = out ? *out : at::empty({x.size(0), n}, x.options());
  TORCH_CHECK_VALUE(y.dim() == 2 && y.size(0) == x.size(0) && y.size(1) == n,
                    "silu_and_mul: out must be [", x.size(0), ", ", n, "]");
  dispatch(x, "silu_and_mul: x", [&](auto tag) {
    using T = decltype(tag);
    const auto from = rows_of<T>(x, "silu_and_mul: x"), to = rows_of<T>(y, "silu_and_mul: out");
    for_rows(from.count, n, kSiluGrain, [&](int64_t row) {
      for (int64_t i = 0; i < n; i += kLanes) {
        const int left = lanes_left(n, i);
        const Vec gate = load_n(from[row] + i, left);
        const Vec silu = round_to<T>(gate / (splat(1.0f) + exp_neg(gate)));
        store_n(to[row] + i, silu * load_n(from[row] + n + i, left), left);
      }
    });
  });
  return y;
}

}  // namespace sgl_ext
