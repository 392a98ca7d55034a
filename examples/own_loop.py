"""Fine-tunes a model of transformers in a loop of your own: ``torchrun --nproc-per-node 2 own_loop.py``.

The model is a small BERT with random weights, so that nothing has to be downloaded; give a name to start from
published ones: ``torchrun --nproc-per-node 2 own_loop.py google/bert_uncased_L-4_H-256_A-4``.
"""

import sys

import torch
from torch.nn.functional import cross_entropy
from transformers import AutoModelForSequenceClassification, BertConfig, BertForSequenceClassification

import pipetransformer as pt


def make_model(name: str | None) -> torch.nn.Module:
    if name is not None:
        return AutoModelForSequenceClassification.from_pretrained(name, num_labels=2)
    config = BertConfig(
        vocab_size=100, hidden_size=32, num_hidden_layers=4, num_attention_heads=4, intermediate_size=64, num_labels=2
    )
    return BertForSequenceClassification(config)


def sentences(num_samples: int, seed: int) -> list[dict[str, object]]:
    """Token ids of any length; class 1 where the first token is below 50."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(4, 16, (num_samples,), generator=generator).tolist()
    tokens = [torch.randint(1, 100, (length,), generator=generator) for length in lengths]
    return [{"input_ids": ids, "labels": int(ids[0] < 50)} for ids in tokens]


class PrintTransitions(pt.Callback):
    def on_transition(self, trainer: pt.ElasticTrainer, before: pt.Plan, after: pt.Plan) -> None:
        if trainer.rank == 0:
            print(f"{before.num_frozen} -> {after.num_frozen} blocks frozen, {after.num_replicas} replicas")


def main() -> None:
    torch.manual_seed(0)
    with pt.ElasticTrainer(
        make_model(*sys.argv[1:2] or [None]),
        loss=lambda logits, labels: cross_entropy(logits, labels, reduction="none"),
        train=sentences(512, seed=1),
        evaluation={"dev": sentences(64, seed=2)},
        optimizer=pt.AdamW(lr=3e-3, warmup=0.1),
        batch_size=16,
        epochs=3,
        freeze=pt.PaperRule(alpha=0.4),
        callbacks=[PrintTransitions()],
    ) as trainer:
        for step in trainer:
            if trainer.state.step_in_epoch == 0:
                scores = trainer.evaluate()["dev"]
                if trainer.rank == 0:
                    print(f"epoch {trainer.state.epoch}: loss {step.loss:.4f}  dev {scores}")
        trainer.save("own_loop_model")


if __name__ == "__main__":
    main()
