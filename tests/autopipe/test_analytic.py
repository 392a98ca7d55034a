from dataclasses import replace

import pytest

from pipetransformer.autopipe.analytic import Shape, Speed, analytic_profile

VIT_BASE = Shape(
    num_blocks=12,
    hidden_size=768,
    num_heads=12,
    num_tokens=197,
    token_values=768,
    num_embeddings=198,
    head_outputs=1000,
)
BERT_LARGE = Shape(
    num_blocks=24, hidden_size=1024, num_heads=16, num_tokens=384, num_embeddings=31036, head_tokens=None
)
ONE_FLOP_PER_SECOND = Speed(1.0, 1e9, 0.0)


@pytest.mark.parametrize(("shape", "parameters"), [(VIT_BASE, 86.57e6), (BERT_LARGE, 334e6)], ids=["vit", "bert"])
def test_parameters_are_those_of_the_published_models(shape: Shape, parameters: float) -> None:
    layers = analytic_profile(shape, ONE_FLOP_PER_SECOND, 2).layers
    assert sum(layer.parameter_bytes for layer in layers) / 4 == pytest.approx(parameters, rel=0.005)


def test_forward_work_is_that_of_the_published_model() -> None:
    layers = analytic_profile(VIT_BASE, ONE_FLOP_PER_SECOND, 2).layers
    assert sum(layer.forward.at(1) for layer in layers) == pytest.approx(2 * 17.56e9, rel=0.01)  # timm: 17.56 GMACs


def test_backward_is_twice_forward() -> None:
    block = analytic_profile(VIT_BASE, ONE_FLOP_PER_SECOND, 2).layers[1]
    assert block.input_grad.at(1) + block.weight_grad.at(1) == pytest.approx(2 * block.forward.at(1))


def test_launching_does_not_grow_with_the_samples() -> None:
    block = analytic_profile(VIT_BASE, replace(ONE_FLOP_PER_SECOND, launch_s=7.0), 2).layers[1]
    assert block.forward.at(0) == block.weight_grad.at(0) == 7.0


def test_an_empty_shape_is_refused() -> None:
    with pytest.raises(ValueError, match=r"shape\.hidden_size=0 must be above 0"):
        replace(VIT_BASE, hidden_size=0)
