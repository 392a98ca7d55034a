"""Splits a decoder of transformers, or a ModernBERT, into layers that run its own modules.

A decoder has one line of forward per part, as has a ModernBERT, whose tokens also see those after them::

    base model:  word embeddings -> blocks, each called with (hidden, mask, rotary embedding) -> norm
    task model:  base model -> output matrix, or classifier

All that a block is given besides the hidden state follows from positions and padding: one mask and, where the model has
them, one rotary embedding per kind of attention. Each stage computes them from the context tensors
``attention_mask`` and ``position_ids``, so they are neither sent nor stored. A smaller model with ``inputs_embeds``
would not do: GPT-2 would add the positions again, and Gemma 3 would count its kinds of blocks from another one.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.weak import WeakTensorKeyDictionary
from transformers import PretrainedConfig, PreTrainedModel

from pipetransformer.errors import UserError
from pipetransformer.models.huggingface_heads import make_head, run_head, run_on_last_token
from pipetransformer.models.layer import Layer, shallow_copy

FULL, SLIDING = "full_attention", "sliding_attention"


def _embed_words(base: Any, ids: Tensor, **_: Any) -> Tensor:
    """Maps ids (B, T) to (B, T, D). The positions come in the blocks; Gemma's embedding scales its rows itself.

    Starcoder2 has dropout behind it that is no module.
    """
    rate = getattr(base, "embedding_dropout", 0.0)
    return functional.dropout(base.embed_tokens(ids), rate, base.training) if rate else base.embed_tokens(ids)


def _embed_words_and_positions(
    base: Any, ids: Tensor, position_ids: Tensor | None = None, token_type_ids: Tensor | None = None, **_: Any
) -> Tensor:
    """Maps ids (B, T) to (B, T, D) as GPT-2 does, which takes token types for words."""
    positions = torch.arange(ids.shape[1], device=ids.device) if position_ids is None else position_ids
    embedded = base.wte(ids) + base.wpe(positions)
    return base.drop(embedded if token_type_ids is None else embedded + base.wte(token_type_ids))


def _embed_normed_words(base: Any, ids: Tensor, **_: Any) -> Tensor:
    """Maps ids (B, T) to (B, T, D) as ModernBERT does, with a norm."""
    return base.embeddings(ids)


@dataclass(frozen=True)
class Parts:
    """Names of a decoder's modules in its base model.

    Attributes:
        embedding: What the embedding layer runs.
        blocks: The list of blocks.
        norm: The norm after the last block.
        rotary: What computes rotary embeddings; empty where positions are embedded.
        embed: Runs the embedding layer.
        is_causal: Tokens see those before them alone.
    """

    embedding: tuple[str, ...]
    blocks: str
    norm: str
    rotary: str
    embed: Callable[..., Tensor]
    is_causal: bool = True


_STRUCTURES = (
    Parts(("wte", "wpe", "drop"), "h", "ln_f", "", _embed_words_and_positions),  # GPT-2
    Parts(("embed_tokens",), "layers", "norm", "rotary_emb", _embed_words),  # Llama and those built like it
    Parts(("embeddings",), "layers", "final_norm", "rotary_emb", _embed_normed_words, is_causal=False),  # ModernBERT
)


def find_parts(base: nn.Module) -> Parts | None:
    """Returns the parts of a base model that is built as a decoder or a ModernBERT, or ``None``."""
    children = {name for name, _ in base.named_children()}
    return next((p for p in _STRUCTURES if children == {*p.embedding, p.blocks, p.norm, p.rotary} - {""}), None)


def split_decoder(model: PreTrainedModel, parts: Parts) -> list[Layer]:
    """Returns the layers of a task model, which share its parameters.

    Raises:
        UserError: A block is of a kind that cannot be called from outside the model.
    """
    prefix, base, config = model.base_model_prefix, model.base_model, model.config
    rotary = type(base.get_submodule(parts.rotary)) if parts.rotary else None
    arguments = BlockArguments(config, rotary, parts.is_causal)
    blocks = base.get_submodule(parts.blocks)
    assert isinstance(blocks, nn.ModuleList)
    embedding = shallow_copy(base)
    embedding.__dict__["_modules"] = {name: base.get_submodule(name) for name in parts.embedding}
    head = make_head(model, {parts.norm: base.get_submodule(parts.norm)})
    return [
        Layer(embedding, parts.embed, f"{prefix}."),
        *(
            Layer(block, partial(_run_block, arguments, kind), f"{prefix}.{parts.blocks}.{index}.")
            for index, (block, kind) in enumerate(zip(blocks, block_kinds(config), strict=True))
        ),
        Layer(head, run_on_last_token if parts.is_causal and pools_last_token(model) else run_head),
    ]


def pools_last_token(model: PreTrainedModel) -> bool:
    """Returns whether a decoder classifies a text by its last token."""
    return type(model).__name__.endswith("ForSequenceClassification")


def block_kinds(config: PretrainedConfig) -> list[str]:
    """Returns the kind of attention of each block, in the order of the whole model.

    Raises:
        UserError: A block has another kind of attention, or none.
    """
    window, num_blocks = getattr(config, "sliding_window", None), config.num_hidden_layers
    kinds = getattr(config, "layer_types", None) or num_blocks * [SLIDING if window else FULL]
    others = sorted({*kinds} - {FULL, SLIDING})
    if others:
        raise UserError(f"its blocks are of kind {' and '.join(others)}")
    if len(kinds) < num_blocks:
        raise UserError(f"its layer_types name {len(kinds)} blocks and num_hidden_layers is {num_blocks}")
    return kinds[:num_blocks]


class BlockArguments:
    """Computes what the blocks of a decoder are given besides the hidden state, from padding and positions.

    The blocks of one forward share the result, which lives as long as the context tensor that it was computed from.

    Args:
        config: Of the whole model.
        rotary: Class of the module that computes rotary embeddings, if there is one. It has no weights, and
            its buffers follow from the configuration.
        is_causal: Tokens see those before them alone.
    """

    def __init__(self, config: PretrainedConfig, rotary: type[nn.Module] | None, is_causal: bool) -> None:
        self._config, self._rotary, self._is_causal = config, rotary, is_causal
        self._modules: dict[torch.device, nn.Module] = {}
        self._results = WeakTensorKeyDictionary()

    def __deepcopy__(self, _: object) -> "BlockArguments":
        return self  # it has no state: a copy of a layer may share it

    def __call__(
        self, kind: str, hidden: Tensor, attention_mask: Tensor | None, position_ids: Tensor | None
    ) -> dict[str, Any]:
        """Returns the mask and, where the model has them, the rotary embeddings of a kind of blocks.

        Args:
            kind: Of the attention.
            hidden: Shape (B, T, D).
            attention_mask: Shape (B, T), true for tokens and false for padding.
            position_ids: Shape (B, T); without them a row is one text.
        """
        owner = position_ids if attention_mask is None else attention_mask
        if owner is None or owner.is_inference():
            return self._compute(kind, hidden, attention_mask, position_ids)
        results = self._results.setdefault(owner, {})
        key = kind, hidden.dtype, owner._version
        if key not in results or results[key][0] is not position_ids:
            results[key] = position_ids, self._compute(kind, hidden, attention_mask, position_ids)
        return results[key][1]

    def _compute(
        self, kind: str, hidden: Tensor, attention_mask: Tensor | None, position_ids: Tensor | None
    ) -> dict[str, Any]:
        window = self._config.sliding_window if kind == SLIDING else None
        documents = position_ids if self._is_causal else None  # ModernBERT's positions divide no row
        seen = visible_keys(hidden, attention_mask, documents, window, self._is_causal)
        arguments: dict[str, Any] = {"attention_mask": seen}
        if self._rotary is not None:
            positions = torch.arange(hidden.shape[1], device=hidden.device)[None]
            of_kind = (kind,) if kind in self._config.rope_parameters else ()  # Gemma 3 has one for each kind
            rotary = self._module(self._rotary, hidden.device)
            arguments["position_embeddings"] = rotary(
                hidden, positions if position_ids is None else position_ids, *of_kind
            )
        return arguments

    def _module(self, rotary: type[nn.Module], device: torch.device) -> nn.Module:
        if device not in self._modules:
            self._modules[device] = rotary(self._config).to(device)
        return self._modules[device]


def visible_keys(
    hidden: Tensor,
    attention_mask: Tensor | None,
    position_ids: Tensor | None,
    window: int | None,
    is_causal: bool = True,
) -> Tensor | None:
    """Returns which keys each query sees: those up to it, or all, that are no padding and are of its document.

    Args:
        hidden: Shape (B, T, D).
        attention_mask: Shape (B, T), true for tokens and false for padding.
        position_ids: Shape (B, T). A document of a packed row begins where they do not go on by one.
        window: The nearest keys that a query sees, itself included, or where it also sees those after it the keys on
            each side; ``None`` for all.
        is_causal: Queries see no keys after them.

    Returns:
        Shape (B or 1, 1, T, T) of bool; ``None`` where queries see all keys, or all up to them, which attention knows.
    """
    if attention_mask is None and position_ids is None and window is None:
        return None
    places = torch.arange(hidden.shape[1], device=hidden.device)
    distance = places[:, None] - places  # (T, T), of a query from a key
    farthest = hidden.shape[1] if window is None else window - is_causal
    seen = (distance.abs() <= farthest)[None]
    if is_causal:
        seen = seen & (distance >= 0)
    if position_ids is not None:
        document = (position_ids.diff(prepend=position_ids[:, :1] - 1) != 1).cumsum(-1)  # (B, T)
        seen = seen & (document[:, :, None] == document[:, None, :])
    if attention_mask is not None:
        seen = seen & attention_mask.bool()[:, None, :]
    return seen[:, None]


def _run_block(
    arguments: BlockArguments,
    kind: str,
    block: nn.Module,
    hidden: Tensor,
    attention_mask: Tensor | None = None,
    position_ids: Tensor | None = None,
    **_: Any,
) -> Tensor:
    return block(hidden, **arguments(kind, hidden, attention_mask, position_ids))
