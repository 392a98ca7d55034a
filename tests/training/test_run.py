"""A model that finds no room is told with its size, and the summary does not go with it; it can be saved later."""

import json
import os
import shutil
import stat
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors import SafetensorError
from support.jobs import TINY, Job, play, run_job
from support.pool import Pool

from pipetransformer.config.sections import Evaluation
from pipetransformer.errors import NotSaved
from pipetransformer.models.adapters import NoAdapters
from pipetransformer.models.timm import TimmModel
from pipetransformer.report.reporter import Reporter
from pipetransformer.runtime.precision import INITIAL_SCALE
from pipetransformer.training import run
from pipetransformer.training.run import save_model

STATE = {"weight": torch.zeros(2**18)}


class Full(TimmModel):
    """A model whose files find no room in folders of some names."""

    def save(self, stack: Any, state: Any, folder: Path) -> None:
        (folder / "half").touch()
        if folder.name != "roomy":
            raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")
        (folder / "model.safetensors").touch(0o600)


MODEL = Full(name="full")
SAVE = partial(MODEL.save, None, STATE)


def test_a_model_that_finds_no_room_anywhere_is_told_with_its_size(tmp_path: Path) -> None:
    folders = [tmp_path / "small", tmp_path / "narrow"]
    with pytest.raises(NotSaved, match=r"takes 0\.000977 GiB .* in .*small \(.*No space.* GiB free\) nor in .*narrow"):
        save_model(SAVE, STATE, folders)
    assert not list(tmp_path.iterdir())


def test_the_second_place_is_taken_where_the_first_is_full(tmp_path: Path) -> None:
    folder = save_model(SAVE, STATE, [tmp_path / "small", tmp_path / "roomy"])
    assert folder == tmp_path / "roomy"
    assert [path.name for path in tmp_path.iterdir()] == ["roomy"]


def test_a_model_takes_the_place_of_a_link(tmp_path: Path) -> None:
    (tmp_path / "far").mkdir()
    (tmp_path / "roomy").symlink_to(tmp_path / "far")
    assert save_model(SAVE, STATE, [tmp_path / "roomy", tmp_path / "other"]) == tmp_path / "roomy"
    assert not list((tmp_path / "far").iterdir())


def test_others_may_read_what_new_files_let_them(tmp_path: Path) -> None:
    before = os.umask(0o022)
    try:
        save_model(SAVE, STATE, [tmp_path / "roomy"])
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "roomy" / "model.safetensors").stat().st_mode) == 0o644


def ended() -> Any:
    """As much of a trainer as the end of a run asks for."""
    return SimpleNamespace(
        runtime=SimpleNamespace(weights=lambda: STATE, averaged=nullcontext),
        config=SimpleNamespace(model=MODEL, evaluate=Evaluation(), peft=NoAdapters()),
        components=SimpleNamespace(stack=None),
        report=Reporter(),
        summary=lambda: {"metric": 0.5},
        state=SimpleNamespace(step=8),
        main_metric=SimpleNamespace(best_step=None),
        estimate={},
        spent=SimpleNamespace(cpu_seconds=1.0),
    )


@pytest.mark.parametrize("is_file", [False, True], ids=["removed", "a file"])
def test_a_run_whose_folder_is_gone_at_its_end_saves_its_weights(
    is_file: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, second = tmp_path / "run", tmp_path / "roomy"
    if is_file:
        folder.touch()
    monkeypatch.setattr(run, "places", lambda _: [folder / "model", second])
    monkeypatch.setattr(run.dist, "get_rank", lambda: 0)
    summary = run._finish(ended(), folder, "completed", None, True)
    assert summary["model"] == {"folder": str(second), "step": 8}
    assert (second / "model.safetensors").is_file()
    if not is_file:
        assert json.loads((folder / "summary.json").read_text())["status"] == "completed"


@pytest.mark.parametrize(("status", "raised"), [("completed", True), ("diverged", False)])
def test_a_run_whose_model_finds_no_room_keeps_its_summary(
    status: str, raised: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run, "SECOND_PLACE", tmp_path / "second")
    monkeypatch.setattr(run.dist, "get_rank", lambda: 0)
    with pytest.raises(NotSaved) if raised else nullcontext():
        run._finish(ended(), tmp_path, status, None, True)
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert (summary["status"], summary["metric"]) == (status, 0.5)
    assert "could not be saved in" in summary["error"]


def test_a_complete_run_whose_model_was_not_saved_goes_on_to_save_it(pool: Pool, tmp_path: Path) -> None:
    job = run_job(pool, 1, tmp_path / "run", *TINY, "epochs=1")
    file, losses, whole = job.folder / "model" / "model.safetensors", job.losses, job.summary
    weights = file.read_bytes()
    shutil.rmtree(file.parent)
    known = {name: value for name, value in whole.items() if name != "model"}
    (job.folder / "summary.json").write_text(json.dumps(known))
    for _ in range(2):  # the second time nothing is left to do
        again = (*TINY, "epochs=1", "resume=auto"), job.folder, False, INITIAL_SCALE, run._run
        assert pool.run(1, play, *again) == [""]
        assert file.read_bytes() == weights
        assert (job.losses, len(job.events("resume"))) == (losses, 1)
        for name in ("status", "model", "metric", "optimizer_steps"):
            assert job.summary[name] == whole[name]


def test_a_run_says_that_its_model_is_in_the_second_place(pool: Pool, tmp_path: Path) -> None:
    folder = tmp_path / "full"
    folder.mkdir()
    (folder / "model").touch()  # no folder can be made there
    assert pool.run(1, play, (*TINY, "epochs=1"), folder, False) == [""]
    messages = Job(folder, "").messages
    saved = Path(messages[-1].removeprefix("the model is in ").partition(":")[0])
    try:
        assert (saved / "model.safetensors").is_file()
    finally:
        shutil.rmtree(saved)
