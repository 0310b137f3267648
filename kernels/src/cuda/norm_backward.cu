// Backward of the normed fusions, in one pass over the rows. Few blocks walk over many rows, each
// thread owning the same columns throughout, so that the norm weight's gradient gathers in
// registers; a second kernel adds up the blocks' sums in fixed order.
//
// With y = combine(a, b), r its reciprocal RMS and g = dx * weight:
//   dy = r * (g - y * mean(g * y) * r^2),  dweight = sum over rows of dx * y * r.
#include "device.cuh"

namespace megalatent::cuda {
namespace {

// What of a pack outlives the sum over the row.
template <Combine combine, int K>
struct Kept {
  float gate[K], slope[K];
};
template <int K>
struct Kept<Combine::sum, K> {};

template <typename T, Combine combine, int K>
__device__ __forceinline__ float value_of(
    float a, float b, Kept<combine, K>& kept, int j) {
  if constexpr (combine == Combine::gate) {
    sigmoid<T>(b, kept.gate[j], kept.slope[j]);
    return a * kept.gate[j];
  } else {
    return a + b;
  }
}

// Share of a pack in sum(dx * weight * y).
template <typename T, Combine combine, int K>
__device__ __forceinline__ float pack_product(
    const float (&a)[K], const float (&b)[K], const float (&dx)[K], const float (&weight)[K],
    Kept<combine, K>& kept) {
  float sum = 0.0f;
#pragma unroll
  for (int j = 0; j < K; ++j) {
    sum += dx[j] * weight[j] * value_of<T, combine, K>(a[j], b[j], kept, j);
  }
  return sum;
}

// Gradients of a pack, given what was kept and the whole row's sum; adds to dweight.
template <typename T, Combine combine, int K>
__device__ __forceinline__ void pack_gradients(
    const float (&a)[K], const float (&b)[K], const float (&dx)[K], const float (&weight)[K],
    const Kept<combine, K>& kept, float r, float along, float (&da)[K], float (&db)[K],
    float (&dweight)[K]) {
#pragma unroll
  for (int j = 0; j < K; ++j) {
    float y;
    if constexpr (combine == Combine::gate) {
      y = a[j] * kept.gate[j];
    } else {
      y = a[j] + b[j];
    }
    const float dy = r * (dx[j] * weight[j] - y * along);
    dweight[j] += dx[j] * (y * r);
    if constexpr (combine == Combine::gate) {
      da[j] = dy * kept.gate[j];
      db[j] = dy * (a[j] * kept.slope[j]);
    } else {
      da[j] = dy;
    }
  }
}

// Gradients of a pack at a plain position: all of it goes to the embedding.
template <typename T, Combine combine, int K>
__device__ __forceinline__ void plain_pack(const NormBackward& p, int64_t at) {
  clear<K, T>(static_cast<T*>(p.da) + at);
  if constexpr (combine == Combine::gate) clear<K, T>(static_cast<T*>(p.db) + at);
  if (p.de) copy<K, T>(static_cast<const T*>(p.dx) + at, static_cast<T*>(p.de) + at);
}

constexpr int kInputs = 3;  // a, b, dx

// blockDim = (threads of a row, rows at once). The rows to come are copied to shared memory
// `kStages - 1` steps ahead; each thread copies and reads its own packs alone, so no barrier.
template <typename T, Combine combine, int kPacks, int kStages>
__global__ void __launch_bounds__(kMostThreads, 1) norm_backward_pipelined(const NormBackward p) {
  constexpr int K = kPackWidth<T>;
  using Staged = Pack<T, K>;
  __shared__ float slots[2][kMostThreads / kWarp];
  MEGALATENT_DYNAMIC_SHARED(dynamic);
  Staged* const ring = reinterpret_cast<Staged*>(dynamic);
  const int threads = blockDim.x * blockDim.y;
  const int thread = threadIdx.y * blockDim.x + threadIdx.x;
  const bool wide_weight = sizeof(T) == 4 || p.weight_dtype == DType::float32;
  const int64_t packs = p.width / K;
  const int64_t stride = int64_t{gridDim.x} * blockDim.y;
  const int64_t begin = int64_t{blockIdx.x} * blockDim.y;
  const void* const inputs[kInputs] = {p.a, p.b, p.dx};

  auto staged = [&](int64_t step, int input, int i) -> Staged& {
    const int slot = (static_cast<int>(step % kStages) * kInputs + input) * kPacks + i;
    return ring[slot * threads + thread];
  };
  auto row_at = [&](int64_t step) { return begin + step * stride + threadIdx.y; };
  auto fused_at = [&](int64_t step) {
    const int64_t row = row_at(step);
    return row < p.rows && p.mask[row];
  };
  auto fetch = [&](int64_t step, bool fused) {
    const int64_t at = row_at(step) * p.width;
#pragma unroll
    for (int i = 0; i < kPacks; ++i) {
      const int64_t pack = threadIdx.x + int64_t{i} * blockDim.x;
      if (!fused || pack >= packs) continue;
#pragma unroll
      for (int input = 0; input < kInputs; ++input) {
        copy_async(&staged(step, input, i), static_cast<const T*>(inputs[input]) + at + pack * K);
      }
    }
    commit_copies();
  };

  float weight[kPacks][K], dweight[kPacks][K];
#pragma unroll
  for (int i = 0; i < kPacks; ++i) {
    const int64_t pack = threadIdx.x + int64_t{i} * blockDim.x;
#pragma unroll
    for (int j = 0; j < K; ++j) dweight[i][j] = weight[i][j] = 0.0f;
    if (pack < packs) load_weight<K, T>(p.weight, wide_weight, pack * K, weight[i]);
  }

  // Bit n: is the row n steps ahead fused? Read a step before it decides what to fetch.
  unsigned ahead = 0;
  for (int step = 0; step < kStages; ++step) ahead |= unsigned{fused_at(step)} << step;
  for (int step = 0; step < kStages - 1; ++step) fetch(step, (ahead >> step) & 1u);

  for (int64_t step = 0; begin + step * stride < p.rows; ++step) {
    const int64_t row = row_at(step), at = row * p.width;
    const bool active = row < p.rows;
    const bool fused = ahead & 1u;
    const bool later = fused_at(step + kStages);
    const float r = fused ? static_cast<const float*>(p.rstd)[row] : 0.0f;
    fetch(step + kStages - 1, (ahead >> (kStages - 1)) & 1u);
    wait_for_copies<kStages - 1>();

    Kept<combine, K> kept[kPacks];
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < kPacks; ++i) {
      const int64_t pack = threadIdx.x + int64_t{i} * blockDim.x;
      if (pack >= packs) continue;
      if (fused) {
        float a[K], b[K], dx[K];
        unpack<K, T>(staged(step, 0, i), a);
        unpack<K, T>(staged(step, 1, i), b);
        unpack<K, T>(staged(step, 2, i), dx);
        sum += pack_product<T, combine, K>(a, b, dx, weight[i], kept[i]);
      } else if (active) {
        plain_pack<T, combine, K>(p, at + pack * K);
      }
    }
    const float total = row_sum(sum, slots[step & 1]);
    const float along = total / static_cast<float>(p.width) * r * r;
#pragma unroll
    for (int i = 0; i < kPacks; ++i) {
      const int64_t pack = threadIdx.x + int64_t{i} * blockDim.x, to = at + pack * K;
      if (!fused || pack >= packs) continue;
      float a[K], b[K], dx[K], da[K], db[K];
      unpack<K, T>(staged(step, 0, i), a);
      unpack<K, T>(staged(step, 1, i), b);
      unpack<K, T>(staged(step, 2, i), dx);
      pack_gradients<T, combine, K>(
          a, b, dx, weight[i], kept[i], r, along, da, db, dweight[i]);
      store<K, T>(da, static_cast<T*>(p.da) + to);
      if constexpr (combine == Combine::gate) store<K, T>(db, static_cast<T*>(p.db) + to);
      if (p.de) clear<K, T>(static_cast<T*>(p.de) + to);
    }
    ahead = (ahead >> 1) | (unsigned{later} << (kStages - 1));
  }

  // The rows walked at once add up in order, through shared memory that no copy uses any more.
  wait_for_copies<0>();
  __syncthreads();
  float* const sums = reinterpret_cast<float*>(dynamic);
  constexpr int kOwned = kPacks * K;
  if (blockDim.y > 1) {
#pragma unroll
    for (int n = 0; n < kOwned; ++n) sums[n * threads + thread] = dweight[n / K][n % K];
    __syncthreads();
    if (threadIdx.y > 0) return;
#pragma unroll
    for (int n = 0; n < kOwned; ++n) {
      for (int other = 1; other < static_cast<int>(blockDim.y); ++other) {
        dweight[n / K][n % K] += sums[n * threads + other * blockDim.x + threadIdx.x];
      }
    }
  }
  float* const partial = static_cast<float*>(p.partials) + blockIdx.x * p.width;
#pragma unroll
  for (int i = 0; i < kPacks; ++i) {
    const int64_t pack = threadIdx.x + int64_t{i} * blockDim.x;
    if (pack >= packs) continue;
#pragma unroll
    for (int j = 0; j < K; ++j) partial[pack * K + j] = dweight[i][j];
  }
}

// Any width and alignment: a row per block at a time, sums of dweight in the block's own row of
// `partials`, which stays in the cache.
template <typename T, Combine combine, int K>
__global__ void __launch_bounds__(kMostThreads) norm_backward_any(const NormBackward p) {
  __shared__ float slots[2][kMostThreads / kWarp];
  const bool wide_weight = sizeof(T) == 4 || p.weight_dtype == DType::float32;
  const int64_t begin = int64_t{threadIdx.x} * K, step = int64_t{blockDim.x} * K;
  float* const partial = static_cast<float*>(p.partials) + blockIdx.x * p.width;
  for (int64_t column = begin; column < p.width; column += step) clear<K, float>(partial + column);
  int turn = 0;
  for (int64_t row = blockIdx.x; row < p.rows; row += gridDim.x) {
    const int64_t at = row * p.width;
    const bool fused = p.mask[row];
    Kept<combine, K> kept;
    float a[K], b[K], dx[K], weight[K], sum = 0.0f;
    auto read = [&](int64_t column) {
      load<K, T>(static_cast<const T*>(p.a) + at + column, a);
      load<K, T>(static_cast<const T*>(p.b) + at + column, b);
      load<K, T>(static_cast<const T*>(p.dx) + at + column, dx);
      load_weight<K, T>(p.weight, wide_weight, column, weight);
      return pack_product<T, combine, K>(a, b, dx, weight, kept);
    };
    for (int64_t column = begin; column < p.width; column += step) {
      if (fused) {
        sum += read(column);
      } else {
        plain_pack<T, combine, K>(p, at + column);
      }
    }
    const float total = row_sum(sum, slots[turn]);
    turn ^= 1;
    if (!fused) continue;
    const float r = static_cast<const float*>(p.rstd)[row];
    const float along = total / static_cast<float>(p.width) * r * r;
    for (int64_t column = begin; column < p.width; column += step) {
      float da[K], db[K], dweight[K];
      read(column);
#pragma unroll
      for (int j = 0; j < K; ++j) dweight[j] = partial[column + j];
      pack_gradients<T, combine, K>(a, b, dx, weight, kept, r, along, da, db, dweight);
#pragma unroll
      for (int j = 0; j < K; ++j) partial[column + j] = dweight[j];
      store<K, T>(da, static_cast<T*>(p.da) + at + column);
      if constexpr (combine == Combine::gate) store<K, T>(db, static_cast<T*>(p.db) + at + column);
      if (p.de) clear<K, T>(static_cast<T*>(p.de) + at + column);
    }
  }
}

// blockDim = (32 columns, 32 strands of rows); strands, then strands' sums, in fixed order.
__global__ void __launch_bounds__(kMostThreads) add_partials(const NormBackward p) {
  __shared__ float strands[kWarp][kWarp + 1];
  const int64_t column = int64_t{blockIdx.x} * kWarp + threadIdx.x;
  float sum = 0.0f;
  if (column < p.width) {
    for (int64_t row = threadIdx.y; row < p.partial_rows; row += kWarp) {
      sum += static_cast<const float*>(p.partials)[row * p.width + column];
    }
  }
  strands[threadIdx.y][threadIdx.x] = sum;
  __syncthreads();
  if (threadIdx.y > 0 || column >= p.width) return;
  float total = 0.0f;
  for (int strand = 0; strand < kWarp; ++strand) total += strands[strand][threadIdx.x];
  switch (p.weight_dtype) {
    case DType::bfloat16:
      return narrow(total, static_cast<bfloat16*>(p.dweight)[column]);
    case DType::float16:
      return narrow(total, static_cast<float16*>(p.dweight)[column]);
    default:
      return narrow(total, static_cast<float*>(p.dweight)[column]);
  }
}

// How a shape runs on a card. `row_threads` is 0 for the kernel that takes any shape.
struct Layout {
  int64_t row_threads, rows_at_once, blocks, shared;
  bool vector;
};

template <typename T>
struct Pipeline {
  static constexpr int kPacks = 8 / kPackWidth<T>;  // eight elements a thread
  static constexpr int kStages = sizeof(T) == 4 ? 2 : 3;
  static constexpr int64_t kSharedPerThread = int64_t{kStages} * kInputs * kPacks * kPackBytes;
};

template <typename T>
Layout layout_of(const NormBackward& p, const Card& card) {
  const bool vector = p.width % kPackWidth<T> == 0 &&
      aligned(p.dx, p.a, p.b, p.weight, p.da, p.db, p.de);
  const int64_t row_threads = divide_up(divide_up(p.width, 8), kWarp) * kWarp;
  const int64_t row_shared = row_threads * Pipeline<T>::kSharedPerThread;
  // Some of the card's shared memory is spoken for by `slots`.
  const int64_t fit = (card.shared_per_block - 1024) / row_shared;
  if (vector && row_threads <= kMostThreads && fit >= 1) {
    const int64_t rows = smaller(kMostThreads / row_threads, fit);
    const int64_t blocks = smaller(larger(divide_up(p.rows, rows), 1), card.processors);
    return {row_threads, rows, blocks, rows * row_shared, true};
  }
  return {0, 1, smaller(larger(p.rows, 1), 2 * int64_t{card.processors}), 0, vector};
}

template <typename T, Combine combine>
cudaError_t launch(const NormBackward& p, const Card& card, cudaStream_t stream) {
  const Layout layout = layout_of<T>(p, card);
  const unsigned grid = static_cast<unsigned>(p.partial_rows);  // a block writes one of them
  if (layout.row_threads > 0) {
    auto kernel = norm_backward_pipelined<T, combine, Pipeline<T>::kPacks, Pipeline<T>::kStages>;
    const int shared = static_cast<int>(layout.shared);
    const cudaError_t error =
        cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared);
    if (error != cudaSuccess) return error;
    const dim3 block(
        static_cast<unsigned>(layout.row_threads), static_cast<unsigned>(layout.rows_at_once));
    MEGALATENT_LAUNCH(kernel, grid, block, shared, stream, p);
  } else if (layout.vector) {
    auto kernel = norm_backward_any<T, combine, kPackWidth<T>>;
    MEGALATENT_LAUNCH(kernel, grid, dim3(512), 0, stream, p);
  } else {
    auto kernel = norm_backward_any<T, combine, 1>;
    MEGALATENT_LAUNCH(kernel, grid, dim3(256), 0, stream, p);
  }
  const cudaError_t error = cudaGetLastError();
  if (error != cudaSuccess) return error;
  const dim3 strands(kWarp, kWarp), columns(static_cast<unsigned>(divide_up(p.width, kWarp)));
  MEGALATENT_LAUNCH(add_partials, columns, strands, 0, stream, p);
  return cudaGetLastError();
}

}  // namespace

cudaError_t norm_partial_rows(const NormBackward& p, int64_t* rows) {
  Card card;
  const cudaError_t error = current_card(&card);
  if (error != cudaSuccess) return error;
  return with_type(p.dtype, [&](auto tag) {
    *rows = layout_of<typename decltype(tag)::type>(p, card).blocks;
    return cudaSuccess;
  });
}

cudaError_t norm_backward(const NormBackward& p, cudaStream_t stream) {
  Card card;
  const cudaError_t error = current_card(&card);
  if (error != cudaSuccess) return error;
  return with_type(p.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    return p.combine == Combine::gate ? launch<T, Combine::gate>(p, card, stream)
                                      : launch<T, Combine::sum>(p, card, stream);
  });
}

}  // namespace megalatent::cuda
