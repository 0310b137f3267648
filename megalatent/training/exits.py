"""What Megatron means when it ends the process. Imports neither torch nor Megatron.

Megatron calls `sys.exit` where a run ends in order, and also where it cannot go on: then without a
status, which Python takes for success, or with one that only its source explains.
"""

from __future__ import annotations

import re
import traceback

from megalatent.errors import UserError

__all__ = ["TrainingStopped", "why_it_ends"]


class TrainingStopped(RuntimeError):
    """Megatron stopped the run because of what it computed: no traceback would help.

    Attributes:
        status: what it wanted the process to end with; never 0.
    """

    def __init__(self, message: str, status: int = 1) -> None:
        super().__init__(message)
        self.status = status


# Megatron's rerun state machine, for losses and gradients that are not finite or jump.
_STATUSES = {
    16: "Megatron found a loss or gradient that is not finite (the log says where), saved a"
    " checkpoint if `save` is given and ended with status 16: start again from it, and the"
    " same step is run once more to tell bad data or a bad learning rate from a faulty device",
    17: "Megatron found a loss or gradient that is not finite (the log says where), ran the step"
    " again to be sure and ended with status 17: look at the data and the learning rate, or at"
    " the device if the log says that the results differed",
}

_IN_MEGATRON = re.compile(r"megatron[/\\](training|core)[/\\]")

# Function of Megatron that gives up -> what it could not do, and what to do.
_GIVEN_UP = {
    "read_metadata": "latest_checkpointed_iteration.txt holds no iteration: write the number of a"
    " whole checkpoint into it",
    "_load_base_checkpoint": "there is no checkpoint to load, or it cannot be read: check"
    " megatron.load, or leave exit_on_missing_checkpoint out",
    "load_checkpoint": "the checkpoint lacks its iteration or the states of the random numbers:"
    " set megatron.finetune or megatron.no_load_rng",
    "fix_query_key_value_ordering": "the checkpoint is of a version that Megatron cannot read:"
    " convert it",
}


def why_it_ends(error: BaseException) -> BaseException | None:
    """What ended the run: None for an exit in order, an error in place of any other exit.

    Args:
        error: what Megatron raised. Anything but a `SystemExit` is returned as it is.
    """
    if not isinstance(error, SystemExit) or isinstance(error.code, str):
        return error
    if error.code == 0:
        return None
    if error.code is not None:
        text = _STATUSES.get(error.code, f"Megatron ended the run with status {error.code}")
        return TrainingStopped(text, error.code)
    frame = traceback.extract_tb(error.__traceback__)[-1]
    if not _IN_MEGATRON.search(frame.filename):
        return None
    reason = _GIVEN_UP.get(frame.name)
    if reason is None:
        return TrainingStopped(f"Megatron gave up in {frame.name}: see what it printed")
    return UserError(f"Megatron cannot load: {reason}")
