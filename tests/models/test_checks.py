"""Layers that cannot run on a part of the batch are found, whatever library they come from."""

import random
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import dropout

from pipetransformer.errors import UserError
from pipetransformer.models.checks import check_same_outputs, where_padding_counts
from pipetransformer.models.stack import Layer, LayerStack
from pipetransformer.models.without_dropout import WithoutDropout
from pipetransformer.runtime import rng


class Block(nn.Module):
    """A block of width 8 with dropout and a buffer that stays as it is."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.dropout = nn.Linear(8, 8), nn.Dropout(0.5)
        self.register_buffer("scale", torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.scale * self.dropout(self.linear(x))


class Mixing(Block):
    """A block that adds the mean over the batch."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + x.mean(0)


class Counting(Block):
    """A block that counts its training passes."""

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.scale += 1
        return super().forward(x)


class Growing(Block):
    """A block that counts its passes beside its buffers."""

    num_passes = 0

    def forward(self, x: Tensor) -> Tensor:
        self.num_passes += 1
        return super().forward(x) * self.num_passes


class Noisy(Block):
    """A block with noise of its own."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + torch.randn_like(x)


class Hidden(nn.Module):
    """A block with dropout whose rate no attribute tells."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return x + nn.functional.dropout(self.linear(x), 0.25, self.training)


class ByName(Block):
    """A block that runs a function on its linear layer's outputs."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return x + self.function(self.linear(x))


class Attending(Block):
    """A block with torch's attention, which gives the weights unless it is told not to."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.attention, self.options = nn.MultiheadAttention(8, 2, dropout=0.3, batch_first=True), options

    def forward(self, x: Tensor) -> Tensor:
        return x + self.attention(x, x, x, **self.options)[0]


class TokensFirst(Block):
    """A block whose dropout gets the tokens first."""

    def forward(self, x: Tensor) -> Tensor:
        return x + self.dropout(self.linear(x).transpose(0, 1)).transpose(0, 1)


class Pair(Block):
    """A block that returns its attention, too, as many do."""

    def forward(self, x: Tensor) -> Any:
        return super().forward(x), None


class Narrowing(Block):
    """A block that drops a token."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x)[:, 1:]


def run(module: nn.Module, x: Tensor, **_: Any) -> Tensor:
    return module(x)


def stack_with(block: nn.Module, embedding: nn.Module | None = None) -> LayerStack:
    modules = [embedding or nn.Linear(4, 8), block, nn.Linear(8, 3)]
    return LayerStack(
        [Layer(m, run, f"part.{i}.") for i, m in enumerate(modules)], lambda x: torch.Size((*x.shape[:2], 8))
    )


INPUTS = torch.randn(4, 5, 4, generator=torch.Generator().manual_seed(0))


def test_blocks_with_dropout_pass_and_keep_their_mode() -> None:
    stack = stack_with(Block())
    stack[2].eval()

    stack.check(INPUTS)

    assert [layer.training for layer in stack.layers] == [True, True, False]


@pytest.mark.parametrize(
    ("block", "message"),
    [
        (nn.BatchNorm1d(5), r"part\.1 \(BatchNorm1d\) changes its buffer running_mean in training"),
        (nn.Sequential(Block(), Counting()), r"part\.1\.1 \(Counting\) changes its buffer scale in training"),
        (
            nn.BatchNorm1d(5, track_running_stats=False),
            r"layer 1 \(part\.1, BatchNorm1d\) mixes the samples of a batch",
        ),
        (Mixing(), r"layer 1 \(part\.1, Mixing\) mixes the samples of a batch"),
        (
            Growing(),
            r"layer 1 .* draws random numbers .*; or it keeps something from one pass to the next, as a count$",
        ),
        (Noisy(), r"layer 1 .* draws random numbers that are not dropout's"),
        (ByName(dropout), r"layer 1 .* by a function that it imports by its name; .* use nn\.Dropout"),
        (ByName(partial(torch.dropout, p=0.1, train=True)), r"layer 1 .* draws random numbers that are not dropout's"),
        (ByName(lambda x: x.bernoulli_(torch.full_like(x, 0.9))), r"layer 1 .* draws random numbers that are not"),
        (ByName(lambda x: x if random.random() < 0.99 else x * 0), r"layer 1 .* draws random numbers that are not"),
        (Attending(), r"layer 1 .* gives dropout a tensor whose first dimension is 8 and not .* need_weights=False"),
        (TokensFirst(), r"layer 1 .* first dimension is 5 and not the batch of 4, .* keep samples first"),
        (Hidden(), r"layer 1 .* draws dropout of rate 0\.25 that no attribute tells, .* use nn\.Dropout"),
        (
            nn.Sequential(nn.ReLU(inplace=True), Block()),
            r"layer 1 .* changes its input in place, .* make it without inplace=True",
        ),
        (nn.Sequential(nn.Dropout(0.1, inplace=True), Block()), r"layer 1 .* changes its input in place"),
        (
            Pair(),
            r"layer 1 \(part\.1, Pair\) returns a tuple, and one tensor goes from layer to layer; return that alone",
        ),
        (Narrowing(), r"layer 1 .* gives \(4, 4, 8\); between layers .* \(4, 5, 8\)"),
    ],
)
def test_a_layer_that_would_train_otherwise_in_micro_batches_is_refused_by_name(block: nn.Module, message: str) -> None:
    with pytest.raises(UserError, match=message):
        stack_with(block).check(INPUTS)


@pytest.mark.parametrize("block", [Block(), Attending(need_weights=False)])
def test_tokens_first_are_noticed_where_they_are_as_many_as_the_samples(block: nn.Module) -> None:
    stack_with(block).check(INPUTS[:, :4])
    with pytest.raises(UserError, match="first dimension is 4 and not the batch of 2"):
        stack_with(TokensFirst()).check(INPUTS[:, :4])


def test_a_trial_leaves_out_what_the_runtime_draws_by_sample_and_nothing_else() -> None:
    assert WithoutDropout()._replaced.keys() == rng._REPLACED.keys()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"max_norm": 0.5},
            r"part\.0 \(Embedding\) has max_norm=0\.5, which changes weights .*; make it without max_",
        ),
        ({"scale_grad_by_freq": True}, r"part\.0 \(Embedding\) has scale_grad_by_freq=True, which counts the rows"),
        ({"sparse": True}, r"part\.0 \(Embedding\) has sparse=True, which gives sparse gradients"),
    ],
)
def test_a_table_that_looks_at_the_rows_of_a_micro_batch_is_refused(options: dict[str, Any], message: str) -> None:
    stack = stack_with(Block(), nn.Embedding(5, 8, **options))
    before = stack[0].module.weight.clone()
    with pytest.raises(UserError, match=message):
        stack.check(torch.arange(20).reshape(4, 5) % 5)
    assert torch.equal(stack[0].module.weight, before)


def test_a_weight_that_a_pass_changes_is_refused() -> None:
    class Renormed(nn.Embedding):
        def forward(self, ids: Tensor) -> Tensor:
            return nn.functional.embedding(ids, self.weight, max_norm=0.5)

    with pytest.raises(UserError, match=r"layer 0 .* changes its weight part\.0\.weight in a forward pass"):
        stack_with(Block(), Renormed(5, 8)).check(torch.arange(20).reshape(4, 5) % 5)


def test_buffers_are_put_back() -> None:
    block = Counting()

    with pytest.raises(UserError, match="changes its buffer"):
        stack_with(block).check(INPUTS)

    assert torch.equal(block.scale, torch.ones(1))


@pytest.mark.parametrize(
    ("differs", "message"),
    [
        (lambda model, x: x, None),
        (lambda model, x: x * 2 if model.training else x, "in training mode"),
        (lambda model, x: x if model.training else x * 2, "in evaluation mode"),
        (lambda model, x: x + torch.arange(4).eq(3)[:, None, None], "for 1 of 4 samples in training mode"),
        (lambda model, x: x[..., :2], r"\(shape \(4, 5, 3\) in place of \(4, 5, 2\)\)"),
    ],
)
def test_a_stack_that_computes_something_else_is_found(differs: Any, message: str | None) -> None:
    stack = stack_with(Block())
    model = nn.Sequential(*(layer.module for layer in stack.layers))

    def check() -> None:
        check_same_outputs(stack, model, lambda x: differs(model, model(x)), INPUTS)

    if message is None:
        check()
        return
    with pytest.raises(UserError, match=message):
        check()


class OfOneLength(Block):
    """A block that knows the number of tokens, three."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + x.reshape(len(x), 3, 8)


class Asserting(Block):
    """A block that asserts its number of tokens, three."""

    def forward(self, x: Tensor) -> Tensor:
        assert x.shape[1] == 3
        return super().forward(x)


class Mean(nn.Linear):
    """A head that averages over tokens, those of the text alone where it is given the mask."""

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        weights = torch.ones_like(x[..., :1]) if mask is None else mask[..., None].to(x.dtype)
        return super().forward((weights * x).sum(1) / weights.sum(1))


def attend_masked(block: nn.Module, x: Tensor, attention_mask: Tensor, **_: Any) -> Tensor:
    return block(x, src_key_padding_mask=~attention_mask)


def run_masked(head: nn.Module, x: Tensor, attention_mask: Tensor, **_: Any) -> Tensor:
    return head(x, attention_mask)


@pytest.mark.parametrize("num_tokens", [1, 3, 8])
@pytest.mark.parametrize(
    ("block", "run_block", "head", "run_head", "where"),
    [
        (Block(), run, nn.Linear(8, 3), run, None),
        (nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), attend_masked, Mean(8, 3), run_masked, None),
        (nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), run, nn.Linear(8, 3), run, "layer 1 (part.1, Trans"),
        (Block(), run, Mean(8, 3), run, "layer 2 (part.2, Mean)"),
        (OfOneLength(), run, nn.Linear(8, 3), run, "layer 1 (part.1, OfOneLength)"),
        (Asserting(), run, nn.Linear(8, 3), run, "layer 1 (part.1, Asserting)"),
    ],
)
def test_a_layer_that_sees_the_padding_of_a_text_is_found(
    block: nn.Module, run_block: Any, head: nn.Module, run_head: Any, where: str | None, num_tokens: int
) -> None:
    parts = zip((nn.Embedding(9, 8), block, head), (run, run_block, run_head), strict=True)
    layers = [Layer(module, forward, f"part.{index}.") for index, (module, forward) in enumerate(parts)]
    ids = torch.arange(2 * num_tokens).reshape(2, num_tokens) % 8 + 1
    found = where_padding_counts(layers, ids, {"attention_mask": torch.ones_like(ids).bool()})
    assert (found is None) if where is None else found is not None and found.startswith(where)
