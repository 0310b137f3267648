// The operators' schemas. megalatent/kernels/ops.py documents them and holds the same text.
#include <torch/csrc/stable/library.h>

STABLE_TORCH_LIBRARY(megalatent, m) {
  m.def(
      "gated(Tensor u, Tensor g, Tensor e, Tensor fused_mask, Tensor norm_weight, float eps)"
      " -> (Tensor x, Tensor rstd)");
  m.def(
      "gated_backward(Tensor dx, Tensor u, Tensor g, Tensor fused_mask, Tensor norm_weight,"
      " Tensor rstd, bool need_e) -> (Tensor du, Tensor dg, Tensor de, Tensor dnorm_weight)");
  m.def(
      "concat(Tensor c_state, Tensor c_gate, Tensor e, Tensor fused_mask, Tensor norm_weight,"
      " float eps) -> (Tensor x, Tensor rstd)");
  m.def(
      "concat_backward(Tensor dx, Tensor c_state, Tensor c_gate, Tensor fused_mask,"
      " Tensor norm_weight, Tensor rstd, bool need_e)"
      " -> (Tensor dc, Tensor de, Tensor dnorm_weight)");
  m.def("additive(Tensor a, Tensor e, Tensor fused_mask) -> Tensor");
  m.def("additive_backward(Tensor dx, Tensor fused_mask) -> Tensor");
  m.def(
      "shift_jitter(Tensor h, Tensor boundary, Tensor source, Tensor position, Tensor sample,"
      " SymInt k, int seed, float sigma) -> Tensor");
  m.def(
      "shift_jitter_backward(Tensor dout, Tensor source, SymInt boundary_rows)"
      " -> (Tensor dh, Tensor dboundary)");
}
