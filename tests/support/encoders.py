"""Tiny encoders whose blocks take more than a mask, or have weights in common."""

from pathlib import Path
from typing import Any

from support.samples import VOCABULARY

BERT_LIKE: dict[str, Any] = {
    "hidden_size": 16, "num_attention_heads": 2, "intermediate_size": 24, "max_position_embeddings": 16,
    "vocab_size": VOCABULARY, "pad_token_id": 0,
}  # fmt: skip
IDS = {"bos_token_id": 1, "eos_token_id": 2, "cls_token_id": 1, "sep_token_id": 2}
CONFIGS: dict[str, dict[str, Any]] = {
    # all tokens, near ones, near, all, near, near
    "modernbert": {**BERT_LIKE, **IDS, "local_attention": 4, "classifier_pooling": "mean"},
    "deberta-v2": {
        **BERT_LIKE, "relative_attention": True, "position_buckets": 4, "norm_rel_ebd": "layer_norm",
        "share_att_key": True, "pos_att_type": "p2c|c2p", "position_biased_input": False, "type_vocab_size": 0,
    },
    "mpnet": BERT_LIKE,
    "roberta": BERT_LIKE,  # positions count the tokens that are no padding
    "ernie": {**BERT_LIKE, "use_task_id": True},
    "distilbert": {
        "dim": 16, "n_heads": 2, "hidden_dim": 24, "max_position_embeddings": 16, "vocab_size": VOCABULARY,
        "pad_token_id": 0,
    },
    "albert": {**BERT_LIKE, "embedding_size": 8},  # each block runs twice
}  # fmt: skip
_OF_BERT = ("hidden_dropout_prob", "attention_probs_dropout_prob")
DROPOUTS = {
    "modernbert": ("embedding_dropout", "attention_dropout", "mlp_dropout", "classifier_dropout"),
    "deberta-v2": _OF_BERT,
    "mpnet": _OF_BERT,
    "roberta": _OF_BERT,
    "ernie": _OF_BERT,
    "distilbert": ("dropout", "attention_dropout", "seq_classif_dropout"),
    "albert": (*_OF_BERT, "classifier_dropout_prob"),
}


def write_configs(folder: Path, num_blocks: int) -> None:
    """Writes the configuration of each encoder into a folder of its name, without weights."""
    from transformers import AutoConfig

    for name, sizes in CONFIGS.items():
        blocks = {"num_hidden_layers": num_blocks}
        if name == "distilbert":
            blocks = {"n_layers": num_blocks}
        if name == "albert":
            blocks = {"num_hidden_layers": 2 * num_blocks, "num_hidden_groups": num_blocks}
        rates = dict.fromkeys(DROPOUTS[name], 0.0)
        AutoConfig.for_model(name, **sizes, **blocks, **rates).save_pretrained(folder / name)
