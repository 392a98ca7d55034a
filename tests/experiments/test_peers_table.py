"""The comparison with peers: its arms, their commands and its table."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
from support.jobs import loaded

from experiments import arms
from experiments.measured import Took
from experiments.peers import __main__ as experiment
from experiments.peers.__main__ import EVERYTHING, HALF, OURS, PEER_ARMS, STATIC, PeerArm
from experiments.peers.rank import PEERS, Peer
from experiments.peers.tables import HEADER, TRAINER, Result, table, verdict
from experiments.peers.workloads import WORKLOADS, write_idx
from experiments.record import BEGIN, END
from pipetransformer.data.images.sources import read_idx
from pipetransformer.report.event_log import write_json

FREEZES = [(100, 2), (200, 4)]
LOG = [
    {"event": "phase", "time": "2026-01-01T00:00:01.000+00:00", "message": "reading data"},
    {"event": "phase", "time": "2026-01-01T00:00:04.000+00:00", "message": "measuring layers and links"},
    {"event": "start", "time": "2026-01-01T00:00:05.000+00:00"},
    {"event": "evaluate", "time": "2026-01-01T00:00:30.000+00:00"},
    {"event": "evaluate", "time": "2026-01-01T00:00:54.500+00:00"},
]


class Machine:
    """Stands for the machine: writes what a peer leaves behind, and what our runs do."""

    def __init__(self) -> None:
        self.commands: list[list[str]] = []

    def run(self, command: Sequence[str], file: Path, env: Any = None) -> Took:
        self.commands.append(list(command))
        file.parent.mkdir(parents=True, exist_ok=True)
        if "train.py" in command:
            plans = [{"num_frozen": frozen, "step": step} for step, frozen in ((0, 0), *FREEZES)]
            metric = {"name": "accuracy", "value": 0.8 if "epochs=1" in command else 0.9}
            summary = {"status": "completed", "metric": metric, "plans": plans}
            write_json(file.parent / "summary.json", summary)
            (file.parent / "config.yaml").write_text("seed: 1\n")
            (file.parent / "metrics.jsonl").write_text("\n".join(map(json.dumps, LOG)) + "\n")
        else:
            write_json(file.parent / "result.json", {"metrics": [{"f1": 0.1}, {"f1": 0.85}], "train_seconds": 40.0})
        took = Took(60.0, 100.0)
        write_json(file, vars(took))
        return took


@pytest.fixture
def machine() -> Any:
    made = Machine()
    with mock.patch.object(arms, "run_measured", made.run), mock.patch.object(experiment, "run_measured", made.run):
        yield made


def run(tmp_path: Path, seeds: str = "1", *more: str) -> None:
    (tmp_path / "README.md").write_text(f"{BEGIN}\n{END}\n")
    paths = ["model.name=minilm", "dataset.path=data"]
    experiment.main([str(tmp_path / "runs"), "sst2", *paths, "--seeds", seeds, "--into", str(tmp_path), *more])


def test_every_peer_runs_as_it_is_and_with_the_decisions_of_our_run(machine: Machine, tmp_path: Path) -> None:
    run(tmp_path)
    peers = [command for command in machine.commands if "train.py" not in command]
    given = [json.loads(command[command.index("--freezes") + 1]) for command in peers]
    installed = [peer for peer in PEERS.values() if peer.is_installed]
    assert given == [[], [[100, 2], [200, 4]]] * len(installed)
    full = [command for command in machine.commands if "epochs=1" not in command]
    assert len(full) == len(machine.commands) - 1
    assert all({"seed=1", "epochs=2", "model.name=minilm"} < set(command) for command in full)


def test_what_is_complete_is_not_repeated(machine: Machine, tmp_path: Path) -> None:
    run(tmp_path)
    num_arms = len(machine.commands)
    run(tmp_path, "1,2")
    assert len(machine.commands) == 2 * num_arms
    kept = json.loads((tmp_path / "results.json").read_text())["results"]["sst2"]
    assert len(kept) == 2 * num_arms
    ours = next(one for one in kept if one["arm"] == EVERYTHING)
    assert (ours["seconds"], ours["cpu_seconds"], ours["loop_seconds"]) == (60.0, 100.0, 50.5)


def test_a_brief_seed_runs_the_arms_that_a_claim_needs(machine: Machine, tmp_path: Path) -> None:
    run(tmp_path, "1", "--brief-seeds", "2,3")
    kept = json.loads((tmp_path / "results.json").read_text())["results"]["sst2"]
    assert [(one["arm"], one["seed"]) for one in kept if one["seed"] > 1] == [
        (arm, seed) for seed in (2, 3) for arm in (EVERYTHING, STATIC, HALF)
    ]
    assert len([one for one in kept if one["seed"] == 1]) > len(OURS)
    assert "Can carry a claim about accuracy: yes" in (tmp_path / "README.md").read_text()


def test_a_peer_that_is_not_installed_is_left_out_with_the_remedy(
    machine: Machine, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    missing = Peer("Lightning", PEERS["lightning"].train, "no_such_library")
    with mock.patch.dict(PEERS, lightning=missing):
        run(tmp_path)
    assert "Lightning is left out: pip install no_such_library" in capsys.readouterr().out
    assert "| Lightning" not in (tmp_path / "README.md").read_text()


@pytest.mark.parametrize("workload", WORKLOADS)
def test_the_options_of_every_arm_compose(workload: str) -> None:
    common = [*WORKLOADS[workload].options, *experiment.COMMON]
    for arm in OURS:
        assert isinstance(arm.options, tuple)
        assert loaded(*common, *arm.options).parallel.world_size == 2
    assert WORKLOADS[workload].epochs % 2 == 0, "a control trains for half of them"


def result(arm: str, seed: int, seconds: float, metric: float = 0.9, is_static: bool = True) -> Result:
    return Result(arm, seed, metric, seconds, 2 * seconds, seconds - 20, is_static)


def test_ratios_are_to_the_fastest_static_arm_and_to_the_trainer_of_the_same_seed() -> None:
    """The machine was ten times as slow during the second seed."""
    fast = [result(TRAINER, 1, 100.0), result(STATIC, 1, 80.0), result(EVERYTHING, 1, 40.0, is_static=False)]
    slow = [
        Result(one.arm, 2, one.metric, 10 * one.seconds, 10 * one.cpu_seconds, 10 * one.loop_seconds, one.is_static)
        for one in fast
    ]
    rows = [line.removesuffix(" |").split(" | ") for line in table([*fast, *slow]).splitlines()[2:5]]
    cells = {row[0].removeprefix("| "): dict(zip(HEADER, row, strict=True)) for row in rows}
    assert cells[EVERYTHING]["times best static"] == "2.00 · 2.00 · 3.00"
    assert cells[EVERYTHING]["times HF Trainer"] == "2.50 · 2.50 · 4.00"
    assert cells[STATIC]["times best static"] == "1.00 · 1.00 · 1.00"
    assert cells[TRAINER]["times best static"] == "0.80 · 0.80 · 0.75"


def test_a_seed_with_which_not_all_static_arms_ran_has_no_best_static_arm() -> None:
    whole = [result(TRAINER, 1, 100.0), result(STATIC, 1, 200.0), result(EVERYTHING, 1, 50.0, is_static=False)]
    brief = [result(STATIC, 2, 200.0), result(EVERYTHING, 2, 50.0, is_static=False)]
    row = next(line for line in table([*whole, *brief]).splitlines() if EVERYTHING in line)
    assert row.split(" | ")[HEADER.index("times best static")] == "2.00 · 2.00 · 2.67", "of seed 1, not 4.00 of seed 2"


@pytest.mark.parametrize(
    ("full", "half", "answer"),
    [
        ((0.90, 0.91, 0.90), (0.80, 0.80, 0.81), "yes; the full schedule gains +0.1000"),
        ((0.90, 0.91, 0.90), (0.90, 0.89, 0.92), "no; the full schedule gains +0.0000"),
        ((0.90, 0.91), (0.80, 0.80), "unknown; 2 of at least 3 seeds have run"),
    ],
)
def test_a_workload_carries_a_claim_where_half_the_schedule_is_worse(
    full: tuple[float, ...], half: tuple[float, ...], answer: str
) -> None:
    results = [result(STATIC, seed, 1.0, metric) for seed, metric in enumerate(full)]
    results += [result(HALF, seed, 1.0, metric) for seed, metric in enumerate(half)]
    assert verdict(results).startswith(answer)


def test_a_row_says_which_arms_freeze() -> None:
    assert PeerArm("ddp", True).name == "DDP by hand, freezing as ours"
    assert len({arm.name for arm in PEER_ARMS}) == 2 * len(PEERS)


def test_pictures_come_back_from_mnist_s_format(tmp_path: Path) -> None:
    pictures = np.arange(2 * 28 * 28).reshape(2, 28, 28) % 256
    write_idx(tmp_path / "train-images-idx3-ubyte.gz", pictures)
    assert (read_idx(tmp_path / "train-images-idx3-ubyte.gz") == pictures).all()
