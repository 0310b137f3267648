// The normed fusions, forward and backward, row by row. Included by isa.cpp into the namespace of
// one instruction set. No standard library templates here: an inline function compiled for AVX2
// could otherwise be the copy that the linker keeps for everyone.

template <typename T>
struct Wide {
  using type = float;
};
template <>
struct Wide<double> {
  using type = double;
};
template <typename T>
using wide_t = typename Wide<T>::type;

// Scratch of one call; freed when the call ends.
template <typename T>
struct Scratch {
  explicit Scratch(int64_t count) : data(static_cast<T*>(std::malloc(count * sizeof(T)))) {}
  ~Scratch() { std::free(data); }
  Scratch(const Scratch&) = delete;
  Scratch& operator=(const Scratch&) = delete;
  T* const data;
};

// exp(x) for x <= 0 to about 2 ulp: x = n ln2 + r, |r| <= ln2 / 2, then Cephes' polynomial.
MEGALATENT_INLINE float exp_of_negative(float x) {
  x = x < -104.0f ? -104.0f : x;  // exp(-104) rounds to zero; a nan passes
  const float shifted = x * 1.44269504f + 12582912.0f;  // 1.5 * 2^23: rounds to an integer
  const float n = shifted - 12582912.0f;
  const float r = (x - n * 0.693359375f) - n * -2.12194440e-4f;
  float p = 1.9875691500e-4f;
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = (p * r) * r + r + 1.0f;
  // 2^n in two factors, so that denormal results come out right.
  const int32_t whole = bits_as<int32_t>(shifted) - 0x4B400000;
  const int32_t half = whole >> 1;
  return p * bits_as<float>((half + 127) << 23) * bits_as<float>((whole - half + 127) << 23);
}

MEGALATENT_INLINE double exp_of_negative(double x) { return ::exp(x); }

// sigmoid(g) and its slope sigmoid(g) * (1 - sigmoid(g)), both without cancellation.
template <typename A>
MEGALATENT_INLINE void sigmoid(A g, A& value, A& slope) {
  const A e = exp_of_negative(g < 0 ? g : -g);
  const A d = A(1) / (A(1) + e);
  value = g < 0 ? e * d : d;
  slope = e * d * d;
}

template <Combine combine, typename T, typename W>
void norm_forward_rows(const NormForward& p, int64_t begin, int64_t end) {
  using A = wide_t<T>;
  const int64_t width = p.width;
  const W* weight = static_cast<const W*>(p.weight);
  Scratch<A> scratch(width);
  A* __restrict__ y = scratch.data;
  for (int64_t row = begin; row < end; ++row) {
    T* __restrict__ x = static_cast<T*>(p.x) + row * width;
    A& rstd = static_cast<A*>(p.rstd)[row];
    if (!p.mask[row]) {
      std::memcpy(x, static_cast<const T*>(p.e) + row * width, width * sizeof(T));
      rstd = 0;
      continue;
    }
    const T* a = static_cast<const T*>(p.a) + row * width;
    const T* b = static_cast<const T*>(p.b) + row * width;
    A sum = 0;
#pragma omp simd reduction(+ : sum)
    for (int64_t c = 0; c < width; ++c) {
      A value;
      if constexpr (combine == Combine::gate) {
        A slope;
        sigmoid(static_cast<A>(widen(b[c])), value, slope);
        value *= widen(a[c]);
      } else {
        value = A(widen(a[c])) + widen(b[c]);
      }
      y[c] = value;
      sum += value * value;
    }
    const A r = A(1) / A(::sqrt(sum / A(width) + A(p.eps)));
    rstd = r;
#pragma omp simd
    for (int64_t c = 0; c < width; ++c) narrow(y[c] * r * widen(weight[c]), x[c]);
  }
}

template <Combine combine, typename T, typename W>
void norm_backward_block(const NormBackward& p, int64_t block) {
  using A = wide_t<T>;
  const int64_t width = p.width, per_block = rows_per_block(p.rows);
  const int64_t begin = block * per_block;
  const int64_t end = begin + per_block < p.rows ? begin + per_block : p.rows;
  const W* weight = static_cast<const W*>(p.weight);
  A* __restrict__ partial = static_cast<A*>(p.partials) + block * width;
  std::memset(partial, 0, width * sizeof(A));
  Scratch<A> scratch(3 * width);
  A* __restrict__ y = scratch.data;
  A* __restrict__ gate = y + width;        // sigmoid(b)
  A* __restrict__ by_gate = gate + width;  // a * sigmoid'(b)
  for (int64_t row = begin; row < end; ++row) {
    const int64_t at = row * width;
    const T* dx = static_cast<const T*>(p.dx) + at;
    T* __restrict__ da = static_cast<T*>(p.da) + at;
    T* __restrict__ db = combine == Combine::gate ? static_cast<T*>(p.db) + at : nullptr;
    T* de = p.de ? static_cast<T*>(p.de) + at : nullptr;
    if (!p.mask[row]) {
      std::memset(da, 0, width * sizeof(T));
      if (db) std::memset(db, 0, width * sizeof(T));
      if (de) std::memcpy(de, dx, width * sizeof(T));
      continue;
    }
    if (de) std::memset(de, 0, width * sizeof(T));
    const T* a = static_cast<const T*>(p.a) + at;
    const T* b = static_cast<const T*>(p.b) + at;
    const A r = static_cast<const A*>(p.rstd)[row];
    A sum = 0;
#pragma omp simd reduction(+ : sum)
    for (int64_t c = 0; c < width; ++c) {
      if constexpr (combine == Combine::gate) {
        A value, slope;
        sigmoid(static_cast<A>(widen(b[c])), value, slope);
        gate[c] = value;
        by_gate[c] = A(widen(a[c])) * slope;
        y[c] = A(widen(a[c])) * value;
      } else {
        y[c] = A(widen(a[c])) + widen(b[c]);
      }
      sum += A(widen(dx[c])) * widen(weight[c]) * y[c];
    }
    const A along = sum / A(width) * r * r;  // what of the gradient the norm takes away
#pragma omp simd
    for (int64_t c = 0; c < width; ++c) {
      const A gradient = widen(dx[c]);
      const A dy = r * (gradient * widen(weight[c]) - y[c] * along);
      partial[c] += gradient * (y[c] * r);
      if constexpr (combine == Combine::gate) {
        narrow(dy * gate[c], da[c]);
        narrow(dy * by_gate[c], db[c]);
      } else {
        narrow(dy, da[c]);
      }
    }
  }
}

template <typename T, typename W>
void weight_gradient_columns(const NormBackward& p, int64_t begin, int64_t end) {
  using A = wide_t<T>;
  constexpr int64_t kColumns = 64;
  for (int64_t first = begin; first < end; first += kColumns) {
    const int64_t count = end - first < kColumns ? end - first : kColumns;
    A sums[kColumns] = {};
    for (int64_t block = 0; block < p.partial_rows; ++block) {
      const A* row = static_cast<const A*>(p.partials) + block * p.width + first;
#pragma omp simd
      for (int64_t c = 0; c < count; ++c) sums[c] += row[c];
    }
    for (int64_t c = 0; c < count; ++c) narrow(sums[c], static_cast<W*>(p.dweight)[first + c]);
  }
}
