"""Two agents of ``torchrun``, or two pairs of ranks, each with a folder of its own, are two nodes of two devices."""

import json
import os
import signal
import time
from collections import Counter
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import pytest
from support.command import TIMEOUT_S, processes, started
from support.jobs import ROOT, TINY, Job, run_job
from support.nodes import NODE_ALL_REDUCE_S, free_port, of_two_nodes
from support.pool import Pool
from support.slow_nodes import play_on_two_nodes

from pipetransformer.autodp.topology import Topology
from pipetransformer.autopipe.plan import Plan

DEVICES_PER_NODE = 2
SLOW_NODES = str(ROOT / "tests" / "support" / "slow_nodes.py")
SOON = ("freeze=schedule", "freeze.num_frozen=[1, 2]", "freeze.interval=0.1")  # so that caching pays twice
RUN = (*TINY, "model.options.depth=3", *SOON, "precision=float64", "epochs=4")
TWO_BY_TWO = ("parallel.num_stages=2", "parallel.num_replicas=2", "parallel.num_microbatches=2", "hydra.run.dir=run")
ENDLESS = (
    *TINY, "freeze=schedule", "freeze.num_frozen=[1]", "freeze.interval=0.001", "cache.memory_gib=0", "epochs=1000",
    "hydra.run.dir=endless",
)  # fmt: skip
SHORT = ("cache.memory_gib=0", "cache.disk_gib=4e-5")  # about two thirds of the features find room on a node


@dataclass(frozen=True)
class TwoNodes:
    """What two nodes left: their folders, how they ended, and processes that go on."""

    folders: tuple[Path, Path]
    codes: list[int]
    pids: list[int]

    @property
    def job(self) -> Job:
        return self.job_in("run")

    def job_in(self, name: str) -> Job:
        return Job(next(folder / name for folder in self.folders if (folder / name).exists()), error="")


def make_folders(parent: Path) -> tuple[Path, Path]:
    folders = parent / "a", parent / "b"
    for folder in folders:
        folder.mkdir()
    return folders


@pytest.fixture(scope="module")
def agents(tmp_path_factory: pytest.TempPathFactory) -> TwoNodes:
    """Two nodes that have trained one model, and then another one without end, until one of them was interrupted."""
    folders = make_folders(tmp_path_factory.mktemp("nodes"))
    words = ("-m", "torch.distributed.run", *of_two_nodes(free_port(), DEVICES_PER_NODE), SLOW_NODES)
    with ExitStack() as agents:
        both = []
        for folder in folders:
            run = (*RUN, *TWO_BY_TWO, *SHORT, f"cache.path={folder / 'features'}", "trace=true")
            both.append(agents.enter_context(started(folder, *words, *run, "then", *ENDLESS)))
        first = wait_for_a_transition([folder / "endless" for folder in folders])
        os.killpg(both[first][0].pid, signal.SIGINT)
        for process, _ in both:
            process.communicate(timeout=TIMEOUT_S)
        left = [pid for _, mark in both for pid in processes(mark)]
    return TwoNodes(folders, [process.returncode for process, _ in both], left)


DYING = f"""
import os, sys
from contextlib import nullcontext
from unittest import mock

sys.path.insert(0, {str(ROOT / "tests")!r})
from pipetransformer.command import main
from support.faults import Fault
from support.pool import BRIEF

for name, value in BRIEF.items():  # no plan has to be good
    mock.patch(name, value).start()
dies = os.environ["NODE"] == "b" and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
death = Fault("pipetransformer.runtime.elastic.ElasticRuntime.train_step", call=7)
with death.injected() if dies else nullcontext():
    main()
"""


@pytest.mark.thorough  # what ranks agree on: training/test_meeting.py; a restart on one node: test_torchrun.py
@pytest.mark.parametrize("shares_store", [True, False], ids=["a store of the agents", "a store of each start"])
def test_all_ranks_go_on_after_the_death_of_one_that_its_node_alone_counts(tmp_path: Path, shares_store: bool) -> None:
    folders, run = make_folders(tmp_path), (*TINY, "epochs=3", "checkpoint.every_steps=2", "resume=auto")
    (tmp_path / "dying.py").write_text(DYING)
    words = ("-m", "torch.distributed.run", *of_two_nodes(free_port(), 1), "--max-restarts", "1")
    options = *run, f"hydra.run.dir={tmp_path / 'run'}", "parallel.timeout_s=60"
    own = {} if shares_store else {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    with ExitStack() as agents:
        command = *words, str(tmp_path / "dying.py"), *options
        both = [agents.enter_context(started(each, *command, NODE=each.name, **own)) for each in folders]
        ended = [process.communicate(timeout=TIMEOUT_S) for process, _ in both]
    assert [process.returncode for process, _ in both] == [0, 0], [err for _, err in ended]
    job = Job(tmp_path / "run", error="")
    assert job.summary["status"] == "completed"
    assert [event["step"] for event in job.events("resume")] in ([2], [4], [6]), "no start was in vain"
    assert [event["step"] for event in job.events("step")] == list(range(1, 13))


AGENTS = "two agents"


# every run: the same on ranks of the pool; torchrun, test_torchrun.py; a signal at one rank, training/test_stopping.py
@pytest.fixture(scope="module", params=["four ranks", pytest.param(AGENTS, marks=pytest.mark.thorough)])
def nodes(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> TwoNodes:
    """Two nodes that have trained one model."""
    if request.param == AGENTS:
        return request.getfixturevalue("agents")
    folders = make_folders(tmp_path_factory.mktemp("ranks"))
    options = (*RUN, *TWO_BY_TWO, *SHORT, f"cache.path={folders[0] / 'features'}", "trace=true")
    (folders[0] / "run").mkdir()
    errors = request.getfixturevalue("pool").run(4, play_on_two_nodes, options, folders)
    assert errors == [""] * 4
    return TwoNodes(folders, [], [])


def wait_for_a_transition(runs: list[Path]) -> int:
    """Which node has the run folder, once frozen features are stored."""
    end = time.monotonic() + TIMEOUT_S
    while time.monotonic() < end:
        for node, log in enumerate(run / "metrics.jsonl" for run in runs):
            if log.exists() and '"transition"' in log.read_text():
                return node
        time.sleep(0.05)
    raise AssertionError("no transition")


def test_two_nodes_train_one_model(nodes: TwoNodes) -> None:
    assert nodes.job.summary["status"] == "completed"
    assert nodes.job.events("start")[0]["world_size"] == 4


def test_the_losses_are_those_of_one_process(nodes: TwoNodes, pool: Pool, tmp_path: Path) -> None:
    alone = run_job(pool, 1, tmp_path / "alone", *RUN, "cache=off")
    assert len(nodes.job.losses) == 16
    assert nodes.job.losses == pytest.approx(alone.losses, rel=0, abs=1e-10)
    assert nodes.job.summary["metric"] == alone.summary["metric"]
    frozen = [[plan["num_frozen"] for plan in job.summary["plans"]] for job in (nodes.job, alone)]
    assert frozen == [[0, 1, 2]] * 2


def test_each_node_fills_a_cache_of_its_own(nodes: TwoNodes) -> None:
    assert [plan["cache_level"] for plan in nodes.job.summary["plans"]] == [0, 1, 2]
    stores = [sorted((folder / "features").glob("*/node*/*/*.features")) for folder in nodes.folders]
    assert [sorted(path.name for path in own) for own in stores] == [["test.features", "train.features"]] * 2
    assert {path.parents[1].name for own in stores for path in own} == {"node0", "node1"}
    assert {len({path.parents[1].name for path in own}) for own in stores} == {1}
    budget = 4e-5 * 2**30
    assert all(budget / 2 < sum(path.stat().st_size for path in own) <= budget for own in stores)


def test_samples_stay_with_the_node_that_has_room_for_them(nodes: TwoNodes) -> None:
    """A node keeps two thirds of the samples; as they come, a third of a share would have to be computed."""
    (first, _) = nodes.job.events("cache_fill")
    kept = first["num_samples"] / 2 / (64 + 40)
    assert 0.5 < kept < 0.75
    assert kept + 0.1 < nodes.job.summary["cache"]["hit_rate"] < 1


@pytest.mark.thorough  # what a run leaves on one node: test_run_folder.py
def test_nothing_stays_on_the_nodes_but_the_run_folder_and_the_features(agents: TwoNodes) -> None:
    left = sorted(path.name for folder in agents.folders for path in folder.iterdir())
    assert left == ["endless", "features", "features", "run"], (
        "the node of rank 0 has the run folders, and the other none"
    )


def test_no_pipeline_crosses_a_node(nodes: TwoNodes) -> None:
    for values in nodes.job.summary["plans"]:
        layout = {name: values[name] for name in ("num_replicas", "num_microbatches")}
        layout["rank_order"] = "replica-first" if values["replicas_adjacent"] else "pipeline-first"
        stages = tuple((first, last) for first, last in values["stages"])
        topology = Topology(Plan(values["num_frozen"], values["cache_level"], stages, **layout), rank=0)
        pipelines = [topology.ranks_along("pp", {"dp": replica}) for replica in range(2)]
        assert [Counter(rank // DEVICES_PER_NODE for rank in ranks) for ranks in pipelines] == [{0: 2}, {1: 2}]


def test_the_planner_counts_on_averaging_gradients_between_the_nodes(nodes: TwoNodes) -> None:
    first = nodes.job.summary["plans"][0]  # the others read from a cache that may miss any share of a sample's second
    assert first["predicted_step_s"] % 1 == pytest.approx(NODE_ALL_REDUCE_S, abs=0.05)


def test_a_trace_shows_the_ranks_of_both_nodes_from_the_start_of_the_step(nodes: TwoNodes) -> None:
    files = [nodes.job.folder / name for name in nodes.job.summary["traces"]]
    assert len(files) == len(nodes.job.summary["plans"])
    for file in files:
        rows = json.loads(file.read_text())["traceEvents"]
        starts = [(row["pid"], row["ts"]) for row in rows if row["ph"] == "X"]
        assert {rank for rank, _ in starts} == {0, 1, 2, 3}
        assert all(start >= 0 for _, start in starts)


@pytest.mark.thorough  # one of two ranks is told to stop: tests/training/test_stopping.py
def test_an_interrupt_on_one_node_ends_both(agents: TwoNodes) -> None:
    assert all(agents.codes), "neither says that it came to its end"
    assert not agents.pids
    assert agents.job_in("endless").summary["status"] == "interrupted"
