"""Text data and a text model as small as they can be, in files as users keep them."""

import json
from pathlib import Path

from support.cases import write_config

WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "a", "bird", "sings", "sleeps"]
SENTENCES = ["a bird sings", "a bird sleeps", "bird sings", "bird sleeps"]


def write_encoder(folder: Path) -> Path:
    """A tiny BERT without weights, and a tokenizer of a few words."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Whitespace
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(WordLevel({word: index for index, word in enumerate(WORDS)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = Whitespace()
    special = dict(zip(("pad_token", "unk_token", "cls_token", "sep_token"), WORDS, strict=False))
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special).save_pretrained(folder)
    return write_config(folder)


def text_run(encoder: Path, dataset: str, path: Path) -> list[str]:
    """Overrides of a run on local files."""
    model = ["model=bert", f"model.name={encoder}", "model.pretrained=false"]
    return [*model, f"dataset={dataset}", f"dataset.path={path}", "logger=none", "batch_size=2"]


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
