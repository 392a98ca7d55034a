"""Trains an ``nn.Sequential`` on a data set of your own: ``python own_model.py``, or under torchrun.

The first entry of the model is the embedding, the last one the head; those between are the blocks, which freeze from
the bottom up.
"""

import torch
from torch import nn

import pipetransformer as pt

WIDTH, NUM_TOKENS, VOCABULARY, NUM_BLOCKS = 32, 12, 50, 4


class Embedding(nn.Embedding):
    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return super().forward(tokens)  # (B, T) -> (B, T, D)


class Head(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x.mean(1))  # (B, T, D) -> (B, 2)


class Reviews(torch.utils.data.Dataset):
    """Sentences of random words; those with more words below 25 than above are of class 1."""

    def __init__(self, num_samples: int, seed: int) -> None:
        self.words = torch.randint(VOCABULARY, (num_samples, NUM_TOKENS), generator=torch.Generator().manual_seed(seed))

    def __len__(self) -> int:
        return len(self.words)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return self.words[index], int((self.words[index] < VOCABULARY // 2).float().mean() > 0.5)


def main() -> None:
    torch.manual_seed(0)
    blocks = [
        nn.TransformerEncoderLayer(WIDTH, nhead=4, dim_feedforward=64, batch_first=True) for _ in range(NUM_BLOCKS)
    ]
    model = nn.Sequential(Embedding(VOCABULARY, WIDTH), *blocks, Head(WIDTH, 2))
    with pt.ElasticTrainer(
        model,
        loss=nn.CrossEntropyLoss(reduction="none"),
        train=Reviews(512, seed=1),
        evaluation={"test": Reviews(128, seed=2)},
        optimizer=pt.AdamW(lr=3e-3),
        batch_size=32,
        epochs=4,
    ) as trainer:
        for step in trainer:
            if trainer.state.step % 16 == 0:
                print(f"step {trainer.state.step}  loss {step.loss:.3f}  {trainer.plan.num_frozen} blocks frozen")
        print(trainer.evaluate()["test"])


if __name__ == "__main__":
    main()
