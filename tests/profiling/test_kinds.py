"""Layers of one kind are measured once, and a head that looks like a block is none of its kind."""

from support.alike import measured, stack_of
from support.pool import Pool

from pipetransformer.models.stack import ParamRef
from pipetransformer.profiling.layers import kinds_of_layers


def test_a_kind_has_the_shapes_and_the_parameters_that_train_and_a_head_is_alone() -> None:
    first, second, wide, head = kinds_of_layers(stack_of(3, 3, 3, 5, 5))
    assert first == second != wide != head
    first, block, head = kinds_of_layers(stack_of(3, 3, 3, 3))
    assert first == block != head, "it has the loss as well"
    stack = stack_of(3, 3, 3, 3)
    stack.fixed = frozenset({ParamRef(0, "weight")})
    fixed, trained, _ = kinds_of_layers(stack)
    assert fixed != trained


def test_a_head_that_looks_like_a_block_is_measured_with_the_loss(pool: Pool) -> None:
    ((*_, block, head),) = pool.run(1, measured)
    assert block.loss_bytes == 0 < head.loss_bytes
