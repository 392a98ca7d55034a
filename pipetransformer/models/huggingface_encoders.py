"""Splits encoders of transformers whose blocks have weights in common: DeBERTa-v2 and v3, MPNet, and ALBERT.

DeBERTa and MPNet give every block the same weights for relative positions. Each layer holds them beside its block, as
copies that train as one weight and freeze with the lowest block::

    original    encoder: relative positions, blocks 1 to L
    stack       embedding | positions, block 1 | positions, block 2 | ... | positions, block L | head

A layer is the original encoder with one of its blocks, so it computes masks and positions by its own code.

The blocks of ALBERT are one block, which runs L times. It is one layer of the stack, and freezes as a whole.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from pipetransformer.models.huggingface_heads import find_base, make_head, run_head
from pipetransformer.models.layer import Layer, shallow_copy
from pipetransformer.models.shared_dropout import SharedDropout


def _run_deberta(encoder: Any, hidden: Tensor, attention_mask: Tensor | None = None, **_: Any) -> Tensor:
    """Maps (B, T, D) to the same; the mask (B, T) counts as 0 and 1, as the tokenizer gives it."""
    mask = torch.ones(hidden.shape[:2], dtype=torch.long, device=hidden.device)
    if attention_mask is not None:
        mask = attention_mask.long()
    return encoder(hidden, mask, output_hidden_states=False).last_hidden_state


def _run_mpnet(encoder: Any, hidden: Tensor, attention_mask: Tensor | None = None, **_: Any) -> Tensor:
    """Maps (B, T, D) to the same; what the mask (B, T) leaves out gets the lowest score."""
    added = None
    if attention_mask is not None:
        out = ~attention_mask.bool()[:, None, None, :]  # (B, 1, 1, T)
        added = out.to(hidden.dtype) * torch.finfo(hidden.dtype).min
    return encoder(hidden, added, return_dict=True).last_hidden_state


@dataclass(frozen=True)
class SharedParts:
    """Names of an encoder's modules beside its blocks.

    Attributes:
        shared: Those that every block uses; an encoder has some of them.
        first: Those that only the first block is followed by.
        run: Runs the encoder with one block.
    """

    shared: frozenset[str]
    first: frozenset[str]
    run: Callable[..., Tensor]


_STRUCTURES = {
    "deberta-v2": SharedParts(frozenset({"rel_embeddings", "LayerNorm"}), frozenset({"conv"}), _run_deberta),
    "mpnet": SharedParts(frozenset({"relative_attention_bias"}), frozenset(), _run_mpnet),
}
"""By transformers' word for the kind of model, since an encoder need not have all of these modules."""


def find_shared_parts(base: PreTrainedModel) -> SharedParts | None:
    """Returns the parts of a base model whose blocks have weights in common, or ``None``."""
    parts = _STRUCTURES.get(base.config.model_type)
    if parts is None or {name for name, _ in base.named_children()} - {"pooler"} != {"embeddings", "encoder"}:
        return None
    beside = {name for name, _ in base.get_submodule("encoder").named_children()} - {"layer"}
    return parts if beside <= parts.shared | parts.first else None


def split_sharing_encoder(model: PreTrainedModel, parts: SharedParts) -> list[Layer]:
    """Returns the layers of a task model, which share its parameters."""
    prefix, base = find_base(model)
    encoder, pooler = base.get_submodule("encoder"), getattr(base, "pooler", None)
    blocks = encoder.get_submodule("layer")
    assert isinstance(blocks, nn.ModuleList)
    alone = [_with_one_block(encoder, index, block, parts) for index, block in enumerate(blocks)]
    return [
        Layer(base.get_submodule("embeddings"), run_embedding, f"{prefix}.embeddings."),
        *(Layer(module, parts.run, f"{prefix}.encoder.") for module in alone),
        Layer(make_head(model, {} if pooler is None else {"pooler": pooler}), run_head),
    ]


def _with_one_block(encoder: nn.Module, index: int, block: nn.Module, parts: SharedParts) -> nn.Module:
    """Returns a shallow copy of an encoder with one block, under its own number."""
    twin, blocks = shallow_copy(encoder), nn.ModuleList()
    blocks.add_module(str(index), _with_shared_dropout(block))
    twin._modules["layer"] = blocks
    twin._modules.update(dict.fromkeys(parts.first, None) if index and parts.first else {})
    return twin


def _with_shared_dropout(module: nn.Module) -> nn.Module:
    """Returns a shallow copy of a block whose dropout of positions, which all samples have in common, is drawn once."""
    twin = shallow_copy(module)
    for name, child in module.named_children():
        if name == "pos_dropout" and isinstance(child, nn.Dropout):
            twin._modules[name] = SharedDropout(child.p).train(child.training)
        elif any(path.endswith("pos_dropout") for path, _ in child.named_modules()):
            twin._modules[name] = _with_shared_dropout(child)
    return twin


def is_albert(base: nn.Module) -> bool:
    """Returns whether the blocks of a base model are few groups that run again and again."""
    return "albert_layer_groups" in getattr(getattr(base, "encoder", None), "_modules", ())


def split_albert(model: PreTrainedModel) -> list[Layer]:
    """Returns the layers of an ALBERT: one block for each group of blocks that are one."""
    prefix, base = find_base(model)
    encoder: Any = base.get_submodule("encoder")
    embedding = shallow_copy(base)
    projection = shallow_copy(encoder)
    projection._modules = {"embedding_hidden_mapping_in": encoder.embedding_hidden_mapping_in}
    embedding._modules = {"embeddings": base.get_submodule("embeddings"), "encoder": projection}
    num_blocks, num_groups = model.config.num_hidden_layers, model.config.num_hidden_groups
    group_of = [int(index / (num_blocks / num_groups)) for index in range(num_blocks)]
    after = {name: part for name, part in base.named_children() if name.startswith("pooler")}
    return [
        Layer(embedding, _run_albert_embedding, f"{prefix}."),
        *(
            Layer(group, partial(_run_group, group_of.count(index)), f"{prefix}.encoder.albert_layer_groups.{index}.")
            for index, group in enumerate(encoder.albert_layer_groups)
        ),
        Layer(make_head(model, after), run_head),
    ]


def run_embedding(
    embeddings: nn.Module,
    ids: Tensor,
    attention_mask: Tensor | None = None,
    token_type_ids: Tensor | None = None,
    position_ids: Tensor | None = None,
    **_: Any,
) -> Tensor:
    """Maps ids (B, T) to (B, T, D). DeBERTa's padding is zero."""
    config = getattr(embeddings, "config", None)
    mask = {} if config is None else {"mask": attention_mask}
    types = {"token_type_ids": token_type_ids} if getattr(config, "type_vocab_size", 0) > 1 else {}
    return embeddings(input_ids=ids, position_ids=position_ids, **types, **mask)


def _run_albert_embedding(
    base: Any, ids: Tensor, token_type_ids: Tensor | None = None, position_ids: Tensor | None = None, **_: Any
) -> Tensor:
    """Maps ids (B, T) to (B, T, D) through the narrow embedding."""
    types = token_type_ids if base.config.type_vocab_size > 1 else None
    embedded = base.embeddings(input_ids=ids, token_type_ids=types, position_ids=position_ids)
    return base.encoder.embedding_hidden_mapping_in(embedded)


def _run_group(times: int, group: nn.Module, hidden: Tensor, attention_mask: Tensor | None = None, **_: Any) -> Tensor:
    """Runs a group of blocks again and again on (B, T, D); the mask (B, T) is one for all heads and queries."""
    mask = None if attention_mask is None else attention_mask.bool()[:, None, None, :]
    for _repeat in range(times):
        hidden = group(hidden, mask)
    return hidden
