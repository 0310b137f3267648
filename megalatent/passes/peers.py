"""Control connections between the ranks of a run: who has ended, and why.

When a rank dies, the ranks around it lose their connections and end too, and theirs after them:
whoever reads the messages sees many consequences and no cause. So every rank keeps a few plain TCP
connections that carry nothing but notes. A process that ends without a word closes them at once
(whatever killed it), and each note is passed on to all ranks before anybody ends.

A rank is connected to the ranks at distance 1, 2, 4, … of its own number, both ways round. The
number of connections grows with the logarithm of the number of ranks, a note reaches every rank in
as many hops, and the ranks that are left stay connected.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import select
import socket
import sys
import threading
import time
import weakref
from dataclasses import asdict, dataclass, field
from typing import Any

import torch.distributed as dist

__all__ = ["Note", "Peers", "neighbours"]

# Seconds for one attempt to connect, and for all neighbours to be there.
_CONNECT, _GATHER = 5.0, 30.0


@dataclass(frozen=True)
class Note:
    """What is passed on to all ranks.

    Attributes:
        kind: ``gone`` (ended without a word), ``left`` (has finished), or what `Peers.tell` was
            given.
        rank: the global rank that the note is about.
        text, facts: of the note.
        key: notes with the same key are one note.
    """

    kind: str
    rank: int
    text: str = ""
    facts: dict[str, Any] = field(default_factory=dict)
    key: str = ""


def neighbours(rank: int, world: int) -> list[int]:
    """The ranks that ``rank`` is connected to."""
    steps = [1 << i for i in range(world.bit_length()) if 1 << i < world]
    return sorted({(rank + way * step) % world for step in steps for way in (1, -1)} - {rank})


class _Line:
    """One connection."""

    def __init__(self, rank: int, sock: socket.socket) -> None:
        sock.setblocking(False)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.rank, self.sock = rank, sock
        self.unread, self.unsent = b"", b""

    def send(self, data: bytes = b"") -> None:
        self.unsent += data
        # A broken connection shows when it is read.
        with contextlib.suppress(OSError):
            while self.unsent:
                self.unsent = self.unsent[self.sock.send(self.unsent) :]

    def receive(self) -> list[bytes] | None:
        """Whole lines that have come; None at the end of the connection."""
        ended = False
        try:
            while data := self.sock.recv(65536):
                self.unread += data
            ended = True
        except BlockingIOError:
            pass
        except OSError:
            ended = True
        *lines, self.unread = self.unread.split(b"\n")
        return None if ended and not lines else lines


class Peers:
    """This rank's control connections. `tell` may be called from any thread, `poll` from one.

    Args:
        rank: this rank.
        names: how messages name each rank of the run.
        sockets: an open connection for each neighbour.
    """

    def __init__(self, rank: int, names: list[str], sockets: dict[int, socket.socket]) -> None:
        self.rank, self.names = rank, names
        self._lines = {peer: _Line(peer, sock) for peer, sock in sockets.items()}
        self._lock = threading.RLock()
        self._seen: set[str] = set()
        self._left: set[int] = set()
        self._told = 0
        # A data loader that this process forks must not keep its connections open.
        mine = weakref.ref(self)
        os.register_at_fork(after_in_child=lambda: _abandon(mine()))

    @staticmethod
    def connect(name: str) -> Peers | None:
        """Connect to the neighbours; None where there is one rank only. All ranks together.

        Args:
            name: how messages name this rank.
        """
        if not dist.is_initialized() or dist.get_world_size() == 1:
            return None
        rank, world = dist.get_rank(), dist.get_world_size()
        with _listen() as server:
            mine = {
                "name": name,
                "host": socket.gethostname(),
                "addresses": _addresses(),
                "port": server.getsockname()[1],
                "token": secrets.token_hex(16),
            }
            every: list[Any] = [None] * world
            dist.all_gather_object(every, mine)
            hello = f"{every[0]['token']} {rank}\n".encode()
            around = neighbours(rank, world)
            sockets = {}
            for peer in (peer for peer in around if peer > rank):
                sock = _call(every[peer], mine["host"])
                if sock is not None:
                    sock.sendall(hello)
                    sockets[peer] = sock
            lower = {peer for peer in around if peer < rank}
            sockets |= _answer(server, every[0]["token"], lower)
        missing = [peer for peer in around if peer not in sockets]
        if missing:
            print(
                f"megalatent: {name} has no control connection to rank "
                f"{', '.join(map(str, missing))}: if a rank fails, the reason may not get through; "
                "open the ports that the nodes use among themselves",
                file=sys.stderr,
                flush=True,
            )
        several = len({one["host"] for one in every}) > 1
        names = [f"{one['name']} on {one['host']}" if several else one["name"] for one in every]
        return Peers(rank, names, sockets)

    def tell(self, kind: str, text: str = "", **facts: Any) -> None:
        """Pass a note about this rank on to all ranks. ``facts`` are plain values."""
        with self._lock:
            self._told += 1
            key = f"{self.rank}.{self._told}"
            self._pass_on(Note(kind, self.rank, text, facts, key))

    def poll(self, seconds: float) -> list[Note]:
        """Wait at most so long for notes; those that are new to this rank."""
        with self._lock:
            lines = list(self._lines.values())
        if not lines:
            time.sleep(seconds)
            return []
        poller = select.poll()
        for line in lines:
            if line.sock.fileno() >= 0:  # else closed by another thread
                poller.register(line.sock, select.POLLIN)
        with self._lock:
            for line in lines:
                line.send()
        ready = {fd for fd, _ in poller.poll(1000 * seconds)}
        return [
            note for line in lines if line.sock.fileno() in ready for note in self._received(line)
        ]

    def _received(self, line: _Line) -> list[Note]:
        texts = line.receive()
        if texts is None:
            with self._lock:
                if self._lines.pop(line.rank, None) is None:
                    return []  # closed by this process
                line.sock.close()
                if line.rank in self._left:
                    return []
                notes = [Note("gone", line.rank, key=f"gone {line.rank}")]
        else:
            notes = [Note(**json.loads(text)) for text in texts]
        return [note for note in notes if self._pass_on(note)]

    def _pass_on(self, note: Note) -> bool:
        """Send a note to all neighbours, unless that has been done."""
        with self._lock:
            if note.key in self._seen:
                return False
            self._seen.add(note.key)
            if note.kind == "left":
                self._left.add(note.rank)
            data = json.dumps(asdict(note)).encode() + b"\n"
            for line in self._lines.values():
                line.send(data)
            return True

    def close(self) -> None:
        """Tell the others that this rank has finished, and disconnect."""
        with self._lock:
            self.tell("left")
            self._abandon()

    def _abandon(self) -> None:
        for line in self._lines.values():
            # With something unread, closing would drop what has not been sent yet.
            line.receive()
            line.sock.close()
        self._lines = {}


def _abandon(peers: Peers | None) -> None:
    if peers is not None:
        # Another thread of the parent may have held the lock at the fork.
        peers._lock = threading.RLock()
        peers._abandon()


def _listen() -> socket.socket:
    if socket.has_dualstack_ipv6():
        return socket.create_server(("", 0), family=socket.AF_INET6, dualstack_ipv6=True)
    return socket.create_server(("", 0))


def _addresses() -> list[str]:
    """Where other nodes may find this one, best guess first."""
    found = []
    master = os.environ.get("MASTER_ADDR")
    if master:
        # The address from which this node reaches the first rank's; nothing is sent.
        with contextlib.suppress(OSError):
            family, _, _, _, target = socket.getaddrinfo(master, 9, type=socket.SOCK_DGRAM)[0]
            with socket.socket(family, socket.SOCK_DGRAM) as probe:
                probe.connect(target)
                found.append(probe.getsockname()[0])
    return [*found, socket.gethostname(), socket.getfqdn()]


def _call(peer: dict[str, Any], host: str) -> socket.socket | None:
    addresses = ["localhost"] if peer["host"] == host else peer["addresses"]
    for address in addresses:
        with contextlib.suppress(OSError):
            return socket.create_connection((address, peer["port"]), timeout=_CONNECT)
    return None


def _answer(server: socket.socket, token: str, wanted: set[int]) -> dict[int, socket.socket]:
    """Accept a connection from each wanted rank; strangers are turned away."""
    sockets: dict[int, socket.socket] = {}
    deadline = time.monotonic() + _GATHER
    while len(sockets) < len(wanted) and (left := deadline - time.monotonic()) > 0:
        server.settimeout(left)
        try:
            sock, _ = server.accept()
        except OSError:
            break
        sock.settimeout(_CONNECT)
        rank = _greeting(sock, token)
        if rank in wanted and rank not in sockets:
            sockets[rank] = sock
        else:
            sock.close()
    return sockets


def _greeting(sock: socket.socket, token: str) -> int | None:
    """The rank that says hello with the run's token."""
    text = b""
    with contextlib.suppress(OSError, ValueError):
        # Byte by byte: what follows the greeting is for the connection's reader.
        while not text.endswith(b"\n") and len(text) < 100:
            byte = sock.recv(1)
            if not byte:
                return None
            text += byte
        given, rank = text.decode().split()
        if secrets.compare_digest(given, token):
            return int(rank)
    return None
