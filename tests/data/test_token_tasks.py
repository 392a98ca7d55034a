"""Losses and scores by token are those of the field's own code: transformers' losses, seqeval's scores."""

import math
import random
from itertools import chain

import numpy as np
import pytest
import torch
from seqeval import metrics
from seqeval.scheme import BILOU, IOB2, IOBES
from torch import Tensor
from transformers import BertConfig, BertForTokenClassification, GPT2Config, GPT2LMHeadModel

from pipetransformer.data.token_tasks import (
    IGNORED,
    causal_language_modelling,
    chunk_scores,
    next_token_scores,
    tag_scores,
    token_classification,
    token_cross_entropy,
    token_sums,
)

LENGTHS = [5, 1, 7, 2]  # of the texts, in a batch of 8 columns
VOCABULARY, NUM_TAGS = 11, 3
IDS = torch.randint(1, VOCABULARY, (len(LENGTHS), 8), generator=torch.Generator().manual_seed(0))
MASK = torch.arange(8) < torch.tensor(LENGTHS)[:, None]


@pytest.fixture(autouse=True)
def wide_losses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without it transformers rounds logits to float32 before it takes the loss."""
    monkeypatch.setattr(Tensor, "float", Tensor.double)


def tags() -> Tensor:
    """One word of one sub-word, one of many, one that the tokenizer dropped, none that counts in the last text."""
    tags = torch.full(IDS.shape, IGNORED)
    tags[0, [1, 3]] = torch.tensor([2, 0])
    tags[1, 0] = 1
    tags[2, 1] = 2
    return tags


def test_the_loss_of_token_classification_is_that_of_transformers() -> None:
    torch.manual_seed(0)
    config = BertConfig(vocab_size=VOCABULARY, hidden_size=8, num_hidden_layers=2, num_attention_heads=2)
    config.num_labels = NUM_TAGS
    model = BertForTokenClassification(config).double().eval()
    right = model(IDS, attention_mask=MASK, labels=tags())
    losses = token_cross_entropy(right.logits, tags().double())
    assert losses.shape == (len(LENGTHS),)
    assert losses[-1] == 0
    torch.testing.assert_close(losses.sum() / (tags() != IGNORED).sum(), right.loss, rtol=0, atol=1e-12)


def test_the_loss_of_a_language_model_is_that_of_transformers() -> None:
    torch.manual_seed(0)
    config = GPT2Config(vocab_size=VOCABULARY, n_embd=8, n_layer=2, n_head=2, n_positions=16, bos_token_id=0)
    model = GPT2LMHeadModel(config).double().eval()
    labels = IDS.masked_fill(~MASK, IGNORED)
    right = model(IDS, attention_mask=MASK, labels=labels)
    following = torch.nn.functional.pad(labels[:, 1:], (0, 1), value=IGNORED)
    losses = token_cross_entropy(right.logits, following.double())
    assert losses[1] == 0, "nothing follows the only token"
    sums = token_sums(right.logits, following.double())
    count = sum(length - 1 for length in LENGTHS)
    assert sums[:, 2].tolist() == [length - 1 for length in LENGTHS]
    torch.testing.assert_close(losses.sum() / count, right.loss, rtol=0, atol=1e-12)
    scores = next_token_scores(sums.detach().numpy())
    assert scores["loss"] == pytest.approx(right.loss.item(), abs=1e-12)
    assert scores["perplexity"] == pytest.approx(math.exp(right.loss.item()), abs=1e-9)
    guesses = right.logits[:, :-1].argmax(-1)
    assert scores["token_accuracy"] == (guesses == labels[:, 1:])[labels[:, 1:] != IGNORED].float().mean().item()


def test_neither_loss_nor_sums_of_a_sample_depend_on_the_others_or_on_padding() -> None:
    output = torch.randn(4, 8, NUM_TAGS, dtype=torch.float64)
    alone = torch.cat([token_cross_entropy(output[i : i + 1, :7], tags()[i : i + 1, :7]) for i in range(4)])
    torch.testing.assert_close(token_cross_entropy(output, tags()), alone)
    torch.testing.assert_close(token_sums(output, tags()), token_sums(output[:, :7], tags()[:, :7]))


def test_samples_of_one_token_each_have_targets_without_columns() -> None:
    output = torch.randn(3, 1, NUM_TAGS, dtype=torch.float64)
    targets = torch.tensor([0.0, IGNORED, 2.0], dtype=torch.float64)  # as they reach a loss
    expected = torch.nn.functional.cross_entropy(output[:, 0], targets.long(), reduction="none")
    torch.testing.assert_close(token_cross_entropy(output, targets), expected)
    assert token_sums(output, targets)[:, 2].tolist() == [1, 0, 1]


def test_a_sample_in_which_nothing_counts_has_no_gradient() -> None:
    output = torch.randn(2, 4, NUM_TAGS, requires_grad=True)
    token_cross_entropy(output, torch.tensor([[IGNORED] * 4, [0, 1, 2, IGNORED]])).sum().backward()
    assert output.grad is not None
    assert output.grad[0].eq(0).all()
    assert output.grad[1, :3].ne(0).all()


def test_the_perplexity_of_a_model_that_knows_nothing_is_infinite() -> None:
    assert next_token_scores(np.array([[4000.0, 1, 2]])) == {
        "token_accuracy": 0.5, "loss": 2000.0, "perplexity": math.inf,
    }  # fmt: skip


def test_the_perplexity_of_a_loss_that_is_not_a_number_is_none_either() -> None:
    scores = next_token_scores(np.array([[math.nan, 1, 2]]))
    assert math.isnan(scores["loss"])
    assert math.isnan(scores["perplexity"])


def drawn(choices: list[str], seed: int) -> list[list[str]]:
    draw = random.Random(seed)
    return [[draw.choice(choices) for _ in range(draw.randint(1, 9))] for _ in range(40)]


@pytest.mark.parametrize(
    "choices",
    [
        ["O", "B-PER", "I-PER", "B-LOC", "I-LOC"],
        ["O", "I-PER", "B-PER"],  # IOB1
        ["O", "B-PER", "I-PER", "E-PER", "S-PER", "B-first-name", "I-first-name"],
        ["O", "B", "I"],
    ],
    ids=" ".join,
)
def test_scores_of_chunks_are_those_of_seqeval(choices: list[str]) -> None:
    truth = drawn(choices, 0)
    draw = random.Random(1)
    guess = [[tag if draw.random() < 0.7 else draw.choice(choices) for tag in tags] for tags in truth]
    scores = chunk_scores(guess, truth)
    assert next(iter(scores)) == "f1"
    assert 0 < scores["f1"] < 1
    assert scores == {
        "f1": metrics.f1_score(truth, guess),
        "precision": metrics.precision_score(truth, guess),
        "recall": metrics.recall_score(truth, guess),
        "token_accuracy": metrics.accuracy_score(truth, guess),
    }


@pytest.mark.parametrize(("scheme", "last", "single"), [(IOBES, "E", "S"), (BILOU, "L", "U")])
def test_well_formed_chunks_of_each_scheme_score_as_seqeval_does_when_it_is_told_the_scheme(
    scheme: type, last: str, single: str
) -> None:
    chunks = [["O"], [f"{single}-PER"], ["B-PER", f"{last}-PER"], ["B-LOC", "I-LOC", f"{last}-LOC"]]
    draw = random.Random(0)
    truth = [[draw.choice(chunks) for _ in range(5)] for _ in range(30)]
    same_length = [[["O"] * len(chunk) if draw.random() < 0.4 else chunk for chunk in each] for each in truth]
    truth_tags, guess_tags = ([[*chain.from_iterable(each)] for each in part] for part in (truth, same_length))
    expected = metrics.f1_score(truth_tags, guess_tags, mode="strict", scheme=scheme)
    assert chunk_scores(guess_tags, truth_tags)["f1"] == pytest.approx(expected)
    assert 0 < expected < 1


def test_chunks_in_two_schemes_score_alike() -> None:
    assert metrics.f1_score([["B-A", "I-A", "O"]], [["B-A", "I-A", "O"]], mode="strict", scheme=IOB2) == 1
    for tags in (["B-A", "I-A", "O", "B-A"], ["B-A", "L-A", "O", "U-A"], ["B-A", "E-A", "O", "S-A"]):
        assert chunk_scores([tags], [tags])["f1"] == 1
        assert chunk_scores([["O", *tags[1:]]], [tags])["recall"] == 0.5


def test_texts_without_a_chunk_score_zero_and_their_accuracy() -> None:
    assert chunk_scores([["O", "O"]], [["O", "O"]]) == {"f1": 0, "precision": 0, "recall": 0, "token_accuracy": 1}


def test_the_main_metric_of_tags_without_chunks_is_the_accuracy() -> None:
    guess, truth = [["NOUN"], ["VERB", "NOUN"]], [["NOUN"], ["VERB", "VERB"]]
    assert tag_scores(guess, truth) == {"token_accuracy": 2 / 3}
    assert token_classification(("NOUN", "VERB"), is_chunked=False).score(guess, truth) == tag_scores(guess, truth)
    assert token_classification(("O", "B-PER"), is_chunked=True).score is chunk_scores


def test_the_heads_of_both_tasks_give_one_output_per_token() -> None:
    assert token_classification(("a", "b"), False).output_shape((2, 5, 16)) == (2, 5, 2)
    task = causal_language_modelling(50257)
    assert task.output_shape((2, 5, 16)) == (2, 5, 50257)
    assert task.head.kind == "causal"
