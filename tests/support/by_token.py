"""Made-up texts with a target for each token, very different numbers of which count."""

from functools import cache

import numpy as np

from pipetransformer.data.text.document_split import Documents, DocumentSplit
from pipetransformer.data.text.split import Ragged, Tokens
from pipetransformer.data.text.tagged_split import TaggedSplit, Words
from pipetransformer.data.token_tasks import causal_language_modelling, token_classification
from support.samples import NUM_CLASSES, VOCABULARY

TAGGING = token_classification(tuple(f"tag{number}" for number in range(NUM_CLASSES)), is_chunked=False)
next_token = cache(causal_language_modelling)


@cache
def random_tokens(num_samples: int) -> Tokens:
    """Texts of 3 to 11 tokens."""
    draw = np.random.default_rng(0)
    lengths = draw.integers(3, 12, num_samples)
    return Tokens(Ragged.of([draw.integers(5, VOCABULARY, length) for length in lengths]), None, 0)


def tagged_texts(num_samples: int) -> TaggedSplit:
    """Of each text some tokens, or none, are first tokens of words."""
    tokens, draw = random_tokens(num_samples), np.random.default_rng(1)
    counts = draw.integers(0, tokens.ids.lengths)
    counts[::5] = 0
    first = [np.sort(draw.permutation(length)[:num]) for length, num in zip(tokens.ids.lengths, counts, strict=True)]
    tags = Ragged.of([draw.integers(0, NUM_CLASSES, num) for num in counts])
    return TaggedSplit("train", Words(tokens, Ragged.of(map(np.arange, counts)), Ragged.of(first)), tags, list, TAGGING)


def prompted_texts(num_samples: int, vocabulary: int = VOCABULARY) -> DocumentSplit:
    """Of each text a part, from its second token on or later, is learned."""
    tokens = random_tokens(num_samples)
    first = np.random.default_rng(1).integers(1, tokens.ids.lengths)
    return DocumentSplit("train", Documents(tokens, first, 0, []), next_token(vocabulary))
