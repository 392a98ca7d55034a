"""The GPU benchmark runs with small models on the CPU, trains alike in all loops, and says where there is no GPU."""

import json
from pathlib import Path
from unittest import mock

import pytest
import torch

from experiments.gpu import __main__ as gpu
from experiments.gpu.__main__ import CACHED, NO_GPU, PLAIN, RUNTIME, Measured, OtherTraining, main, warm_up
from experiments.gpu.cases import CASES, SMALL, Case
from experiments.gpu.loops import Loop
from experiments.gpu.runs import __main__ as runs
from experiments.record import BEGIN, END

TINY = ["--device", "cpu", "--small", "--precision", "float32", "--seconds", "0", "--steps", "1"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so_and_ends(capsys: pytest.CaptureFixture[str]) -> None:
    main([])
    assert capsys.readouterr().out.strip() == NO_GPU


def test_every_prefix_of_every_model_is_timed_with_the_same_training_in_all_loops(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "README.md").write_text(f"{BEGIN}\n{END}\n")
    main([*TINY, "--into", str(tmp_path)])
    results = json.loads((tmp_path / "results.json").read_text())["results"]
    assert [(each["name"], each["num_frozen"]) for each in results] == [(c.name, n) for c in SMALL for n in c.prefixes]
    for each in results:
        assert list(each["step_s"]) == [PLAIN, RUNTIME, *([CACHED] if each["num_frozen"] else [])]
        assert all(seconds > 0 for turns in each["step_s"].values() for seconds in turns)
    assert f"| {SMALL[0].name} | 2 |" in (tmp_path / "README.md").read_text()
    assert "On one CPU, float32" in capsys.readouterr().out


def test_whole_runs_take_turns_and_freeze_alike_with_and_without_the_cache(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "README.md").write_text(f"{BEGIN}\n{END}\n")
    tiny = ("--device", "cpu", "--small", "--precision", "float32", "--batches", "4", "--epochs", "4", "--rounds", "1")
    runs.main([*tiny, "--into", str(tmp_path)])
    results = json.loads((tmp_path / "results.json").read_text())["results"]
    assert [each["arm"] for each in results] == 2 * list(runs.ARMS)
    for plain, frozen, cached in (results[:3], results[3:]):
        assert frozen["losses"] == pytest.approx(cached["losses"], rel=0, abs=1e-6)
        assert frozen["losses"] != pytest.approx(plain["losses"], rel=0, abs=1e-6)
        prefixes = [[plan["num_frozen"] for plan in each["summary"]["plans"]] for each in (plain, frozen, cached)]
        assert prefixes == [[0], [0, 1, 2, 3], [0, 1, 2, 3]]
    assert f"| {SMALL[1].name} | {runs.CACHED} |" in capsys.readouterr().out


@pytest.mark.parametrize(("free_mib", "expected"), [(64, [0, 4]), (512, [2, 4]), (4096, [4, 4])])
def test_no_more_processes_read_ahead_than_have_room_in_shared_memory(
    free_mib: int, expected: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A batch of pictures takes 73.5 MiB, and each process has three."""
    monkeypatch.setattr(runs.shutil, "disk_usage", lambda _: mock.Mock(free=free_mib * 2**20))
    assert [runs.num_workers(case, tmp_path) for case in CASES[:2]] == expected
    assert runs.num_workers(CASES[0], tmp_path / "none") == runs.MAX_WORKERS


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_whole_runs_without_a_gpu_say_so_and_end(capsys: pytest.CaptureFixture[str]) -> None:
    runs.main([])
    assert capsys.readouterr().out.strip() == NO_GPU


class Other(Loop):
    def __init__(self, loss: float, *drifts: float) -> None:
        self._losses = [loss - 0.1 * (step + 1) + drift for step, drift in enumerate((drifts + 5 * (0.0,))[:5])]

    def _train(self, index: int) -> None:
        pass

    def loss(self) -> float:
        return self._losses[self._num_steps - 1]


def test_loops_that_train_otherwise_are_noticed() -> None:
    warm_up([Other(1.0), Other(1.0)], same_losses=True, exact=True)
    warm_up([Other(1.0), Other(2.0)], same_losses=False, exact=True)
    with pytest.raises(ValueError, match="do not train the same"):
        warm_up([Other(1.0), Other(1.001)], same_losses=True, exact=True)


def test_what_rounding_of_16_bits_grows_to_is_no_other_training() -> None:
    warm_up([Other(1.0), Other(1.0, 0.01, 0.01, 0.1)], same_losses=True, exact=False)
    for early in ((0.1,), (0.0, 0.1)):
        with pytest.raises(ValueError, match=f"the losses of step {len(early) - 1} are"):
            warm_up([Other(1.0), Other(1.0, *early)], same_losses=True, exact=False)


def test_a_row_that_does_not_train_alike_costs_no_other_row(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def measured(case: Case, num_frozen: int, *_: object) -> Measured:
        if num_frozen == 0:
            raise OtherTraining("the loops do not train the same")
        return Measured(case.name, num_frozen, {PLAIN: (0.1,), RUNTIME: (0.1,)}, {})

    (tmp_path / "README.md").write_text(f"{BEGIN}\n{END}\n")
    monkeypatch.setattr(gpu, "measure", measured)
    with pytest.raises(SystemExit) as ended:
        main([*TINY, "--cases", "0", "--into", str(tmp_path)])
    assert ended.value.code == 1
    assert f"\nNot timed: {SMALL[0].name}, 0 frozen: the loops do not train the same." in capsys.readouterr().out
    assert "Not timed" in (tmp_path / "README.md").read_text()
    assert [each["num_frozen"] for each in json.loads((tmp_path / "results.json").read_text())["results"]] == [2]


def test_every_loop_pays_for_the_workspace_of_its_matrix_products(monkeypatch: pytest.MonkeyPatch) -> None:
    held = {"weights": 0, "workspace": 0}

    class Multiplying(Other):
        def _train(self, index: int) -> None:
            held.update(weights=5, workspace=3)

        def close(self) -> None:
            held["weights"] = 0

    def clear() -> None:
        held["workspace"] = 0

    monkeypatch.setattr(torch._C, "_cuda_clearCublasWorkspaces", clear, raising=False)
    for name in ("empty_cache", "reset_peak_memory_stats", "synchronize"):
        monkeypatch.setattr(torch.cuda, name, lambda *_: None)
    for name in ("memory_allocated", "max_memory_allocated"):
        monkeypatch.setattr(torch.cuda, name, lambda _: sum(held.values()))
    peaks = [gpu.peak_bytes(lambda: Multiplying(1.0), torch.device("cuda")) for _ in range(2)]
    assert peaks == [8, 8]


def test_a_ratio_is_taken_within_its_round() -> None:
    steps = {PLAIN: (0.1, 0.2, 0.4), RUNTIME: (0.1, 0.22, 0.8), CACHED: (0.05, 0.1, 0.2)}
    measured = Measured("a", 3, steps, {PLAIN: 2**30, RUNTIME: 2**31, CACHED: None})
    assert measured.row() == ("a", "3", "200.0", "220.0", "1.100", "100.0", "0.500", "1.00", "2.00", "", "3")


def test_the_real_models_are_those_of_the_question() -> None:
    assert [(case.size, case.batch_size) for case in CASES] == [(224, 128), (384, 32), (384, 32), (384, 32)]
    assert [case.draws for case in CASES] == [False, False, True, True]
