"""What `torch.cuda` means on a machine without CUDA."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from megalatent import platform
from megalatent.platform.device import cuda_type_names
from tests.distributed.harness import Layout, init, run_ranks

platform.install()
pytestmark = pytest.mark.skipif(not platform.on_cpu(), reason="CUDA is present")


def test_cuda_tensors_land_on_the_cpu() -> None:
    made = [
        torch.zeros(2, device="cuda"),
        torch.tensor([1.0], device=torch.device("cuda", 0)),
        torch.zeros(2).to("cuda"),
        torch.zeros(2).to(device="cuda", dtype=torch.float64),
        torch.zeros(2).cuda(non_blocking=True),
        torch.empty(2, device=torch.cuda.current_device(), pin_memory=True),
    ]
    assert {x.device.type for x in made} == {"cpu"}
    assert made[3].dtype == torch.float64
    module = torch.nn.Linear(2, 2)
    assert module.cuda(0) is module


def test_meta_tensors_stay_meta() -> None:
    assert torch.zeros(2, device="meta").device.type == "meta"


def test_type_names_are_cuda_only_inside() -> None:
    x = torch.zeros(2, dtype=torch.bfloat16)
    with cuda_type_names():
        assert x.type() == "torch.cuda.BFloat16Tensor"
        assert x.type(torch.float32).dtype == torch.float32
    assert x.type() == "torch.BFloat16Tensor"


def test_events_measure_time_and_streams_order_nothing() -> None:
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    with torch.cuda.stream(torch.cuda.Stream()):
        torch.cuda.current_stream().wait_stream(torch.cuda.Stream())
    end.record()
    assert end.query()
    assert start.elapsed_time(end) >= 0


def _dropout_against_host(rank: int) -> None:
    x = torch.ones(100)
    torch.manual_seed(5)
    plain = F.dropout(x)
    torch.manual_seed(5)
    torch.empty((), dtype=torch.int64).random_()
    assert not torch.equal(plain, F.dropout(x)), "nobody seeded the device: torch as it is"

    init(Layout())
    torch.cuda.manual_seed(5)
    first = F.dropout(x)
    torch.cuda.manual_seed(5)
    torch.empty((), dtype=torch.int64).random_()  # what a new DataLoader draws
    host = torch.get_rng_state()
    state = torch.cuda.get_rng_state()
    assert torch.equal(first, F.dropout(x))
    assert torch.equal(host, torch.get_rng_state())
    assert not torch.equal(first, F.dropout(x))
    torch.cuda.set_rng_state(state)
    assert torch.equal(first, F.dropout(x))
    assert 0 < first.count_nonzero() < 100


def test_dropout_and_the_host_do_not_disturb_each_other() -> None:
    """Host draws leave dropout as it is, and dropout leaves the host generator as it is."""
    run_ranks(1, _dropout_against_host)


def test_hooks_of_the_backward_see_the_device() -> None:
    seen = []
    x = torch.ones(2, requires_grad=True)
    x.register_hook(lambda grad: seen.append(torch.zeros(1, device="cuda").device.type))
    x.sum().backward()
    torch.autograd.backward([x.sum()], [torch.ones(())])
    torch.autograd.grad(x.sum(), x)
    assert seen == ["cpu"] * 3


def _recomputed(rank: int) -> None:
    from megatron.core import tensor_parallel

    init(Layout())
    kept: list[torch.Tensor] = []

    def layer(x: torch.Tensor) -> torch.Tensor:
        with tensor_parallel.get_cuda_rng_tracker().fork():
            inside = F.dropout(x)
        kept.append(F.dropout(inside))
        return kept[-1]

    x = torch.ones(100, requires_grad=True)
    tensor_parallel.checkpoint(layer, False, x).sum().backward()
    assert len(kept) == 2
    assert torch.equal(kept[0], kept[1])
    # With inputs 1, the output is the derivative.
    assert torch.equal(x.grad, kept[0])  # type: ignore[arg-type]


def test_recomputation_repeats_the_draws() -> None:
    run_ranks(1, _recomputed)


def _tracker_draws(rank: int) -> list[torch.Tensor]:
    from megatron.core.tensor_parallel import random

    init(Layout(tp=2))
    tracker = random.get_cuda_rng_tracker()
    host = torch.get_rng_state()
    device = torch.cuda.get_rng_state()
    with tracker.fork():
        inside = torch.randn(4)
    with tracker.fork():
        again = torch.nn.init.normal_(torch.empty(4))
    assert torch.equal(host, torch.get_rng_state())
    assert torch.equal(device, torch.cuda.get_rng_state())
    reference = torch.randn(8, generator=torch.Generator().manual_seed(1234 + 2718 + rank))
    return [inside, again, F.dropout(torch.ones(50)), reference]


def test_tracker_draws_are_its_own() -> None:
    """In `fork()` TP ranks differ and continue their own stream; outside they draw the same."""
    (a0, b0, c0, _), (a1, b1, c1, _) = run_ranks(2, _tracker_draws)
    assert not torch.equal(a0, a1)
    assert not torch.equal(a0, b0)
    assert not torch.equal(b0, b1)
    assert torch.equal(c0, c1)


def _freed_while_sent(rank: int) -> torch.Tensor | None:
    """What the schedules do to an output that has been sent: `out.data = …`."""
    from megatron.core.pipeline_parallel import p2p_communication

    common: dict[str, Any] = {"group": torch.distributed.group.WORLD}
    nothing = {"tensor_send_prev": None, "tensor_recv_next": None}
    neighbours = {"prev_pipeline_rank": 1 - rank, "next_pipeline_rank": 1 - rank}
    if rank == 0:
        # Large enough to be given back to the system when it is freed, and to fill the socket.
        sent: Any = torch.arange(4_000_000.0)
        received = None
        requests = p2p_communication._p2p_ops(
            tensor_send_next=sent, tensor_recv_prev=None, **common, **nothing, **neighbours
        )
        sent.data = torch.empty(1)
    else:
        time.sleep(0.3)
        received = torch.empty(4_000_000)
        requests = p2p_communication._p2p_ops(
            tensor_send_next=None, tensor_recv_prev=received, **common, **nothing, **neighbours
        )
    for request in requests.values():
        request.wait()
    return received


def test_a_sent_tensor_may_be_freed() -> None:
    _, received = run_ranks(2, _freed_while_sent)
    assert torch.equal(received, torch.arange(4_000_000.0))
