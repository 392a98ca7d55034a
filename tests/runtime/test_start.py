"""A rank reads and holds its own layers only, so that a model larger than its memory starts."""

import subprocess
import sys
from pathlib import Path

import pytest
from support.cases import NUM_CLASSES, Case
from support.memory import Started, start
from support.plans import HEAD, plan
from support.pool import Pool

from pipetransformer.autodp.transition import first_transition
from pipetransformer.models.base import Head
from pipetransformer.models.huggingface import HuggingFaceModel
from pipetransformer.models.stack import LayerStack

PLANS = {
    "4 stages": plan(0, 0, [1, 3, 5, HEAD], 1, 2),
    "2 stages x 2": plan(0, 0, [3, HEAD], 2, 2),
    "below a cached prefix on rank 0": plan(3, 3, [5, HEAD], 1, 2),
}


@pytest.fixture(scope="module")
def published(bert_config: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, LayerStack]:
    """A tiny BERT with weights, in a folder; the tokenizer plays no part."""
    import torch
    from transformers import BertConfig, BertForSequenceClassification

    folder = tmp_path_factory.mktemp("published")
    torch.manual_seed(0)
    BertForSequenceClassification(BertConfig.from_pretrained(bert_config, num_labels=NUM_CLASSES)).save_pretrained(
        folder
    )
    return folder, HuggingFaceModel(name=str(folder)).build_meta(Head("sequence", NUM_CLASSES), (), 0)


def num_bytes(stack: LayerStack, layers: list[int]) -> int:
    return sum(tensor.nbytes for layer in layers for _, tensor in stack[layer].tensors())


@pytest.mark.parametrize("name", PLANS)
def test_a_rank_reads_and_holds_the_layers_of_its_first_plan_alone(
    name: str, published: tuple[Path, LayerStack], pool: Pool, bert_config: Path
) -> None:
    folder, stack = published
    case, wanted = Case("bert", bert_config), PLANS[name]
    world = wanted.num_devices
    seen: list[Started] = pool.run(world, start, case, folder, NUM_CLASSES, wanted)

    for rank, own in enumerate(seen):
        layers = [layer for layer, ranks in enumerate(first_transition(wanted).placement) if rank in ranks]
        assert own.held == layers
        assert own.read == {name for layer in layers for name in stack[layer].original_state()}
        assert own.most_bytes == num_bytes(stack, layers)


def test_the_layers_are_measured_one_at_a_time(
    published: tuple[Path, LayerStack], pool: Pool, bert_config: Path
) -> None:
    folder, stack = published
    seen = pool.run(2, start, Case("bert", bert_config), folder, NUM_CLASSES, plan(0, 0, [3, HEAD], 1, 2))

    largest = max(num_bytes(stack, [layer]) for layer in range(len(stack)))
    assert [own.most_bytes_measuring for own in seen] == [largest] * 2


SCRIPT = """
import os, resource, sys
import torch
from transformers import AutoModelForSequenceClassification
from pipetransformer.models.base import Head
from pipetransformer.models.base import Head
from pipetransformer.models.huggingface import HuggingFaceModel

torch.set_num_threads(1)
def load(layers):
    stack = HuggingFaceModel(name=sys.argv[1]).build_meta(Head("sequence", 2), (), 0)
    for layer in layers:
        stack.load(layer)

load([0])  # whatever is allocated once
used = next(int(line.split()[1]) * 1024 for line in open("/proc/self/status") if line.startswith("VmData"))
for layers in sys.argv[3:]:
    if os.fork() == 0:
        resource.setrlimit(resource.RLIMIT_DATA, (used + int(sys.argv[2]),) * 2)
        load(map(int, layers.split(",")))
        os._exit(0)
    print(os.waitstatus_to_exitcode(os.wait()[1]), flush=True)
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="Linux counts and limits the memory of a process")
@pytest.mark.thorough  # every run counts bytes: test_a_rank_reads_and_holds_the_layers_of_its_first_plan_alone
def test_a_model_larger_than_the_memory_of_a_rank_starts(tmp_path: Path) -> None:
    """12 blocks of 12 MiB, room for 110: a rank that has three of them starts, and all of them do not fit.

    The file is in parts, as that of a large model is: safetensors maps a whole file, and Linux counts that.
    """
    from transformers import BertConfig, BertForSequenceClassification

    sizes = {"hidden_size": 512, "intermediate_size": 2048, "num_attention_heads": 8, "vocab_size": 64}
    model = BertForSequenceClassification(BertConfig(num_hidden_layers=12, **sizes))
    model.save_pretrained(tmp_path, max_shard_size="16MB")

    part, whole = "4,5,6", ",".join(map(str, range(14)))
    words = [sys.executable, "-c", SCRIPT, str(tmp_path), str(110 << 20), part, whole]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.stdout.split() == ["0", "1"], done.stderr
    assert "memory" in done.stderr.lower()
