"""Writes what the decoder of this experiment begins with: a small GPT-2 without weights, and two files of texts.

``python -m experiments.default_freeze.prepare <folder of a BERT tokenizer> <SST-2> <XQuAD's JSON> <folder to write>``
"""

import json
from argparse import ArgumentParser
from pathlib import Path

from transformers import AutoTokenizer, GPT2Config

NUM_REVIEWS, LEAST_WORDS, TRAIN_ARTICLES = 8000, 12, 38


def write_decoder(tokenizer: Path, folder: Path) -> None:
    """Writes config.json, and a tokenizer that ends texts with ``[SEP]``."""
    words = AutoTokenizer.from_pretrained(tokenizer, eos_token="[SEP]")
    words.save_pretrained(folder)
    GPT2Config(
        vocab_size=len(words), n_embd=128, n_layer=6, n_head=4, n_positions=256, bos_token_id=words.cls_token_id,
        eos_token_id=words.eos_token_id, pad_token_id=words.pad_token_id,
    ).save_pretrained(folder)  # fmt: skip


def write_texts(reviews: Path, articles: Path, folder: Path) -> None:
    """Writes sentences to begin with, and paragraphs of other articles for training and for evaluation."""
    sentences = [line.split("\t")[0] for line in (reviews / "train.tsv").read_text().splitlines()[1:]]
    long = [sentence for sentence in sentences if len(sentence.split()) >= LEAST_WORDS][:NUM_REVIEWS]
    (folder / "reviews.txt").write_text("\n".join(long) + "\n")
    data = json.loads(articles.read_text())["data"]
    (folder / "wiki").mkdir(exist_ok=True)
    for name, part in (("train", data[:TRAIN_ARTICLES]), ("validation", data[TRAIN_ARTICLES:])):
        paragraphs = [each["context"].replace("\n", " ") for article in part for each in article["paragraphs"]]
        (folder / "wiki" / f"{name}.txt").write_text("\n".join(paragraphs) + "\n")


if __name__ == "__main__":
    parser = ArgumentParser(description=__doc__)
    for name in ("tokenizer", "reviews", "articles", "folder"):
        parser.add_argument(name, type=Path)
    tokenizer, reviews, articles, folder = vars(parser.parse_args()).values()
    folder.mkdir(parents=True, exist_ok=True)
    write_decoder(tokenizer, folder)
    write_texts(reviews, articles, folder)
