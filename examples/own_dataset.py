"""Fine-tunes a model of transformers on a ``datasets.Dataset``: ``python own_dataset.py [model]``.

The data is the table beside this script. The model is a small BERT with random weights and a tokenizer of the table's
words, so that nothing has to be downloaded; give a name to start from published ones.
"""

import sys
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset, DatasetDict
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, trainers
from torch.nn.functional import cross_entropy
from transformers import (
    AutoModelForSequenceClassification,
    AutoTokenizer,
    BertConfig,
    BertForSequenceClassification,
    PreTrainedTokenizerFast,
)

import pipetransformer as pt

TABLE = Path(__file__).with_name("reviews.csv")


def make_model(name: str | None, texts: list[str]) -> tuple[torch.nn.Module, Any]:
    if name is not None:
        model = AutoModelForSequenceClassification.from_pretrained(name, num_labels=5)
        return model, AutoTokenizer.from_pretrained(name)
    words = Tokenizer(models.WordLevel(unk_token="[UNK]"))
    words.normalizer, words.pre_tokenizer = normalizers.Lowercase(), pre_tokenizers.Whitespace()
    words.train_from_iterator(texts, trainers.WordLevelTrainer(special_tokens=["[PAD]", "[UNK]"]))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="[PAD]", unk_token="[UNK]")
    config = BertConfig(
        vocab_size=len(tokenizer), hidden_size=32, num_hidden_layers=4, num_attention_heads=4, intermediate_size=64,
        num_labels=5, hidden_dropout_prob=0.0,
    )  # fmt: skip
    return BertForSequenceClassification(config), tokenizer


def read(tokenizer: Any) -> DatasetDict:
    """Rows with ``input_ids``, ``attention_mask`` and ``labels``; other columns may stay, and are not read."""
    rows = Dataset.from_csv(str(TABLE))
    assert isinstance(rows, Dataset)
    tokenised = rows.map(
        lambda row: dict(tokenizer(row["review"], truncation=True, max_length=64)) | {"labels": row["stars"] - 1}
    )
    tokenised.set_format("torch")
    return tokenised.train_test_split(test_size=0.2, seed=0)


def main() -> None:
    torch.manual_seed(0)
    name = sys.argv[1] if len(sys.argv) > 1 else None
    model, tokenizer = make_model(name, TABLE.read_text(encoding="utf-8").splitlines())
    rows = read(tokenizer)
    with pt.ElasticTrainer(
        model,
        loss=lambda logits, labels: cross_entropy(logits, labels, reduction="none"),
        train=rows["train"],
        evaluation={"dev": rows["test"]},
        optimizer=pt.AdamW(lr=3e-3 if name is None else 5e-5, warmup=0.1),
        batch_size=16,
        epochs=6,
    ) as trainer:
        for step in trainer:
            if trainer.state.step_in_epoch == 0:
                print(f"epoch {trainer.state.epoch}: loss {step.loss:.4f}  dev {trainer.evaluate()['dev']}")
        trainer.save("own_dataset_model")


if __name__ == "__main__":
    main()
