// Philox4x32-10 (Salmon et al., SC 2011, constants of Random123) and the jitter made of it.
// Host and device share this file; megalatent/kernels/philox.py is the definition it must equal.
#pragma once

#include <cstdint>

#include "inline.h"

namespace megalatent {

constexpr uint32_t kJitterDomain = 0x6A697474u;  // "jitt"

// Turns the counter (c0, c1, c2, c3) into its four words, in place: with plain variables rather than
// an array, a loop over counters vectorises.
MEGALATENT_INLINE void philox4x32(
    uint32_t key0, uint32_t key1, uint32_t& c0, uint32_t& c1, uint32_t& c2, uint32_t& c3) {
#if defined(__CUDACC__)
#pragma unroll
#else
#pragma GCC unroll 10
#endif
  for (int round = 0; round < 10; ++round) {
    const uint64_t product0 = uint64_t{0xD2511F53u} * c0;
    const uint64_t product1 = uint64_t{0xCD9E8D57u} * c2;
    c0 = static_cast<uint32_t>(product1 >> 32) ^ c1 ^ key0;
    c1 = static_cast<uint32_t>(product1);
    c2 = static_cast<uint32_t>(product0 >> 32) ^ c3 ^ key1;
    c3 = static_cast<uint32_t>(product0);
    key0 += 0x9E3779B9u;
    key1 += 0xBB67AE85u;
  }
}

// The last counter word: pass in the high half, bits 32 to 47 of the sample in the low one.
MEGALATENT_INLINE uint32_t jitter_counter3(uint32_t pass, int64_t sample) {
  return (pass << 16) | (static_cast<uint32_t>(sample >> 32) & 0xFFFFu);
}

// A signed 24-bit integer, exact in float32: the one product with `scale` is all that rounds.
MEGALATENT_INLINE float signed_24(uint32_t word) {
  return static_cast<float>(static_cast<int32_t>(word >> 8) - (1 << 23));
}

}  // namespace megalatent
