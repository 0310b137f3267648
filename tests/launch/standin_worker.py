"""Trains nothing, but behaves like a rank of `megalatent train`, within milliseconds of starting.

    python standin_worker.py CONFIG [--set megatron.key=value …]

Every step needs all ranks (a sum over TCP), the loss depends on every sample seen so far and on
their order, checkpoints are written file by file in Megatron's order, SIGTERM means save and stop.

From the environment: STANDIN_STEP_SECONDS, STANDIN_SAVE_SECONDS, and STANDIN_FAULT, a list of
WHAT:RANK:ITERATION[:always] with WHAT one of kill, stop (signals to itself), raise, nan, hang,
pause (until SIGTERM or the file `go` in the run folder) and half (hang in the middle of a save).
Without `always` a fault happens once in the life of the run folder.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import signal
import socket
import struct
import sys
import time
from pathlib import Path

import yaml

RANK = int(os.environ["RANK"])
WORLD = int(os.environ["WORLD_SIZE"])
STEP_SECONDS = float(os.environ.get("STANDIN_STEP_SECONDS", "0.05"))
SAVE_SECONDS = float(os.environ.get("STANDIN_SAVE_SECONDS", "0.05"))
CONNECT_SECONDS = 600.0


def options() -> dict:
    given = yaml.safe_load(Path(sys.argv[1]).read_text())["megatron"]
    for flag, item in zip(sys.argv[2::2], sys.argv[3::2], strict=True):
        assert flag == "--set", sys.argv
        key, _, value = item.partition("=")
        given[key.removeprefix("megatron.")] = yaml.safe_load(value)
    return given


class Ring:
    """Sums a number over all ranks, through rank 0."""

    def __init__(self) -> None:
        # torchrun's agent listens on the port itself
        offset = 1 if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True" else 0
        address = (os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]) + offset)
        self.peers: list[socket.socket] = []
        if RANK == 0:
            server = socket.create_server(("", address[1]), backlog=WORLD)
            peers = [server.accept()[0] for _ in range(WORLD - 1)]
            # in the order of the ranks, so that sums round alike every time
            self.peers = sorted(peers, key=self._receive)
            return
        # The first rank may start much later, on a busy machine; who waits in vain is ended.
        deadline = time.monotonic() + CONNECT_SECONDS
        while time.monotonic() < deadline:
            try:
                self.peers = [socket.create_connection(address)]
                self.peers[0].sendall(struct.pack("d", RANK))
                return
            except OSError:
                time.sleep(0.05)
        raise ConnectionError(f"no master at {address}")

    def sum(self, value: float) -> float:
        if RANK == 0:
            total = value + sum(self._receive(peer) for peer in self.peers)
            for peer in self.peers:
                peer.sendall(struct.pack("d", total))
            return total
        self.peers[0].sendall(struct.pack("d", value))
        return self._receive(self.peers[0])

    @staticmethod
    def _receive(peer: socket.socket) -> float:
        data = b""
        while len(data) < 8:
            more = peer.recv(8 - len(data))
            if not more:
                raise ConnectionError("Connection closed by peer")
            data += more
        return struct.unpack("d", data)[0]


class Faults:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.items = [x.split(":") for x in os.environ.get("STANDIN_FAULT", "").split(",") if x]

    def due(self, iteration: int, saving: bool = False) -> str | None:
        for number, (what, rank, at, *always) in enumerate(self.items):
            if int(rank) != RANK or int(at) != iteration or (what == "half") is not saving:
                continue
            mark = self.folder / f"fault-{number}"
            if not always and mark.exists():
                continue
            mark.touch()
            return what
        return None


def number_of(sample: int) -> float:
    return int.from_bytes(hashlib.sha256(str(sample).encode()).digest()[:4], "big") / 2**32


def save(
    folder: Path, ring: Ring, faults: Faults, iteration: int, samples: int, weight: float
) -> None:
    target = folder / f"iter_{iteration:07d}"
    target.mkdir(exist_ok=True)
    if RANK == 0:
        (target / "common.pt").write_text(json.dumps({"iteration": iteration, "samples": samples}))
    shard = json.dumps({"weight": weight, "iteration": iteration})
    with (target / f"__{RANK}_0.distcp").open("w") as stream:
        stream.write(shard[:5])
        stream.flush()
        time.sleep(3600 if faults.due(iteration, saving=True) else SAVE_SECONDS)
        stream.write(shard[5:])
    ring.sum(0)
    if RANK == 0:
        (target / ".metadata").write_text("shards")
        (target / "metadata.json").write_text('{"sharded_backend": "torch_dist"}')
        (folder / "latest_checkpointed_iteration.txt").write_text(str(iteration))
    ring.sum(0)


def load(folder: Path | None) -> tuple[int, int, float]:
    tracker = folder / "latest_checkpointed_iteration.txt" if folder else None
    if folder is None or tracker is None or not tracker.exists():
        return 0, 0, 0.5
    source = folder / f"iter_{int(tracker.read_text()):07d}"
    common = json.loads((source / "common.pt").read_text())
    shard = json.loads((source / f"__{RANK}_0.distcp").read_text())
    return common["iteration"], common["samples"], shard["weight"]


def main() -> int:
    given = options()
    folder = Path(given["save"])
    folder.mkdir(parents=True, exist_ok=True)
    stopping = False

    def stop(number: int, frame: object) -> None:
        nonlocal stopping
        stopping = True

    signal.signal(signal.SIGTERM, stop)
    ring, faults = Ring(), Faults(folder)
    iteration, samples, weight = load(Path(given["load"]) if "load" in given else None)
    batch = given["global_batch_size"]
    while iteration < given["train_iters"]:
        time.sleep(STEP_SECONDS)
        mine = range(samples + RANK, samples + batch, WORLD)
        total = ring.sum(sum(number_of(sample) for sample in mine))
        iteration, samples = iteration + 1, samples + batch
        fault = faults.due(iteration)
        if fault == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        elif fault == "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        elif fault == "hang":
            time.sleep(3600)
        elif fault == "pause":
            while not stopping and not (folder / "go").exists():
                time.sleep(0.05)
        elif fault == "raise":
            raise RuntimeError(f"the machine is on fire at iteration {iteration}")
        elif fault == "nan":
            weight = math.nan
        # not linear, so that the order of the samples matters
        weight = math.sin(weight * 1.7 + total / batch)
        weight = ring.sum(weight) / WORLD
        if RANK == WORLD - 1:
            record = {
                "kind": "train",
                "iteration": iteration,
                "consumed_samples": samples,
                "loss_per_pass": {"1": weight, "2": weight * 0.9},
                "tokens_per_second": batch * given["seq_length"] / max(STEP_SECONDS, 1e-3),
                "first_sample": samples - batch,
            }
            with (folder / "metrics.jsonl").open("a") as stream:
                stream.write(json.dumps(record) + "\n")
        if RANK == 0:
            print(f"iteration {iteration} loss {weight:.9f}", flush=True)
        if ring.sum(float(stopping)) > 0:
            save(folder, ring, faults, iteration, samples, weight)
            return 0
        if iteration % given["save_interval"] == 0 or iteration == given["train_iters"]:
            save(folder, ring, faults, iteration, samples, weight)
    return 0


if __name__ == "__main__":
    sys.exit(main())
