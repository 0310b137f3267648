"""`megalatent train` that waits after its second step, once, until it has been asked to stop.

    python paused_training.py CONFIG [options]

Where a test asks a run to stop, it is then sure to be in the middle of it: after the step every
rank leaves a file `paused-RANK` in the run folder, and goes on when SIGTERM has come.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Any

from megalatent import cli, platform

platform.install()

from megatron.training import training  # noqa: E402

STEP = 2


def main() -> int:
    after_step = training.post_training_step_callbacks

    def pause(model: Any, optimizer: Any, scheduler: Any, iteration: int, *rest: Any) -> Any:
        result = after_step(model, optimizer, scheduler, iteration, *rest)
        mark = Path(training.get_args().save, f"paused-{os.environ['RANK']}")
        if iteration == STEP and not mark.exists():
            mark.touch()
            while not training.get_signal_handler()._signal_received:
                time.sleep(0.05)
        return result

    training.post_training_step_callbacks = pause
    return cli.main(["train", *sys.argv[1:]])


if __name__ == "__main__":
    sys.exit(main())
