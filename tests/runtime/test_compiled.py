"""Compiled blocks train as the original model does, share their graphs, and keep them when blocks freeze."""

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo
from support.cases import Case
from support.compiling import train_compiled, train_with_frozen_graphs
from support.exactness import assert_equal
from support.jobs import loaded
from support.plans import HEAD, plan
from support.pool import Pool
from support.trainings import Plans, train_reference
from torch import Tensor, nn
from torch._dynamo.utils import counters

from pipetransformer.autopipe.plan import Plan
from pipetransformer.config.validate import validate
from pipetransformer.errors import UserError
from pipetransformer.models.layer import Layer
from pipetransformer.runtime import compiled
from pipetransformer.runtime.compiled import BlockCompiler

FREEZES = {0: 0, 2: 2, 3: 4, 4: 0, 5: 2}
ALONE: Plans = {step: plan(n, 0, [HEAD], 1, 2) for step, n in FREEZES.items()}
STAGES: Plans = {step: plan(n, 0, [4, HEAD], 1, 2) for step, n in FREEZES.items()}
RECOMPUTED: Plans = {step: Plan(n, 0, ((0, HEAD),), 1, 2, recompute=True) for step, n in FREEZES.items()}
CACHED: Plans = {0: plan(0, 0, [HEAD], 2, 1), 2: plan(2, 2, [HEAD], 2, 1), 4: plan(4, 4, [HEAD], 2, 1)}


def case_of(kind: str, folder: Path, dropout: float = 0.0, **options: Any) -> Case:
    return Case(kind, folder, dropout, num_samples=24, parks=True, **{"compiles": True, **options})


def test_freezing_and_unfreezing_makes_each_graph_once(pool: Pool, bert_config: Path, tmp_path: Path) -> None:
    case = case_of("vit", bert_config)
    ((trace, graphs),) = pool.run(1, train_compiled, case, ALONE, str(tmp_path), "aot_eager")
    assert_equal(trace, train_reference(case, FREEZES))
    # all blocks train; then frozen ones, and the lowest active one, whose input takes no gradient; then nothing new
    assert graphs == [1, 1, 3, 3, 3, 3, 3]


@pytest.mark.thinned("plans1", "plans2")
@pytest.mark.parametrize(("world", "plans"), [(2, STAGES), (1, RECOMPUTED), (2, CACHED)])
def test_compiled_blocks_train_as_the_original_model_at_any_topology(
    world: int, plans: Plans, pool: Pool, bert_config: Path, tmp_path: Path
) -> None:
    case = case_of("vit", bert_config)
    trace, _ = pool.run(world, train_compiled, case, plans, str(tmp_path))[0]
    assert_equal(trace, train_reference(case, {step: each.num_frozen for step, each in plans.items()}))


def test_blocks_that_draw_by_sample_train_as_they_are(pool: Pool, bert_config: Path, tmp_path: Path) -> None:
    case = case_of("bert", bert_config, 0.2)
    ((trace, graphs),) = pool.run(1, train_compiled, case, ALONE, str(tmp_path))
    assert_equal(trace, train_reference(case, FREEZES))
    assert graphs[:3] == [0, 0, 1], "frozen blocks alone are compiled"


def test_blocks_that_draw_by_the_device_are_compiled(pool: Pool, bert_config: Path, tmp_path: Path) -> None:
    plain, compiled = (case_of("bert", bert_config, 0.2, randomness="device", compiles=each) for each in (False, True))
    ((trace, graphs),) = pool.run(1, train_compiled, compiled, ALONE, str(tmp_path))
    assert graphs[:3] == [1, 1, 3]
    assert_equal(trace, pool.run(1, train_compiled, plain, ALONE, str(tmp_path))[0][0])


def test_the_comparison_notices_a_graph_of_frozen_weights(pool: Pool, bert_config: Path, tmp_path: Path) -> None:
    case = case_of("vit", bert_config)
    (trace,) = pool.run(1, train_with_frozen_graphs, case, ALONE, str(tmp_path))
    with pytest.raises(AssertionError):
        assert_equal(trace, train_reference(case, FREEZES))


def run_block(module: nn.Module, x: Tensor, scale: Tensor | None = None, **_: Any) -> Tensor:
    y = module(x)
    return x + (y if scale is None else y * scale[:, None, None])


@pytest.fixture
def compiler(monkeypatch: pytest.MonkeyPatch) -> BlockCompiler:
    monkeypatch.setattr(compiled, "BACKEND", "eager")
    torch._dynamo.reset()
    counters.clear()
    return BlockCompiler(num_layers=5)


def num_graphs() -> int:
    return counters["stats"]["unique_graphs"]


def test_batches_of_any_size_and_texts_of_any_length_share_three_graphs(compiler: BlockCompiler) -> None:
    layers = [Layer(nn.Linear(4, 4), run_block) for _ in range(3)]
    for batch_size, num_tokens in [(4, 8), (4, 16), (4, 24), (3, 8), (6, 40), (6, 8), (5, 56)]:
        x = torch.randn(batch_size, num_tokens, 4)
        for index, layer in enumerate(layers, 1):
            scale = torch.ones(batch_size)
            torch.testing.assert_close(compiler.call(index, layer)(x, scale=scale), layer(x, scale=scale))
    assert num_graphs() == 3, "one of the first length, then of any length, then of any batch"


def test_weights_that_freeze_in_a_part_of_a_block_get_a_graph_of_their_own(compiler: BlockCompiler) -> None:
    layer, x = Layer(nn.Linear(4, 4), run_block), torch.randn(2, 8, 4)
    weight, bias = layer.parameters()
    for trains in (True, False, True):
        weight.requires_grad_(trains)
        weight.grad = bias.grad = None
        compiler.call(1, layer)(x).sum().backward()
        assert (weight.grad is not None) == trains
        assert bias.grad is not None
    assert num_graphs() == 2


def test_torchs_advice_to_round_float32_is_not_handed_on() -> None:
    """Torch 2.11 warns on a GPU."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        BlockCompiler(num_layers=5)
        warnings.warn(
            "TensorFloat32 tensor cores for float32 matrix multiplication available but not enabled. Consider setting "
            "`torch.set_float32_matmul_precision('high')` for better performance.",
            stacklevel=1,
        )


def test_embedding_and_head_run_as_they_are(compiler: BlockCompiler) -> None:
    layer = Layer(nn.Linear(4, 4), run_block)
    assert [compiler.call(index, layer) is layer for index in range(5)] == [True, False, False, False, True]


def test_a_block_that_is_no_single_graph_is_refused_by_name(compiler: BlockCompiler) -> None:
    class Branching(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return x if x.sum() > 0 else -x

    call = compiler.call(1, Layer(Branching(4, 4), run_block))
    with pytest.raises(UserError, match=r"Branching does not compile to one graph .* take compile=false"):
        call(torch.ones(2, 3, 4))


def test_sharded_layers_are_not_compiled() -> None:
    with pytest.raises(UserError, match="compile=true does not go with parallel=sharded"):
        validate(loaded("compile=true", "parallel=sharded"))
