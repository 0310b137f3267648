// The operators on CPU tensors: rows are shared out over torch's own threads.
#include <cstring>

#include "cpu/kernels.h"
#include "operators.h"

namespace megalatent {
namespace {

// Elements that make a thread worth waking; the same order as torch's own pointwise operators.
constexpr int64_t kGrain = 1 << 15;

class Cpu {
 public:
  explicit Cpu(const Tensor&) : kernels_(cpu::chosen_kernels()) {
    STD_TORCH_CHECK(
        kernels_ != nullptr,
        "MEGALATENT_CPU_ISA names an instruction set that is not built or not on this processor");
  }

  void norm_forward(const NormForward& p) const {
    over_rows(p.rows, p.width, [&](int64_t begin, int64_t end) {
      kernels_->norm_forward(p, begin, end);
    });
  }

  int64_t partial_rows(const NormBackward& p) const {
    const int64_t per_block = cpu::rows_per_block(p.rows);
    return (p.rows + per_block - 1) / per_block;
  }

  void norm_backward(const NormBackward& p) const {
    torch::stable::parallel_for(0, p.partial_rows, 1, [&](int64_t begin, int64_t end) {
      for (int64_t block = begin; block < end; ++block) kernels_->norm_backward(p, block);
    });
    torch::stable::parallel_for(0, p.width, 1024, [&](int64_t begin, int64_t end) {
      kernels_->weight_gradient(p, begin, end);
    });
  }

  void masked_add(const MaskedAdd& p) const {
    over_rows(p.rows, p.width, [&](int64_t begin, int64_t end) {
      kernels_->masked_add(p, begin, end);
    });
  }

  void shift_forward(const ShiftForward& p) const {
    for (int64_t i = 0; i < p.s; ++i) check_source(p.source[i], p.s + p.boundary_rows);
    over_rows(p.s * p.batch, p.width, [&](int64_t begin, int64_t end) {
      kernels_->shift_forward(p, begin, end);
    });
  }

  void shift_backward(const ShiftBackward& p) const {
    const int64_t all = p.s + p.boundary_rows;
    for (int64_t row = 0; row < all; ++row) p.inverse[row] = -1;
    for (int64_t i = 0; i < p.s; ++i) {
      check_source(p.source[i], all);
      if (p.source[i] < 0) continue;
      STD_TORCH_CHECK(p.inverse[p.source[i]] < 0, "source uses row ", p.source[i], " twice");
      p.inverse[p.source[i]] = i;
    }
    const int64_t bytes = p.batch * p.width * size_of(p.dtype);
    const char* dout = static_cast<const char*>(p.dout);
    over_rows(all, p.batch * p.width, [&](int64_t begin, int64_t end) {
      for (int64_t row = begin; row < end; ++row) {
        char* to = row < p.s ? static_cast<char*>(p.dh) + row * bytes
                             : static_cast<char*>(p.dboundary) + (row - p.s) * bytes;
        if (p.inverse[row] < 0) {
          std::memset(to, 0, bytes);
        } else {
          std::memcpy(to, dout + p.inverse[row] * bytes, bytes);
        }
      }
    });
  }

 private:
  static void check_source(int64_t source, int64_t rows) {
    STD_TORCH_CHECK(
        source >= -1 && source < rows, "source ", source, " is not -1 or a row below ", rows);
  }

  template <class Run>
  static void over_rows(int64_t rows, int64_t width, const Run& run) {
    const int64_t grain = kGrain / (width < 1 ? 1 : width) + 1;
    torch::stable::parallel_for(0, rows, grain, run);
  }

  const cpu::Kernels* kernels_;
};

}  // namespace
}  // namespace megalatent

STABLE_TORCH_LIBRARY_IMPL(megalatent, CPU, m) { megalatent::register_operators<megalatent::Cpu>(m); }

extern "C" {

__attribute__((visibility("default"))) const char* megalatent_cpu_build_information() {
  return "{\"sources\": \"" MEGALATENT_SOURCES "\"}";
}

// The instruction set in use, "none" if MEGALATENT_CPU_ISA names one that is not available.
__attribute__((visibility("default"))) const char* megalatent_cpu_instruction_set() {
  const auto* kernels = megalatent::cpu::chosen_kernels();
  return kernels ? kernels->name : "none";
}

}  // extern "C"
