// Masked addition, and the shift with its jitter: every row is read once and written once.
#include <cassert>

#include "device.cuh"

namespace megalatent::cuda {
namespace {

// blockDim = (threads of a row, rows at once), for rows of `width` elements in packs of K.
template <int K>
dim3 row_block(int64_t width) {
  const int64_t packs = divide_up(width, K);
  const int64_t row_threads = smaller(divide_up(packs, kWarp) * kWarp, 256);
  return {static_cast<unsigned>(row_threads), static_cast<unsigned>(256 / row_threads)};
}

template <typename T, int K>
__global__ void __launch_bounds__(256) masked_add_rows(const MaskedAdd p) {
  for (int64_t first = int64_t{blockIdx.x} * blockDim.y; first < p.rows;
       first += int64_t{gridDim.x} * blockDim.y) {
    const int64_t row = first + threadIdx.y, at = row * p.width;
    if (row >= p.rows) return;
    const T* a = static_cast<const T*>(p.a) + at;
    const T* e = static_cast<const T*>(p.e) + at;
    T* x = static_cast<T*>(p.x) + at;
    const bool fused = p.mask[row];
    for (int64_t column = int64_t{threadIdx.x} * K; column < p.width;
         column += int64_t{blockDim.x} * K) {
      if (fused && p.e) {
        float from_a[K], from_e[K];
        load<K, T>(a + column, from_a);
        load<K, T>(e + column, from_e);
#pragma unroll
        for (int j = 0; j < K; ++j) from_e[j] += from_a[j];
        store<K, T>(from_e, x + column);
      } else if (fused) {
        copy<K, T>(a + column, x + column);
      } else if (p.e) {
        copy<K, T>(e + column, x + column);
      } else {
        clear<K, T>(x + column);
      }
    }
  }
}

// Jitter of the four channels of a counter. The product and, in the caller, the sum round each by
// itself: a fused multiply-add would give another last bit than the other implementations.
__device__ __forceinline__ void jitter(
    const ShiftForward& p, int64_t position, int64_t sample, int64_t quad, float* noise) {
  uint32_t c0 = static_cast<uint32_t>(position), c1 = static_cast<uint32_t>(quad);
  uint32_t c2 = static_cast<uint32_t>(sample), c3 = jitter_counter3(p.pass, sample);
  philox4x32(p.key0, p.key1, c0, c1, c2, c3);
  noise[0] = __fmul_rn(signed_24(c0), p.scale);
  noise[1] = __fmul_rn(signed_24(c1), p.scale);
  noise[2] = __fmul_rn(signed_24(c2), p.scale);
  noise[3] = __fmul_rn(signed_24(c3), p.scale);
}

// A thread makes `kChannels` neighbouring channels, a multiple of 4, moved in packs of K: all of
// them at once, or one by one where rows are not aligned.
template <typename T, int kChannels, int K>
__global__ void __launch_bounds__(256) shift_forward_rows(const ShiftForward p) {
  const int64_t rows = p.s * p.batch;
  for (int64_t first = int64_t{blockIdx.x} * blockDim.y; first < rows;
       first += int64_t{gridDim.x} * blockDim.y) {
    const int64_t row = first + threadIdx.y;
    if (row >= rows) return;
    const int64_t i = row / p.batch, from = p.source[i];
    assert(from >= -1 && from < p.s + p.boundary_rows && "source is not a row");
    const bool local = from < p.s;
    const T* base = static_cast<const T*>(local ? p.h : p.boundary);
    const T* in = base + ((local ? from : from - p.s) * p.batch + (row - i * p.batch)) * p.width;
    T* out = static_cast<T*>(p.out) + row * p.width;
    const bool noisy = from >= 0 && p.scale > 0.0f;
    const int64_t position = noisy ? p.position[row] : 0, sample = noisy ? p.sample[row] : 0;
    for (int64_t begin = int64_t{threadIdx.x} * kChannels; begin < p.width;
         begin += int64_t{blockDim.x} * kChannels) {
      float noise[kChannels];
      if (noisy) {
#pragma unroll
        for (int q = 0; q < kChannels; q += 4) {
          jitter(p, position, sample, (begin + q) / 4, noise + q);
        }
      }
#pragma unroll
      for (int c = 0; c < kChannels; c += K) {
        if (begin + c >= p.width) break;
        if (noisy) {
          float x[K];
          load<K, T>(in + begin + c, x);
#pragma unroll
          for (int j = 0; j < K; ++j) x[j] = __fadd_rn(x[j], noise[c + j]);
          store<K, T>(x, out + begin + c);
        } else if (from >= 0) {
          copy<K, T>(in + begin + c, out + begin + c);
        } else {
          clear<K, T>(out + begin + c);
        }
      }
    }
  }
}

__global__ void invert_source(const ShiftBackward p) {
  for (int64_t i = int64_t{blockIdx.x} * blockDim.x + threadIdx.x; i < p.s;
       i += int64_t{gridDim.x} * blockDim.x) {
    const int64_t from = p.source[i];
    assert(from >= -1 && from < p.s + p.boundary_rows && "source is not a row");
    if (from >= 0) p.inverse[from] = i;
  }
}

// Rows of `units` units each, copied as they are; one row per block at a time.
template <typename Unit>
__global__ void __launch_bounds__(256) shift_backward_rows(const ShiftBackward p, int64_t units) {
  for (int64_t row = blockIdx.x; row < p.s + p.boundary_rows; row += gridDim.x) {
    const bool local = row < p.s;
    Unit* to = static_cast<Unit*>(local ? p.dh : p.dboundary) + (local ? row : row - p.s) * units;
    const int64_t reader = p.inverse[row];
    const Unit* from = static_cast<const Unit*>(p.dout) + reader * units;
    for (int64_t n = threadIdx.x; n < units; n += blockDim.x) {
      to[n] = reader < 0 ? Unit{} : from[n];
    }
  }
}

}  // namespace

cudaError_t masked_add(const MaskedAdd& p, cudaStream_t stream) {
  if (p.rows == 0) return cudaSuccess;
  return with_type(p.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    constexpr int K = kPackWidth<T>;
    if (p.width % K == 0 && aligned(p.a, p.e, p.x)) {
      auto kernel = masked_add_rows<T, K>;
      const dim3 block = row_block<K>(p.width);
      MEGALATENT_LAUNCH(kernel, grid_of(divide_up(p.rows, block.y)), block, 0, stream, p);
    } else {
      auto kernel = masked_add_rows<T, 1>;
      const dim3 block = row_block<1>(p.width);
      MEGALATENT_LAUNCH(kernel, grid_of(divide_up(p.rows, block.y)), block, 0, stream, p);
    }
    return cudaGetLastError();
  });
}

cudaError_t shift_forward(const ShiftForward& p, cudaStream_t stream) {
  const int64_t rows = p.s * p.batch;
  if (rows == 0) return cudaSuccess;
  return with_type(p.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    constexpr int K = kPackWidth<T>;
    if (p.width % K == 0 && aligned(p.h, p.boundary, p.out)) {
      auto kernel = shift_forward_rows<T, K, K>;
      const dim3 block = row_block<K>(p.width);
      MEGALATENT_LAUNCH(kernel, grid_of(divide_up(rows, block.y)), block, 0, stream, p);
    } else {
      auto kernel = shift_forward_rows<T, 4, 1>;
      const dim3 block = row_block<4>(p.width);
      MEGALATENT_LAUNCH(kernel, grid_of(divide_up(rows, block.y)), block, 0, stream, p);
    }
    return cudaGetLastError();
  });
}

cudaError_t shift_backward(const ShiftBackward& p, cudaStream_t stream) {
  const int64_t rows = p.s + p.boundary_rows, bytes = p.batch * p.width * size_of(p.dtype);
  if (rows == 0 || bytes == 0) return cudaSuccess;
  const cudaError_t error = cudaMemsetAsync(p.inverse, 0xFF, rows * sizeof(int64_t), stream);
  if (error != cudaSuccess) return error;
  MEGALATENT_LAUNCH(
      invert_source, grid_of(smaller(divide_up(p.s, 256), 1024)), dim3(256), 0, stream, p);
  if (bytes % kPackBytes == 0 && aligned(p.dout, p.dh, p.dboundary)) {
    auto kernel = shift_backward_rows<uint4>;
    MEGALATENT_LAUNCH(kernel, grid_of(rows), dim3(256), 0, stream, p, bytes / kPackBytes);
  } else {
    auto kernel = shift_backward_rows<uint16_t>;
    MEGALATENT_LAUNCH(kernel, grid_of(rows), dim3(256), 0, stream, p, bytes / 2);
  }
  return cudaGetLastError();
}

}  // namespace megalatent::cuda
