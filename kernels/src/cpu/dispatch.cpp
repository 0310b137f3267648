#include <cstdlib>
#include <cstring>

#include "kernels.h"

namespace megalatent::cpu {
namespace {

const Kernels* choose() {
  const char* wanted = std::getenv("MEGALATENT_CPU_ISA");
#if defined(MEGALATENT_HAS_AVX2)
  const bool runs_avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
  if (runs_avx2 && (wanted == nullptr || std::strcmp(wanted, "avx2") == 0)) {
    return &avx2_kernels();
  }
#endif
  if (wanted == nullptr || std::strcmp(wanted, "baseline") == 0) return &baseline_kernels();
  return nullptr;
}

}  // namespace

const Kernels* chosen_kernels() {
  static const Kernels* const kernels = choose();
  return kernels;
}

}  // namespace megalatent::cpu
