"""Runs inside the batch job, around srun: checks the nodes, starts the ranks, watches them, and
decides what follows when they end.

    python -m megalatent.launch.supervise --run RUN --srun srun [options] -- PROGRAM…

Imports neither torch nor Megatron: it starts at once and survives what happens to the ranks.

Exit codes: 0 the run is finished, or goes on later; 1 it failed; 2 the run folder is in use or
something given is wrong.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import sys
from collections.abc import Mapping, Sequence

from megalatent.errors import UserError, describe_os_error
from megalatent.launch import checkpoints
from megalatent.launch.decisions import Action, Cause, Decision, Outcome, Policy, decide
from megalatent.launch.node_results import NodeCheck
from megalatent.launch.progress import end_last_line, read_metrics
from megalatent.launch.requeue import start_again
from megalatent.launch.runfolder import Attempt, Owner, RunFolder, RunLock, State, now
from megalatent.launch.slurm import Slurm, SlurmError
from megalatent.launch.srun import Ended, Launch, Ranks, Signals, free_port, why_ending

__all__ = ["main"]


def main(argv: Sequence[str] | None = None) -> int:
    """Supervise one start of the job; the exit code of the batch script."""
    options = _parser().parse_args(argv)
    if isinstance(sys.stdout, io.TextIOWrapper):  # whatever the site's locale can write
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        return _Supervisor(options).run()
    except UserError as error:
        print(f"megalatent: error: {error}", flush=True)
        return 2
    except OSError as error:
        print(f"megalatent: error: {describe_os_error(error) or error}", flush=True)
        return 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="megalatent.launch.supervise",
        description="Checks the nodes, starts the ranks, watches them, decides what follows.",
    )
    add = parser.add_argument
    add("--run", required=True, help="run folder")
    add("--srun", required=True, action="append", help="srun, and its options one by one")
    add("--python", default="python", help="interpreter of the ranks, for the node check")
    add(
        "--resume", default=[], action="append", help="added to PROGRAM where there is a checkpoint"
    )
    add("--target-iterations", type=int, help="the run is finished at this iteration")
    add("--target-samples", type=int, help="the run is finished after so many samples")
    add("--max-requeues", type=int, default=10, help="failures in a row without a new checkpoint")
    add("--back-off-seconds", type=float, default=30.0, help="wait after a failure, then doubled")
    add(
        "--hang-minutes", type=float, default=30.0, help="no progress for so long: a hang; 0: never"
    )
    add("--startup-minutes", type=float, default=60.0, help="the same before the first iteration")
    add("--node-check", choices=("off", "basic", "full"), default="full")
    add("--node-check-seconds", type=float, default=300.0, help="a node silent for longer is bad")
    add("--gpus-per-node", type=int, default=0, help="GPUs that the node check must find")
    add("--min-bandwidth", type=float, default=0.0, help="GB/s that the all-reduce must reach")
    add("--chain", type=int, default=1, help="jobs in the chain that this one belongs to")
    add("--poll-seconds", type=float, default=1.0, help=argparse.SUPPRESS)
    add("program", nargs="+", help="what every rank runs, after --")
    return parser


class _Supervisor:
    def __init__(self, options: argparse.Namespace) -> None:
        self._options = options
        self._folder = RunFolder(options.run)
        self._slurm = Slurm()
        self._signals = Signals()
        self._ranks: Ranks | None = None
        self._job = _job_id(os.environ)
        if not self._job:
            raise UserError(
                "SLURM_JOB_ID is not set: start this from a job script, as slurm/pretrain.sbatch"
            )
        self._restart = int(os.environ.get("SLURM_RESTART_COUNT") or 0)
        self._nodes = os.environ.get("SLURM_JOB_NODELIST", "")

    def run(self) -> int:
        self._folder.logs.mkdir(parents=True, exist_ok=True)
        lock = RunLock(self._folder, self._slurm.is_active)
        lock.acquire(Owner.this_process(self._job))
        try:
            self._signals.install()
            return self._run_alone()
        finally:
            lock.release()

    def _run_alone(self) -> int:
        state = self._folder.read_state()
        mark = self._folder.finished()
        if mark is not None:
            self._say(f"the run finished at iteration {mark.get('iteration')}: nothing to do")
            return 0
        if state.status == "failed":
            self._say(f"the run failed and is not started again: {state.reason}")
            self._say("to go on all the same, submit it again")
            return 1
        attempt = self._begin(state)
        if self._lost_too_often(state, attempt.from_iteration):
            return 1
        state.status, state.reason = "running", ""
        state.attempts.append(attempt)
        self._folder.write_state(state)

        try:
            code = self._conclude(self._attempt(attempt, state), state)
        except SlurmError as error:  # no answer to what cannot be done without
            return self._fail(state, str(error))
        except OSError as error:
            return self._fail(state, describe_os_error(error) or str(error))
        if self._ranks is not None:
            self._ranks.drain()
            self._note_last_save(state)
        return code

    def _fail(self, state: State, reason: str) -> int:
        attempt = state.attempts[-1]
        if attempt.ended is None:
            attempt.ended, attempt.outcome, attempt.reason = now(), "failed", reason
        state.status, state.reason = "failed", reason
        self._say(f"failed: {reason}")
        self._folder.write_state(state)
        return 1

    def _attempt(self, attempt: Attempt, state: State) -> Ended:
        """Check the nodes, run the ranks, and look for a bad node where they failed."""
        check = self._node_check(attempt)
        mode = self._options.node_check
        if mode != "off":
            bad = check.run("basic")
            if not bad and mode == "full":
                bad = check.run("all-reduce")
            interrupted = self._interrupted()
            if interrupted is not None:
                return interrupted
            if bad:
                self._leave_out(bad, check, state)
                cause = Cause.NO_GOOD_NODE if check.all_bad(bad) else Cause.BAD_NODES
                return Ended(cause, check.summary(bad), returncode=1)
        self._ranks = Ranks(
            self._launch(attempt), self._folder, self._slurm, self._signals, self._say
        )
        self._ranks.start()
        ended = self._ranks.watch()
        if mode != "off" and _is_failure(ended):
            bad = check.run("basic", name="check-after")
            ended = self._interrupted() or ended
            self._leave_out(bad, check, state)
        return ended

    def _interrupted(self) -> Ended | None:
        """What Slurm said meanwhile that makes everything else void."""
        if self._signals.ending:
            return Ended(*why_ending(self._slurm, self._job), returncode=1)
        return None

    def _leave_out(self, bad: dict[str, str], check: NodeCheck, state: State) -> None:
        if not bad or check.all_bad(bad):
            return
        left = self._slurm.nodes_left(self._job, [*state.excluded, *bad])
        if left is not None and left < len(check.hosts):
            # the job would wait for ever
            self._say(f"not left out, because {left} others are too few: {check.summary(bad)}")
            return
        state.excluded |= bad
        self._say(f"left out from now on: {check.summary(bad)}")

    # --- before the ranks start ---

    def _begin(self, state: State) -> Attempt:
        newest, done = checkpoints.repair(self._folder.path)
        start = newest.iteration if newest else 0
        attempt = Attempt(self._job, self._restart, self._nodes, now(), from_iteration=start)
        if self._job not in state.jobs:
            state.jobs.append(self._job)
        end_last_line(self._folder.metrics)
        self._say(f"attempt {attempt.name} on {self._nodes}, from iteration {start}")
        for line in done:
            self._say(line)
        self._folder.attempt_logs(attempt.name).mkdir(parents=True, exist_ok=True)
        return attempt

    def _lost_too_often(self, state: State, start: int) -> bool:
        """An attempt without an end was cut off with its node; too many in a row are a failure."""
        last = state.attempts[-1] if state.attempts else None
        if last is None or last.ended is not None:
            return False
        reason = f"attempt {last.name} was cut off: a node of {last.nodes} went down"
        last.ended, last.to_iteration, last.outcome, last.reason = now(), start, "lost", reason
        self._say(reason)
        outcome = Outcome(Cause.PREEMPTED, reason, 1, last.from_iteration, start)
        decision = decide(outcome, state, self._policy())
        self._count(state, decision, start)
        if decision.action is not Action.FAIL:
            return False
        state.status, state.reason = "failed", decision.reason
        self._folder.write_state(state)
        self._say(decision.reason)
        return True

    def _node_check(self, attempt: Attempt) -> NodeCheck:
        options = self._options
        hosts = self._slurm.host_names(self._nodes)
        return NodeCheck(
            srun=options.srun,
            python=options.python,
            arguments=[
                f"--gpus={options.gpus_per_node}",
                f"--min-bandwidth={options.min_bandwidth}",
            ],
            folder=self._folder.attempt_logs(attempt.name),
            hosts=hosts,
            # one port for the ranks of a node, one for all
            port=free_port(self._job, ports=2),
            seconds=options.node_check_seconds,
            say=self._say,
        )

    def _launch(self, attempt: Attempt) -> Launch:
        options = self._options
        return Launch(
            job=self._job,
            srun=options.srun,
            program=options.program,
            resume=options.resume,
            start=attempt.from_iteration,
            logs=self._folder.attempt_logs(attempt.name),
            first_node=self._slurm.host_names(self._nodes)[0],
            hang_seconds=60 * options.hang_minutes,
            startup_seconds=60 * options.startup_minutes,
            poll_seconds=options.poll_seconds,
        )

    # --- after they have ended ---

    def _conclude(self, ended: Ended, state: State) -> int:
        """Write down how the attempt ended, then do what follows; the exit code."""
        if self._ranks is not None and not self._ranks.running:
            # a half-written checkpoint may be what fills the disk; of bad weights none may stay
            bad = ended.bad_loss.since if ended.bad_loss else None
            _, done = checkpoints.repair(self._folder.path, before=bad)
            for line in done:
                self._say(line)
        attempt = state.attempts[-1]
        saved = self._last_saved()
        outcome = Outcome(
            cause=ended.cause,
            reason=ended.reason,
            returncode=ended.returncode,
            from_iteration=attempt.from_iteration,
            to_iteration=saved,
            reached_target=self._reached_target(ended, saved),
        )
        decision = decide(outcome, state, self._policy())
        attempt.ended, attempt.to_iteration = now(), saved
        attempt.outcome, attempt.reason = ended.cause.value, ended.reason
        self._count(state, decision, saved)
        state.reason = decision.reason
        state.status = _STATUS[decision.action]
        if decision.action is Action.NOTHING:
            state.status = "cancelled" if ended.cause is Cause.CANCELLED else "waiting"
        return self._carry_out(decision, state, saved)

    def _carry_out(self, decision: Decision, state: State, saved: int) -> int:
        self._say(f"{state.status}: {decision.reason}; last complete checkpoint: {saved or 'none'}")
        if decision.action is Action.FINISH:
            self._folder.mark_finished(saved)
        self._folder.write_state(state)
        if decision.action is not Action.REQUEUE:
            return 1 if decision.action is Action.FAIL else 0
        try:
            job = start_again(
                self._slurm,
                self._job,
                self._folder,
                sorted(state.excluded),
                decision.delay_seconds,
                self._say,
            )
        except SlurmError as error:
            return self._fail(state, f"{decision.reason}; not started again: {error}")
        if job not in state.jobs:
            state.jobs.append(job)
            self._folder.write_state(state)
        return 0

    def _note_last_save(self, state: State) -> None:
        """Ranks that Slurm ended may have saved after the attempt was written down."""
        saved, target = self._last_saved(), self._options.target_iterations
        if state.attempts[-1].to_iteration == saved or state.status == "failed":
            return
        state.attempts[-1].to_iteration = saved
        if target is not None and saved >= target:
            self._say(f"finished all the same: the last checkpoint is of iteration {saved}")
            self._folder.mark_finished(saved)
            state.status = "finished"
        self._folder.write_state(state)

    def _last_saved(self) -> int:
        newest = checkpoints.last_complete(self._folder.path)
        return newest.iteration if newest else 0

    def _reached_target(self, ended: Ended, saved: int) -> bool | None:
        options = self._options
        if options.target_iterations is not None:
            return bool(max(saved, ended.iteration or 0) >= options.target_iterations)
        if options.target_samples is not None:
            samples = ended.samples
            if samples is None:
                records = read_metrics(self._folder.metrics)
                samples = records[-1].get("consumed_samples", 0) if records else 0
            return bool(samples >= options.target_samples)
        return None

    def _policy(self) -> Policy:
        chained = self._options.chain > 1
        return Policy(
            max_requeues=self._options.max_requeues,
            back_off_seconds=self._options.back_off_seconds,
            chained=chained,
            successor=self._successor() if chained else None,
        )

    def _successor(self) -> str | None:
        """The next job of the chain that still waits in the queue."""
        jobs = self._folder.read_submission().jobs
        later = jobs[jobs.index(self._job) + 1 :] if self._job in jobs else []
        for job in later:
            try:
                state = self._slurm.job_state(job)
            except SlurmError:  # no answer: it was there when the chain was submitted
                return job
            if state == "PENDING":
                return job
        return None

    def _count(self, state: State, decision: Decision, saved: int) -> None:
        if decision.failures > state.failures or saved > state.failures_at:
            state.failures_at = saved
        state.failures = decision.failures

    def _say(self, line: str) -> None:
        text = f"{now()} megalatent: {line}"
        # a full disk is no reason to leave the ranks alone
        with contextlib.suppress(OSError):
            print(text, flush=True)
        with (
            contextlib.suppress(OSError),
            self._folder.rank0_log.open("a", encoding="utf-8") as log,
        ):
            log.write(text + "\n")


def _job_id(environment: Mapping[str, str]) -> str:
    """This job as Slurm's commands must name it.

    One task of an array has the array's own number as SLURM_JOB_ID: under that name a command
    would reach its sisters too.
    """
    array = environment.get("SLURM_ARRAY_JOB_ID")
    if array:
        return f"{array}_{environment['SLURM_ARRAY_TASK_ID']}"
    return environment.get("SLURM_JOB_ID", "")


_STATUS = {
    Action.FINISH: "finished",
    Action.REQUEUE: "waiting",
    Action.HAND_OVER: "waiting",
    Action.STOP: "stopped",
    Action.FAIL: "failed",
    Action.NOTHING: "waiting",
}


def _is_failure(ended: Ended) -> bool:
    crashed = ended.cause is Cause.EXITED and ended.returncode not in (0, 2)
    return crashed or ended.cause is Cause.HANG


if __name__ == "__main__":
    raise SystemExit(main())
