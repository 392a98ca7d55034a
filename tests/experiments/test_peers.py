"""All loops of the comparison are one mathematics, and each has its row."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.jobs import run_job
from support.peers import losses_by_own_means
from support.pool import Pool
from support.texts import text_run, write_encoder, write_table

from experiments.peers.agreement import PLAIN, losses
from experiments.peers.rank import PEERS

FREEZES = {"without freezing": [], "with freezing": [(3, 1), (6, 2)], "by lengths": []}
OPTIONS = (
    "precision=float64", "epochs=2", "batch_size=4", "optim.lr=0.01", "optim.warmup=0.2", "optim.weight_decay=0.1",
    "+model.options.hidden_dropout_prob=0", "+model.options.attention_probs_dropout_prob=0",
)  # fmt: skip
NUM_STEPS = 8
OURS = {
    "without freezing": ("freeze=none",),
    "with freezing": ("freeze=schedule", "freeze.num_frozen=[1,2]", "freeze.interval=0.375"),
    "by lengths": ("freeze=none",),
}
# a framework with a loop of its own, and a loop by hand; all by make matrix
ALL_WAYS = PEERS if "MATRIX" in os.environ else ("trainer", "accelerate")
ROWS = [(name, way) for name in PEERS for way in FREEZES if name in ALL_WAYS or way == "with freezing"]
INSTALLED = [name for name, peer in PEERS.items() if peer.is_installed]


@pytest.fixture(scope="module")
def workers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pool]:
    """Ranks of their own, for the libraries leave settings in the processes that they ran in."""
    own = Pool(tmp_path_factory.mktemp("stores"))
    yield own
    own.close()


@pytest.fixture(scope="module")
def uniform(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """A run on a small table, whose last batch is smaller and has unequal shares."""
    folder = tmp_path_factory.mktemp("data")
    for name, count in (("train.tsv", 15), ("dev.tsv", 7)):
        write_table(folder / name, [row % 2 for row in range(count)])
    run = text_run(write_encoder(folder / "encoder"), "sst2", folder)
    return [*(one for one in run if one != "batch_size=2"), *OPTIONS]


@pytest.fixture(scope="module", params=FREEZES)
def way(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def options(uniform: list[str], way: str) -> list[str]:
    return [*uniform, "batching=bucketed"] if way == "by lengths" else uniform


@pytest.fixture(scope="module")
def reference(workers: Pool, options: list[str], way: str) -> list[float]:
    """The losses of one process."""
    return workers.run(1, losses, [PLAIN], options, FREEZES[way])[0][PLAIN]


@pytest.mark.thinned
@pytest.mark.parametrize(("name", "way"), ROWS, indirect=["way"])
def test_the_losses_of_a_peer_on_two_ranks_are_those_of_one_process(
    name: str, workers: Pool, options: list[str], way: str, reference: list[float]
) -> None:
    if name not in INSTALLED:
        pytest.skip(f"pip install {PEERS[name].library}")
    assert len(reference) == NUM_STEPS
    found = workers.run(2, losses, [name], options, FREEZES[way])[0][name]
    assert found == pytest.approx(reference, rel=0, abs=1e-10)


@pytest.mark.thinned("with freezing", "by lengths")
def test_so_are_those_of_a_run(
    workers: Pool, options: list[str], way: str, reference: list[float], tmp_path: Path
) -> None:
    arrangement = ("data", "pipeline")[[*FREEZES].index(way) % 2]
    given = (*options, *OURS[way], f"parallel={arrangement}", "checkpoint=off", "cache=off")
    job = run_job(workers, 2, tmp_path / "run", *given, made_up_times=True)
    assert not job.error
    assert job.losses == pytest.approx(reference, rel=0, abs=1e-10)


@pytest.mark.parametrize("way", ["without freezing"], indirect=True)
def test_a_loop_whose_ranks_average_on_their_own_is_another_training(
    workers: Pool, options: list[str], way: str, reference: list[float]
) -> None:
    found = workers.run(2, losses_by_own_means, ["ddp"], options, FREEZES[way])[0]["ddp"]
    assert found[:3] == pytest.approx(reference[:3], rel=0, abs=1e-10), "equal shares, up to the smaller last batch"
    assert found[4:] != pytest.approx(reference[4:], rel=0, abs=1e-10)


def test_a_prefix_that_freezes_a_step_later_is_another_training(workers: Pool, uniform: list[str]) -> None:
    found, later = (workers.run(1, losses, [PLAIN], uniform, [(at, 1)])[0][PLAIN] for at in (3, 4))
    assert found[:4] == later[:4]
    assert found[4:] != pytest.approx(later[4:], rel=0, abs=1e-10)


@pytest.mark.parametrize("way", ["without freezing"], indirect=True)
def test_batches_by_lengths_are_another_training(workers: Pool, uniform: list[str], reference: list[float]) -> None:
    found = workers.run(1, losses, [PLAIN], [*uniform, "batching=bucketed"], [])[0][PLAIN]
    assert found != pytest.approx(reference, rel=0, abs=1e-10)
