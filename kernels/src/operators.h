// The operators on torch tensors: checks, allocation, and the hand-over to a `Device`, which is the
// CPU (operators_cpu.cpp) or CUDA (operators_cuda.cpp). Uses torch's stable ABI alone.
//
// A Device is made from a tensor and has: norm_forward, partial_rows, norm_backward, masked_add,
// shift_forward, shift_backward, each taking its struct of contract.h.
#pragma once

#include <cmath>
#include <tuple>

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>
#include <torch/headeronly/util/Exception.h>

#include "contract.h"
#include "philox.h"

namespace megalatent {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

inline DType dtype_of(const Tensor& tensor) {
  switch (tensor.scalar_type()) {
    case ScalarType::Float:
      return DType::float32;
    case ScalarType::BFloat16:
      return DType::bfloat16;
    case ScalarType::Half:
      return DType::float16;
    case ScalarType::Double:
      return DType::float64;
    default:
      STD_TORCH_CHECK(false, "the fusion kernels take float32, bfloat16, float16 or float64");
  }
}

inline ScalarType accumulation_type(const Tensor& tensor) {
  return tensor.scalar_type() == ScalarType::Double ? ScalarType::Double : ScalarType::Float;
}

inline const void* in(const Tensor& tensor) { return tensor.data_ptr(); }
inline void* out(const Tensor& tensor) { return tensor.data_ptr(); }

inline void check_dense(const Tensor& tensor, const char* name) {
  STD_TORCH_CHECK(tensor.is_contiguous(), name, " must be contiguous");
}

// Same shape, dtype and device as `like`, and dense.
inline void check_like(const Tensor& tensor, const char* name, const Tensor& like) {
  check_dense(tensor, name);
  bool same = tensor.dim() == like.dim() && tensor.scalar_type() == like.scalar_type() &&
      tensor.device() == like.device();
  for (int64_t d = 0; same && d < like.dim(); ++d) same = tensor.size(d) == like.size(d);
  STD_TORCH_CHECK(same, name, " must have the shape, dtype and device of the other activations");
}

inline void check_integers(
    const Tensor& tensor, const char* name, const Tensor& like, int64_t count) {
  check_dense(tensor, name);
  STD_TORCH_CHECK(
      tensor.scalar_type() == ScalarType::Long && tensor.numel() == count &&
          tensor.device() == like.device(),
      name, " must hold ", count, " int64 values on the device of the activations");
}

inline int64_t width_of(const Tensor& tensor) {
  STD_TORCH_CHECK(tensor.dim() >= 1, "activations must have a hidden dimension");
  const int64_t width = tensor.size(tensor.dim() - 1);
  STD_TORCH_CHECK(width > 0, "the hidden size must be at least 1");
  return width;
}

inline int64_t rows_of(const Tensor& tensor) { return tensor.numel() / width_of(tensor); }

inline const bool* mask_of(const Tensor& mask, const Tensor& like) {
  check_dense(mask, "fused_mask");
  STD_TORCH_CHECK(
      mask.scalar_type() == ScalarType::Bool && mask.numel() == rows_of(like) &&
          mask.device() == like.device(),
      "fused_mask must hold one bool per row on the device of the activations");
  return static_cast<const bool*>(in(mask));
}

inline DType check_weight(const Tensor& weight, const Tensor& like) {
  check_dense(weight, "norm_weight");
  STD_TORCH_CHECK(
      weight.numel() == width_of(like) && weight.device() == like.device(),
      "norm_weight must hold one value per channel on the device of the activations");
  const ScalarType type = weight.scalar_type();
  STD_TORCH_CHECK(
      type == like.scalar_type() || type == accumulation_type(like),
      "norm_weight must have the activations' dtype or the accumulation dtype");
  return dtype_of(weight);
}

template <class Device>
std::tuple<Tensor, Tensor> norm_forward(
    Combine combine, const Tensor& a, const Tensor& b, const Tensor& e, const Tensor& mask,
    const Tensor& weight, double eps) {
  check_dense(a, "the first input");
  check_like(b, "the second input", a);
  check_like(e, "e", a);
  const DType weight_dtype = check_weight(weight, a);
  Device device(a);
  Tensor x = torch::stable::empty_like(a);
  Tensor rstd = torch::stable::new_empty(a, mask.sizes(), accumulation_type(a));
  device.norm_forward(NormForward{
      combine, dtype_of(a), weight_dtype, rows_of(a), width_of(a), eps, in(a), in(b), in(e),
      in(weight), mask_of(mask, a), out(x), out(rstd)});
  return {x, rstd};
}

struct NormGradients {
  Tensor da, db, de, dweight;
};

template <class Device>
NormGradients norm_backward(
    Combine combine, const Tensor& dx, const Tensor& a, const Tensor& b, const Tensor& mask,
    const Tensor& weight, const Tensor& rstd, bool need_e) {
  check_dense(a, "the first input");
  check_like(b, "the second input", a);
  check_like(dx, "dx", a);
  const DType weight_dtype = check_weight(weight, a);
  STD_TORCH_CHECK(
      rstd.is_contiguous() && rstd.numel() == rows_of(a) &&
          rstd.scalar_type() == accumulation_type(a),
      "rstd must be what the forward returned");
  Device device(a);
  const bool gate = combine == Combine::gate;
  Tensor da = torch::stable::empty_like(a);
  Tensor db = gate ? torch::stable::empty_like(a) : da;
  Tensor de = need_e ? torch::stable::empty_like(a) : torch::stable::new_empty(a, {0});
  Tensor dweight = torch::stable::empty_like(weight);
  NormBackward p{combine,    dtype_of(a),      weight_dtype, rows_of(a), width_of(a), in(dx),
                 in(a),      in(b),            in(weight),   in(rstd),   mask_of(mask, a),
                 out(da),    gate ? out(db) : nullptr,       need_e ? out(de) : nullptr,
                 out(dweight), nullptr, 0};
  p.partial_rows = device.partial_rows(p);
  Tensor partials =
      torch::stable::new_empty(a, {p.partial_rows, p.width}, accumulation_type(a));
  p.partials = out(partials);
  device.norm_backward(p);
  return {da, db, de, dweight};
}

template <class Device>
std::tuple<Tensor, Tensor> gated(
    Tensor u, Tensor g, Tensor e, Tensor fused_mask, Tensor norm_weight, double eps) {
  return norm_forward<Device>(Combine::gate, u, g, e, fused_mask, norm_weight, eps);
}

template <class Device>
std::tuple<Tensor, Tensor, Tensor, Tensor> gated_backward(
    Tensor dx, Tensor u, Tensor g, Tensor fused_mask, Tensor norm_weight, Tensor rstd,
    bool need_e) {
  NormGradients r =
      norm_backward<Device>(Combine::gate, dx, u, g, fused_mask, norm_weight, rstd, need_e);
  return {r.da, r.db, r.de, r.dweight};
}

template <class Device>
std::tuple<Tensor, Tensor> concat(
    Tensor c_state, Tensor c_gate, Tensor e, Tensor fused_mask, Tensor norm_weight, double eps) {
  return norm_forward<Device>(Combine::sum, c_state, c_gate, e, fused_mask, norm_weight, eps);
}

template <class Device>
std::tuple<Tensor, Tensor, Tensor> concat_backward(
    Tensor dx, Tensor c_state, Tensor c_gate, Tensor fused_mask, Tensor norm_weight, Tensor rstd,
    bool need_e) {
  NormGradients r = norm_backward<Device>(
      Combine::sum, dx, c_state, c_gate, fused_mask, norm_weight, rstd, need_e);
  return {r.da, r.de, r.dweight};
}

template <class Device>
Tensor additive(Tensor a, Tensor e, Tensor fused_mask) {
  check_dense(a, "a");
  check_like(e, "e", a);
  Device device(a);
  Tensor x = torch::stable::empty_like(a);
  device.masked_add(MaskedAdd{
      dtype_of(a), rows_of(a), width_of(a), in(a), in(e), mask_of(fused_mask, a), out(x)});
  return x;
}

template <class Device>
Tensor additive_backward(Tensor dx, Tensor fused_mask) {
  check_dense(dx, "dx");
  Device device(dx);
  Tensor da = torch::stable::empty_like(dx);
  device.masked_add(MaskedAdd{
      dtype_of(dx), rows_of(dx), width_of(dx), in(dx), nullptr, mask_of(fused_mask, dx),
      out(da)});
  return da;
}

template <class Device>
Tensor shift_jitter(
    Tensor h, Tensor boundary, Tensor source, Tensor position, Tensor sample, int64_t k,
    int64_t seed, double sigma) {
  STD_TORCH_CHECK(h.dim() == 3 && boundary.dim() == 3, "h and boundary must be [rows, b, D]");
  STD_TORCH_CHECK(
      boundary.size(1) == h.size(1) && boundary.size(2) == h.size(2) &&
          boundary.scalar_type() == h.scalar_type() && boundary.device() == h.device(),
      "boundary must fit h");
  STD_TORCH_CHECK(k >= 0 && k < 65536, "pass k must be in [0, 65536)");
  check_dense(h, "h");
  check_dense(boundary, "boundary");
  const int64_t s = h.size(0), batch = h.size(1);
  check_integers(source, "source", h, s);
  check_integers(position, "position", h, s * batch);
  check_integers(sample, "sample", h, s * batch);
  Device device(h);
  Tensor shifted = torch::stable::empty_like(h);
  const uint64_t bits = static_cast<uint64_t>(seed);
  device.shift_forward(ShiftForward{
      dtype_of(h), s, batch, h.size(2), boundary.size(0), in(h), in(boundary),
      static_cast<const int64_t*>(in(source)), static_cast<const int64_t*>(in(position)),
      static_cast<const int64_t*>(in(sample)), static_cast<uint32_t>(bits),
      static_cast<uint32_t>(bits >> 32) ^ kJitterDomain, static_cast<uint32_t>(k),
      static_cast<float>(std::ldexp(sigma, -23)), out(shifted)});
  return shifted;
}

template <class Device>
std::tuple<Tensor, Tensor> shift_jitter_backward(
    Tensor dout, Tensor source, int64_t boundary_rows) {
  STD_TORCH_CHECK(dout.dim() == 3, "dout must be [s, b, D]");
  check_dense(dout, "dout");
  const int64_t s = dout.size(0), batch = dout.size(1), width = dout.size(2);
  check_integers(source, "source", dout, s);
  Device device(dout);
  Tensor dh = torch::stable::empty_like(dout);
  Tensor dboundary = torch::stable::new_empty(dout, {boundary_rows, batch, width});
  Tensor inverse = torch::stable::new_empty(source, {s + boundary_rows});
  device.shift_backward(ShiftBackward{
      dtype_of(dout), s, batch, width, boundary_rows, in(dout),
      static_cast<const int64_t*>(in(source)), static_cast<int64_t*>(out(inverse)), out(dh),
      out(dboundary)});
  return {dh, dboundary};
}

template <class Device>
void register_operators(torch::stable::detail::StableLibrary& m) {
  m.impl("gated", TORCH_BOX(&gated<Device>));
  m.impl("gated_backward", TORCH_BOX(&gated_backward<Device>));
  m.impl("concat", TORCH_BOX(&concat<Device>));
  m.impl("concat_backward", TORCH_BOX(&concat_backward<Device>));
  m.impl("additive", TORCH_BOX(&additive<Device>));
  m.impl("additive_backward", TORCH_BOX(&additive_backward<Device>));
  m.impl("shift_jitter", TORCH_BOX(&shift_jitter<Device>));
  m.impl("shift_jitter_backward", TORCH_BOX(&shift_jitter_backward<Device>));
}

}  // namespace megalatent
