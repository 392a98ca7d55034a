"""Tiny encoders and decoders in folders, as a user would keep them: config.json and tokenizer, no weights."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import AutoConfig, PreTrainedTokenizerFast

SPECIAL_TOKENS = {"pad_token": "[PAD]", "unk_token": "[UNK]", "cls_token": "[CLS]", "sep_token": "[SEP]"}
WORDS = [*SPECIAL_TOKENS.values(), "a", "bird", "sees", "the", "small", "fish", "and", "we", "see", "it", "too"]
BERT_LIKE: dict[str, Any] = {
    "vocab_size": len(WORDS),
    "hidden_size": 16,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "intermediate_size": 24,
    "max_position_embeddings": 12,
    "type_vocab_size": 2,
    "pad_token_id": 0,
}
ENCODERS: dict[str, dict[str, Any]] = {
    "bert": BERT_LIKE,
    "roberta": {**BERT_LIKE, "type_vocab_size": 1, "pad_token_id": 1},
    "electra": {**BERT_LIKE, "embedding_size": 8},
    "distilbert": {
        "vocab_size": len(WORDS),
        "dim": 16,
        "n_layers": 3,
        "n_heads": 2,
        "hidden_dim": 24,
        "max_position_embeddings": 12,
        "pad_token_id": 0,
    },
    "deberta-v2": {
        **BERT_LIKE,
        "type_vocab_size": 0,
        "relative_attention": True,
        "position_buckets": 4,
        "norm_rel_ebd": "layer_norm",
        "share_att_key": True,
        "pos_att_type": "p2c|c2p",
        "position_biased_input": False,
    },
    "mpnet": {**{name: value for name, value in BERT_LIKE.items() if name != "type_vocab_size"}, "pad_token_id": 1},
    "albert": {**BERT_LIKE, "embedding_size": 8},
    "modernbert": {
        **{name: value for name, value in BERT_LIKE.items() if name != "type_vocab_size"},
        "local_attention": 4,
        "layer_types": ["full_attention", "sliding_attention", "full_attention"],
        "bos_token_id": 2,
        "eos_token_id": 3,
        "cls_token_id": 2,
        "sep_token_id": 3,
        "norm_bias": True,
    },
}
ENCODERS["deberta-v2 xlarge"] = {
    **ENCODERS["deberta-v2"],
    "conv_kernel_size": 3,
    "share_att_key": False,
    "position_biased_input": True,
    "type_vocab_size": 2,
    "norm_rel_ebd": "none",
}
LLAMA_LIKE: dict[str, Any] = {
    "vocab_size": len(WORDS),
    "hidden_size": 16,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "intermediate_size": 24,
    "max_position_embeddings": 12,
    "pad_token_id": 0,
    "bos_token_id": 2,
    "eos_token_id": 3,
}
DECODERS: dict[str, dict[str, Any]] = {
    "gpt2": {
        "vocab_size": len(WORDS),
        "n_embd": 16,
        "n_layer": 3,
        "n_head": 2,
        "n_positions": 12,
        "bos_token_id": 3,
        "eos_token_id": 3,
    },
    "llama": LLAMA_LIKE,
    "qwen2": {**LLAMA_LIKE, "tie_word_embeddings": True, "use_sliding_window": True, "sliding_window": 4,
              "max_window_layers": 1},
    "qwen3": {**LLAMA_LIKE, "tie_word_embeddings": True, "head_dim": 12},
    "gemma3_text": {**LLAMA_LIKE, "head_dim": 8, "sliding_window": 4, "sliding_window_pattern": 2},
}  # fmt: skip
"""Of three blocks; those of Qwen2 see all tokens, then only near ones, and those of Gemma 3 take turns."""


VIT_LIKE: dict[str, Any] = {
    "hidden_size": 16,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "intermediate_size": 24,
    "image_size": 16,
    "patch_size": 4,
}
TOWERS: dict[str, dict[str, Any]] = {
    "vit": VIT_LIKE,
    "dinov2": {**{name: value for name, value in VIT_LIKE.items() if name != "intermediate_size"}, "mlp_ratio": 2},
    "siglip": {"vision_config": VIT_LIKE},
}


def write_tokenizer(folder: Path) -> None:
    tokenizer = Tokenizer(WordLevel({word: index for index, word in enumerate(WORDS)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **SPECIAL_TOKENS).save_pretrained(folder)


@pytest.fixture(scope="session")
def encoder_folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Writes config.json and a tokenizer: ``encoder_folder("bert", hidden_size=32)``.

    A word after the model type is one of its variants.
    """

    def write(model_type: str, **changes: Any) -> Path:
        folder = tmp_path_factory.mktemp(model_type)
        sizes = (ENCODERS | DECODERS | TOWERS).get(model_type, {})
        AutoConfig.for_model(model_type.partition(" ")[0], **{**sizes, **changes}).save_pretrained(folder)
        write_tokenizer(folder)
        return folder

    return write


@pytest.fixture
def no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    """The hub's libraries give up at once, as with ``HF_HUB_OFFLINE=1``."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
