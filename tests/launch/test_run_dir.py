"""The last words of a run say where its weights are."""

import json
from pathlib import Path
from typing import Any

import pytest

from pipetransformer.checkpoint.folder import FOLDER
from pipetransformer.checkpoint.manifest import MANIFEST, LayerFile, Manifest
from pipetransformer.config.arguments import quoted
from pipetransformer.config.compose import compose_training
from pipetransformer.config.schema import write_config
from pipetransformer.errors import RankFailed, RankLost, UserError
from pipetransformer.launch import start
from pipetransformer.launch.run_dir import (
    finished_summary,
    record_of_refused,
    refuse_other_run,
    resumed_arguments,
    tell_where_weights_are,
)
from pipetransformer.report.environment import write_overrides

COMPLETE = {"status": "completed", "model": {"folder": "model", "step": 8}}


def notes(
    error: BaseException, folder: Path, num_steps: int = 3, checkpoint: int | None = 2, **summary: object
) -> list[str]:
    (folder / "metrics.jsonl").write_text('{"event": "start"}\n' + num_steps * '{"event": "step", "loss": 1.0}\n')
    if checkpoint is not None:
        (folder / FOLDER / f"step-{checkpoint:08d}").mkdir(parents=True)
    if summary:
        (folder / "summary.json").write_text(json.dumps(summary))
    tell_where_weights_are(error, folder)
    return getattr(error, "__notes__", [])


@pytest.mark.parametrize(
    "error",
    [RankLost("killed"), RankFailed("trace", "line"), KeyboardInterrupt()],
    ids=lambda error: type(error).__name__,
)
def test_the_command_that_saves_the_last_checkpoint_as_a_model_is_told(
    error: BaseException, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a run").mkdir()
    (note,) = notes(error, tmp_path / "a run", status="failed")
    assert note.endswith("pipetransformer-export 'run=a run' 'out=a run/model-2'")
    assert note.startswith("the weights of step 2 are in its last checkpoint")


def test_weights_that_are_lost_are_told(tmp_path: Path) -> None:
    assert notes(RankLost("killed"), tmp_path, checkpoint=None) == [
        "the run had no checkpoint yet, and its weights are lost"
    ]


def test_an_error_during_training_tells_them_and_a_refusal_does_not(tmp_path: Path) -> None:
    assert notes(UserError("the disk is full"), tmp_path, status="failed", optimizer_steps=3)
    (tmp_path / "resumed").mkdir()
    assert not notes(UserError("other settings"), tmp_path / "resumed", status="failed")


def test_nothing_is_told_of_a_run_that_saved_its_model_or_made_no_step(tmp_path: Path) -> None:
    model = {"folder": str(tmp_path / "model"), "step": 3}
    assert not notes(KeyboardInterrupt(), tmp_path, status="interrupted", model=model)
    (tmp_path / "other").mkdir()
    assert not notes(RankLost("killed"), tmp_path / "other", num_steps=0)


def write_manifest(run_dir: Path, step: int = 8, num_samples: int = 0, **place: int) -> None:
    """A checkpoint of which a launcher reads no more than the manifest."""
    folder = run_dir / FOLDER / f"step-{step:08d}"
    folder.mkdir(parents=True)
    state, data = {"step": step} | place, {"num_samples": num_samples}
    manifest = Manifest(step, (LayerFile(0, "", 0, "0" * 32),), state, {}, None, data, {}, {}, {}, 0, "", None, 0.0)
    (folder / MANIFEST).write_bytes(manifest.to_json())


@pytest.mark.parametrize(
    ("known", "has_checkpoint", "resume", "is_over"),
    [
        (COMPLETE, True, ("resume=auto",), True),
        (COMPLETE, True, (), False),
        (COMPLETE | {"status": "interrupted"}, True, ("resume=auto",), False),
        ({"status": "completed"}, True, ("resume=auto",), False),  # a signal came while its model was saved
        ({"status": "completed"}, False, ("resume=auto",), True),
    ],
)
def test_a_run_that_is_complete_is_not_resumed(
    known: dict[str, Any], has_checkpoint: bool, resume: tuple[str, ...], is_over: bool, tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    (tmp_path / "summary.json").write_text(json.dumps(known))
    if has_checkpoint:
        write_manifest(tmp_path)
    summary = finished_summary(compose_training(resume), tmp_path)
    assert summary == (known if is_over else None)
    assert ("nothing to resume: the run in" in capsys.readouterr().out) == is_over


def test_a_complete_run_is_not_resumed_with_other_settings_unless_they_are_allowed(tmp_path: Path) -> None:
    (tmp_path / "summary.json").write_text(json.dumps(COMPLETE))
    write_config(compose_training(["epochs=2"]), tmp_path)
    assert finished_summary(compose_training(["epochs=2", "resume=auto", "parallel=data"]), tmp_path) is not None
    more = ["epochs=3", "resume=auto"]
    allowed = compose_training([*more, "resume.allow=[epochs]"])
    with pytest.raises(UserError, match="drop them, or start another run"):  # there is no checkpoint
        finished_summary(allowed, tmp_path)
    write_manifest(tmp_path, num_samples=128, epoch=2, step_in_epoch=0)
    with pytest.raises(
        UserError, match=r"complete, with other settings \(epochs: 2 -> 3\); drop them, or give resume.al"
    ):
        finished_summary(compose_training(more), tmp_path)
    for option, told in (
        ("seed=7", r"\(seed: 1 -> 7\); drop them, or start another run$"),
        ("batch_size=64", r"\(batch_size: 32 -> 64\); drop them, or start another run$"),
        ("batch_size=33", r"or give resume.allow=\[batch_size\] to go on with the new ones$"),
        (
            "dataset.max_train_samples=64",
            r"max_train_samples\] to go on .* where an epoch has as many steps as before$",
        ),
    ):
        with pytest.raises(UserError, match=told):
            finished_summary(compose_training(["epochs=2", option, "resume=auto"]), tmp_path)
    assert finished_summary(allowed, tmp_path) is None


@pytest.mark.parametrize(
    ("epoch", "step_in_epoch", "epochs", "is_refused"),
    [(2, 0, 1, True), (2, 0, 2, False), (1, 3, 1, True), (1, 3, 2, False), (2, 0, 3, False)],
)
def test_a_run_is_not_resumed_to_fewer_epochs_than_it_has_trained(
    epoch: int, step_in_epoch: int, epochs: int, is_refused: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_manifest(tmp_path, epoch=epoch, step_in_epoch=step_in_epoch)
    monkeypatch.setattr(start, "start", lambda *_: {"status": "goes on"})
    written: list[str] = []

    def resume() -> dict[str, Any]:
        config = compose_training([f"epochs={epochs}", "resume=auto", "resume.allow=[epochs]"])
        return start.run_in_folder(config, tmp_path, lambda: written.append("config.yaml"))

    if not is_refused:
        assert resume() == {"status": "goes on"}
        return
    with pytest.raises(UserError, match=r"epochs=1 ends before step 8 in epoch 2, .*; give epochs=2 or more$"):
        resume()
    assert not written


@pytest.mark.parametrize(
    ("resume", "steps", "is_kept"), [("auto", {}, True), ("auto", {"optimizer_steps": 3}, False), ("null", {}, False)]
)
def test_a_run_whose_resume_is_refused_keeps_its_settings_and_summary(
    resume: str, steps: dict[str, int], is_kept: bool, tmp_path: Path
) -> None:
    files = [tmp_path / name for name in ("config.yaml", "overrides.json", "summary.json")]

    def refuse() -> None:
        with record_of_refused(compose_training([f"resume.run={resume}"]), tmp_path):
            for file in files:
                file.write_text(json.dumps({"status": "failed"} | steps))
            raise UserError("other settings")

    for file in files:
        file.write_text("before")
    with pytest.raises(UserError, match="other settings"):
        refuse()
    assert all((file.read_text() == "before") == is_kept for file in files)


def test_a_complete_run_that_is_refused_before_its_ranks_start_keeps_its_record(tmp_path: Path) -> None:
    def refuse() -> None:
        with record_of_refused(compose_training(["resume.run=auto"]), tmp_path):
            (tmp_path / "config.yaml").write_text("of the refused one")
            raise UserError("torchrun started another number of processes")

    (tmp_path / "config.yaml").write_text("before")
    (tmp_path / "summary.json").write_text(json.dumps({"status": "completed", "optimizer_steps": 5}))
    with pytest.raises(UserError, match="another number"):
        refuse()
    assert (tmp_path / "config.yaml").read_text() == "before"


@pytest.mark.parametrize(("sweep", "option"), [(None, "hydra.run.dir="), ("twice", "hydra.sweep.dir=")])
def test_a_folder_that_is_taken_is_named_with_the_option_that_names_another(
    sweep: str | None, option: str, tmp_path: Path
) -> None:
    (tmp_path / "summary.json").write_text(json.dumps({"status": "completed"}))
    with pytest.raises(UserError, match=rf"holds a run already \(completed\); .* or another {option}$"):
        start.run_in_folder(compose_training([]), tmp_path, lambda: None, sweep)
    with pytest.raises(UserError, match=r"or another run_dir=$"):
        start.train(compose_training([]), tmp_path)


def test_a_run_that_no_rank_began_leaves_its_refusal_and_does_not_stand_in_the_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> dict[str, Any]:
        raise UserError("`world_size`=2 processes need a GPU each")

    monkeypatch.setattr(start, "start", refuse)
    config = compose_training(["dry_run=true"])
    for _ in range(2):
        with pytest.raises(UserError, match="need a GPU each"):
            start.run_in_folder(config, tmp_path, lambda: write_config(config, tmp_path))
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary == {"status": "failed", "error": "parallel.world_size=2 processes need a GPU each"}


@pytest.mark.parametrize("status", ["failed", "interrupted", "requeue"])
def test_a_run_that_ended_before_its_first_step_does_not_stand_in_the_way(status: str, tmp_path: Path) -> None:
    (tmp_path / "summary.json").write_text(json.dumps({"status": status}))
    (tmp_path / "config.yaml").touch()
    (tmp_path / "metrics.jsonl").write_text('{"event": "phase"}\n')
    refuse_other_run(compose_training([]), tmp_path)
    assert not list(tmp_path.iterdir())
    for left in ('{"event": "step"}\n', ""):
        (tmp_path / "summary.json").write_text(json.dumps({"status": status}))
        (tmp_path / "metrics.jsonl").write_text(left)
        (tmp_path / FOLDER).mkdir(exist_ok=True)
        with pytest.raises(UserError, match="holds a run already"):
            refuse_other_run(compose_training([]), tmp_path)


def test_a_run_that_is_overwritten_leaves_nothing_of_its_own(tmp_path: Path) -> None:
    for name in ("model", "wandb/offline-run-1", "tensorboard", "mine"):
        (tmp_path / name).mkdir(parents=True)
    for name in ("config.yaml", "trace_0.json", "trace_10.json"):
        (tmp_path / name).write_text("")
    refuse_other_run(compose_training(["overwrite=true"]), tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]


def test_links_of_a_run_that_is_overwritten_are_removed_and_what_they_lead_to_stays(tmp_path: Path) -> None:
    run, far = tmp_path / "run", tmp_path / "far"
    run.mkdir()
    for name in ("model", FOLDER):
        (far / name / "inside").mkdir(parents=True)
        (run / name).symlink_to(far / name)
    refuse_other_run(compose_training(["overwrite=true"]), run)
    assert not list(run.iterdir())
    assert all((far / name / "inside").is_dir() for name in ("model", FOLDER))


@pytest.mark.thinned("lr=0.1,seed=2", "a'b", "${x}")
@pytest.mark.parametrize(
    "name", ["2026", "lr=0.1,seed=2", "my run", "größer", "a'b", "a(1) [2] {3}", "${x}", "a\\", "#1"]
)
def test_a_run_is_resumed_by_its_folder_whatever_it_is_called(name: str, tmp_path: Path) -> None:
    folder = tmp_path / name
    folder.mkdir()
    (folder / "config.yaml").touch()
    write_overrides(folder, ["epochs=2"])
    for given in (str(folder), quoted(str(folder))):
        arguments = resumed_arguments(["-v", f"resume.run={given}", "seed=3"])
        assert {*arguments} > {"-v", "epochs=2", "seed=3"}
        assert compose_training(arguments[1:]).resume.run == str(folder)
        assert arguments[-1] == f"hydra.run.dir={quoted(str(folder))}"


def test_a_field_of_an_own_policy_is_given_to_a_resumed_run_as_to_a_new_one(tmp_path: Path) -> None:
    """Its file may leave out fields of its class."""
    (tmp_path / "config.yaml").touch()
    write_overrides(tmp_path, ["freeze=mine", "++freeze.fraction=0.5"])
    arguments = resumed_arguments([f"resume.run={tmp_path}", "freeze.target_fraction=0.4", "epochs=3"])
    assert {*arguments} > {"freeze=mine", "++freeze.fraction=0.5", "++freeze.target_fraction=0.4", "epochs=3"}


def test_the_ranks_of_torchrun_take_the_place_of_those_that_the_run_asked_for(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").touch()
    write_overrides(tmp_path, ["parallel.world_size=4", "epochs=2"])
    resumed = [f"resume.run={tmp_path}"]
    by = {by_torchrun: {*resumed_arguments(resumed, by_torchrun)} for by_torchrun in (False, True)}
    assert by[False] - by[True] == {"parallel.world_size=4"}
    assert "parallel.world_size=3" in resumed_arguments([*resumed, "parallel.world_size=3"], by_torchrun=True), "asked"


def test_what_one_command_has_permitted_the_next_one_does_not_permit(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").touch()
    write_overrides(tmp_path, ["epochs=2", "resume.allow=[epochs]", "overwrite=true", "resume.run=auto"])
    resumed = [f"resume.run={tmp_path}"]
    assert resumed_arguments(resumed)[0] == "epochs=2"
    assert len(resumed_arguments(resumed)) == 3, "and the folder, as resume.run= and hydra.run.dir="
    assert "resume.allow=[epochs]" in resumed_arguments([*resumed, "resume.allow=[epochs]"]), "asked"
