// The operators on CUDA tensors: on the current stream of the tensors' device, without allocating
// outside torch's allocator and without waiting, so that they can be captured in a CUDA graph.
#include <cuda_runtime.h>

#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/accelerator.h>

#include "cuda/launch.h"
#include "operators.h"

namespace megalatent {
namespace {

class Cuda {
 public:
  explicit Cuda(const Tensor& tensor) : guard_(tensor.get_device_index()) {
    void* stream = nullptr;
    TORCH_ERROR_CODE_CHECK(
        aoti_torch_get_current_cuda_stream(tensor.get_device_index(), &stream));
    stream_ = static_cast<cudaStream_t>(stream);
  }

  void norm_forward(const NormForward& p) const { check(cuda::norm_forward(p, stream_)); }

  int64_t partial_rows(const NormBackward& p) const {
    int64_t rows = 0;
    check(cuda::norm_partial_rows(p, &rows));
    return rows;
  }

  void norm_backward(const NormBackward& p) const { check(cuda::norm_backward(p, stream_)); }
  void masked_add(const MaskedAdd& p) const { check(cuda::masked_add(p, stream_)); }
  void shift_forward(const ShiftForward& p) const { check(cuda::shift_forward(p, stream_)); }
  void shift_backward(const ShiftBackward& p) const { check(cuda::shift_backward(p, stream_)); }

 private:
  static void check(cudaError_t error) {
    STD_TORCH_CHECK(
        error == cudaSuccess, "a fusion kernel did not start: ", cudaGetErrorString(error));
  }

  torch::stable::accelerator::DeviceGuard guard_;
  cudaStream_t stream_;
};

}  // namespace
}  // namespace megalatent

STABLE_TORCH_LIBRARY_IMPL(megalatent, CUDA, m) {
  megalatent::register_operators<megalatent::Cuda>(m);
}

// `architectures` is a list separated by semicolons: "90;100+PTX".
extern "C" __attribute__((visibility("default"))) const char* megalatent_cuda_build_information() {
  return "{\"sources\": \"" MEGALATENT_SOURCES "\", \"architectures\": \"" MEGALATENT_ARCHITECTURES
         "\"}";
}
