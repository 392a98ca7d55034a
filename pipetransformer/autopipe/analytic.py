"""A profile from counted work: what a model's layers would take on a device that is not there.

Counts the work of matrix products and nothing else (normalisation, activation functions and softmax are part of the
stated efficiency). With ``T`` tokens of width ``h`` and an MLP ``r`` times as wide, per sample::

    linear     T h^2 (4 + 2 r)   multiply-adds; forward, input gradient and weight gradient each
    attention  2 T^2 h           multiply-adds; forward, and twice in the input gradient; it has no weights
"""

from dataclasses import dataclass
from math import inf

from pipetransformer.autopipe.cost import LayerProfile, Profile, Time

BYTES = 4  # of a float32
_ADAM_PASSES = 7  # reads gradient, weight and two moments, writes weight and two moments


@dataclass(frozen=True, kw_only=True)
class Shape:
    """What the cost of a Transformer depends on.

    Attributes:
        num_blocks: Blocks, ``L``.
        hidden_size: Width of the hidden state, ``h``.
        num_heads: Attention heads; their scores are kept for backward.
        mlp_ratio: Width of the MLP over ``h``, ``r``.
        num_tokens: Tokens of a sample, class token and padding included, ``T``.
        token_values: Numbers that the embedding projects for each token: a patch's pixels, 0 for word ids.
        num_embeddings: Rows of the embedding tables: words, positions and token types.
        head_outputs: Columns of the head.
        head_tokens: Tokens that the head reads; ``None`` reads all.
    """

    num_blocks: int
    hidden_size: int
    num_heads: int
    num_tokens: int
    mlp_ratio: float = 4.0
    token_values: int = 0
    num_embeddings: int = 0
    head_outputs: int = 2
    head_tokens: int | None = 1

    def __post_init__(self) -> None:
        for name in ("num_blocks", "hidden_size", "num_heads", "num_tokens", "mlp_ratio", "head_outputs"):
            if getattr(self, name) <= 0:
                raise ValueError(f"shape.{name}={getattr(self, name)} must be above 0")


@dataclass(frozen=True)
class Speed:
    """What a device does in a second.

    Attributes:
        flops_per_s: Floating-point operations of matrix products, as reached and not as advertised.
        memory_bytes_per_s: Between the device's memory and its processors; bounds the optimizer.
        launch_s: Launching one layer's kernels, for each of forward, input gradient and weight gradient.
        cache_bytes_per_s: Reading cached features, before computing with them.
    """

    flops_per_s: float
    memory_bytes_per_s: float
    launch_s: float
    cache_bytes_per_s: float = inf


def analytic_profile(shape: Shape, speed: Speed, state_factor: float) -> Profile:
    """The layers of a model: embedding, blocks, head.

    Args:
        state_factor: Bytes of optimizer state per byte of parameters.
    """
    blocks = tuple(_block(shape, speed, f"block {index + 1}") for index in range(shape.num_blocks))
    layers = (_embedding(shape, speed), *blocks, _head(shape, speed))
    return Profile(layers, state_factor, 1 / speed.cache_bytes_per_s)


def _block(shape: Shape, speed: Speed, name: str) -> LayerProfile:
    tokens, width, ratio = shape.num_tokens, shape.hidden_size, shape.mlp_ratio
    weights = width * width * (4 + 2 * ratio)
    linear, attention = tokens * weights, 2 * tokens * tokens * width
    # kept for backward: inputs of the norms, of the four projections and of the activation, and the softmax twice
    saved = tokens * width * (8 + 2 * ratio) + 2 * shape.num_heads * tokens * tokens
    work = (linear + attention, linear + 2 * attention, linear)
    return _layer(speed, name, work, weights + width * (9 + ratio), saved, tokens * width)


def _embedding(shape: Shape, speed: Speed) -> LayerProfile:
    linear = shape.num_tokens * shape.token_values * shape.hidden_size
    parameters = (shape.token_values + shape.num_embeddings) * shape.hidden_size
    output = shape.num_tokens * shape.hidden_size
    return _layer(speed, "embedding", (linear, 0.0, linear), parameters, output, output)


def _head(shape: Shape, speed: Speed) -> LayerProfile:
    tokens = shape.head_tokens or shape.num_tokens
    weights = shape.hidden_size * shape.head_outputs
    outputs = tokens * shape.head_outputs
    return _layer(speed, "head", (tokens * weights,) * 3, weights, shape.num_tokens * shape.hidden_size, outputs)


def _layer(
    speed: Speed, name: str, work: tuple[float, float, float], parameters: float, saved: float, output: float
) -> LayerProfile:
    """A layer from its multiply-adds per sample (forward, input and weight gradient) and its numbers in memory."""
    forward, input_grad, weight_grad = (Time(speed.launch_s, 2 * count / speed.flops_per_s) for count in work)
    return LayerProfile(
        name,
        forward,
        input_grad,
        weight_grad,
        optimizer_s=_ADAM_PASSES * parameters * BYTES / speed.memory_bytes_per_s,
        parameter_bytes=round(parameters * BYTES),
        saved_bytes=round(saved * BYTES),
        output_bytes=round(output * BYTES),
        working_bytes=round(saved * BYTES / 2),  # half of it has served its turn when the other half is made
    )
