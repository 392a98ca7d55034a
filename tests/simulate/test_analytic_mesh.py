"""What is counted of a layer on a mesh is what a rank of one has: its bytes, and those that it receives."""

from pathlib import Path

import pytest
from support.cases import Case
from support.mesh_profiles import mesh_profile
from support.pool import Pool

from pipetransformer.autopipe.profile import LayerShard, MeshProfile
from pipetransformer.mesh import StageMesh
from pipetransformer.simulate.analytic import WIDTHS, DeviceSpeed, TransformerShape
from pipetransformer.simulate.analytic_mesh import analytic_mesh_profile

SPEED = DeviceSpeed(flops_per_s=1e12, memory_bytes_per_s=1e11, launch_s=1e-4)
MESHES = [
    StageMesh(),
    StageMesh(tp=2),
    StageMesh(dp_shard=2),
    StageMesh(dp_shard=2, tp=2),
    StageMesh(tp=2, algorithm="2d"),
    StageMesh(dp_shard=2, tp=2, algorithm="2d"),
    StageMesh(tp=2, algorithm="3d"),
    StageMesh(dp_shard=2, tp=2, algorithm="3d"),
    StageMesh(cp=2),
    StageMesh(cp=2, tp=2),
]


def counted(case: Case, mesh: StageMesh, precision: str = "float64") -> MeshProfile:
    stack, (inputs, *_) = case.stack(), (case.split().inputs([0], None),)
    _, num_tokens, width = stack.hidden_shape(inputs)
    shape = TransformerShape(num_blocks=len(stack) - 2, hidden_size=width, num_heads=4, num_tokens=num_tokens)
    return analytic_mesh_profile(shape, SPEED, 2, WIDTHS[precision], mesh)


@pytest.mark.thinned
@pytest.mark.parametrize("width", [16, 48])
@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_a_block_that_is_counted_exchanges_what_one_that_is_measured_does(
    mesh: StageMesh, width: int, pool: Pool, bert_config: Path
) -> None:
    case = Case("vit" if mesh.cp == 1 else "vit_pooled", bert_config, width=width)  # 5 tokens, or 4: even
    own, measured = counted(case, mesh).layers[1], pool.run(1, mesh_profile, case, mesh)[0].layers[1]
    assert received(own, "forward") == pytest.approx(received(measured, "forward"))
    backward = [
        [sum(pair) for pair in zip(received(each, "input_grad"), received(each, "weight_grad"), strict=True)]
        for each in (own, measured)
    ]
    assert backward[0] == pytest.approx(backward[1])
    assert numbers(own) == numbers(measured)
    assert own.copied_bytes == measured.copied_bytes
    assert own.layer.parameter_bytes == measured.layer.parameter_bytes
    assert own.layer.output_bytes == measured.layer.output_bytes


@pytest.mark.parametrize("mesh", [StageMesh(tp=4), StageMesh(dp_shard=4), StageMesh(cp=4, reduce_dtype="precision")])
def test_so_does_one_in_16_bits(mesh: StageMesh, pool: Pool, bert_config: Path) -> None:
    case = Case("vit_pooled", bert_config, precision="bfloat16", num_heads=4)
    own, measured = counted(case, mesh, "bfloat16").layers[1], pool.run(1, mesh_profile, case, mesh)[0].layers[1]
    for name in ("forward", "input_grad", "weight_grad"):
        assert received(own, name) == pytest.approx(received(measured, name)), name
    assert numbers(own) == numbers(measured)


def numbers(shard: LayerShard) -> list[tuple[int, int]]:
    """Collectives and messages of each pass."""
    return [(each[0].number, each[1].number) for each in (shard.forward, shard.input_grad, shard.weight_grad)]


def received(shard: LayerShard, name: str) -> list[float]:
    """Bytes whatever the samples, and for each of them."""
    volumes = getattr(shard, name)
    return [sum(each.fixed_bytes for each in volumes), sum(each.sample_bytes for each in volumes)]


def test_the_work_of_a_part_is_its_share_of_the_whole(bert_config: Path) -> None:
    case = Case("vit", bert_config)
    whole, part = (counted(case, mesh).layers[1].layer for mesh in (StageMesh(), StageMesh(tp=2)))
    seconds = [layer.weight_grad.per_sample_s for layer in (whole, part)]
    assert seconds[0] == pytest.approx(2 * seconds[1])
