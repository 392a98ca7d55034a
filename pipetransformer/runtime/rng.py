"""Random numbers by sample, so that dropout is the same at every topology (design promise 1).

Each sample of the global batch has a stream for each layer, keyed by (seed, step, sample, layer). A random function
inside a layer draws row b of its mask from the stream of sample b. So it makes no difference which rank computes the
row, and with which others. A stream is a counter-based hash (like Philox and Threefry), so all rows are drawn at once::

    number i of a stream = hash(key of the stream xor word i of one fixed table)

What all samples have in common (:mod:`pipetransformer.models.shared_dropout`) draws from a stream of the step,
whose key comes with the key of each sample::

    key    step, 32 bits | sample, 32 bits

Where a run asks for the device's own numbers instead (``randomness=device``), :class:`DeviceRng` seeds the device's
generator. What a sample draws then depends on the micro-batch that it is in.
"""

import math
from collections.abc import Callable
from functools import cache, partial
from typing import Any, Protocol, Self

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from pipetransformer.models import shared_dropout

_MULTIPLIERS = (0x7FEB352D, 0x846CA68B - (1 << 32))  # of a 32-bit integer hash that mixes well, as signed numbers
_SHIFT = torch.tensor(15, dtype=torch.int32)
_MIN_TABLE = 1 << 12
_LOWER_HALF = (1 << 32) - 1
_NO_SAMPLE = np.uint64((1 << 64) - 1)  # in the place of a sample's id


class Randomness(Protocol):
    """A context in which layers draw random numbers, and which is told the layer that runs next."""

    def __enter__(self) -> Self: ...

    def __exit__(self, *_: object) -> None: ...

    def layer(self, index: int) -> None:
        """Begins the numbers of a layer."""
        ...


MakeRandomness = Callable[[Tensor], Randomness]
"""Makes the context of a micro-batch from its samples' keys (B,)."""


def make_randomness(kind: str, device: torch.device) -> MakeRandomness:
    """Returns what makes the random numbers of a micro-batch.

    Args:
        kind: ``sample`` or ``device``, see :class:`PerSampleRng` and :class:`DeviceRng`.
        device: Computes the layers.
    """
    return PerSampleRng if kind == "sample" else partial(DeviceRng, device=device)


def sample_keys(seed: int, step: int, ids: np.ndarray) -> Tensor:
    """Computes one key per sample from (seed, step, sample), shape (B,), int64: the upper half is that of the step."""
    of_step = _mix(np.uint64(step) ^ _mix(np.uint64(seed)))
    samples = _words(np.asarray(ids, dtype=np.uint64) ^ of_step).astype(np.int64) & _LOWER_HALF
    return torch.from_numpy((_words(_NO_SAMPLE ^ of_step).astype(np.int64) << 32) | samples)


def sample_words(keys: Tensor) -> Tensor:
    """Returns the lower halves of samples' keys (B,), which tell the samples of a step apart, (B, 1), int32."""
    return (keys << 32 >> 32).int()[:, None]


def _mix(value: Any) -> Any:
    """Applies the finalizer of splitmix64: close inputs give unrelated outputs."""
    with np.errstate(over="ignore"):
        value = np.asarray(value, dtype=np.uint64) + np.uint64(0x9E3779B97F4A7C15)
        value = (value ^ (value >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        value = (value ^ (value >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return value ^ (value >> np.uint64(31))


def _words(values: Any) -> np.ndarray:
    """Returns the upper halves of mixed 64-bit values, int32."""
    return (_mix(values) >> np.uint64(32)).astype(np.uint32).view(np.int32)


@cache
def layer_word(layer: int) -> int:
    """Returns what the streams of a layer differ in from those of others."""
    return int(_words(layer))


@cache
def _table(num_words: int, device: torch.device) -> Tensor:
    """Returns the fixed table of a stream's words, shape (num_words,), int32."""
    return torch.from_numpy(_words(np.arange(num_words))).to(device)


class PerSampleRng:
    """A context in which dropout, attention dropout and stochastic depth draw from the streams of the samples.

    Inside it torch's functions are replaced in the whole process. A ``TorchFunctionMode`` would be called for every
    function of torch and costs a small model 8 % of its step. :class:`RefuseOtherRandomness` finds random functions
    that this does not reach.

    Args:
        keys: Shape (B,), one key per row of the batch, from :func:`sample_keys`.
        layer: Index of the layer that runs first.
    """

    def __init__(self, keys: Tensor, layer: int = 0) -> None:
        self._samples = sample_words(keys)
        self._step = (keys[:1] >> 32).int()[:, None]
        self.layer(layer)

    def layer(self, index: int) -> None:
        """Starts the streams of the layer that runs next."""
        self._keys, self._shared_key = self._samples ^ layer_word(index), self._step ^ layer_word(index)
        self._num_drawn = 0  # of each stream

    def __enter__(self) -> Self:
        for (owner, name), replacement in _REPLACED.items():
            setattr(owner, name, replacement(self))
        return self

    def __exit__(self, *_: object) -> None:
        for (owner, name), original in _ORIGINAL.items():
            setattr(owner, name, original)

    def _dropout(self, x: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
        if not training or p == 0:
            return x
        times = Tensor.mul_ if inplace else Tensor.mul
        if p == 1:
            return times(x, 0)
        mask = self._fill(torch.empty_like(x, requires_grad=False), 1 - p)
        if x.dtype.itemsize < 4:  # in a mask of this type the factor would be rounded, always the same way
            return times(times(x, mask), 1 / (1 - p))
        return times(x, mask.mul_(1 / (1 - p)))

    def _draw_once(self, x: Tensor, p: float, training: bool) -> Tensor:
        """Dropout of a tensor without batch dimension, from the stream of the step."""
        own, self._keys = self._keys, self._shared_key
        try:
            return self._dropout(x[None], p, training)[0]
        finally:
            self._keys = own

    def _attention(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        if dropout_p == 0:
            return _ORIGINAL[F, "scaled_dot_product_attention"](
                query, key, value, attn_mask=attn_mask, is_causal=is_causal, scale=scale, enable_gqa=enable_gqa
            )
        if enable_gqa:  # several heads of queries share one of keys and values
            repeats = query.shape[-3] // key.shape[-3]
            key, value = key.repeat_interleave(repeats, -3), value.repeat_interleave(repeats, -3)
        scores = query @ key.transpose(-2, -1) * (1 / math.sqrt(query.shape[-1]) if scale is None else scale)
        return self._dropout(attention_weights(scores, attn_mask, is_causal), dropout_p) @ value

    def _fill(self, mask: Tensor, p: float) -> Tensor:
        """Fills row b of a mask (B, ...) with Bernoulli(p) numbers of sample b."""
        num_rows = len(self._keys)
        assert mask.shape[0] == num_rows, f"{tuple(mask.shape)} does not begin with the batch of {num_rows}"
        words = self._draw(mask.shape[1:], mask.device).view(mask.shape)
        # written as numbers: a mask of booleans takes three times as long to make and to multiply with
        return torch.lt(words, min(round(p * 2**32) - 2**31, 2**31 - 1), out=mask)

    def _draw(self, shape: torch.Size, device: torch.device) -> Tensor:
        """Draws the next numbers of each stream, (B, numbers of the shape), int32, uniform."""
        words = self._keys.to(device) ^ self._next_words(shape, device)
        for multiplier in _MULTIPLIERS:
            words ^= words >> _SHIFT  # fills up with the sign: the bit that this loses, the product makes up for
            words *= multiplier
        return words

    def _next_words(self, shape: torch.Size, device: torch.device) -> Tensor:
        """Returns the words of the next numbers of a stream, in a row, int32."""
        first, self._num_drawn = self._num_drawn, self._num_drawn + shape.numel()
        return _table(max(_MIN_TABLE, 1 << (self._num_drawn - 1).bit_length()), device)[first : self._num_drawn]


class DeviceRng:
    """A context in which layers draw from the device's own generator, seeded for each layer.

    Nothing of torch is replaced, so that the fast kernels of attention run also where it drops out, and a compiled
    block draws as well. The seed follows from (seed, step, first sample of the micro-batch, layer). So the numbers are
    the same in another run and after a resume whose micro-batches hold the same samples, whatever else their topology
    is, and others where batches are divided otherwise. The generator's own state comes back at the end.

    Args:
        keys: As for :class:`PerSampleRng`, in host memory, where reading one waits for no device.
        device: Its generator draws.
    """

    def __init__(self, keys: Tensor, device: torch.device) -> None:
        assert not keys.is_cuda, "reading a key would wait for the device"
        self._key, self._generator = np.int64(keys[0].item()).view(np.uint64), _generator(device)

    def layer(self, index: int) -> None:
        self._generator.manual_seed(int(_mix(self._key ^ _mix(np.uint64(index)))))

    def __enter__(self) -> Self:
        self._state = self._generator.get_state()
        return self

    def __exit__(self, *_: object) -> None:
        self._generator.set_state(self._state)


def _generator(device: torch.device) -> torch.Generator:
    if device.type != "cuda":
        return torch.default_generator
    return torch.cuda.default_generators[torch.cuda.current_device() if device.index is None else device.index]


def attention_weights(scores: Tensor, attn_mask: Tensor | None, is_causal: bool) -> Tensor:
    """Returns the softmax of scores (B, ..., L, S) under a mask as torch defines it.

    Args:
        scores: Of L queries and S keys.
        attn_mask: True where a query sees a key, or what is added to the scores. A query that sees no key gives 0.
        is_causal: Query i sees the keys up to i, in place of a mask.
    """
    assert attn_mask is None or not is_causal, "torch takes one of both"
    if is_causal:
        attn_mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
    if attn_mask is None:
        return scores.softmax(-1)
    seen = attn_mask if attn_mask.dtype == torch.bool else attn_mask != -math.inf
    if attn_mask is not seen:
        scores = scores + attn_mask.masked_fill(~seen, 0)
    sees_none = ~seen.any(-1, keepdim=True)  # (..., L, 1): a row of padding, whose softmax is NaN
    return scores.masked_fill(~seen, -math.inf).softmax(-1).masked_fill(sees_none, 0)


def _bernoulli(streams: PerSampleRng) -> Callable[[Tensor, float], Tensor]:
    return lambda mask, p=0.5: streams._fill(mask, p)  # a method: called with the tensor first


_REPLACED: dict[tuple[Any, str], Callable[[PerSampleRng], Callable[..., Tensor]]] = {
    (F, "dropout"): lambda streams: streams._dropout,
    (F, "scaled_dot_product_attention"): lambda streams: streams._attention,
    (Tensor, "bernoulli_"): _bernoulli,
    (shared_dropout, "draw_once"): lambda streams: streams._draw_once,
}
_ORIGINAL = {(owner, name): getattr(owner, name) for owner, name in _REPLACED}


class RefuseOtherRandomness(TorchFunctionMode):
    """A mode that refuses every random function that does not draw from the streams of :class:`PerSampleRng`.

    Raises:
        RuntimeError: One is called; its numbers would depend on the topology.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _RANDOM:
            raise RuntimeError(
                f"the model calls {func.__name__}, whose numbers would depend on the topology. Set the model option "
                "that uses it to 0 through model.options"
            )
        return func(*args, **kwargs)


_RANDOM = {
    torch.rand, torch.randn, torch.randint, torch.randperm, torch.rand_like, torch.randn_like, torch.bernoulli,
    torch.multinomial, torch.normal, torch.dropout, Tensor.uniform_, Tensor.normal_, Tensor.random_,
    Tensor.exponential_, Tensor.bernoulli_, F.dropout, F.alpha_dropout, F.feature_alpha_dropout, F.dropout1d,
    F.dropout2d, F.dropout3d,
}  # fmt: skip
