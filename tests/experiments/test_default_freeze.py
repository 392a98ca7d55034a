"""The decoder that experiments/default_freeze begins with is one that a run takes."""

import json
from pathlib import Path

from support.texts import write_encoder
from transformers import AutoTokenizer, GPT2Config

from experiments.default_freeze.prepare import write_decoder, write_texts


def test_a_decoder_ends_its_texts_and_has_articles_of_its_own_to_be_evaluated_on(tmp_path: Path) -> None:
    encoder = write_encoder(tmp_path / "encoder")
    write_decoder(encoder, tmp_path)
    tokenizer, config = AutoTokenizer.from_pretrained(tmp_path), GPT2Config.from_pretrained(tmp_path)
    assert (config.eos_token_id, config.vocab_size) == (tokenizer.eos_token_id, len(tokenizer))
    assert tokenizer.eos_token == "[SEP]"
    (tmp_path / "train.tsv").write_text("sentence\tlabel\nshort\t1\n" + "a bird sings " * 4 + "\t0\n")
    articles = [{"paragraphs": [{"context": f"article {number}\nof birds"}]} for number in range(40)]
    (tmp_path / "xquad.json").write_text(json.dumps({"data": articles}))
    write_texts(tmp_path, tmp_path / "xquad.json", tmp_path)
    assert (tmp_path / "reviews.txt").read_text() == "a bird sings " * 4 + "\n"
    wiki = {file.stem: file.read_text().splitlines() for file in (tmp_path / "wiki").iterdir()}
    assert (len(wiki["train"]), wiki["validation"]) == (38, ["article 38 of birds", "article 39 of birds"])
