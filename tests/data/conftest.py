"""A tokenizer that knows every printable character, and formats of small models."""

import string
from pathlib import Path
from typing import Any

import pytest

from pipetransformer.data.base import ImageFormat, TextFormat

SHARED_DATA = Path(__file__).parents[3] / "shared" / "data"
SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]


@pytest.fixture(scope="session")
def tokenizer() -> Any:
    """Words of two letters at most stay whole, all others fall into characters."""
    from transformers import BertTokenizer

    characters = sorted({*string.printable.lower()} - {*string.whitespace})
    words = ["is", "it", "a", "of"]
    pieces = SPECIAL + words + characters + ["##" + character for character in characters]
    vocabulary = {piece: number for number, piece in enumerate(dict.fromkeys(pieces))}
    return BertTokenizer(vocab=vocabulary, eos_token="[SEP]")


@pytest.fixture(scope="session")
def text(tokenizer: Any) -> TextFormat:
    return TextFormat(tokenizer=tokenizer, max_length=512)


@pytest.fixture
def image() -> ImageFormat:
    return ImageFormat()


@pytest.fixture(scope="session")
def shared_data() -> Path:
    if not SHARED_DATA.is_dir():
        pytest.skip(f"the real data is not there: {SHARED_DATA}")
    return SHARED_DATA
