"""Tiny decoders, and the task of the next token."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from pipetransformer.data.tasks import Task
from pipetransformer.models.base import Head
from support.samples import VOCABULARY, RandomText

NOT_COUNTED = -100
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


class NextTokens(RandomText):
    """Random tokens; the target of each is the one after it."""

    def targets(self, ids: Sequence[int], num_tokens: int | None = None) -> Tensor:
        """(B, T) of the longest text, whatever the batch is padded to."""
        rows = list(ids)
        is_inside = np.arange(1, 12) < self.lengths[rows, None]
        return torch.from_numpy(np.where(is_inside, self._tokens[rows, 1:], NOT_COUNTED))


def _loss(output: Tensor, targets: Tensor) -> Tensor:
    """Mean over a sample's tokens; output (B, T, V), targets (B, any number)."""
    num = min(output.shape[1], targets.shape[1])
    wanted = targets[:, :num].long()
    by_token = F.cross_entropy(output[:, :num].transpose(1, 2), wanted, ignore_index=NOT_COUNTED, reduction="none")
    return by_token.sum(1) / (wanted != NOT_COUNTED).sum(1)


def _score(predictions: np.ndarray, targets: np.ndarray) -> dict[str, float]:
    raise NotImplementedError


NEXT_TOKEN = Task("next_token", Head("causal", 0), _loss, lambda hidden: (*hidden[:2], VOCABULARY), _score)
