"""A profile from counted work: the time of a model's layers on a device that is not there.

Counts the work of matrix products and nothing else (normalisation, activation functions and softmax are part of the
stated efficiency). With ``T`` tokens of width ``h`` and an MLP ``r`` times as wide, per sample::

    linear     T h^2 (4 + 2 r)   multiply-adds; forward, input gradient and weight gradient each
    attention  2 T^2 h           multiply-adds; forward, and twice in the input gradient; it has no weights

Under autocast the inputs and outputs of a matrix product are narrow, and each weight of one has a narrow copy while its
layer trains. Norms and softmax read and give wide numbers, and so does a layer as a whole. The copies that a frozen
layer makes of its weights, one product at a time, are left out.
"""

from dataclasses import dataclass
from math import inf

from pipetransformer.autopipe.profile import AffineTime, LayerProfile, Profile
from pipetransformer.errors import UserError


@dataclass(frozen=True, kw_only=True)
class TransformerShape:
    """The sizes that the cost of a Transformer depends on.

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
        has_tp_plan: A mesh can split its layers.
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
    has_tp_plan: bool = True

    def __post_init__(self) -> None:
        above_zero = "num_blocks", "hidden_size", "num_heads", "num_tokens", "mlp_ratio", "head_outputs", "head_tokens"
        for name in (*above_zero, "token_values", "num_embeddings"):
            value = getattr(self, name)
            if value is not None and not (0 < value < inf or (value == 0 and name not in above_zero)):
                raise UserError(f"shape.{name}={value} must be {'above 0' if name in above_zero else '0 or more'}")


@dataclass(frozen=True)
class DtypeBytes:
    """The bytes of a number.

    Attributes:
        wide: Of weights, optimizer state and everything that goes between layers.
        narrow: Of what matrix products read and give.
    """

    wide: int = 4
    narrow: int = 4


WIDTHS = {
    "float32": DtypeBytes(4, 4),
    "float64": DtypeBytes(8, 8),
    "bfloat16": DtypeBytes(4, 2),
    "float16": DtypeBytes(4, 2),
}
"""By the names of :data:`pipetransformer.config.schema.PRECISIONS`."""


@dataclass(frozen=True)
class DeviceSpeed:
    """The speed of a device.

    Attributes:
        flops_per_s: Floating-point operations of matrix products in their type, as reached and not as advertised.
        memory_bytes_per_s: Between the device's memory and its processors; bounds the optimizer.
        launch_s: Launching one layer's kernels, for each of forward, input gradient and weight gradient.
        cache_bytes_per_s: Reading cached features, before computing with them.
    """

    flops_per_s: float
    memory_bytes_per_s: float
    launch_s: float
    cache_bytes_per_s: float = inf


@dataclass(frozen=True)
class LayerCounts:
    """The counted work and sizes of a layer.

    Attributes:
        work: Multiply-adds per sample: forward, input gradient and weight gradient.
        parameters: Of the layer.
        multiplied: Those of them that matrix products read.
        saved_wide, saved_narrow: Numbers that are kept for backward, per sample, by their :class:`DtypeBytes`.
        output: Numbers of the output, per sample.
        largest: Parameters of its largest matrix.
        loss: Numbers that the loss keeps for backward, per sample.
    """

    work: tuple[float, float, float]
    parameters: float
    multiplied: float
    saved_wide: float
    saved_narrow: float
    output: float
    largest: float
    loss: float = 0.0


def analytic_profile(
    shape: TransformerShape, speed: DeviceSpeed, state_factor: float, widths: DtypeBytes = WIDTHS["float32"]
) -> Profile:
    """Returns the profile of a model: embedding, blocks, head.

    Args:
        state_factor: Bytes of optimizer state per byte of parameters.
        widths: Of numbers in the precision that ``speed`` holds for.
    """
    block = block_counts(shape)
    counted = {"embedding": embedding_counts(shape)}
    counted |= {f"block {index + 1}": block for index in range(shape.num_blocks)} | {"head": head_counts(shape)}
    layers = tuple(layer_profile(speed, widths, name, counts, state_factor) for name, counts in counted.items())
    return Profile(layers, state_factor, 1 / speed.cache_bytes_per_s)


def block_counts(shape: TransformerShape) -> LayerCounts:
    """Counts a block."""
    tokens, width, ratio = shape.num_tokens, shape.hidden_size, shape.mlp_ratio
    weights = width * width * (4 + 2 * ratio)
    linear, attention = tokens * weights, 2 * tokens * tokens * width
    scores = shape.num_heads * tokens * tokens
    return LayerCounts(
        work=(linear + attention, linear + 2 * attention, linear),
        parameters=weights + width * (9 + ratio),
        multiplied=weights + width * (5 + ratio),  # all but those of the norms
        saved_wide=tokens * width * 2 + scores,  # inputs of the norms, and the softmax
        # inputs of the four projections, of the attention and of the activation, and the softmax again as it is read
        saved_narrow=tokens * width * (6 + 2 * ratio) + scores,
        output=tokens * width,
        largest=width * width * max(1.0, ratio),
    )


def embedding_counts(shape: TransformerShape) -> LayerCounts:
    """Counts the embedding."""
    weights = shape.token_values * shape.hidden_size
    linear, output = shape.num_tokens * weights, shape.num_tokens * shape.hidden_size
    parameters = weights + shape.num_embeddings * shape.hidden_size
    largest = max(weights, parameters - weights)
    return LayerCounts((linear, 0.0, linear), parameters, weights, output, 0.0, output, largest)


def head_counts(shape: TransformerShape) -> LayerCounts:
    """Counts the head with the loss, which keeps its outputs and their logarithms."""
    tokens = shape.head_tokens or shape.num_tokens
    weights = shape.hidden_size * shape.head_outputs
    hidden, outputs = shape.num_tokens * shape.hidden_size, tokens * shape.head_outputs
    return LayerCounts((tokens * weights,) * 3, weights, weights, hidden, 0.0, outputs, weights, 2 * outputs)


def layer_profile(
    speed: DeviceSpeed, widths: DtypeBytes, name: str, counts: LayerCounts, state_factor: float
) -> LayerProfile:
    """Returns the profile of a layer that has been counted.

    Its optimizer reads gradient, weight and state, and writes weight and state. In the lowest layer that trains the
    gradient is held to go down to the input, as it does to the norms in front of a product.
    """
    forward, input_grad, weight_grad = (
        AffineTime(speed.launch_s, 2 * count / speed.flops_per_s) for count in counts.work
    )
    has_input_grad = counts.work[1] > 0
    parameter_bytes = counts.parameters * widths.wide
    activation_bytes = counts.saved_wide * widths.wide + counts.saved_narrow * widths.narrow
    loss_bytes = counts.loss * widths.wide  # as many as the gradients of both
    return LayerProfile(
        name,
        forward,
        input_grad,
        weight_grad,
        lowest_grad=input_grad + weight_grad if has_input_grad else weight_grad,
        optimizer_s=(3 + 2 * state_factor) * parameter_bytes / speed.memory_bytes_per_s,
        parameter_bytes=round(parameter_bytes),
        activation_bytes=round(activation_bytes),
        output_bytes=round(counts.output * widths.wide),
        # gradients of activations, whose turn passes like theirs
        peak_backward_bytes=round(activation_bytes / 2 + loss_bytes),
        peak_forward_bytes=round(activation_bytes / 2),  # half of it has served its turn when the other half is made
        autocast_bytes=round(counts.multiplied * widths.narrow) if widths.narrow != widths.wide else 0,
        peak_backward_fixed_bytes=round(counts.largest * widths.wide),
        loss_bytes=round(loss_bytes),
    )
