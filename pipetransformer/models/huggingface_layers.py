"""Splits a model of transformers into layers that run its own code, and checks that they compute what it computes.

A decoder is split by :mod:`pipetransformer.models.huggingface_decoders`, a vision tower by
:mod:`pipetransformer.models.huggingface_vision_layers`, an encoder whose blocks have weights in common by
:mod:`pipetransformer.models.huggingface_encoders`, any other here. An encoder has one line of forward per part::

    base model:  embeddings (+ projection) -> encoder: blocks, each called with (hidden, mask) -> pooler, if it has one
    task model:  base model -> dropout, classifier, ...

So the embedding is the base model without blocks and pooler, and the head is the task model whose base model is
replaced by one that has already reached the last hidden state.
"""

import copy
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel

from pipetransformer.errors import UserError
from pipetransformer.models.checks import beside_weights, check_same_outputs, draw_all
from pipetransformer.models.huggingface_decoders import find_parts, pools_last_token, split_decoder
from pipetransformer.models.huggingface_encoders import (
    find_shared_parts,
    is_albert,
    split_albert,
    split_sharing_encoder,
)
from pipetransformer.models.huggingface_heads import find_base, logits, make_head, run_head
from pipetransformer.models.huggingface_vision_layers import (
    check_vision,
    reads_images,
    split_vision,
    tiny_vision_model,
)
from pipetransformer.models.layer import Layer, arguments, shallow_copy
from pipetransformer.models.stack import LayerStack
from pipetransformer.models.tp_plan import TpPlan

SUPPORTED = (
    "encoders of the usual shape: BERT, RoBERTa, DistilBERT, ELECTRA, XLM-RoBERTa, CamemBERT, ERNIE; ModernBERT, "
    "DeBERTa-v2 and v3, MPNet, ALBERT; and the decoders GPT-2, Llama, Qwen2, Qwen3 and the text model of Gemma 3"
)
OTHERWISE = "it is not made of embeddings and blocks alone"
_PARTS = {"embeddings", "embeddings_project", "pooler"}
EMBEDDING_PLAN: TpPlan = {"embeddings.*_embeddings": "embedding", "embeddings.LayerNorm": "column_norm"}
BLOCK_PLAN: TpPlan = {
    **dict.fromkeys(("*.query", "*.key", "*.value", "intermediate.dense"), "colwise"),
    **dict.fromkeys(("attention.output.dense", "output.dense"), "rowwise"),
    "*LayerNorm": "norm",
    # DistilBERT
    **dict.fromkeys(("*.q_lin", "*.k_lin", "*.v_lin", "ffn.lin1"), "colwise"),
    **dict.fromkeys(("*.out_lin", "ffn.lin2"), "rowwise"),
    "*layer_norm": "norm",
}


def split_layers(model: PreTrainedModel) -> LayerStack:
    """Returns the task model as a flat stack that shares its parameters.

    Raises:
        UserError: The model is built in another way.
    """
    if reads_images(model):
        return split_vision(model)
    check_config(model.config)
    _, base = find_base(model)
    if model.config._attn_implementation != ("sdpa" if model._supports_sdpa else "eager"):
        raise UserError(
            f"its attention is {model.config._attn_implementation}; make it with attn_implementation='sdpa'"
        )
    return LayerStack(
        _layers(model, base),
        lambda ids: torch.Size((*ids.shape, model.config.hidden_size)),
        config=(type(model), model.config),
    )


def _layers(model: PreTrainedModel, base: PreTrainedModel) -> list[Layer]:
    if parts := find_parts(base):
        return split_decoder(model, parts)
    if shared := find_shared_parts(base):
        return split_sharing_encoder(model, shared)
    if not model._supports_sdpa:
        raise UserError("its attention is not torch's scaled_dot_product_attention")
    return split_albert(model) if is_albert(base) else _split_encoder(model)


def _split_encoder(model: PreTrainedModel) -> list[Layer]:
    prefix, base = model.base_model_prefix, model.base_model
    container, name = _place_of_blocks(base)
    encoder = base.get_submodule(container)
    blocks = encoder.get_submodule(name)
    assert isinstance(blocks, nn.ModuleList)

    embedding = shallow_copy(base)
    emptied = shallow_copy(encoder)
    setattr(emptied, name, nn.ModuleList())
    setattr(embedding, container, emptied)
    # an MLP that takes a few tokens at a time draws the dropout of those alone
    plan = None if getattr(base.config, "chunk_size_feed_forward", 0) else BLOCK_PLAN
    pooler = getattr(base, "pooler", None)
    if pooler is not None:
        embedding.pooler = nn.Identity()
    return [
        Layer(embedding, _run_embedding, f"{prefix}.", EMBEDDING_PLAN),
        *(Layer(block, _run_block, f"{prefix}.{container}.{name}.{i}.", plan) for i, block in enumerate(blocks)),
        Layer(make_head(model, {} if pooler is None else {"pooler": pooler}), run_head),
    ]


def _place_of_blocks(base: nn.Module) -> tuple[str, str]:
    """Returns container and name of the blocks; refuses modules beside them that the layers would not run."""
    lists = {path: part for path, part in base.named_modules() if isinstance(part, nn.ModuleList)}
    path = max(lists, key=lambda candidate: len(lists[candidate]), default="")
    container, _, name = path.rpartition(".")
    beside = {part for part, _ in base.named_children()} - _PARTS - {container}
    inside = {part for part, _ in base.get_submodule(container).named_children()} - {name}
    if not container or beside or inside:
        raise UserError(OTHERWISE)
    return container, name


def check_config(config: PretrainedConfig) -> None:
    """Checks a configuration for what no list of layers can hold.

    Raises:
        UserError: It is of such a model, with the reason.
    """
    if config.is_encoder_decoder or getattr(config, "is_decoder", False):
        raise UserError("it has an encoder and a decoder")
    others = sorted(name.removesuffix("_config") for name in config.sub_configs if name != "text_config")
    if others:
        raise UserError(f"it reads more than text ({', '.join(others)})")
    if any("experts" in name and value for name, value in config.to_dict().items()):
        raise UserError("it is a mixture of experts, whose router balances the tokens of a whole batch")
    if hasattr(config, "state_size") or hasattr(config, "mamba_d_state"):
        raise UserError("its blocks are state-space layers")
    if (size := getattr(config, "chunk_size_feed_forward", 0)) > 1:
        raise UserError(
            f"its chunk_size_feed_forward={size} takes texts of {size}, {2 * size}, ... tokens alone; 1 any"
        )
    for rope in _rope_types(config) & {"dynamic", "longrope"}:
        raise UserError(f"its rotary embedding ({rope}) follows the longest text of a batch")


def _rope_types(config: PretrainedConfig) -> set[str]:
    """Returns the kinds of rotary embeddings, of which a configuration has one, or one for each kind of attention."""
    found = getattr(config, "rope_parameters", None) or {}
    each = [value for value in found.values() if isinstance(value, dict)] or [found]
    return {str(parameters.get("rope_type")) for parameters in each}


def check_runs_by_layers(model: PreTrainedModel) -> set[str]:
    """Checks on a two-block copy that the stack computes what the model computes, and trains in any micro-batches.

    The structure alone does not say how a model calls its parts. A few tokens do: with padding, without, and with a
    row of padding alone.

    Returns:
        The names of parameters of the copy that get no gradient.

    Raises:
        UserError: It does not, with the reason.
    """
    return check_instance(tiny_vision_model(model) if reads_images(model) else tiny_model(model))


def check_instance(model: PreTrainedModel) -> set[str]:
    """Checks a model with weights as :func:`check_runs_by_layers` does.

    Returns:
        The names of parameters that get no gradient.

    Raises:
        UserError: It cannot be trained layer by layer, with the reason.
    """
    if reads_images(model):
        return check_vision(model)
    stack, pad_id = split_layers(model), model.config.pad_token_id
    if is_decoder(model) and pools_last_token(model) and pad_id is None:
        raise UserError("it finds the last token of a text by its config.pad_token_id, which is not set")
    words = [word for word in range(min(model.config.vocab_size, 21)) if word != pad_id]
    rows = torch.tensor(words).repeat(20)[:20].reshape(4, 5)
    types = {"token_type_ids": rows % 2} if _has_token_types(model) else {}
    others = _values_of_tokens(model, rows)

    def forward(ids: Tensor, **context: Tensor) -> Tensor:
        context["attention_mask"] = context["attention_mask"].long()  # as the tokenizer gives it
        return logits(model(input_ids=ids, **context))

    idle: set[str] = set()
    for lengths in ([5, 3, 1, 0], [5, 5, 5, 5]):
        mask = torch.arange(5) < torch.tensor(lengths)[:, None]
        ids = rows.masked_fill(~mask, pad_id or 0)
        given = {"attention_mask": mask, **types, **(others if all(lengths) else {})}
        ids, context = beside_weights(model, ids, given)
        idle |= stack.check(ids, **context)
        check_same_outputs(stack, model, forward, ids, context)
    return idle


def _values_of_tokens(model: PreTrainedModel, ids: Tensor) -> dict[str, Tensor]:
    """Returns further values (B, T) that the embedding of an encoder takes; a decoder's texts follow from positions."""
    if find_parts(model.base_model) is not None:
        return {}
    places = torch.arange(ids.shape[1]).flip(0).expand_as(ids)
    num_tasks = getattr(model.config, "task_type_vocab_size", 1)
    given = {"position_ids": places, "task_type_ids": ids % num_tasks}
    return {name: values for name, values in given.items() if name in arguments(model)}


def is_decoder(model: PreTrainedModel) -> bool:
    """Returns whether each token of a model, with or without a head, sees those before it alone."""
    parts = find_parts(model.base_model)
    return parts is not None and parts.is_causal


def num_positions(base: PreTrainedModel) -> int:
    """Returns the longest text that a model without head takes.

    Where padding has a position in the embedding (RoBERTa), the first token's comes after it.

    Raises:
        UserError: It is built in another way.
    """
    if find_parts(base) is not None:
        return base.config.max_position_embeddings
    embeddings = base._modules.get("embeddings")
    if embeddings is None:
        raise UserError(OTHERWISE)
    positions = embeddings._modules.get("position_embeddings")
    if not isinstance(positions, nn.Embedding):  # DeBERTa's are relative alone
        return base.config.max_position_embeddings
    return positions.num_embeddings - (0 if positions.padding_idx is None else positions.padding_idx + 1)


def tiny_model(model: PreTrainedModel) -> PreTrainedModel:
    """Returns a model of the same kind with two blocks, a few words and random weights.

    Args:
        model: May have no storage.
    """
    config: Any = copy.deepcopy(model.config)
    config.dtype = torch.get_default_dtype()  # some heads are of it whatever the configuration says of their model
    config.pad_token_id = min(config.pad_token_id or 0, 1)  # one that is among so few words
    config.vocab_size = min(config.vocab_size, 8 + config.pad_token_id)
    config.num_hidden_layers = min(2, config.num_hidden_layers)
    if getattr(config, "num_hidden_groups", 1) > 1:  # ALBERT's
        config.num_hidden_groups = config.num_hidden_layers
    if getattr(config, "layer_types", None):  # of each kind one
        config.layer_types = [*dict.fromkeys(config.layer_types), config.layer_types[0]][: config.num_hidden_layers]
    if getattr(config, "sliding_window", None):
        config.sliding_window = 3  # narrower than the texts
    if hasattr(config, "intermediate_size"):
        config.intermediate_size = 8  # two thirds of a block's weights, which take their time to draw
    tiny = type(model)(config)
    draw_all(tiny)
    return tiny


def _run_embedding(
    base: nn.Module,
    ids: Tensor,
    token_type_ids: Tensor | None = None,
    position_ids: Tensor | None = None,
    task_type_ids: Tensor | None = None,
    **_: Any,
) -> Tensor:
    """Maps ids (B, T) to (B, T, D); without blocks the mask is not used."""
    types = {"token_type_ids": token_type_ids} if _has_token_types(base) else {}
    given = {"position_ids": position_ids, "task_type_ids": task_type_ids}  # the latter are ERNIE's
    others = {name: value for name, value in given.items() if value is not None and name in arguments(base)}
    return base(input_ids=ids, **types, **others).last_hidden_state


def _has_token_types(model: nn.Module) -> bool:
    return getattr(model.config, "type_vocab_size", 0) > 1


def _run_block(block: nn.Module, hidden: Tensor, attention_mask: Tensor | None = None, **_: Any) -> Tensor:
    """Broadcasts the mask (B, T) over heads and queries. transformers drops a mask of ones, at a device sync."""
    return block(hidden, None if attention_mask is None else attention_mask[:, None, None, :])
