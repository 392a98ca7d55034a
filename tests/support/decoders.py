"""Tiny decoders."""

from pathlib import Path
from typing import Any

from support.samples import VOCABULARY

IDS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
LLAMA_LIKE = {
    "hidden_size": 16, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 24,
    "max_position_embeddings": 16, "head_dim": 6, **IDS,
}  # fmt: skip
CONFIGS: dict[str, dict[str, Any]] = {
    "gpt2": {"n_embd": 16, "n_head": 2, "n_positions": 16, "n_inner": 24, **IDS},
    "llama": LLAMA_LIKE,
    # near tokens, near, all, near, near, all
    "gemma3_text": {**LLAMA_LIKE, "sliding_window": 4, "sliding_window_pattern": 3},
}
DROPOUTS = {
    "gpt2": ("attn_pdrop", "embd_pdrop", "resid_pdrop"),
    "llama": ("attention_dropout",),
    "gemma3_text": ("attention_dropout",),
}


def write_configs(folder: Path, num_blocks: int) -> None:
    """Writes the configuration of each decoder into a folder of its name, without weights."""
    from transformers import AutoConfig

    for name, sizes in CONFIGS.items():
        rates = dict.fromkeys(DROPOUTS[name], 0.0)
        config = AutoConfig.for_model(name, vocab_size=VOCABULARY, num_hidden_layers=num_blocks, **sizes, **rates)
        config.save_pretrained(folder / name)
