// The kernels without a norm: masked addition, and the shift with its jitter. Included by isa.cpp.

template <typename T>
void masked_add_rows(const MaskedAdd& p, int64_t begin, int64_t end) {
  using A = wide_t<T>;
  for (int64_t row = begin; row < end; ++row) {
    const int64_t at = row * p.width;
    T* __restrict__ x = static_cast<T*>(p.x) + at;
    const T* a = static_cast<const T*>(p.a) + at;
    const T* e = p.e ? static_cast<const T*>(p.e) + at : nullptr;
    if (p.mask[row] && e) {
#pragma omp simd
      for (int64_t c = 0; c < p.width; ++c) narrow(A(widen(e[c])) + widen(a[c]), x[c]);
    } else if (p.mask[row]) {
      std::memcpy(x, a, p.width * sizeof(T));
    } else if (e) {
      std::memcpy(x, e, p.width * sizeof(T));
    } else {
      std::memset(x, 0, p.width * sizeof(T));
    }
  }
}

// Noise of `kQuads` counters in a row, from channel 4 * first_quad on.
constexpr int kQuads = 16;

inline void noise_block(
    const ShiftForward& p, int64_t row, int64_t first_quad, float* __restrict__ noise) {
  const int64_t sample = p.sample[row];
  const uint32_t position = static_cast<uint32_t>(p.position[row]);
  const uint32_t pass_and_sample = jitter_counter3(p.pass, sample);
  alignas(64) uint32_t words[4][kQuads];
#pragma omp simd
  for (int q = 0; q < kQuads; ++q) {
    uint32_t c0 = position, c1 = static_cast<uint32_t>(first_quad) + static_cast<uint32_t>(q);
    uint32_t c2 = static_cast<uint32_t>(sample), c3 = pass_and_sample;
    philox4x32(p.key0, p.key1, c0, c1, c2, c3);
    words[0][q] = c0;
    words[1][q] = c1;
    words[2][q] = c2;
    words[3][q] = c3;
  }
  for (int q = 0; q < kQuads; ++q) {
    for (int lane = 0; lane < 4; ++lane) noise[4 * q + lane] = signed_24(words[lane][q]) * p.scale;
  }
}

template <typename T>
void shift_forward_rows(const ShiftForward& p, int64_t begin, int64_t end) {
  using A = wide_t<T>;
  constexpr int64_t kChannels = 4 * kQuads;
  alignas(64) float noise[kChannels];
  const int64_t width = p.width;
  for (int64_t row = begin; row < end; ++row) {
    const int64_t from = p.source[row / p.batch], column = row % p.batch;
    T* __restrict__ out = static_cast<T*>(p.out) + row * width;
    if (from < 0) {
      std::memset(out, 0, width * sizeof(T));
      continue;
    }
    const bool local = from < p.s;
    const T* base = static_cast<const T*>(local ? p.h : p.boundary);
    const T* in = base + ((local ? from : from - p.s) * p.batch + column) * width;
    if (!(p.scale > 0)) {
      std::memcpy(out, in, width * sizeof(T));
      continue;
    }
    for (int64_t first = 0; first < width; first += kChannels) {
      noise_block(p, row, first / 4, noise);
      const int64_t count = width - first < kChannels ? width - first : kChannels;
#pragma omp simd
      for (int64_t c = 0; c < count; ++c) {
        narrow(A(widen(in[first + c])) + A(noise[c]), out[first + c]);
      }
    }
  }
}
