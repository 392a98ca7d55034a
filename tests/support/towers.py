"""Tiny vision models besides timm's ViT: those of transformers, and an EVA, whose blocks take rotary positions."""

from pathlib import Path
from typing import Any

from support.samples import IMAGE_SIZE

VIT_LIKE: dict[str, Any] = {
    "hidden_size": 16, "num_attention_heads": 2, "intermediate_size": 24, "image_size": IMAGE_SIZE, "patch_size": 4,
}  # fmt: skip
CONFIGS: dict[str, dict[str, Any]] = {"vit_hf": VIT_LIKE, "dinov2": {**VIT_LIKE, "mlp_ratio": 2}, "siglip": VIT_LIKE}
KINDS = (*CONFIGS, "eva02")
_MODEL_TYPES = {"vit_hf": "vit"}  # of those that are not called as the files of conf/model are
DROPOUTS = {"vit_hf": ("hidden_dropout_prob", "attention_probs_dropout_prob")}


def write_configs(folder: Path, num_blocks: int) -> None:
    """Writes the configuration of each model of transformers into a folder of its name, without weights."""
    from transformers import AutoConfig

    for name, sizes in CONFIGS.items():
        own = {**sizes, "num_hidden_layers": num_blocks}
        changes = {"vision_config": own} if name == "siglip" else own
        AutoConfig.for_model(_MODEL_TYPES.get(name, name), **changes).save_pretrained(folder / name)
