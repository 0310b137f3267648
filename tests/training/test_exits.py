"""What becomes of Megatron's own exits, from Megatron's own functions."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from megatron.core import rerun_state_machine
from megatron.training import checkpointing

from megalatent import cli
from megalatent.errors import UserError
from megalatent.launch.local import RankFailure, run_local
from megalatent.training.exits import TrainingStopped, why_it_ends


def exit_of(function: object, *args: object) -> SystemExit:
    with pytest.raises(SystemExit) as caught:
        function(*args)  # type: ignore[operator]
    return caught.value


def test_giving_up_is_no_success(tmp_path: Path) -> None:
    tracker = tmp_path / "latest_checkpointed_iteration.txt"
    tracker.write_text("")
    error = exit_of(checkpointing.read_metadata, str(tracker))
    assert error.code is None  # as sys.exit() of a run that ends well
    found = why_it_ends(error)
    assert isinstance(found, UserError)
    assert "latest_checkpointed_iteration.txt holds no iteration" in str(found)


@pytest.mark.parametrize(
    ("status", "expected"),
    [
        (rerun_state_machine.EXIT_CODE_RESUME_TO_DISAMBIGUATE, "saved a checkpoint"),
        (rerun_state_machine.EXIT_CODE_FAILED_ON_RESULT_VALIDATION, "ran the step again"),
        (5, "status 5"),
    ],
)
def test_a_status_is_explained(status: int, expected: str) -> None:
    found = why_it_ends(exit_of(sys.exit, status))
    assert isinstance(found, TrainingStopped)
    assert found.status == status
    assert expected in str(found)
    assert str(status) in str(found)


def test_what_ends_in_order_or_is_an_error_already() -> None:
    assert why_it_ends(exit_of(sys.exit, 0)) is None
    for error in (ValueError("x"), exit_of(sys.exit, "no data"), KeyboardInterrupt()):
        assert why_it_ends(error) is error


def test_the_command_ends_with_megatrons_status(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """A supervisor decides by it whether to start again."""

    def stopped(arguments: list[str]) -> int:
        raise TrainingStopped("the loss is not finite", 17)

    monkeypatch.setattr(cli, "_run", stopped)
    assert cli.main(["train", "x"]) == 17
    assert capfd.readouterr().err == "megalatent: error: the loss is not finite\n"


def test_a_local_rank_that_megatron_stops_shows_no_traceback() -> None:
    def worker(rank: int) -> None:
        raise TrainingStopped("the loss is not finite", 16)

    with pytest.raises(RankFailure) as caught:
        run_local(worker, 1)
    assert (caught.value.summary, caught.value.trace) == ("the loss is not finite", "")
    assert not caught.value.is_user_error
