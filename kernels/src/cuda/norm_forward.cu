// Forward of the normed fusions. A row is read once: it stays in registers between the sum of
// squares and the product with its reciprocal RMS.
#include "device.cuh"

namespace megalatent::cuda {
namespace {

template <typename T, Combine combine, int K>
__device__ __forceinline__ float combine_pack(const T* a, const T* b, float (&y)[K]) {
  float from_a[K], from_b[K], sum = 0.0f;
  load<K, T>(a, from_a);
  load<K, T>(b, from_b);
#pragma unroll
  for (int j = 0; j < K; ++j) {
    if constexpr (combine == Combine::gate) {
      float gate, slope;
      sigmoid<T>(from_b[j], gate, slope);
      y[j] = from_a[j] * gate;
    } else {
      y[j] = from_a[j] + from_b[j];
    }
    sum += y[j] * y[j];
  }
  return sum;
}

// blockDim = (threads of a row, rows at once). Each thread owns `kPacks` packs of its row.
template <typename T, Combine combine, int kPacks>
__global__ void __launch_bounds__(kMostThreads) norm_forward_in_registers(const NormForward p) {
  constexpr int K = kPackWidth<T>;
  __shared__ float slots[2][kMostThreads / kWarp];
  const bool wide_weight = sizeof(T) == 4 || p.weight_dtype == DType::float32;
  const int64_t packs = p.width / K;
  int turn = 0;
  for (int64_t first = int64_t{blockIdx.x} * blockDim.y; first < p.rows;
       first += int64_t{gridDim.x} * blockDim.y) {
    const int64_t row = first + threadIdx.y, at = row * p.width;
    const bool active = row < p.rows;
    const bool fused = active && p.mask[row];
    float y[kPacks][K], weight[kPacks][K], sum = 0.0f;
#pragma unroll
    for (int i = 0; i < kPacks; ++i) {
      const int64_t pack = threadIdx.x + int64_t{i} * blockDim.x, column = pack * K;
      if (pack >= packs) continue;
      if (fused) {
        sum += combine_pack<T, combine, K>(
            static_cast<const T*>(p.a) + at + column, static_cast<const T*>(p.b) + at + column,
            y[i]);
        load_weight<K, T>(p.weight, wide_weight, column, weight[i]);
      } else if (active) {
        copy<K, T>(static_cast<const T*>(p.e) + at + column, static_cast<T*>(p.x) + at + column);
      }
    }
    const float total = row_sum(sum, slots[turn]);
    turn ^= 1;
    const float r = rsqrtf(total / static_cast<float>(p.width) + static_cast<float>(p.eps));
#pragma unroll
    for (int i = 0; i < kPacks; ++i) {
      const int64_t pack = threadIdx.x + int64_t{i} * blockDim.x;
      if (!fused || pack >= packs) continue;
      float x[K];
#pragma unroll
      for (int j = 0; j < K; ++j) x[j] = y[i][j] * r * weight[i][j];
      store<K, T>(x, static_cast<T*>(p.x) + at + pack * K);
    }
    if (active && threadIdx.x == 0) static_cast<float*>(p.rstd)[row] = fused ? r : 0.0f;
  }
}

// Any width and alignment, one row per block at a time; the second reading comes from the cache.
template <typename T, Combine combine, int K>
__global__ void __launch_bounds__(kMostThreads) norm_forward_any(const NormForward p) {
  __shared__ float slots[2][kMostThreads / kWarp];
  const bool wide_weight = sizeof(T) == 4 || p.weight_dtype == DType::float32;
  int turn = 0;
  for (int64_t row = blockIdx.x; row < p.rows; row += gridDim.x) {
    const int64_t at = row * p.width;
    const T* a = static_cast<const T*>(p.a) + at;
    const T* b = static_cast<const T*>(p.b) + at;
    T* x = static_cast<T*>(p.x) + at;
    const bool fused = p.mask[row];
    const int64_t begin = int64_t{threadIdx.x} * K, step = int64_t{blockDim.x} * K;
    float y[K], weight[K], sum = 0.0f;
    for (int64_t column = begin; column < p.width; column += step) {
      if (fused) {
        sum += combine_pack<T, combine, K>(a + column, b + column, y);
      } else {
        copy<K, T>(static_cast<const T*>(p.e) + at + column, x + column);
      }
    }
    const float total = row_sum(sum, slots[turn]);
    turn ^= 1;
    const float r = rsqrtf(total / static_cast<float>(p.width) + static_cast<float>(p.eps));
    for (int64_t column = begin; fused && column < p.width; column += step) {
      combine_pack<T, combine, K>(a + column, b + column, y);
      load_weight<K, T>(p.weight, wide_weight, column, weight);
#pragma unroll
      for (int j = 0; j < K; ++j) y[j] *= r * weight[j];
      store<K, T>(y, x + column);
    }
    if (threadIdx.x == 0) static_cast<float*>(p.rstd)[row] = fused ? r : 0.0f;
  }
}

template <typename T, Combine combine>
cudaError_t launch(const NormForward& p, cudaStream_t stream) {
  constexpr int K = kPackWidth<T>;
  constexpr int kPacks = 8 / K;  // eight elements a thread
  const bool vector = p.width % K == 0 && aligned(p.a, p.b, p.e, p.weight, p.x);
  const int64_t row_threads = divide_up(divide_up(p.width, 8), kWarp) * kWarp;
  if (vector && row_threads <= kMostThreads) {
    const int64_t rows = larger(128 / row_threads, 1);
    auto kernel = norm_forward_in_registers<T, combine, kPacks>;
    const dim3 block(static_cast<unsigned>(row_threads), static_cast<unsigned>(rows));
    MEGALATENT_LAUNCH(kernel, grid_of(divide_up(p.rows, rows)), block, 0, stream, p);
  } else if (vector) {
    auto kernel = norm_forward_any<T, combine, K>;
    MEGALATENT_LAUNCH(kernel, grid_of(p.rows), dim3(512), 0, stream, p);
  } else {
    auto kernel = norm_forward_any<T, combine, 1>;
    MEGALATENT_LAUNCH(kernel, grid_of(p.rows), dim3(256), 0, stream, p);
  }
  return cudaGetLastError();
}

}  // namespace

cudaError_t norm_forward(const NormForward& p, cudaStream_t stream) {
  if (p.rows == 0) return cudaSuccess;
  return with_type(p.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    return p.combine == Combine::gate ? launch<T, Combine::gate>(p, stream)
                                      : launch<T, Combine::sum>(p, stream);
  });
}

}  // namespace megalatent::cuda
