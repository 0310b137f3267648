// The CUDA kernels' launchers: asynchronous on `stream`, no allocation, no host synchronisation.
// Activations in float32, bfloat16 or float16. The current device must be the tensors' own.
#pragma once

#if defined(MEGALATENT_EMULATE_CUDA)
#include "cuda_emulator.h"
#else
#include <cuda_runtime.h>
#endif

#include "../contract.h"

namespace megalatent::cuda {

cudaError_t norm_forward(const NormForward& p, cudaStream_t stream);

// Rows of `partials` that norm_backward needs for p; it depends on the shape and the card alone.
cudaError_t norm_partial_rows(const NormBackward& p, int64_t* rows);
cudaError_t norm_backward(const NormBackward& p, cudaStream_t stream);

cudaError_t masked_add(const MaskedAdd& p, cudaStream_t stream);
cudaError_t shift_forward(const ShiftForward& p, cudaStream_t stream);
cudaError_t shift_backward(const ShiftBackward& p, cudaStream_t stream);

}  // namespace megalatent::cuda
