from dataclasses import replace

import pytest

from pipetransformer.simulate.analytic import WIDTHS, DeviceSpeed, TransformerShape, analytic_profile

VIT_BASE = TransformerShape(
    num_blocks=12,
    hidden_size=768,
    num_heads=12,
    num_tokens=197,
    token_values=768,
    num_embeddings=198,
    head_outputs=1000,
)
BERT_LARGE = TransformerShape(
    num_blocks=24, hidden_size=1024, num_heads=16, num_tokens=384, num_embeddings=31036, head_tokens=None
)
ONE_FLOP_PER_SECOND = DeviceSpeed(1.0, 1e9, 0.0)


@pytest.mark.parametrize(("shape", "parameters"), [(VIT_BASE, 86.57e6), (BERT_LARGE, 334e6)], ids=["vit", "bert"])
def test_parameters_are_those_of_the_published_models(shape: TransformerShape, parameters: float) -> None:
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


@pytest.mark.parametrize(("precision", "activation_bytes"), [("float32", 64), ("bfloat16", 36), ("float64", 128)])
def test_a_block_saves_for_each_token_and_channel_what_autograd_keeps(precision: str, activation_bytes: int) -> None:
    """Counted in a block of ViT and of BERT without attention scores, less the casts of weights and the norms' scales.

    Two inputs of norms stay wide; 14 numbers are read or given by products.
    """
    few_scores = replace(VIT_BASE, num_heads=1, num_tokens=1)
    block = analytic_profile(few_scores, ONE_FLOP_PER_SECOND, 2, WIDTHS[precision]).layers[1]
    assert block.activation_bytes / few_scores.hidden_size == pytest.approx(activation_bytes, rel=0.01)
    assert block.peak_forward_bytes == pytest.approx(block.activation_bytes / 2)


def test_the_softmax_is_kept_wide_and_once_more_as_the_product_reads_it() -> None:
    one, many = (replace(VIT_BASE, num_heads=heads) for heads in (1, 2))
    for precision, num_bytes in [("float32", 8), ("float16", 6), ("float64", 16)]:
        fewer, more = (
            analytic_profile(shape, ONE_FLOP_PER_SECOND, 2, WIDTHS[precision]).layers[1].activation_bytes
            for shape in (one, many)
        )
        assert more - fewer == num_bytes * VIT_BASE.num_tokens**2


def test_half_precision_copies_the_weights_of_products_and_nothing_else() -> None:
    layers = analytic_profile(VIT_BASE, ONE_FLOP_PER_SECOND, 2, WIDTHS["bfloat16"]).layers
    norms, positions = 4 * 768, 198 * 768
    weights = [layer.parameter_bytes / 4 for layer in layers]
    assert [layer.autocast_bytes for layer in layers] == [
        2 * (weights[0] - positions), *(2 * (block - norms) for block in weights[1:-1]), 2 * weights[-1],
    ]  # fmt: skip
    wide = analytic_profile(VIT_BASE, ONE_FLOP_PER_SECOND, 2).layers
    assert [(a.parameter_bytes, a.output_bytes, a.optimizer_s) for a in layers] == [
        (b.parameter_bytes, b.output_bytes, b.optimizer_s) for b in wide
    ]
