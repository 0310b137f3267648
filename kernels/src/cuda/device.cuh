// What the kernels share: 16-byte packs of elements, sums over the threads of a row, asynchronous
// copies to shared memory, and the launch. With MEGALATENT_EMULATE_CUDA the same sources compile
// as plain C++ against tests/kernels/emulation/cuda_emulator.h, to be checked without a GPU.
#pragma once

#include "launch.h"

#include "../half_types.h"
#include "../philox.h"

#if !defined(MEGALATENT_EMULATE_CUDA)
#define MEGALATENT_LAUNCH(kernel, grid, block, shared, stream, ...) \
  kernel<<<grid, block, shared, stream>>>(__VA_ARGS__)
#define MEGALATENT_DYNAMIC_SHARED(name) extern __shared__ __align__(16) unsigned char name[]
#endif

namespace megalatent::cuda {

constexpr int kWarp = 32;
constexpr int kMostThreads = 1024;
constexpr int kPackBytes = 16;

template <typename T>
constexpr int kPackWidth = kPackBytes / static_cast<int>(sizeof(T));

// K elements moved at once. K = 1 serves rows that 16-byte accesses cannot.
template <typename T, int K>
struct alignas(K * sizeof(T)) Pack {
  T v[K];
};

template <int K, typename T>
__device__ __forceinline__ void unpack(const Pack<T, K>& pack, float (&to)[K]) {
#pragma unroll
  for (int j = 0; j < K; ++j) to[j] = widen(pack.v[j]);
}

template <int K, typename T>
__device__ __forceinline__ void load(const T* from, float (&to)[K]) {
  unpack<K, T>(*reinterpret_cast<const Pack<T, K>*>(from), to);
}

template <int K, typename T>
__device__ __forceinline__ void store(const float (&from)[K], T* to) {
  Pack<T, K> pack;
#pragma unroll
  for (int j = 0; j < K; ++j) narrow(from[j], pack.v[j]);
  *reinterpret_cast<Pack<T, K>*>(to) = pack;
}

template <int K, typename T>
__device__ __forceinline__ void copy(const T* from, T* to) {
  *reinterpret_cast<Pack<T, K>*>(to) = *reinterpret_cast<const Pack<T, K>*>(from);
}

template <int K, typename T>
__device__ __forceinline__ void clear(T* to) {
  const float zeros[K] = {};
  store<K, T>(zeros, to);
}

// The norm weight is in the activations' dtype or in float32: one branch, the same for all threads.
template <int K, typename T>
__device__ __forceinline__ void load_weight(
    const void* weight, bool in_float, int64_t column, float (&to)[K]) {
  if (in_float) {
    constexpr int kStep = K < 4 ? K : 4;
#pragma unroll
    for (int j = 0; j < K; j += kStep) {
      float part[kStep];
      load<kStep, float>(static_cast<const float*>(weight) + column + j, part);
#pragma unroll
      for (int i = 0; i < kStep; ++i) to[j + i] = part[i];
    }
  } else {
    load<K, T>(static_cast<const T*>(weight) + column, to);
  }
}

// exp(x) for x <= 0: exact enough for the dtype. __expf is off by up to 2^-17 at x = -88.
template <typename T>
__device__ __forceinline__ float exp_of_negative(float x) {
  if constexpr (sizeof(T) == 4) {
    return expf(x);
  } else {
    return __expf(x);
  }
}

// sigmoid(g) and its slope, neither by a difference that cancels.
template <typename T>
__device__ __forceinline__ void sigmoid(float g, float& value, float& slope) {
  const float e = exp_of_negative<T>(-fabsf(g));
  const float d = __fdividef(1.0f, 1.0f + e);
  value = g < 0.0f ? e * d : d;
  slope = e * d * d;
}

__device__ __forceinline__ float warp_sum(float value) {
#pragma unroll
  for (int offset = kWarp / 2; offset > 0; offset /= 2) {
    value += __shfl_xor_sync(0xFFFFFFFFu, value, offset);
  }
  return value;
}

// Sum over the threads that share threadIdx.y; blockDim.x is a multiple of 32. All threads of the
// block must call it together. `slots` holds one float per warp of the block; the next call must
// bring another one, so that a single barrier is enough.
__device__ __forceinline__ float row_sum(float value, float* slots) {
  value = warp_sum(value);
  const int warps = blockDim.x / kWarp;
  if (warps == 1) return value;
  const int lane = threadIdx.x % kWarp;
  float* mine = slots + threadIdx.y * warps;
  if (lane == 0) mine[threadIdx.x / kWarp] = value;
  __syncthreads();
  return warp_sum(lane < warps ? mine[lane] : 0.0f);
}

// Sixteen bytes from global to shared memory, behind the thread's back.
__device__ __forceinline__ void copy_async(void* shared, const void* global) {
#if defined(MEGALATENT_EMULATE_CUDA)
  emulator::copy_async(shared, global);
#else
  const auto address = static_cast<unsigned>(__cvta_generic_to_shared(shared));
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(address), "l"(global) : "memory");
#endif
}

// Closes a group of copies; empty groups count.
__device__ __forceinline__ void commit_copies() {
#if defined(MEGALATENT_EMULATE_CUDA)
  emulator::commit_copies();
#else
  asm volatile("cp.async.commit_group;" ::: "memory");
#endif
}

// Waits until all but this thread's newest `kNewest` groups have arrived.
template <int kNewest>
__device__ __forceinline__ void wait_for_copies() {
#if defined(MEGALATENT_EMULATE_CUDA)
  emulator::wait_for_copies(kNewest);
#else
  asm volatile("cp.async.wait_group %0;" ::"n"(kNewest) : "memory");
#endif
}

// --- host side ---------------------------------------------------------------------------------

template <typename T>
struct Tag {
  using type = T;
};

// Calls run(Tag<T>{}) with the element type of `dtype`.
template <typename Run>
cudaError_t with_type(DType dtype, const Run& run) {
  switch (dtype) {
    case DType::float32:
      return run(Tag<float>{});
    case DType::bfloat16:
      return run(Tag<bfloat16>{});
    case DType::float16:
      return run(Tag<float16>{});
    default:
      return cudaErrorInvalidValue;
  }
}

inline int64_t divide_up(int64_t a, int64_t b) { return (a + b - 1) / b; }
inline int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }
inline int64_t larger(int64_t a, int64_t b) { return a > b ? a : b; }

template <typename... Pointers>
bool aligned(const Pointers*... pointers) {
  return ((reinterpret_cast<uintptr_t>(pointers) % kPackBytes == 0) && ...);
}

struct Card {
  int processors;        // streaming multiprocessors
  int shared_per_block;  // bytes of shared memory that a block may ask for
};

inline cudaError_t current_card(Card* card) {
  int device = 0;
  cudaError_t error = cudaGetDevice(&device);
  if (error != cudaSuccess) return error;
  error = cudaDeviceGetAttribute(&card->processors, cudaDevAttrMultiProcessorCount, device);
  if (error != cudaSuccess) return error;
  return cudaDeviceGetAttribute(
      &card->shared_per_block, cudaDevAttrMaxSharedMemoryPerBlockOptin, device);
}

// Grids have at most 2^31 - 1 blocks in x; kernels stride over what is left.
inline int64_t most_blocks() {
#if defined(MEGALATENT_EMULATE_CUDA)
  return emulator::machine().most_blocks;
#else
  return 0x7FFFFFFF;
#endif
}

inline unsigned grid_of(int64_t blocks) {
  return static_cast<unsigned>(smaller(larger(blocks, 1), most_blocks()));
}

}  // namespace megalatent::cuda
