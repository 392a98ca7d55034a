"""A signal ends a run in whatever it is, on all ranks alike, and the run goes on from there as if it had not come."""

import signal
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from support.faults import Fault
from support.jobs import TINY, Job, play, run_job
from support.pool import Pool
from support.stopping import play_until_stopped

from pipetransformer.checkpoint.folder import FOLDER, CheckpointFolder
from pipetransformer.runtime.snapshot import WEIGHTS
from pipetransformer.training import interrupt
from pipetransformer.training.run import failed

RUN = (
    *TINY, "precision=float64", "epochs=5", "freeze=schedule", "freeze.num_frozen=[1,3]", "freeze.interval=0.4",
    "model.options={patch_size: 4, embed_dim: 16, depth: 4, num_heads: 2}",
    "checkpoint.every_minutes=null",
)  # fmt: skip
PLACES = {
    "a step": Fault("pipetransformer.runtime.elastic.ElasticRuntime.train_step", call=3, what="signal"),
    "a fill": Fault("pipetransformer.autocache.cache.AutoCache._compute_and_store", call=1, what="signal"),
    "an evaluation": Fault("pipetransformer.runtime.elastic.ElasticRuntime.evaluate", call=5, what="signal"),
    "the last evaluation": Fault("pipetransformer.runtime.elastic.ElasticRuntime.evaluate", call=14, what="Ctrl-C"),
    "a transition": Fault("pipetransformer.runtime.elastic.change_holders", call=2, what="signal"),
}
STEPS = {
    "a step": 4,
    "a fill": 8,
    "an evaluation": 8,
    "the last evaluation": 20,
    "a transition": 10,
}


def weights_of_checkpoint(run_dir: Path) -> dict[str, torch.Tensor]:
    """The weights of the newest checkpoint by their names in the model."""
    tensors: dict[str, torch.Tensor] = {}
    for file in CheckpointFolder(run_dir / FOLDER).published()[-1].glob("*.safetensors"):
        tensors |= load_file(file)
    return {path.removeprefix(WEIGHTS): each for path, each in tensors.items() if path.startswith(WEIGHTS)}


def assert_equal(model: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    assert model.keys() == other.keys()
    assert all(torch.equal(tensor, other[name]) for name, tensor in model.items())


@pytest.mark.parametrize(
    ("number", "status"), [(None, "interrupted"), (signal.SIGINT, "interrupted"), (signal.SIGTERM, "requeue")]
)
def test_a_run_that_is_stopped_before_its_first_step_asks_to_be_started_again(
    number: signal.Signals | None, status: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(interrupt, "_requested", number)
    assert failed(KeyboardInterrupt()) == {"status": status}


@pytest.mark.thinned("signal-requeue")
@pytest.mark.parametrize(("what", "status"), [("signal", "requeue"), ("Ctrl-C", "interrupted")])
def test_a_run_without_checkpoints_that_is_stopped_saves_its_model(
    pool: Pool, tmp_path: Path, what: str, status: str
) -> None:
    pool.run(2, play_until_stopped, replace(PLACES["a step"], what=what), 1, (*RUN, "checkpoint=off"), tmp_path)
    job = Job(tmp_path, "")
    assert (job.summary["status"], job.summary["model"]["step"]) == (status, STEPS["a step"])
    assert load_file(tmp_path / "model" / "model.safetensors")


@pytest.fixture(scope="module")
def undisturbed(pool: Pool, tmp_path_factory: pytest.TempPathFactory) -> Job:
    return run_job(pool, 2, tmp_path_factory.mktemp("undisturbed") / "run", *RUN, made_up_times=True)


@pytest.mark.thinned("a fill", "the last evaluation")
@pytest.mark.parametrize(("place", "rank"), [(place, number % 2) for number, place in enumerate(PLACES)])
def test_a_signal_in_any_loop_saves_the_run(
    place: str, rank: int, pool: Pool, tmp_path: Path, undisturbed: Job
) -> None:
    (tmp_path / "run").mkdir()
    pool.run(2, play_until_stopped, PLACES[place], rank, RUN, tmp_path / "run")
    stopped = Job(tmp_path / "run", "")
    is_quit = PLACES[place].what == "Ctrl-C"
    assert stopped.summary["status"] == ("interrupted" if is_quit else "requeue")
    assert stopped.summary["optimizer_steps"] == STEPS[place]
    assert stopped.summary["model"]["step"] == STEPS[place]
    assert_equal(load_file(tmp_path / "run" / "model" / "model.safetensors"), weights_of_checkpoint(tmp_path / "run"))
    errors = pool.run(2, play, (*RUN, "resume=auto"), tmp_path / "run", True)
    job = Job(tmp_path / "run", errors[0])
    assert (job.error, job.summary["status"]) == ("", "completed")
    assert job.losses == pytest.approx(undisturbed.losses, rel=0, abs=1e-10)
    assert [event["step"] for event in job.events("evaluate")] == [4, 8, 12, 16, 20]
    assert job.summary["metrics"] == undisturbed.summary["metrics"]
    assert job.events("resume")[0]["num_steps_lost"] == 0
