"""Optimizers of torch and timm by name, and of one's own: what is taken, what is refused, and that it is exact."""

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from support.cases import OPTIMIZERS, Case
from support.exactness import assert_equal
from support.jobs import TINY
from support.own_optimizer import OwnOptimizer
from support.plans import HEAD, plan
from support.pool import Pool
from support.resumes import run_on
from support.trainings import train_elastic, train_reference
from torch import nn

from pipetransformer.errors import UserError
from pipetransformer.optim.base import OptimizerSpec
from pipetransformer.optim.named import NamedOptimizer, TimmOptimizer, TorchOptimizer
from pipetransformer.optim.signatures import timm_optimizers, torch_optimizers
from pipetransformer.runtime.mesh_layers import check_mesh

NAMED = {name: spec for name, spec in OPTIMIZERS.items() if isinstance(spec, NamedOptimizer)}
PLANS = {  # from a pipeline to replicas and back, with blocks that freeze and thaw between
    0: plan(0, 0, [2, HEAD], 1, 2),
    2: plan(2, 2, [HEAD], 2, 1),
    4: plan(1, 0, [4, HEAD], 1, 2),
}


@pytest.mark.thinned("Adafactor", "muon", "own")
@pytest.mark.parametrize("name", [*NAMED, "own"])
def test_training_through_transitions_equals_one_process(
    name: str, pool: Pool, bert_config: Path, tmp_path: Path
) -> None:
    case = Case("bert", bert_config, optimizer=name, num_steps=6)
    trace = pool.run(2, train_elastic, case, PLANS, str(tmp_path))[0]
    assert_equal(trace, train_reference(case, {0: 0, 2: 2, 4: 1}))
    assert trace.moments, "what the optimizer remembers is compared, too"


@pytest.mark.parametrize("spec", NAMED.values(), ids=NAMED)
def test_an_optimizer_steps_as_its_library_has_it(spec: NamedOptimizer) -> None:
    ours, theirs = (nn.Linear(24, 32).double() for _ in range(2))
    theirs.load_state_dict(ours.state_dict())
    optimizer = replace(spec, ema_decay=None).build(ours.parameters())
    decays = ((theirs.weight, spec.weight_decay), (theirs.bias, 0.0))
    original = spec._build([{"params": [parameter], "weight_decay": decay} for parameter, decay in decays])
    assert optimizer is not None
    for step in range(5):
        for module in (ours, theirs):
            module.zero_grad()
            module(torch.full((2, 24), step + 1.0, dtype=torch.float64).cos()).square().sum().backward()
        optimizer.step()
        original.step()
    torch.testing.assert_close(ours.weight, theirs.weight, rtol=0, atol=1e-12)
    torch.testing.assert_close(ours.bias, theirs.bias, rtol=0, atol=1e-12)


RUN = (
    *TINY, "model.options={patch_size: 4, embed_dim: 16, depth: 4, num_heads: 2}", "epochs=2", "precision=float64",
    "optim.clip_norm=0.5", "freeze.interval=0.2",
)  # fmt: skip


@pytest.mark.thinned("adafactor")
@pytest.mark.parametrize("optimizer", ["optim=timm optim.name=adafactor", "optim=timm optim.name=adan"])
def test_a_run_goes_on_in_another_world(optimizer: str, pool: Pool, tmp_path: Path) -> None:
    run, prefixes = (*RUN, *optimizer.split(), "optim.lr=0.01"), [1, 2, 1]
    whole = pool.run(1, run_on, run, tmp_path / "whole", prefixes)[0]
    first = pool.run(2, run_on, (*run, "parallel=pipeline"), tmp_path / "run", prefixes, 3)
    ranks = pool.run(2, run_on, (*run, "parallel=data"), tmp_path / "run", prefixes, None, None)
    assert [rank.differences for rank in ranks] == [[], []]
    assert [*first[0].losses, *ranks[0].losses] == pytest.approx(whole.losses, rel=0, abs=1e-10)


def test_factored_moments_are_smaller_than_their_parameter() -> None:
    spec = TorchOptimizer(name="Adafactor", lr=0.1)
    assert (spec.is_elementwise, spec.state_factor) == (False, (256 + 160) / (256 * 160))


@pytest.mark.parametrize("name", ["Adagrad", "Adamax", "RAdam", "Rprop"])
def test_torchs_elementwise_optimizers_run_on_shards(name: str) -> None:
    spec = TorchOptimizer(name=name, lr=0.1)
    assert spec.is_elementwise
    spec.check_shards()


def test_gpu_generators_are_not_seeded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "manual_seed_all", None)
    assert TorchOptimizer(name="Adadelta", lr=0.1).is_elementwise


MIXING = ["adafactor", "lars", "muon", "clion", "adamp", "novograd"]


@pytest.mark.parametrize("name", MIXING)
def test_an_optimizer_that_mixes_the_numbers_of_a_parameter_does_not_run_on_shards(name: str) -> None:
    with pytest.raises(UserError, match=f"optim.name={name} updates a number by other numbers"):
        TimmOptimizer(name=name, lr=0.1).check_shards()


def test_an_optimizer_of_ones_own_that_mixes_the_numbers_of_a_parameter_does_not_run_on_parts() -> None:
    spec = OwnOptimizer(lr=0.1, by_norm=True)
    with pytest.raises(UserError, match="OwnOptimizer updates a number by other numbers"):
        spec.check_shards()
    with pytest.raises(UserError, match="OwnOptimizer needs each weight in one piece"):
        check_mesh(spec, compiles=False)
    OwnOptimizer(lr=0.1).check_shards()
    check_mesh(OwnOptimizer(lr=0.1), compiles=False)


@pytest.mark.parametrize("spec", [*NAMED.values(), OPTIMIZERS["own"]], ids=[*NAMED, "own"])
def test_the_state_takes_as_many_bytes_as_the_planner_is_told(spec: OptimizerSpec) -> None:
    weight = nn.Parameter(torch.randn(256, 160))
    optimizer = spec.build([weight])
    assert optimizer is not None
    weight.grad = torch.randn_like(weight)
    optimizer.step()
    assert all(isinstance(value, torch.Tensor) for value in optimizer.state[weight].values())
    assert sum(t.nbytes for t in optimizer.state[weight].values() if t.ndim) == spec.state_factor * weight.nbytes


@pytest.mark.parametrize(
    ("spec", "reason"),
    [
        (TorchOptimizer(name="LBFGS", lr=0.1), "takes the loss several times in a step"),
        (TorchOptimizer(name="SparseAdam", lr=0.1), "does not support dense gradients"),
        (TorchOptimizer(name="Muon", lr=0.1), "only supports 2D parameters"),
        (TimmOptimizer(name="adahessian", lr=0.1), "takes second derivatives"),
        (TimmOptimizer(name="kron", lr=0.1), "draws random numbers"),
        (TimmOptimizer(name="lamb", lr=0.1), "updates a parameter by other parameters"),
        (TorchOptimizer(name="Adam", lr=0.1, options={"betas": [2.0, 0.9]}), "Invalid beta parameter at index 0: 2.0"),
    ],
)
def test_an_optimizer_that_cannot_be_exact_is_refused_by_reason(spec: NamedOptimizer, reason: str) -> None:
    with pytest.raises(UserError, match=f"optim.name={spec.name} .*{reason}"):
        _ = spec.state_factor


def test_lamb_without_its_norm_over_all_parameters_is_taken() -> None:
    spec = TimmOptimizer(name="lamb", lr=0.1, options={"max_grad_norm": None})
    assert (spec.state_factor, spec.is_elementwise) == (2.0, False)


@pytest.mark.parametrize(
    ("library", "options", "words"),
    [
        (TorchOptimizer, {"name": "AdamMax"}, "optim.name=AdamMax is no optimizer of torch.optim; did you mean Adamax"),
        (TorchOptimizer, {"name": "adam"}, "did you mean .*Adam"),
        (TimmOptimizer, {"name": "lio"}, "optim.name=lio is no optimizer of timm; did you mean lion"),
        (TimmOptimizer, {"name": "lion", "options": {"beta": 1}}, "options.beta is no .* did you mean betas"),
        (TimmOptimizer, {"name": "lion", "options": {"lr": 1}}, "optim.options.lr is not an option: use optim.lr"),
        (TorchOptimizer, {"name": "Rprop", "weight_decay": 0.1}, "optim.name=Rprop has no weight decay"),
    ],
)
def test_a_wrong_name_or_option_is_answered_in_one_line(
    library: type[NamedOptimizer], options: dict[str, object], words: str
) -> None:
    with pytest.raises(UserError, match=words) as error:
        library(lr=0.1, **options)  # type: ignore[arg-type]
    assert "\n" not in str(error.value)


def test_the_names_are_those_of_the_libraries() -> None:
    from timm.optim import list_optimizers

    elsewhere = ("fused", "bnb")
    assert set(timm_optimizers()) == {name for name in list_optimizers() if not name.startswith(elsewhere)}
    theirs = {name for name, each in vars(torch.optim).items() if isinstance(each, type) and name != "Optimizer"}
    assert set(torch_optimizers()) == theirs


def test_names_are_read_without_torch() -> None:
    code = "import sys, pipetransformer as pt; pt.TimmOptimizer(name='lion', lr=1.0); print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
