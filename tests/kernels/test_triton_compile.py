"""The Triton kernels through the real compiler, down to machine code for sm_90; needs no GPU.

The interpreter accepts more than the compiler does, so this is the other half of their test.
"""

from __future__ import annotations

from tests.kernels.test_operators import run_python

_COMPILE = """
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from megalatent.kernels import triton_norm, triton_rows

def build(kernel, pointers, scalars, options=None, **constants):
    signature = {name: kind for kind, names in pointers.items() for name in names.split()}
    signature |= {name: kind for kind, names in scalars.items() for name in names.split()}
    signature |= {name: "constexpr" for name in constants}
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants)
    built = triton.compile(
        source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 4} | (options or {})
    )
    assert built.asm["cubin"]
    return built.asm["ptx"]

T = "*bf16"
for gate in (True, False):
    build(triton_norm._forward_kernel,
          {T: "a_ptr b_ptr e_ptr weight_ptr x_ptr", "*u8": "mask_ptr", "*fp32": "rstd_ptr"},
          {"i32": "width", "fp32": "eps"}, GATE=gate, BLOCK=1024)
    build(triton_norm._backward_kernel,
          {T: "dx_ptr a_ptr b_ptr weight_ptr da_ptr db_ptr de_ptr", "*u8": "mask_ptr",
           "*fp32": "rstd_ptr partial_ptr"},
          {"i32": "rows width"}, GATE=gate, NEED_E=True, BLOCK=1024)
build(triton_rows._masked_add_kernel, {T: "a_ptr e_ptr x_ptr", "*u8": "mask_ptr"},
      {"i32": "width"}, HAS_E=True, BLOCK=1024)
build(triton_rows._copy_rows_kernel, {T: "from_ptr to_ptr", "*i64": "reader_ptr"},
      {"i32": "first width"}, BLOCK=1024)
shift = build(triton_rows._shift_kernel,
              {T: "h_ptr boundary_ptr out_ptr", "*i64": "source_ptr position_ptr sample_ptr",
               "*fp32": "scale_ptr"},
              {"i32": "s batch width k", "i64": "key0 key1"}, {"enable_fp_fusion": False},
              NOISY=True, BLOCK=1024)
assert "mul.f32" in shift or "mul.rn.f32" in shift
assert "fma" not in shift, "the jitter is contracted"
print("built")
"""


def test_kernels_compile(tmp_path):
    output = run_python(_COMPILE, TRITON_INTERPRET="0", TRITON_CACHE_DIR=str(tmp_path))
    assert "built" in output
