"""Text data and text models as small as they can be, in files as users keep them."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from support.cases import write_config

WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "a", "bird", "sings", "sleeps"]
SENTENCES = ["a bird sings", "a bird sleeps", "bird sings", "bird sleeps"]


def write_encoder(folder: Path, words: Sequence[str] = WORDS) -> Path:
    """A tiny BERT without weights, and a tokenizer of a few words, the special ones first."""
    special = dict(zip(("pad_token", "unk_token", "cls_token", "sep_token"), WORDS, strict=False))
    write_tokenizer(folder, words, **special)
    return write_config(folder)


def write_decoder(folder: Path) -> Path:
    """A tiny GPT-2 without weights, and a tokenizer of a few words that has no token for padding."""
    from transformers import GPT2Config

    names = ["input_ids", "attention_mask"]
    write_tokenizer(folder, WORDS, eos_token=WORDS[0], unk_token=WORDS[1], model_input_names=names)
    sizes = {"n_embd": 16, "n_layer": 4, "n_head": 2, "n_positions": 16, "vocab_size": len(WORDS)}
    GPT2Config(**sizes, bos_token_id=0, eos_token_id=0).save_pretrained(folder)
    return folder


def write_tokenizer(folder: Path, words: Sequence[str], **settings: Any) -> None:
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Whitespace
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(WordLevel({word: index for index, word in enumerate(words)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **settings).save_pretrained(folder)


def text_run(folder: Path, dataset: str, path: Path, model: str = "bert") -> list[str]:
    """Overrides of a run on local files."""
    options = [f"model={model}", f"model.name={folder}", "model.pretrained=false"]
    return [*options, f"dataset={dataset}", f"dataset.path={path}", "logger=none", "batch_size=2"]


def write_table(file: Path, labels: list[object]) -> None:
    """A table of SST-2's form; the sentences repeat."""
    rows = [f"{SENTENCES[row % len(SENTENCES)]}\t{label}" for row, label in enumerate(labels)]
    file.write_text("\n".join(["sentence\tlabel", *rows]) + "\n")


def write_squad(file: Path, start: int) -> Path:
    """Five articles that ask for ``bird``, which stands at character 2, and say that it starts at ``start``."""
    answers = [{"text": "bird", "answer_start": start}]
    paragraph = {"context": "a bird sings", "qas": [{"id": "q1", "question": "a", "answers": answers}]}
    file.write_text(json.dumps({"data": [{"title": "", "paragraphs": [paragraph]}] * 5}))
    return file
