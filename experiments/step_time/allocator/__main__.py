"""Times steps where freed memory stays with the process: ``python -m experiments.step_time.allocator``."""

from __future__ import annotations

import argparse
import resource
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

import timm
import torch
from torch import Tensor, nn
from transformers import BertConfig, BertForSequenceClassification

from experiments.ranks import run_ranks
from experiments.record import markdown, publish, spread
from pipetransformer.runtime.host_memory import keep_freed_memory

ROUNDS, WARM_UP = 5, 5
VIT = {"embed_dim": 96, "depth": 6, "num_heads": 3, "img_size": 28, "patch_size": 7, "in_chans": 1, "num_classes": 10}
MINILM = {"hidden_size": 384, "num_hidden_layers": 6, "num_attention_heads": 12, "intermediate_size": 1536}
HEADER = ("model", "times as fast", "range", "page faults a step", "kept", "resident, MiB", "kept")


@dataclass(frozen=True)
class Measured:
    """One process. Times are of a step, in seconds; page faults are those without reading from a disk."""

    seconds: float
    page_faults: float
    resident_mib: float


def vit() -> tuple[nn.Module, Tensor]:
    return timm.create_model("vit_tiny_patch16_224", **VIT), torch.rand(64, 1, 28, 28)


def minilm(batch_size: int, num_tokens: int) -> tuple[nn.Module, Tensor]:
    tokens = torch.randint(0, 30000, (batch_size, num_tokens))
    return BertForSequenceClassification(BertConfig(**MINILM)), tokens  # type: ignore[arg-type]


CASES: dict[str, tuple[Callable[[], tuple[nn.Module, Tensor]], int]] = {
    "ViT 96 wide, 6 blocks, 64 pictures of 16 patches": (vit, 100),
    "as MiniLM, 32 texts of 27 tokens": (lambda: minilm(32, 27), 20),
    "as MiniLM, 16 texts of 256 tokens": (lambda: minilm(16, 256), 5),
}
"""Each model with its number of timed steps."""


def measure(name: str, keeps: bool, num_steps: int) -> Measured:
    """Takes steps of a hand-written loop in this process."""
    if keeps:
        keep_freed_memory()
    model, inputs = CASES[name][0]()
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    seconds, before = list[float](), 0
    for step in range(WARM_UP + num_steps):
        if step == WARM_UP:
            before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        began = time.perf_counter()
        optimizer.zero_grad()
        outputs = model(inputs)
        (outputs if isinstance(outputs, Tensor) else outputs.logits).square().mean().backward()
        optimizer.step()
        seconds.append(time.perf_counter() - began)
    used = resource.getrusage(resource.RUSAGE_SELF)
    return Measured(median(seconds[WARM_UP:]), (used.ru_minflt - before) / num_steps, used.ru_maxrss / 1024)


def run_rounds(name: str, rounds: int, num_steps: int) -> list[tuple[Measured, Measured]]:
    """Returns each round's process with the allocator as it is and the one that keeps memory, in turns."""
    found = []
    for index in range(rounds):
        turns = (False, True) if index % 2 == 0 else (True, False)
        by_turn = {keeps: run_ranks(1, measure, name, keeps, num_steps) for keeps in turns}
        found.append((by_turn[False], by_turn[True]))
        print(f"{name}, round {index + 1}: {by_turn[False]} {by_turn[True]}", flush=True)
    return found


def row(name: str, rounds: Sequence[tuple[Measured, Measured]]) -> list[str]:
    """Returns a case as cells of the table; ratios are taken within a round."""
    ratios = [plain.seconds / kept.seconds for plain, kept in rounds]
    figures = [(one.page_faults, one.resident_mib) for pair in rounds for one in pair]
    faults, resident = ([median(figure[which] for figure in figures[kind::2]) for kind in (0, 1)] for which in (0, 1))
    return [name, *spread(ratios), *(f"{value:,.0f}" for value in (*faults, *resident))]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--into", type=Path, default=Path(__file__).parent, help="whose README.md takes the table")
    given = parser.parse_args(arguments)
    if given.rounds < 1:
        parser.error(f"--rounds {given.rounds}: a ratio takes at least one round")
    found = {name: run_rounds(name, given.rounds, num_steps) for name, (_, num_steps) in CASES.items()}
    kept = {name: [[asdict(one) for one in pair] for pair in rounds] for name, rounds in found.items()}
    publish(markdown(HEADER, (row(name, rounds) for name, rounds in found.items())), kept, given.into)


if __name__ == "__main__":
    main()
