#pragma once

#if defined(__CUDACC__)
#define MEGALATENT_INLINE __host__ __device__ __forceinline__
#else
#define MEGALATENT_INLINE inline __attribute__((always_inline))
#endif
