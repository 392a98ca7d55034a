"""Splits a transformers encoder into layers that run its own code.

An encoder's forward is one line per part::

    base model:  embeddings (+ projection) -> encoder: blocks, each called with (hidden, mask) -> pooler, if it has one
    task model:  base model -> dropout, classifier, ...

So the embedding is the base model without blocks and pooler, and the head is the task model whose base model is
replaced by one that has already reached the last hidden state.
"""

import copy
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.modeling_outputs import BaseModelOutputWithPooling

from pipetransformer.errors import UserError
from pipetransformer.models.checks import check_same_outputs, draw_all
from pipetransformer.models.layer import Layer, shallow_copy
from pipetransformer.models.stack import LayerStack

SUPPORTED = "encoders of the usual shape: BERT, RoBERTa, DistilBERT, ELECTRA, XLM-RoBERTa, CamemBERT, ERNIE"
_PARTS = {"embeddings", "embeddings_project", "pooler"}


class _Reached(nn.Module):
    """Replacement of the base model in the head; takes the last hidden state as ``inputs_embeds``."""

    def __init__(self, pooler: nn.Module | None) -> None:
        super().__init__()
        self.pooler = pooler

    def forward(self, *_: Any, inputs_embeds: Tensor, **__: Any) -> BaseModelOutputWithPooling:
        pooled = None if self.pooler is None else self.pooler(inputs_embeds)
        return BaseModelOutputWithPooling(last_hidden_state=inputs_embeds, pooler_output=pooled)


def split_layers(model: PreTrainedModel) -> LayerStack:
    """Returns the task model as a flat stack that shares its parameters.

    Raises:
        UserError: The model is built in another way.
    """
    prefix, base = model.base_model_prefix, model.base_model
    if base is model:
        raise UserError("it has no head; take one of transformers' AutoModelFor classes")
    if model.config._attn_implementation != "sdpa":
        raise UserError(
            f"its attention is {model.config._attn_implementation}; make it with attn_implementation='sdpa'"
        )
    container, name = _place_of_blocks(base)
    encoder = base.get_submodule(container)
    blocks = encoder.get_submodule(name)
    assert isinstance(blocks, nn.ModuleList)

    embedding = shallow_copy(base)
    emptied = shallow_copy(encoder)
    setattr(emptied, name, nn.ModuleList())
    setattr(embedding, container, emptied)
    head = shallow_copy(model)
    pooler = getattr(base, "pooler", None)
    setattr(head, prefix, _Reached(pooler))
    if pooler is not None:
        embedding.pooler = nn.Identity()

    return LayerStack(
        [
            Layer(embedding, _run_embedding, f"{prefix}."),
            *(Layer(block, _run_block, f"{prefix}.{container}.{name}.{i}.") for i, block in enumerate(blocks)),
            Layer(head, _run_head),
        ],
        lambda ids: torch.Size((*ids.shape, model.config.hidden_size)),
        config=(type(model), model.config),
    )


def _place_of_blocks(base: nn.Module) -> tuple[str, str]:
    """Returns container and name of the blocks; refuses modules beside them that the layers would not run."""
    lists = {path: part for path, part in base.named_modules() if isinstance(part, nn.ModuleList)}
    path = max(lists, key=lambda candidate: len(lists[candidate]), default="")
    container, _, name = path.rpartition(".")
    beside = {part for part, _ in base.named_children()} - _PARTS - {container}
    inside = {part for part, _ in base.get_submodule(container).named_children()} - {name}
    if not container or beside or inside:
        raise UserError("it is not made of embeddings and blocks alone")
    return container, name


def check_runs_by_layers(model: PreTrainedModel) -> None:
    """Checks on a two-block copy that the stack computes what the model computes, and trains in any micro-batches.

    The structure alone does not say how a model calls its parts. A few tokens do: with padding, without, and with a
    row of padding alone.

    Raises:
        UserError: It does not, with the reason.
    """
    check_instance(tiny_model(model))


def check_instance(model: PreTrainedModel) -> None:
    """Checks a model with weights as :func:`check_runs_by_layers` does.

    Raises:
        UserError: It cannot be trained layer by layer, with the reason.
    """
    stack = split_layers(model)
    ids = torch.arange(20).reshape(4, 5) % model.config.vocab_size
    types = {"token_type_ids": ids % 2} if _has_token_types(model) else {}

    def forward(ids: Tensor, **context: Tensor) -> Tensor:
        return _logits(model(input_ids=ids, **context))

    for lengths in ([5, 3, 1, 0], [5, 5, 5, 5]):
        context = {"attention_mask": torch.arange(5) < torch.tensor(lengths)[:, None], **types}
        stack.check(ids, **context)
        check_same_outputs(stack, model, forward, ids, context)


def tiny_model(model: PreTrainedModel) -> PreTrainedModel:
    """Returns a model of the same kind with two blocks, a few words and random weights.

    Args:
        model: May have no storage.
    """
    config = copy.deepcopy(model.config)
    config.num_hidden_layers = min(2, config.num_hidden_layers)
    config.vocab_size = min(config.vocab_size, 8 + (config.pad_token_id or 0))
    if hasattr(config, "intermediate_size"):
        config.intermediate_size = 8  # two thirds of a block's weights, which take their time to draw
    tiny = type(model)(config)
    draw_all(tiny)
    return tiny


def _run_embedding(base: nn.Module, ids: Tensor, token_type_ids: Tensor | None = None, **_: Any) -> Tensor:
    """Maps ids (B, T) to (B, T, D); without blocks the mask is not used."""
    types = {"token_type_ids": token_type_ids} if _has_token_types(base) else {}
    return base(input_ids=ids, **types).last_hidden_state


def _has_token_types(model: nn.Module) -> bool:
    return getattr(model.config, "type_vocab_size", 0) > 1


def _run_block(block: nn.Module, hidden: Tensor, attention_mask: Tensor | None = None, **_: Any) -> Tensor:
    """Broadcasts the mask (B, T) over heads and queries. transformers drops a mask of ones, at a device sync."""
    return block(hidden, None if attention_mask is None else attention_mask[:, None, None, :])


def _run_head(model: nn.Module, hidden: Tensor, **_: Any) -> Tensor:
    return _logits(model(inputs_embeds=hidden))


def _logits(outputs: Any) -> Tensor:
    """Returns (B, num_labels), or for question answering (B, T, 2) of start and end."""
    if "start_logits" in outputs:
        return torch.stack((outputs.start_logits, outputs.end_logits), dim=-1)
    return outputs.logits
