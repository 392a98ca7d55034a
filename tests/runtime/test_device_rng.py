"""The device's own random numbers: the same where batches are divided alike, and torch's own kernels throughout."""

import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from support.cases import Case
from support.exactness import assert_equal
from support.jobs import loaded
from support.mesh_plans import plan_on
from support.plans import HEAD, plan
from support.pool import Pool
from support.random_kernels import keys_on_host, kinds_that_are_drawn, train_and_count
from support.resumes import run_on
from support.trainings import Plans, Trace
from torch import Tensor

from pipetransformer.autopipe.plan import Plan
from pipetransformer.checkpoint.folder import FOLDER
from pipetransformer.config.no_effect import warnings
from pipetransformer.config.validate import validate
from pipetransformer.errors import UserError
from pipetransformer.mesh import StageMesh
from pipetransformer.runtime.rng import DeviceRng, sample_keys

CPU = torch.device("cpu")
WHOLE: Plans = {0: plan(0, 0, [HEAD], 1, 2), 3: plan(2, 2, [HEAD], 1, 2)}
RECOMPUTED: Plans = {0: Plan(0, 0, ((0, HEAD),), 1, 2, recompute=True), 3: Plan(2, 2, ((3, HEAD),), 1, 2)}
STAGES: Plans = {0: plan(0, 0, [3, HEAD], 1, 2), 3: plan(2, 2, [4, HEAD], 1, 2)}
REPLICAS: Plans = {0: plan(0, 0, [HEAD], 2, 1), 3: plan(2, 2, [HEAD], 2, 1)}
QUARTERS: Plans = {0: plan(0, 0, [HEAD], 2, 2), 3: plan(2, 2, [HEAD], 2, 2)}
RUN = (
    "logger=none", "dataset.max_train_samples=64", "dataset.max_eval_samples=16", "epochs=2", "batch_size=16",
    "model.options={patch_size: 4, embed_dim: 16, depth: 2, num_heads: 2, proj_drop_rate: 0.2}",
    "precision=float64", "randomness=device", "freeze.interval=0.25", "parallel=data", "parallel.num_microbatches=2",
)  # fmt: skip


def drawn(ids: list[int], layer: int = 1, step: int = 3) -> Tensor:
    with DeviceRng(sample_keys(1, step, np.array(ids)), CPU) as numbers:
        numbers.layer(layer)
        return F.dropout(torch.ones(len(ids), 64), 0.5)


def test_numbers_follow_from_the_micro_batch_the_step_and_the_layer() -> None:
    assert torch.equal(drawn([4, 2]), drawn([4, 2]))
    others = [drawn([5, 2]), drawn([4, 2], layer=2), drawn([4, 2], step=4)]
    assert not any(torch.equal(drawn([4, 2]), other) for other in others)
    assert torch.equal(drawn([4, 2]), drawn([4, 7])), "the first sample stands for the micro-batch"


@pytest.fixture(scope="module")
def trained(pool: Pool, bert_config: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Trace]:
    """BERT, whose attention drops out, at several topologies."""
    case, folder = Case("bert", bert_config, 0.2, randomness="device"), str(tmp_path_factory.mktemp("trained"))
    worlds = {"whole": (1, WHOLE), "again": (1, WHOLE), "recomputed": (1, RECOMPUTED), "stages": (2, STAGES),
              "replicas": (2, REPLICAS), "quarters": (2, QUARTERS), "quarters again": (2, QUARTERS)}  # fmt: skip
    traces = {}
    for name, (world, plans) in worlds.items():
        traces[name], num_calls, state_is_kept = pool.run(world, train_and_count, case, plans, folder)[0]
        assert num_calls > 0, "attention keeps torch's own kernels"
        assert state_is_kept
    exact = pool.run(1, train_and_count, replace(case, randomness="sample"), WHOLE, folder)[0]
    assert exact[1] == 0, "attention by samples is a softmax of its own"
    return traces


@pytest.mark.parametrize(("one", "other"), [("again", "whole"), ("quarters again", "quarters")])
def test_a_run_at_the_same_topology_draws_the_same(trained: dict[str, Trace], one: str, other: str) -> None:
    assert_equal(trained[one], trained[other])


@pytest.mark.parametrize("name", ["recomputed", "stages", "replicas"])
def test_where_batches_are_divided_alike_the_rest_of_a_topology_changes_nothing(
    trained: dict[str, Trace], name: str
) -> None:
    assert_equal(trained[name], trained["whole"])


def test_keys_are_on_the_host_where_they_seed_the_device_and_not_on_a_mesh(
    pool: Pool, bert_config: Path, tmp_path: Path
) -> None:
    """A mesh draws by sample: each mask would copy the keys to the device, and the host would wait."""
    case = Case("vit", bert_config, 0.2, randomness="device", num_steps=1)
    for world, mesh, on_host in ((1, StageMesh(), True), (2, StageMesh(tp=2), False)):
        assert pool.run(world, keys_on_host, case, {0: plan_on(mesh)}, str(tmp_path)) == [{on_host}] * world


def test_another_division_of_batches_draws_others(trained: dict[str, Trace]) -> None:
    one, other = trained["quarters"].losses, trained["whole"].losses
    assert max(abs(a - b) for a, b in zip(one, other, strict=True)) > 1e-6
    assert other == pytest.approx(one, rel=0.5), "it is the same training but for its masks"


def test_a_run_goes_on_at_the_same_topology_as_if_it_had_never_stopped(pool: Pool, tmp_path: Path) -> None:
    whole = pool.run(2, run_on, RUN, tmp_path / "whole", [1, 1, 1])[0]
    shutil.copytree(tmp_path / "whole" / FOLDER / "step-00000003", tmp_path / "half" / FOLDER / "step-00000003")
    half = pool.run(2, run_on, RUN, tmp_path / "half", [1, 1, 1], None, None)[0]
    assert half.first == 3
    assert half.losses == pytest.approx(whole.losses[3:], rel=0, abs=1e-10)


def test_another_topology_is_refused_unless_it_is_allowed(pool: Pool, tmp_path: Path) -> None:
    pool.run(2, run_on, RUN, tmp_path, [1, 1, 1], 2)
    with pytest.raises(AssertionError, match=r"randomness\.topology: .*2 ranks.* -> .*1 ranks"):
        pool.run(1, run_on, RUN, tmp_path, [1, 1, 1])
    with pytest.raises(AssertionError, match=r"randomness: .*device.* -> .*sample"):
        pool.run(2, run_on, (*RUN, "randomness=sample"), tmp_path, [1, 1, 1])


def test_a_run_with_elastic_plans_is_told_that_they_change_it() -> None:
    assert any("randomness=device" in text for text in warnings(loaded("randomness=device")))
    assert not any("randomness" in text for text in (*warnings(loaded()), *warnings(loaded(*RUN))))
    with pytest.raises(UserError, match="randomness=kernel is unknown; choose one of sample, device"):
        validate(loaded("randomness=kernel"))


def test_layers_are_measured_with_the_numbers_that_they_draw_in_a_step(pool: Pool, bert_config: Path) -> None:
    case = Case("bert", bert_config, dropout=0.2)
    for kind, other in (("sample", "device"), ("device", "sample")):
        (drawn,) = pool.run(1, kinds_that_are_drawn, case, kind)
        assert drawn[kind] > 0
        assert drawn[other] == 0
