"""One thread, no compilation, Megatron imported once: what every test module relies on."""

from __future__ import annotations

import os

# Before torch starts any OpenMP thread: the distributed tests fork from this process.
os.environ["OMP_NUM_THREADS"] = "1"
# Before anything imports Triton, as Megatron does: its own library of functions is interpreted or
# not from then on, and the kernel tests interpret theirs.
os.environ["TRITON_INTERPRET"] = "1"

import torch

torch.set_num_threads(1)

from megalatent import platform  # noqa: E402

platform.install_torch()
