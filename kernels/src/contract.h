// What the operators hand to the kernels: raw pointers and sizes, no torch headers, so that the
// kernel files compile in seconds and their arithmetic can be tested without torch or a GPU.
//
// Every activation is a dense [rows, width] matrix; `rows` is s * b. Arithmetic is in float32
// (float64 for float64 activations) and rounds once.
#pragma once

#include <cstdint>

namespace megalatent {

enum class DType : int32_t { float32, bfloat16, float16, float64 };

// How the two normed inputs meet: a * sigmoid(b) (gated fusion, FBT eq. 4) or a + b (concat).
enum class Combine : int32_t { gate, sum };

// x = RMSNorm(combine(a, b)) * weight where mask, else e. The kernel also writes rstd, the
// reciprocal RMS per row (0 at plain rows), all that the backward keeps besides the inputs.
struct NormForward {
  Combine combine;
  DType dtype;
  DType weight_dtype;  // `dtype` or the accumulation type
  int64_t rows, width;
  double eps;
  const void *a, *b, *e, *weight;
  const bool* mask;
  void* x;
  void* rstd;
};

// Gradients of the above. For Combine::sum the gradient of b is that of a, and db is null.
// de is null where it is not wanted. `partials` is scratch: `partial_rows` rows of `width` sums
// of dweight in the accumulation type, added in fixed order, so that results repeat bit for bit.
struct NormBackward {
  Combine combine;
  DType dtype;
  DType weight_dtype;
  int64_t rows, width;
  const void *dx, *a, *b, *weight, *rstd;
  const bool* mask;
  void *da, *db, *de, *dweight;
  void* partials;
  int64_t partial_rows;
};

// x = e + a where mask, else e. Without e: x = a where mask, else 0 (the gradient of a).
struct MaskedAdd {
  DType dtype;
  int64_t rows, width;
  const void *a, *e;
  const bool* mask;
  void* x;
};

// out[i, j] = row source[i] of h, or row source[i] - s of boundary, or zeros; plus jitter where it
// is not zeros and scale > 0. Layouts [s, batch, width] and [boundary_rows, batch, width].
struct ShiftForward {
  DType dtype;
  int64_t s, batch, width, boundary_rows;
  const void *h, *boundary;
  const int64_t *source, *position, *sample;
  uint32_t key0, key1, pass;
  float scale;  // sigma * 2^-23
  void* out;
};

// Gathers dout back: row r of dh (or of dboundary) is dout[inverse[r]], or zeros where nothing read
// that row. `inverse` is scratch of s + boundary_rows elements.
struct ShiftBackward {
  DType dtype;
  int64_t s, batch, width, boundary_rows;
  const void* dout;
  const int64_t* source;
  int64_t* inverse;
  void *dh, *dboundary;
};

inline int64_t size_of(DType dtype) {
  switch (dtype) {
    case DType::float64:
      return 8;
    case DType::float32:
      return 4;
    default:
      return 2;
  }
}

}  // namespace megalatent
