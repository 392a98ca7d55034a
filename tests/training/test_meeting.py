"""The ranks of one start find each other, whatever earlier starts have left in their store."""

from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch.distributed as dist
from support.nodes import free_port

from pipetransformer.errors import UserError
from pipetransformer.training import meeting

LONG, SHORT = timedelta(seconds=60), timedelta(seconds=0.2)


def starts(store: dist.Store, world_size: int) -> list[str]:
    """What the ranks of one start agree on."""
    with ThreadPoolExecutor(world_size) as ranks:
        return [*ranks.map(lambda rank: meeting.agree(store, rank, world_size, LONG), reversed(range(world_size)))]


@pytest.fixture(params=["in memory", "of an agent"])
def store(request: pytest.FixtureRequest) -> dist.Store:
    if request.param == "in memory":
        return dist.HashStore()
    return dist.TCPStore("127.0.0.1", free_port(), is_master=True, timeout=LONG, wait_for_workers=False)


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_all_ranks_of_a_start_agree_on_a_name_that_no_other_start_has(store: dist.Store, world_size: int) -> None:
    first, second = starts(store, world_size), starts(store, world_size)
    assert len({*first}) == len({*second}) == 1
    assert first != second


def test_names_that_dead_ranks_have_left_are_passed_over(store: dist.Store) -> None:
    for size in (4, 3):  # which never met
        for rank in range(1, size):
            store.set(f"hello/{rank}", f"dead {rank} of {size}")
    assert len({*starts(store, 3)}) == 1


@pytest.mark.parametrize(
    ("rank", "world_size", "missing"), [(0, 2, "rank 1"), (1, 2, "rank 0"), (0, 4, "3 ranks, the first is 1,")]
)
def test_ranks_that_do_not_come_are_named(
    rank: int, world_size: int, missing: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {"MASTER_ADDR": "first-node", "MASTER_PORT": "29400"}.items():
        monkeypatch.setenv(name, value)
    words = f"^{missing} did not come to the start within parallel.timeout_s=0.2; .* reaches first-node:29400, or raise"
    with pytest.raises(UserError, match=words):
        meeting.agree(dist.HashStore(), rank, world_size, SHORT)


def test_agents_that_count_restarts_each_by_itself_do_not_part_their_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """As after a death: the agent of that node counts it, and others start their ranks again and do not."""
    agents = dist.HashStore()
    monkeypatch.setattr(meeting, "_joined", {})
    found = []

    def join(rank: int, num_restarts: int) -> None:
        monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", str(num_restarts))
        own = dist.PrefixStore(f"/worker/attempt_{num_restarts}", agents)
        monkeypatch.setattr(meeting, "rendezvous", lambda *_, **__: iter([(own, rank, 2)]))
        monkeypatch.setenv("RANK", str(rank))

    monkeypatch.setattr(meeting, "agree", lambda *_: "start")  # one process stands for both
    monkeypatch.setattr(meeting, "_worlds", iter([0, 0]))
    for rank, num_restarts in ((0, 0), (1, 3)):
        join(rank, num_restarts)
        found.append(meeting.meet(LONG)[0])
    found[0].set("address", "of rank 0")
    assert found[1].get("address") == b"of rank 0"
