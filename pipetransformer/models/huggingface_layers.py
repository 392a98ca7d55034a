"""Cuts a transformers encoder into layers that run its own code.

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

from pipetransformer.models.sharing import shallow_copy
from pipetransformer.models.stack import Layer, LayerStack

SUPPORTED = "encoders of the usual shape: BERT, RoBERTa, DistilBERT, ELECTRA, XLM-RoBERTa, CamemBERT, ERNIE"
_PARTS = {"embeddings", "embeddings_project", "pooler"}


class _Reached(nn.Module):
    """Stands in for the base model in the head: takes the last hidden state as ``inputs_embeds``."""

    def __init__(self, pooler: nn.Module | None) -> None:
        super().__init__()
        self.pooler = pooler

    def forward(self, *_: Any, inputs_embeds: Tensor, **__: Any) -> BaseModelOutputWithPooling:
        pooled = None if self.pooler is None else self.pooler(inputs_embeds)
        return BaseModelOutputWithPooling(last_hidden_state=inputs_embeds, pooler_output=pooled)


def cut(model: PreTrainedModel) -> LayerStack:
    """The task model as a flat stack that shares its parameters, in training mode.

    Raises:
        ValueError: The model is built in another way.
    """
    prefix, base = model.base_model_prefix, model.base_model
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

    stack = LayerStack(
        [
            Layer(embedding, _run_embedding, f"{prefix}."),
            *(Layer(block, _run_block, f"{prefix}.{container}.{name}.{i}.") for i, block in enumerate(blocks)),
            Layer(head, _run_head),
        ],
        lambda ids: torch.Size((*ids.shape, model.config.hidden_size)),
        config=(type(model), model.config),
    )
    return stack.train()


def _place_of_blocks(base: nn.Module) -> tuple[str, str]:
    """Container and name of the blocks, where nothing else stands beside them that the cut would lose."""
    lists = {path: part for path, part in base.named_modules() if isinstance(part, nn.ModuleList)}
    path = max(lists, key=lambda candidate: len(lists[candidate]), default="")
    container, _, name = path.rpartition(".")
    beside = {part for part, _ in base.named_children()} - _PARTS - {container}
    inside = {part for part, _ in base.get_submodule(container).named_children()} - {name}
    if not container or beside or inside:
        raise ValueError(f"a {type(base).__name__} is not made of embeddings and blocks; supported are {SUPPORTED}")
    return container, name


@torch.no_grad()
def check_same_outputs(model: PreTrainedModel) -> None:
    """The structure alone does not say how a model calls its parts; a few tokens do, and so does a small likeness.

    The likeness has two of the blocks and a few words, so that a model of any depth and vocabulary is checked.

    Raises:
        ValueError: The stack does not compute what the model computes.
    """
    config = copy.deepcopy(model.config)
    config.num_hidden_layers = min(2, config.num_hidden_layers)
    config.vocab_size = min(config.vocab_size, 8 + (config.pad_token_id or 0))
    likeness = type(model)(config).eval()
    stack = cut(likeness).eval()
    ids = torch.arange(8).reshape(2, 4) % config.vocab_size
    mask = torch.tensor([[True] * 4, [True] * 3 + [False]])
    outputs = likeness(input_ids=ids, attention_mask=mask)
    if not torch.allclose(stack(ids, attention_mask=mask), _logits(outputs), rtol=1e-4, atol=1e-5):
        raise ValueError(f"a {type(model).__name__} does not run layer by layer; supported are {SUPPORTED}")


def _run_embedding(base: nn.Module, ids: Tensor, token_type_ids: Tensor | None = None, **_: Any) -> Tensor:
    """(B, T) -> (B, T, D). Without blocks the mask has no part in it."""
    has_token_types = getattr(base.config, "type_vocab_size", 0) > 1
    types = {"token_type_ids": token_type_ids} if has_token_types else {}
    return base(input_ids=ids, **types).last_hidden_state


def _run_block(block: nn.Module, hidden: Tensor, attention_mask: Tensor | None = None, **_: Any) -> Tensor:
    """The mask (B, T) spreads over heads and queries. transformers drops a mask of ones, which costs a device sync."""
    return block(hidden, None if attention_mask is None else attention_mask[:, None, None, :])


def _run_head(model: nn.Module, hidden: Tensor, **_: Any) -> Tensor:
    return _logits(model(inputs_embeds=hidden))


def _logits(outputs: Any) -> Tensor:
    """(B, num_labels), or for question answering (B, T, 2) of start and end."""
    if "start_logits" in outputs:
        return torch.stack((outputs.start_logits, outputs.end_logits), dim=-1)
    return outputs.logits
