"""One thread, no compilation, a known environment: what every test module relies on."""

from __future__ import annotations

import os

# Who runs the tests may do so in a job of Slurm or torchrun, with settings of ours for something
# else, or with wishes for the terminal: the tests say themselves what they are about.
_FOREIGN = (
    *("SLURM", "SBATCH_", "SRUN_", "SQUEUE_", "SCANCEL_", "MEGALATENT_", "TORCHELASTIC_"),
    *("PET_", "WANDB_", "MASTER_"),
)
_NAMES = {
    *("RANK", "LOCAL_RANK", "GROUP_RANK", "ROLE_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"),
    *("COLUMNS", "LINES", "FORCE_COLOR", "NO_COLOR", "PYTHON_COLORS", "TTY_COMPATIBLE"),
}
for _name in list(os.environ):
    if _name in _NAMES or _name.startswith(_FOREIGN):
        del os.environ[_name]

# Before torch starts any OpenMP thread: the distributed tests fork from this process.
os.environ["OMP_NUM_THREADS"] = "1"
# Before anything imports Triton, as Megatron does: its own library of functions is interpreted or
# not from then on, and the kernel tests interpret theirs.
os.environ["TRITON_INTERPRET"] = "1"

import torch  # noqa: E402

torch.set_num_threads(1)

from megalatent import platform  # noqa: E402

platform.install_torch()
