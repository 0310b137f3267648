// Enough of CUDA to run the project's kernels on a CPU, one block after another, its threads as
// fibers that switch at barriers and shuffles. It checks indexing, barriers and arithmetic where
// there is no GPU; it says nothing about speed, memory models or the compiler.
//
// Stricter than a GPU where that finds mistakes: dynamic shared memory starts poisoned, asynchronous
// copies land only when waited for, a barrier that not all threads reach is an error, warps run ahead
// of one another as far as barriers let them, and their order can be reversed or shuffled.
#pragma once

#include <setjmp.h>
#include <ucontext.h>

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <utility>
#include <vector>

#define __global__
#define __device__
#define __host__
#define __forceinline__ inline __attribute__((always_inline))
#define __launch_bounds__(...)
#define __shared__ static

struct dim3 {
  unsigned x, y, z;
  dim3(unsigned x = 1, unsigned y = 1, unsigned z = 1) : x(x), y(y), z(z) {}
};
struct uint4 {
  unsigned x, y, z, w;
};

namespace emulator {

enum class State { ready, at_block_barrier, at_warp_barrier, done };

struct Thread {
  ucontext_t context;  // for the first entry; later switches jump, which costs no system call
  jmp_buf resume_at;
  bool started = false;
  dim3 index;
  State state = State::ready;
  unsigned shuffles = 0;
  std::vector<std::pair<void*, const void*>> open_copies;
  std::vector<std::vector<std::pair<void*, const void*>>> groups;
};

struct Machine {
  int processors = 3;
  int shared_per_block = 227 * 1024;
  int most_blocks = 0x7FFFFFFF;  // in a grid that strides: with few, blocks take several turns
  int order = 0;  // of warps: 0 ascending, 1 descending, otherwise the seed of a shuffle
  dim3 grid, block, block_index;
  std::vector<Thread> threads;
  std::vector<char> stacks;
  std::vector<unsigned char> dynamic_shared;
  std::vector<float> shuffle_slots;
  jmp_buf scheduler;
  Thread* current = nullptr;
  const std::function<void()>* body = nullptr;
};

inline Machine& machine() {
  static Machine instance;
  return instance;
}

[[noreturn]] inline void fail(const char* what) {
  std::fprintf(stderr, "cuda_emulator: %s\n", what);
  std::abort();
}

inline void pause(State state) {
  Machine& m = machine();
  Thread* self = m.current;
  self->state = state;
  if (_setjmp(self->resume_at) == 0) _longjmp(m.scheduler, 1);
}

inline void enter() {
  Machine& m = machine();
  (*m.body)();
  if (!m.current->open_copies.empty()) fail("a thread ended with copies that it never committed");
  m.current->state = State::done;
  _longjmp(m.scheduler, 1);
}

// Runs a thread until it comes to a barrier or to its end. Not inlined: nothing but this frame's
// unchanging variables may live across the jumps.
__attribute__((noinline)) inline void resume(Thread* thread) {
  Machine& m = machine();
  m.current = thread;
  if (_setjmp(m.scheduler) != 0) return;
  if (thread->started) _longjmp(thread->resume_at, 1);
  thread->started = true;
  setcontext(&thread->context);
}

// Lets the threads of a warp, or of the block, go on once all have come to the same barrier.
inline void release(std::size_t begin, std::size_t end, State barrier, const char* divergence) {
  std::vector<Thread>& threads = machine().threads;
  std::size_t waiting = 0;
  for (std::size_t t = begin; t < end; ++t) waiting += threads[t].state == barrier;
  if (waiting == 0) return;
  for (std::size_t t = begin; t < end; ++t) {
    if (threads[t].state == State::ready) return;
  }
  if (waiting < end - begin) fail(divergence);
  for (std::size_t t = begin; t < end; ++t) threads[t].state = State::ready;
}

inline void run_block(const std::function<void()>& body) {
  constexpr std::size_t kStack = 64 * 1024;
  Machine& m = machine();
  const std::size_t count = std::size_t{m.block.x} * m.block.y * m.block.z;
  if (count > 1024 || count % 32 != 0) fail("a block must be whole warps and at most 1024 threads");
  m.threads.assign(count, Thread{});
  m.stacks.resize(1024 * kStack);
  m.shuffle_slots.assign(2 * count, NAN);
  std::memset(m.dynamic_shared.data(), 0xFF, m.dynamic_shared.size());
  m.body = &body;
  for (std::size_t t = 0; t < count; ++t) {
    Thread& thread = m.threads[t];
    thread.index = dim3(
        static_cast<unsigned>(t % m.block.x), static_cast<unsigned>(t / m.block.x % m.block.y),
        static_cast<unsigned>(t / m.block.x / m.block.y));
    getcontext(&thread.context);
    thread.context.uc_stack.ss_sp = m.stacks.data() + t * kStack;
    thread.context.uc_stack.ss_size = kStack;
    thread.context.uc_link = nullptr;
    makecontext(&thread.context, reinterpret_cast<void (*)()>(&enter), 0);
  }
  const std::size_t warps = count / 32;
  std::vector<std::size_t> turn(warps);
  for (std::size_t w = 0; w < warps; ++w) turn[w] = m.order == 1 ? warps - 1 - w : w;
  uint64_t random = 0x9E3779B97F4A7C15u * static_cast<uint64_t>(m.order + 1);
  for (std::size_t w = warps; m.order > 1 && w > 1; --w) {
    random = random * 6364136223846793005u + 1442695040888963407u;
    std::swap(turn[w - 1], turn[(random >> 33) % w]);
  }
  // A warp runs as far as it can before the next one starts: what it writes too early is then seen.
  for (std::size_t done = 0; done < count;) {
    for (std::size_t w : turn) {
      const std::size_t begin = w * 32, end = begin + 32;
      while (true) {
        bool ran = false;
        for (std::size_t t = begin; t < end; ++t) {
          if (m.threads[t].state != State::ready) continue;
          ran = true;
          resume(&m.threads[t]);
          done += m.threads[t].state == State::done;
        }
        if (!ran) break;
        release(begin, end, State::at_warp_barrier, "not all lanes of a warp came to a shuffle");
      }
    }
    if (done < count) {
      release(0, count, State::at_block_barrier, "not all threads came to __syncthreads");
    }
  }
}

template <typename Kernel, typename... Arguments>
void launch(Kernel kernel, dim3 grid, dim3 block, std::size_t shared, const Arguments&... arguments) {
  Machine& m = machine();
  if (static_cast<int>(shared) > m.shared_per_block) fail("a block asks for too much shared memory");
  m.grid = grid;
  m.block = block;
  m.dynamic_shared.resize(shared);
  const std::function<void()> body = [&] { kernel(arguments...); };
  for (unsigned x = 0; x < grid.x; ++x) {
    m.block_index = dim3(x, 0, 0);
    run_block(body);
  }
}

inline float shuffle_xor(float value, int mask) {
  Machine& m = machine();
  Thread* self = m.current;
  const std::size_t thread = static_cast<std::size_t>(self - m.threads.data());
  // Two sets of slots, in turn: a lane may be one shuffle ahead of the lane that reads its value.
  float* slots = m.shuffle_slots.data() + (self->shuffles++ % 2) * m.threads.size();
  slots[thread] = value;
  pause(State::at_warp_barrier);
  return slots[thread ^ static_cast<std::size_t>(mask)];
}

inline void copy_async(void* shared, const void* global) {
  if (reinterpret_cast<uintptr_t>(global) % 16 != 0) fail("an asynchronous copy is not aligned");
  machine().current->open_copies.emplace_back(shared, global);
}

inline void commit_copies() {
  Thread* self = machine().current;
  self->groups.push_back(std::move(self->open_copies));
  self->open_copies.clear();
}

inline void wait_for_copies(std::size_t newest) {
  auto& groups = machine().current->groups;
  while (groups.size() > newest) {
    for (const auto& [to, from] : groups.front()) std::memcpy(to, from, 16);
    groups.erase(groups.begin());
  }
}

}  // namespace emulator

#define threadIdx (emulator::machine().current->index)
#define blockIdx (emulator::machine().block_index)
#define blockDim (emulator::machine().block)
#define gridDim (emulator::machine().grid)

#define MEGALATENT_LAUNCH(kernel, grid, block, shared, stream, ...) \
  (static_cast<void>(stream), emulator::launch(kernel, grid, block, shared, __VA_ARGS__))
#define MEGALATENT_DYNAMIC_SHARED(name) \
  unsigned char* const name = emulator::machine().dynamic_shared.data()

inline void __syncthreads() { emulator::pause(emulator::State::at_block_barrier); }
inline float __shfl_xor_sync(unsigned, float value, int mask) {
  return emulator::shuffle_xor(value, mask);
}
inline float __fdividef(float a, float b) { return a / b; }
inline float __expf(float x) { return std::exp(x); }
inline float rsqrtf(float x) { return 1.0f / std::sqrt(x); }
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fadd_rn(float a, float b) { return a + b; }

using cudaStream_t = void*;
enum cudaError_t { cudaSuccess = 0, cudaErrorInvalidValue = 1 };
enum cudaDeviceAttr { cudaDevAttrMultiProcessorCount, cudaDevAttrMaxSharedMemoryPerBlockOptin };
enum cudaFuncAttribute { cudaFuncAttributeMaxDynamicSharedMemorySize };

inline cudaError_t cudaGetLastError() { return cudaSuccess; }
inline cudaError_t cudaGetDevice(int* device) {
  *device = 0;
  return cudaSuccess;
}
inline cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr which, int) {
  const emulator::Machine& m = emulator::machine();
  *value = which == cudaDevAttrMultiProcessorCount ? m.processors : m.shared_per_block;
  return cudaSuccess;
}
template <typename Kernel>
cudaError_t cudaFuncSetAttribute(Kernel, cudaFuncAttribute, int) {
  return cudaSuccess;
}
inline cudaError_t cudaMemsetAsync(void* to, int value, std::size_t bytes, cudaStream_t) {
  std::memset(to, value, bytes);
  return cudaSuccess;
}
