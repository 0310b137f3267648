// The CPU kernels as a table of functions. The same sources are compiled once per instruction set,
// each in its own namespace, and the best one the processor runs is taken (dispatch.cpp).
#pragma once

#include "../contract.h"

namespace megalatent::cpu {

struct Kernels {
  const char* name;
  // Rows [begin, end).
  void (*norm_forward)(const NormForward&, int64_t begin, int64_t end);
  // Block `block` of `partial_rows`: its rows' gradients, and its row of `partials`.
  void (*norm_backward)(const NormBackward&, int64_t block);
  // Columns [begin, end) of dweight: the sum of the partials, in order.
  void (*weight_gradient)(const NormBackward&, int64_t begin, int64_t end);
  void (*masked_add)(const MaskedAdd&, int64_t begin, int64_t end);
  // Rows [begin, end) of out; all s * batch of them make the whole.
  void (*shift_forward)(const ShiftForward&, int64_t begin, int64_t end);
};

// Rows per block of the weight gradient's first stage. It depends on the shape alone, never on the
// number of threads: the sums are then the same on every run.
inline int64_t rows_per_block(int64_t rows) {
  constexpr int64_t kMostBlocks = 256, kFewestRows = 16;
  const int64_t even = (rows + kMostBlocks - 1) / kMostBlocks;
  return even < kFewestRows ? kFewestRows : even;
}

const Kernels& baseline_kernels();
#if defined(MEGALATENT_HAS_AVX2)
const Kernels& avx2_kernels();
#endif

// The kernels in use. MEGALATENT_CPU_ISA=baseline|avx2 overrides the choice, for tests; a name that
// is not available is an error (null is returned).
const Kernels* chosen_kernels();

}  // namespace megalatent::cpu
