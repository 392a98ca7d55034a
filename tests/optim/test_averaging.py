"""The average of the weights: torch's own, kept through transitions and shards, evaluated and saved."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from support.cases import Case
from support.exactness import assert_equal
from support.jobs import TINY, loaded, run_job
from support.plans import HEAD, plan, sharded
from support.pool import Pool
from support.saved import scored
from support.trainings import train_elastic, train_reference
from torch import nn
from torch.optim.swa_utils import AveragedModel

from pipetransformer.checkpoint.folder import FOLDER, CheckpointFolder
from pipetransformer.checkpoint.manifest import read_manifest
from pipetransformer.checkpoint.source import CheckpointLayers
from pipetransformer.config.schema import write_config
from pipetransformer.models.base import Head
from pipetransformer.optim.averaging import AVERAGE, decay_at
from pipetransformer.optim.base import AdamW


def test_the_average_is_torchs_averaged_model() -> None:
    model = nn.Linear(3, 2).double()
    expected = AveragedModel(model, avg_fn=lambda mean, new, n: torch.lerp(new, mean, decay_at(int(n), 0.6)))
    optimizer = AdamW(lr=0.1, ema_decay=0.6).build(model.parameters())
    assert optimizer is not None
    for step in range(12):
        optimizer.zero_grad()
        model(torch.full((2, 3), step + 1.0, dtype=torch.float64)).square().sum().backward()
        optimizer.step()
        expected.update_parameters(model)
    assert decay_at(20, 0.6) == 0.6
    assert decay_at(1, 0.6) == 2 / 11
    for own, theirs in zip(model.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(optimizer.state[own][AVERAGE], theirs.detach(), rtol=0, atol=1e-12)


PLANS = {
    "transitions": {0: plan(0, 0, [2, HEAD], 1, 2), 2: plan(2, 2, [HEAD], 2, 1), 4: plan(1, 0, [4, HEAD], 1, 2)},
    "shards": {0: sharded(0, 0, 2, 2), 3: sharded(2, 2, 2, 1)},
}


@pytest.mark.thinned("adamw_ema", "shards")
@pytest.mark.parametrize(
    ("plans", "optimizer"), [("transitions", "adamw_ema"), ("transitions", "adan_ema"), ("shards", "adan_ema")]
)
def test_averages_move_with_their_layers(
    plans: str, optimizer: str, pool: Pool, bert_config: Path, tmp_path: Path
) -> None:
    case = Case("bert_mlm", bert_config, optimizer=optimizer, num_steps=6)
    trace = pool.run(2, train_elastic, case, PLANS[plans], str(tmp_path))[0]
    assert_equal(trace, train_reference(case, {step: each.num_frozen for step, each in PLANS[plans].items()}))
    assert any(name.endswith(AVERAGE) for name in trace.moments)


RUN = (
    *TINY, "optim.ema_decay=0.5", "optim.lr=0.01", "precision=float64", "freeze=schedule", "freeze.num_frozen=[1]",
    "freeze.interval=0.5", "checkpoint.every_steps=2",
)  # fmt: skip


def test_averages_are_evaluated_and_saved_at_any_topology(pool: Pool, tmp_path: Path) -> None:
    """Of the frozen block its weights: they made the cached features."""
    jobs = [
        run_job(pool, world, tmp_path / name, *RUN, *options, made_up_times=True)
        for name, world, options in (("one", 1, ["cache=off"]), ("two", 2, ["parallel=pipeline"]), ("three", 2, []))
    ]
    assert [job.error for job in jobs] == ["", "", ""]
    models = [load_file(job.folder / "model" / "model.safetensors") for job in jobs]
    written = {
        name: tensor
        for file in sorted((jobs[0].folder / "checkpoints").iterdir())[-1].glob("*.safetensors")
        for name, tensor in load_file(file).items()
    }
    averaged = {name for name in models[0] if f"optimizer/{name}/{AVERAGE}" in written}
    assert {name.split(".")[1] for name in models[0].keys() - averaged if name.startswith("blocks")} == {"0"}
    for name, tensor in models[0].items():
        place = f"optimizer/{name}/{AVERAGE}" if name in averaged else f"weights/{name}"
        assert torch.equal(tensor, written[place])
        assert (name in averaged) == (not torch.equal(tensor, written[f"weights/{name}"]))
        for other in models[1:]:
            torch.testing.assert_close(other[name], tensor, rtol=0, atol=1e-10)
    assert jobs[1].summary["metrics"] == jobs[2].summary["metrics"] == jobs[0].summary["metrics"]
    write_config(loaded(*RUN), jobs[0].folder)
    (results,) = pool.run(1, scored, jobs[0].folder, None, [], tmp_path / "scores", False)
    assert results["test"] == {**jobs[0].summary["metrics"]["test"], "num_samples": 40}


def test_the_parked_average_of_a_frozen_block_is_not_its_model(pool: Pool, tmp_path: Path) -> None:
    """It is where the average goes on, should the guard unfreeze the block."""
    job = run_job(pool, 2, tmp_path / "run", *RUN, "freeze.guard=1", "guard.freeze=unfreeze", made_up_times=True)
    assert (job.error, job.summary["num_frozen"]) == ("", 1)
    path = CheckpointFolder(job.folder / FOLDER).published()[-1]
    config, start = loaded(*RUN), job.events("start")[0]
    head = Head(**start["head"] | {"labels": tuple(start["head"]["labels"])})
    stack = config.model.build_meta(head, tuple(start["input_shape"]), config.seed).double()
    layers = CheckpointLayers(path, read_manifest(path), stack)
    model = load_file(job.folder / "model" / "model.safetensors")
    parked = {name for state in map(layers.optimizer_state, (0, 1)) for name in state if AVERAGE in state[name]}
    assert parked, "the checkpoint has averages of the frozen layers"
    for layer in range(len(stack)):
        assert all(torch.equal(tensor, model[name]) for name, tensor in layers.averages(layer))


def test_evaluating_leaves_the_training_as_it_was(pool: Pool, tmp_path: Path) -> None:
    often, once = (
        run_job(pool, 1, tmp_path / str(every), *RUN, f"evaluate.every_epochs={every}", "epochs=3", made_up_times=True)
        for every in (1, 3)
    )
    assert often.losses == once.losses
