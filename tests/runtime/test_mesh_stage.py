"""A stage on a mesh of ranks trains as one process does: 1, 2 and 3 dimensions, and around a ring (float64, 1e-10)."""

from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import timm
import torch
from support.cases import Case
from support.exactness import assert_equal
from support.mesh_mutations import MUTATIONS, is_equal_when_mutated, masks
from support.mesh_training import bytes_of_a_step, held_fraction, normed_in_parts, train_on_mesh
from support.pool import Pool
from support.trainings import train_reference
from timm.models import vision_transformer
from torch import Tensor, nn

from pipetransformer.errors import UserError
from pipetransformer.mesh import SINGLE, StageMesh
from pipetransformer.models.layer import Layer
from pipetransformer.models.split import split_widths
from pipetransformer.models.timm_layers import split_layers
from pipetransformer.models.tp_plan import parts
from pipetransformer.profiling.pretended import PretendedMesh
from pipetransformer.runtime.mesh import RankMesh
from pipetransformer.runtime.mesh_stage import MeshStage
from pipetransformer.runtime.precision import PRECISIONS
from pipetransformer.runtime.rng import sample_keys
from pipetransformer.runtime.tensor_parallel import shard_layer

MESHES = {
    "tp 2": StageMesh(tp=2),
    "dp_shard 2": StageMesh(dp_shard=2),
    "2d 1x2": StageMesh(tp=2, algorithm="2d"),
    "cp 2": StageMesh(cp=2),
    "cp 3": StageMesh(cp=3),
    "dp_shard 2 x tp 2": StageMesh(dp_shard=2, tp=2),
    "2d 2x2": StageMesh(dp_shard=2, tp=2, algorithm="2d"),
    "3d 1x2x2": StageMesh(tp=2, algorithm="3d"),
    "cp 2 x tp 2": StageMesh(cp=2, tp=2),
    "2d, cp 2 x tp 2": StageMesh(cp=2, tp=2, algorithm="2d"),
    "3d 2x2x2": StageMesh(dp_shard=2, tp=2, algorithm="3d"),
    "dp_shard 2 x cp 2 x tp 2": StageMesh(2, 2, 2),
}
PLAIN_NORM = partial(nn.LayerNorm, elementwise_affine=False)
NUM_STEPS = 3  # the last one has a smaller batch
KINDS = {  # of the meshes that test_mesh_matrix.py does not reach, and of one with each way to multiply
    "vit": ["tp 2", "2d, cp 2 x tp 2", "3d 1x2x2", "dp_shard 2 x cp 2 x tp 2"],
    "vit_map": ["cp 2"], "vit_gated": ["dp_shard 2 x tp 2", "2d, cp 2 x tp 2", "3d 1x2x2"],
}  # fmt: skip


@pytest.mark.thinned("vit_map", "vit_gated-dp", "vit_gated-2d")
@pytest.mark.parametrize(("kind", "name"), [(kind, name) for kind, names in KINDS.items() for name in names])
def test_a_mesh_trains_as_one_process_does(kind: str, name: str, pool: Pool, bert_config: Path) -> None:
    case, mesh = Case(kind, bert_config, dropout=0.2, num_steps=NUM_STEPS), MESHES[name]
    trace = pool.run(mesh.num_ranks, train_on_mesh, case, mesh)[0]
    assert_equal(trace, train_reference(case, {}))


@pytest.mark.thinned(1)
@pytest.mark.parametrize("mutation", MUTATIONS)
def test_a_broken_mesh_is_noticed(mutation: str, pool: Pool, bert_config: Path) -> None:
    mesh, _ = MUTATIONS[mutation]
    case = Case("vit", bert_config, dropout=0.2, num_steps=NUM_STEPS)
    reference = train_reference(case, {})
    assert not pool.run(mesh.num_ranks, is_equal_when_mutated, case, mutation, reference)[0]


@pytest.mark.thinned("[tp 2", "[dp_shard 2-7", "2d 2x2", "3d 1x2x2", "cp 2")
@pytest.mark.parametrize(
    ("name", "forward", "backward"),
    [
        ("tp 2", 64_000, 64_000),
        ("dp_shard 2", 73_728, 147_456),
        ("dp_shard 2 x tp 2", 68_864, 105_728),
        ("2d 2x2", 95_744, 186_368),
        ("3d 2x2x2", 82_432, 127_744),
        ("3d 1x2x2", 128_000, 181_760),
        ("cp 2", 27_648, 64_512),
        ("cp 3", 40_960, 90_112),
    ],
)
def test_a_rank_receives_the_bytes_of_the_formulas(
    name: str, forward: int, backward: int, pool: Pool, bert_config: Path
) -> None:
    mesh = MESHES[name]
    assert pool.run(mesh.num_ranks, bytes_of_a_step, Case("vit", bert_config), mesh)[0] == (forward, backward)


@pytest.mark.thinned("[tp 2", "x tp 2", "2d")
@pytest.mark.parametrize(
    ("name", "fraction"), [("tp 2", 0.515), ("dp_shard 2 x tp 2", 0.280), ("2d 2x2", 0.266), ("3d 2x2x2", 0.149)]
)
def test_a_rank_holds_its_part_of_the_blocks(name: str, fraction: float, pool: Pool, bert_config: Path) -> None:
    mesh = MESHES[name]
    held = pool.run(mesh.num_ranks, held_fraction, Case("vit", bert_config), mesh)
    assert held == pytest.approx([fraction] * mesh.num_ranks, abs=5e-4)


KEYS = sample_keys(1, 2, np.arange(4))


@pytest.mark.parametrize("algorithm", ["1d", "2d"])
def test_the_masks_of_a_mesh_are_the_whole_mask(algorithm: str) -> None:
    """(B, heads, queries, keys), (B, tokens, width) inside, and (B, tokens, width) between products."""
    mesh = StageMesh(cp=2, tp=2, algorithm=algorithm)  # type: ignore[arg-type]
    (whole,) = masks(SINGLE, KEYS, "inner", lambda tokens: (4, 4, tokens, 5), [5])
    own = masks(mesh, KEYS, "inner", lambda tokens: (4, 2, tokens, 5), [3, 2])
    rows = [torch.cat([own[2 * cp], own[2 * cp + 1]], 1) for cp in range(2)]
    assert torch.equal(torch.cat(rows, 2), whole)
    width = 8 if algorithm == "1d" else 4
    (whole,) = masks(SINGLE, KEYS, "hidden", lambda tokens: (4, tokens, 8), [5])
    own = masks(mesh, KEYS, "hidden", lambda tokens: (4, tokens, width), [3, 2])
    rows = [own[2 * cp] if algorithm == "1d" else torch.cat([own[2 * cp], own[2 * cp + 1]], -1) for cp in range(2)]
    assert torch.equal(torch.cat(rows, 1), whole)


def test_in_three_dimensions_each_side_of_a_product_draws_for_its_own_rows() -> None:
    mesh = StageMesh(tp=2, algorithm="3d")
    (whole,) = masks(SINGLE, KEYS, "hidden", lambda _: (4, 6, 8), [6])
    own = masks(mesh, KEYS, "hidden", lambda _: (2, 6, 4), [6])
    assert torch.equal(torch.cat([torch.cat([own[2 * y + z] for z in range(2)], -1) for y in range(2)]), whole)
    (whole,) = masks(SINGLE, KEYS, "inner", lambda _: (4, 2, 5, 5), [5])
    own = masks(mesh, KEYS, "inner", lambda _: (2, 1, 5, 5), [5])
    assert torch.equal(torch.cat([torch.cat([own[2 * y + z] for y in range(2)], 1) for z in range(2)]), whole)


def test_a_path_that_is_dropped_is_dropped_on_all_ranks() -> None:
    mesh = StageMesh(cp=2, tp=2)
    (whole,) = masks(SINGLE, KEYS, "hidden", lambda _: (4, 1, 1), [6])
    assert all(torch.equal(own, whole) for own in masks(mesh, KEYS, "hidden", lambda _: (4, 1, 1), [3, 3]))


def test_a_module_without_a_rule_is_refused_by_name(bert_config: Path) -> None:
    block = Case("vit", bert_config).stack()[1]
    block.module.attn.extra = nn.Linear(2, 2)  # type: ignore[union-attr]
    with pytest.raises(UserError, match=r"Linear \(attn.extra, parameters weight, bias\) has no rule"):
        parts(block.module, block.tp_plan or {})
    other = Layer(nn.Linear(2, 2), _call)
    with pytest.raises(UserError, match=r"no tp_plan says how Linear is split; run with parallel.tp=1"):
        shard_layer(other, RankMesh(SINGLE, 0, {}))


def test_a_parameter_beside_those_of_its_rule_is_refused_by_name(bert_config: Path) -> None:
    stack = Case("vit", bert_config).stack()
    stack[0].module.register_parameter("prompt", nn.Parameter(torch.zeros(1, 1, 16)))
    with pytest.raises(UserError, match=r"\(the layer itself, parameters prompt\) has no rule .* parallel.tp=1"):
        split_widths(stack)


def test_a_rule_that_does_not_exist_is_refused_with_those_that_do() -> None:
    with pytest.raises(UserError, match=r"tp_plan has 0: nrom, which is no rule; choose one of colwise, rowwise, "):
        parts(nn.Sequential(nn.LayerNorm(2)), {"0": "nrom"})


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (
            {"act_layer": partial(nn.Softmax, dim=-1)},
            r"Softmax \(mlp\.act, which mixes the columns of its input\) has no",
        ),
        ({"norm_layer": PLAIN_NORM, "scale_mlp_norm": True}, r"LayerNorm \(mlp\.norm, which mixes the columns"),
        ({"norm_layer": PLAIN_NORM, "act_layer": nn.SiLU, "qk_norm": True, "init_values": 0.1}, None),
    ],
)
def test_a_module_that_mixes_a_split_width_is_refused_where_it_has_no_rule(
    options: dict[str, Any], words: str | None
) -> None:
    sizes = {"patch_size": 4, "embed_dim": 16, "depth": 1, "num_heads": 2, "img_size": 8, "proj_drop_rate": 0.1}
    stack = split_layers(timm.create_model("vit_tiny_patch16_224", drop_path_rate=0.1, **sizes, **options))
    if words is None:
        assert split_widths(stack)["heads"] == 2
        return
    with pytest.raises(UserError, match=words):
        split_widths(stack)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"block_fn": vision_transformer.ParallelScalingBlock}, r"LayerNorm \(in_norm, parameters weight, bias\)"),
        (
            {"block_fn": vision_transformer.ParallelThingsBlock},
            r"LayerNorm \(attns\.0\.norm, parameters weight, bias\)",
        ),
        ({"attn_layer": "diff"}, r"DiffAttention \(attn, parameters lambda_q1, .*\)"),
    ],
)
def test_timms_other_blocks_are_refused_by_name(options: dict[str, Any], words: str) -> None:
    sizes = {"patch_size": 4, "embed_dim": 16, "depth": 1, "num_heads": 2, "img_size": 8}
    stack = split_layers(timm.create_model("vit_tiny_patch16_224", **sizes, **options))
    with pytest.raises(UserError, match=rf"{words} has no rule for tensor parallelism; run with parallel\.tp=1"):
        split_widths(stack)


@pytest.mark.parametrize("options", [{}, {"bias": False}, {"elementwise_affine": False}], ids=str)
def test_a_norm_over_a_split_width_is_that_over_the_whole(pool: Pool, options: dict[str, bool]) -> None:
    for own, expected in pool.run(2, normed_in_parts, options):
        torch.testing.assert_close(own, expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    ("rule", "module", "words"),
    [
        ("colwise", nn.Conv1d(2, 2, 1), "Conv1d and not an nn.Linear, and cannot be split; run with parallel.tp=1"),
        ("embedding", nn.Linear(2, 2), "Linear and not an nn.Embedding, and cannot be split; run with parallel.tp=1"),
        ("norm", nn.RMSNorm(2), "RMSNorm and not an nn.LayerNorm, .*; run with parallel.tp_algorithm=1d$"),
        (
            "norm",
            nn.RMSNorm(2, elementwise_affine=False),
            "RMSNorm and not an nn.LayerNorm, .* parallel.tp_algorithm=1d$",
        ),
        ("column_norm", nn.RMSNorm(2), "RMSNorm and not an nn.LayerNorm, .*; run with parallel.tp=1"),
    ],
)
def test_a_module_of_another_class_than_its_rule_is_for_is_refused(rule: str, module: nn.Module, words: str) -> None:
    layer = Layer(nn.Sequential(module), _call, tp_plan={"0": rule})
    with pytest.raises(UserError, match=f"0 is a {words}"):
        shard_layer(layer, RankMesh(StageMesh(tp=2, algorithm="2d"), 0, {}))


def _call(module: nn.Module, x: Tensor) -> Tensor:
    return module(x)


@pytest.mark.parametrize("kind", ["vit", "bert", "distilbert"])
def test_every_parameter_of_a_block_and_an_embedding_has_a_part(kind: str, bert_config: Path) -> None:
    stack = replace(Case(kind, bert_config)).stack()
    for index in range(len(stack) - 1):
        layer = stack[index]
        assert parts(layer.module, layer.tp_plan or {}).keys() == dict(layer.module.named_parameters()).keys()


@pytest.mark.parametrize(("mesh", "is_refused"), [(StageMesh(cp=2), True), (StageMesh(tp=2), False)], ids=str)
def test_attention_that_no_ring_goes_around_is_refused(mesh: StageMesh, is_refused: bool, bert_config: Path) -> None:
    """Its tokens would see those of their own rank alone."""
    stack = Case("vit", bert_config).stack()
    for module in stack[1].modules():
        if hasattr(module, "fused_attn"):
            module.fused_attn = False
    refused = pytest.raises(UserError, match=r"cp=2 .*attn computes its attention without")
    with refused if is_refused else nullcontext():
        shard_layer(stack[1], PretendedMesh(mesh))


def test_a_block_whose_heads_are_not_on_the_ring_is_refused_when_it_runs(bert_config: Path) -> None:
    """No attribute tells of a softmax by hand; a block without heads has nothing to pass around."""
    mesh, block = PretendedMesh(StageMesh(cp=2)), Case("vit", bert_config).stack()[1]
    shard_layer(block, mesh)
    block.module.attn.fused_attn = False  # type: ignore[union-attr]
    mesh.num_tokens, hidden = 5, torch.ones(2, 3, 16, dtype=torch.float64)
    for layer, refused in ((block, True), (Layer(nn.LayerNorm(16, dtype=torch.float64), _call), False)):
        stage = MeshStage({1: layer}, {1: [*layer.parameters()]}, PRECISIONS["float64"], False, mesh, 3)
        words = r"cp=2 splits the tokens, and layer 1 computes its attention without .*; call that, or take"
        with pytest.raises(UserError, match=words) if refused else nullcontext():
            stage(hidden, keys=sample_keys(0, 0, np.arange(2)))
