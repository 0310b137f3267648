// bfloat16 and float16 by their bits: branch-free, so that a compiler can vectorise them. On a GPU
// the conversions are the hardware's, which round alike.
#pragma once

#include <cstdint>
#include <cstring>

#include "inline.h"

#if defined(__CUDACC__)
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#endif

namespace megalatent {

struct bfloat16 {
  uint16_t bits;
};
struct float16 {
  uint16_t bits;
};

template <typename To, typename From>
MEGALATENT_INLINE To bits_as(From from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  std::memcpy(&to, &from, sizeof(to));
  return to;
}

MEGALATENT_INLINE float widen(bfloat16 x) {
  return bits_as<float>(static_cast<uint32_t>(x.bits) << 16);
}

MEGALATENT_INLINE float widen(float16 x) {
#if defined(__CUDA_ARCH__)
  return __half2float(__ushort_as_half(x.bits));
#else
  // Exponent and mantissa moved into float32's place are 2^112 too small; the product mends that,
  // denormals included. An exponent of all ones (inf, nan) then lands 2^16 too low.
  const uint32_t magnitude = static_cast<uint32_t>(x.bits & 0x7FFFu) << 13;
  const uint32_t scaled = bits_as<uint32_t>(bits_as<float>(magnitude) * 0x1p112f);
  const uint32_t special = magnitude >= 0x0F800000u ? 0x7F800000u : 0u;
  const uint32_t sign = static_cast<uint32_t>(x.bits & 0x8000u) << 16;
  return bits_as<float>(scaled | special | sign);
#endif
}

MEGALATENT_INLINE float widen(float x) { return x; }
MEGALATENT_INLINE double widen(double x) { return x; }

MEGALATENT_INLINE void narrow(float x, bfloat16& to) {
#if defined(__CUDA_ARCH__)
  to.bits = __bfloat16_as_ushort(__float2bfloat16_rn(x));
#else
  const uint32_t bits = bits_as<uint32_t>(x);
  // To nearest, ties to even. A nan must not round into infinity: it gets the quiet bit instead.
  const uint32_t rounded = (bits + 0x7FFFu + ((bits >> 16) & 1u)) >> 16;
  const uint32_t quiet = (bits >> 16) | 0x40u;
  to.bits = static_cast<uint16_t>((bits & 0x7FFFFFFFu) > 0x7F800000u ? quiet : rounded);
#endif
}

MEGALATENT_INLINE void narrow(float x, float16& to) {
#if defined(__CUDA_ARCH__)
  to.bits = __half_as_ushort(__float2half_rn(x));
#else
  const uint32_t bits = bits_as<uint32_t>(x);
  const uint32_t magnitude = bits & 0x7FFFFFFFu;
  const uint32_t sign = (bits >> 16) & 0x8000u;
  // Normal: rebias the exponent, round to nearest even on the 13 bits that go.
  const uint32_t normal = (magnitude - 0x38000000u + 0xFFFu + ((magnitude >> 13) & 1u)) >> 13;
  // Denormal (below 2^-14): adding 0.5 leaves multiples of 2^-24 in the low bits, rounded by the
  // addition itself.
  const uint32_t denormal = bits_as<uint32_t>(bits_as<float>(magnitude) + 0.5f) - 0x3F000000u;
  uint32_t result = magnitude < 0x38800000u ? denormal : normal;
  result = magnitude >= 0x47800000u ? 0x7C00u : result;  // 65536 and more, infinity
  result = magnitude > 0x7F800000u ? 0x7E00u : result;   // nan
  to.bits = static_cast<uint16_t>(sign | result);
#endif
}

MEGALATENT_INLINE void narrow(float x, float& to) { to = x; }
MEGALATENT_INLINE void narrow(double x, double& to) { to = x; }

}  // namespace megalatent
