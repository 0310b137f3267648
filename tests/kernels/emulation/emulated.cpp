// The CUDA kernels behind C functions, for ctypes. Built by tests/kernels/emulated.py together with
// kernels/src/cuda/*.cu, which it compiles as C++.
#include "../../../kernels/src/cuda/launch.h"

using namespace megalatent;

extern "C" {

// See cuda_emulator.h.
void emulated_card(int processors, int shared_per_block, int most_blocks, int order) {
  emulator::machine().processors = processors;
  emulator::machine().most_blocks = most_blocks;
  emulator::machine().shared_per_block = shared_per_block;
  emulator::machine().order = order;
}

int emulated_norm_forward(const NormForward* p) { return cuda::norm_forward(*p, nullptr); }

int64_t emulated_partial_rows(const NormBackward* p) {
  int64_t rows = -1;
  return cuda::norm_partial_rows(*p, &rows) == cudaSuccess ? rows : -1;
}

int emulated_norm_backward(const NormBackward* p) { return cuda::norm_backward(*p, nullptr); }
int emulated_masked_add(const MaskedAdd* p) { return cuda::masked_add(*p, nullptr); }
int emulated_shift_forward(const ShiftForward* p) { return cuda::shift_forward(*p, nullptr); }
int emulated_shift_backward(const ShiftBackward* p) { return cuda::shift_backward(*p, nullptr); }

// Sizes of the structs, so that a caller's copy of their layout can be checked.
int64_t emulated_struct_size(int which) {
  const int64_t sizes[] = {sizeof(NormForward), sizeof(NormBackward), sizeof(MaskedAdd),
                           sizeof(ShiftForward), sizeof(ShiftBackward)};
  return sizes[which];
}

}  // extern "C"
