"""How many ranks lie together."""

import contextlib
import os
import sys
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from support.links import node_size
from support.meshes import policies, scheduled_as_at_first, threads
from support.nodes import free_port, sums_in_shared_worlds, sums_of_worlds
from support.pool import Pool

from pipetransformer.config.sections import Parallel
from pipetransformer.errors import UserError
from pipetransformer.training import meeting, world
from pipetransformer.training.world import limit_threads, open_world


@pytest.mark.parametrize(("local_world_sizes", "expected"), [([2, 2], 2), ([1, 1, 1], 1), ([4, 4, 4, 4], 4)])
def test_it_is_what_the_launcher_started_on_a_node(pool: Pool, local_world_sizes: list[int], expected: int) -> None:
    assert set(pool.run(len(local_world_sizes), node_size, local_world_sizes)) == {expected}


def test_nodes_that_differ_count_as_groups_that_fit_each(pool: Pool) -> None:
    assert set(pool.run(6, node_size, [4, 4, 4, 4, 2, 2])) == {2}, "ranks 4 and 5 are a node of their own"


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({}, "lo"),
        ({"GLOO_SOCKET_IFNAME": "lo:0"}, "lo:0"),
        ({"LOCAL_RANK": "0", "GROUP_RANK": "0", "LOCAL_WORLD_SIZE": "1", "WORLD_SIZE": "2"}, None),
    ],
    ids=["one node", "the user's choice", "two nodes"],
)
def test_a_world_on_one_node_keeps_to_loopback(
    variables: dict[str, str], expected: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "LOCAL_RANK", "GROUP_RANK", "LOCAL_WORLD_SIZE", "WORLD_SIZE")
    for name in names:
        monkeypatch.setenv(name, "")  # restored at the end, whatever the world sets
        monkeypatch.delenv(name)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with contextlib.suppress(RuntimeError), open_world(Parallel(device="cpu", world_size=1)):
        pass  # gloo may not know the user's interface
    assert os.environ.get("GLOO_SOCKET_IFNAME") == expected


def test_a_script_may_open_one_world_after_the_other(pool: Pool) -> None:
    """Rank 0 holds their store, as where no torchrun does; rank 1 may come while rank 0 still leaves the first."""
    assert pool.run(2, sums_of_worlds, free_port(), 3) == [[4.0] * 3] * 2


@pytest.mark.parametrize(
    ("config", "device_type", "world_size", "wanted"),
    [
        ("cuda:nccl", "cpu", 2, "gloo"),  # which has nothing for it
        ("cpu:gloo,cuda:gloo", "cuda", 2, "nccl"),  # stages send nothing of a GPU by gloo
        ("cpu:gloo,cuda:nccl", "cuda", 2, None),
        ("cpu:gloo", "cpu", 2, None),
        ("cpu:gloo,cuda:gloo", "cuda", 1, None),  # one rank sends nothing
    ],
)
def test_a_world_that_does_not_exchange_what_the_device_has_is_refused(
    config: str, device_type: str, world_size: int, wanted: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dist, "get_backend_config", lambda _=None: config)
    monkeypatch.setattr(dist, "get_world_size", lambda: world_size)
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(world, "_own_device", lambda _: torch.device(device_type))
    told = pytest.raises(UserError, match=f'"{wanted}"') if wanted else contextlib.nullcontext()
    with told, open_world(Parallel()) as device:
        assert device.type == device_type


def test_a_world_stays_until_the_last_one_that_uses_it_has_left(pool: Pool) -> None:
    """A cell of a notebook that runs twice opens a trainer before the last one is closed."""
    assert pool.run(1, sums_in_shared_worlds) == [([1.0, 1.0, 1.0], False)]


def test_worlds_of_a_script_share_a_store_and_no_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    joined = [(dist.HashStore(), 0, 1)]
    monkeypatch.setattr(meeting, "_joined", {})
    monkeypatch.setattr(meeting, "rendezvous", lambda *_, **__: iter([joined.pop()]))
    first, second = (meeting.meet(timedelta(seconds=60))[0] for _ in range(2))
    first.set("address", "of a group that is closed")
    assert first.check(["address"])
    assert not second.check(["address"])
    assert not joined, "joined once"


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has SCHED_BATCH")
def test_the_threads_of_a_world_take_no_core_from_others() -> None:
    before = threads()
    with scheduled_as_at_first(), open_world(Parallel(device="cpu", world_size=1)):
        assert policies(threads() - before) == {os.SCHED_BATCH}
        assert os.sched_getscheduler(0) == os.SCHED_OTHER


@pytest.mark.parametrize(("variable", "expected"), [(None, [4]), ("1", [1]), ("3,2", [3])])
def test_a_rank_takes_its_share_of_the_cores_unless_told_otherwise(
    variable: str | None, expected: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    taken: list[int] = []
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))  # of 64, which other jobs have
    monkeypatch.setattr(os, "cpu_count", lambda: 64)
    monkeypatch.setattr(torch, "set_num_threads", taken.append)
    for name, value in {"GROUP_RANK": "0", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("OMP_NUM_THREADS", variable or "")
    if variable is None:
        monkeypatch.delenv("OMP_NUM_THREADS")
    limit_threads()
    assert taken == expected
