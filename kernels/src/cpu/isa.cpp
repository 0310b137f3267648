// The CPU kernels for one instruction set: compiled once per set, with MEGALATENT_ISA its name.
// Built without contraction of products and sums: the jitter must be the same on every machine.
#include <cmath>
#include <cstdlib>
#include <cstring>

#include "../contract.h"
#include "../half_types.h"
#include "../philox.h"
#include "kernels.h"

namespace megalatent::cpu {
namespace {

#include "norm.h"
#include "rows.h"

// Calls `run` with a null pointer of the activation's and of the weight's type.
template <typename Run>
inline void with_types(DType dtype, DType weight_dtype, const Run& run) {
  const bool wide_weight = weight_dtype == DType::float32;
  switch (dtype) {
    case DType::float64:
      return run((double*)nullptr, (double*)nullptr);
    case DType::float32:
      return run((float*)nullptr, (float*)nullptr);
    case DType::bfloat16:
      return wide_weight ? run((bfloat16*)nullptr, (float*)nullptr)
                         : run((bfloat16*)nullptr, (bfloat16*)nullptr);
    case DType::float16:
      return wide_weight ? run((float16*)nullptr, (float*)nullptr)
                         : run((float16*)nullptr, (float16*)nullptr);
  }
}

void norm_forward(const NormForward& p, int64_t begin, int64_t end) {
  with_types(p.dtype, p.weight_dtype, [&]<typename T, typename W>(T*, W*) {
    if (p.combine == Combine::gate) {
      norm_forward_rows<Combine::gate, T, W>(p, begin, end);
    } else {
      norm_forward_rows<Combine::sum, T, W>(p, begin, end);
    }
  });
}

void norm_backward(const NormBackward& p, int64_t block) {
  with_types(p.dtype, p.weight_dtype, [&]<typename T, typename W>(T*, W*) {
    if (p.combine == Combine::gate) {
      norm_backward_block<Combine::gate, T, W>(p, block);
    } else {
      norm_backward_block<Combine::sum, T, W>(p, block);
    }
  });
}

void weight_gradient(const NormBackward& p, int64_t begin, int64_t end) {
  with_types(p.dtype, p.weight_dtype, [&]<typename T, typename W>(T*, W*) {
    weight_gradient_columns<T, W>(p, begin, end);
  });
}

void masked_add(const MaskedAdd& p, int64_t begin, int64_t end) {
  with_types(p.dtype, p.dtype, [&]<typename T, typename W>(T*, W*) {
    masked_add_rows<T>(p, begin, end);
  });
}

void shift_forward(const ShiftForward& p, int64_t begin, int64_t end) {
  with_types(p.dtype, p.dtype, [&]<typename T, typename W>(T*, W*) {
    shift_forward_rows<T>(p, begin, end);
  });
}

}  // namespace

#define MEGALATENT_JOIN(a, b) a##b
#define MEGALATENT_TABLE(isa) MEGALATENT_JOIN(isa, _kernels)
#define MEGALATENT_STRING(isa) #isa
#define MEGALATENT_NAME(isa) MEGALATENT_STRING(isa)

const Kernels& MEGALATENT_TABLE(MEGALATENT_ISA)() {
  static const Kernels kernels{MEGALATENT_NAME(MEGALATENT_ISA), norm_forward, norm_backward,
                               weight_gradient, masked_add, shift_forward};
  return kernels;
}

}  // namespace megalatent::cpu
