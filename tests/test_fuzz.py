"""Every file that is read back, damaged in every way: one clear line or right data, and no file outside its folder.

``FUZZ_EXAMPLES`` is the number of inputs of each test; ``make fuzz`` takes a thousand.
"""

import gzip
import json
import os
import shutil
import tempfile
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.caches import OURS
from support.own import sequential
from support.stores import LENGTHS, PLENTY, fill, make_spec, padded

from pipetransformer.autocache.persistent import IDENTITY, LOCK, lock_store_dir, other_stores
from pipetransformer.autocache.store import FeatureStore
from pipetransformer.checkpoint.folder import CheckpointFolder, Retention, check_files, open_checkpoints
from pipetransformer.checkpoint.manifest import MANIFEST, digest_of, layer_file
from pipetransformer.checkpoint.source import CheckpointLayers
from pipetransformer.checkpoint.writer import CheckpointWriter
from pipetransformer.data.images.datasets import IdxImages
from pipetransformer.data.images.sources import IDX_FILES, read_idx
from pipetransformer.data.text.glue import Glue
from pipetransformer.data.text.squad import Squad
from pipetransformer.errors import DamagedCheckpoint, UserError
from pipetransformer.models.stack import LayerStack
from pipetransformer.report import page as pages
from pipetransformer.report.environment import ENVIRONMENT
from pipetransformer.report.event_log import EVENT_LOG, SUMMARY
from pipetransformer.report.run_folder import CONFIG
from pipetransformer.runtime.snapshot import OPTIMIZER, WEIGHTS

from .checkpoint.test_manifest import EXAMPLE
from .report.conftest import run_events

NUM_EXAMPLES = int(os.environ.get("FUZZ_EXAMPLES", "40"))
HOSTILE = [
    b"1e999", b"-1e308", b"-1", b"0", b"1e18", b"9" * 5000, b"NaN", b"-Infinity", b"null", b"true", b"[]", b"{}", b'""',
    b'"../../etc/passwd"', b'"\\ud800"', b"[" * 100_000, b"{" * 2000, b"\xff\xfe", b"\0", b"\n", b"\t", b"\r",
    b"!!python/object/apply:os.system ['touch ran']", b"&a [*a]", b"2026-13-41", b"? [1]\n: 2",
    b"\x80\x05cposix\nsystem\n",
]  # fmt: skip
Damage = Callable[[bytes], bytes | None]


@st.composite
def damages(draw: st.DrawFn) -> Damage:
    """Draws what happens to the bytes of a file; ``None`` for one that is removed."""
    kind = draw(st.sampled_from(["cut", "flip", "drop", "double", "insert", "value", "random", "remove", "keep"]))
    first, second = sorted(draw(st.tuples(st.floats(0, 1), st.floats(0, 1))))
    bit, extra, hostile = draw(st.integers(0, 7)), draw(st.binary(max_size=40)), draw(st.sampled_from(HOSTILE))

    def damage(content: bytes) -> bytes | None:
        start, end = int(first * len(content)), int(second * len(content))
        if kind == "value":  # in place of the number or word that begins next
            start = next((at for at in range(start, len(content)) if content[at - 1 : at] in b" :,[\t"), start)
            end = next((at for at in range(start, len(content)) if content[at : at + 1] in b" ,]}\t\n"), len(content))
        changed = bytearray(content)
        if kind == "flip" and content:
            changed[min(start, len(content) - 1)] ^= 1 << bit
        return {
            "cut": content[:start],
            "flip": bytes(changed),
            "drop": content[:start] + content[end:],
            "double": content[:end] + content[start:],
            "insert": content[:start] + hostile + content[start:],
            "value": content[:start] + hostile + content[end:],
            "random": extra,
            "remove": None,
            "keep": content,
        }[kind]

    return damage


@contextmanager
def damaged(files: dict[str, bytes], draw: st.DataObject) -> Iterator[tuple[Path, bool]]:
    """Yields a folder with files of which one is damaged or two are swapped, and whether all are as they were."""
    name, other = (draw.draw(st.sampled_from(sorted(files))) for _ in range(2))
    changed: dict[str, bytes | None] = {**files, name: draw.draw(damages())(files[name])}
    if draw.draw(st.integers(0, 9)) == 0:
        changed = {**files, name: files[other], other: files[name]}
    with tempfile.TemporaryDirectory() as around:
        folder = Path(around) / "here"
        folder.mkdir()
        for each, content in changed.items():
            (folder / each).parent.mkdir(parents=True, exist_ok=True)
            if content is not None:
                (folder / each).write_bytes(content)
        with warnings.catch_warnings(action="ignore"):
            yield folder, changed == files
        assert os.listdir(around) == ["here"], "nothing is written outside"
        assert not Path("ran").exists()


@contextmanager
def one_line(is_whole: bool) -> Iterator[None]:
    """Swallows an error that is one clear line, where the files are not whole."""
    try:
        yield
    except UserError as error:
        if is_whole or not str(error) or "\n" in str(error):
            raise


@pytest.fixture(scope="module")
def run_files() -> dict[str, bytes]:
    lines = (json.dumps({"event": event, "time": "2026-01-31T12:00:00", **values}) for event, values in run_events())
    summary = dict(run_events())["summary"]
    return {
        EVENT_LOG: "\n".join(lines).encode() + b"\n",
        CONFIG: b"seed: 1\nfreeze:\n  alpha: 0.33\ndataset:\n  path: null\n",
        SUMMARY: json.dumps(summary, indent=2).encode(),
        ENVIRONMENT: b'{"python": "3.11"}',
    }


@settings(max_examples=NUM_EXAMPLES)
@given(data=st.data())
def test_a_run_folder_is_shown_or_refused(run_files: dict[str, bytes], data: st.DataObject) -> None:
    figures = pages.FIGURES if NUM_EXAMPLES >= 1000 and data.draw(st.integers(0, 19)) == 0 else ()
    drawn = mock.patch.object(pages, "FIGURES", figures)
    with damaged(run_files, data) as (folder, is_whole), drawn, one_line(is_whole):
        page = pages.read_page(folder)
        assert page.startswith("<!doctype html>")
        assert "<script" not in page


def idx(array: np.ndarray) -> bytes:
    return bytes((0, 0, 8, array.ndim)) + np.array(array.shape, ">u4").tobytes() + array.tobytes()


IMAGES, LABELS = np.arange(4 * 3 * 3, dtype=np.uint8).reshape(4, 3, 3), np.arange(4, dtype=np.uint8) % 2


@settings(max_examples=NUM_EXAMPLES)
@given(zipped=st.booleans(), data=st.data())
def test_pictures_in_idx_files_are_right_or_refused(zipped: bool, data: st.DataObject) -> None:
    contents = {name: idx(IMAGES if "images" in name else LABELS) for name in IDX_FILES}
    if zipped:
        contents = {f"{name}.gz": gzip.compress(content, mtime=0) for name, content in contents.items()}
    with damaged(contents, data) as (folder, is_whole):
        spec = IdxImages(path=str(folder), num_classes=10)
        with one_line(is_whole):
            spec.check()
            assert spec.preflight() is not None
        for file in folder.iterdir():
            with one_line(is_whole):
                found = idx(read_idx(file))
                if zipped:  # with a checksum; plain files have their size alone
                    assert found in map(gzip.decompress, contents.values())
                else:
                    assert found == file.read_bytes()


@settings(max_examples=NUM_EXAMPLES)
@given(data=st.data())
def test_tables_of_texts_are_read_or_refused(data: st.DataObject) -> None:
    table = "sentence\tlabel\n" + "".join(f"text number {row}\t{row % 2}\n" for row in range(6))
    task = data.draw(st.sampled_from(["sst2", "stsb"]))
    if task == "stsb":
        table = "sentence1\tsentence2\tscore\n" + "".join(f"one {row}\ttwo\t{row / 2}\n" for row in range(6))
    with damaged({f"{name}.tsv": table.encode() for name in ("train", "dev")}, data) as (folder, is_whole):
        spec = Glue(task=task, path=str(folder))
        with one_line(is_whole):
            spec.check()
            assert (spec.preflight() or 0) >= 0


@settings(max_examples=NUM_EXAMPLES)
@given(data=st.data())
def test_questions_are_read_or_refused(data: st.DataObject) -> None:
    context = "The small bird sees the fish."
    answers = [{"text": "bird", "answer_start": 10}]
    articles = [
        {"paragraphs": [{"context": context, "qas": [{"id": str(row), "question": "Who sees?", "answers": answers}]}]}
        for row in range(4)
    ]
    content = json.dumps({"version": "1.1", "data": articles}).encode()
    with damaged({"train-v1.json": content, "dev-v1.json": content}, data) as (folder, is_whole):
        spec = Squad(path=str(folder))
        with one_line(is_whole):
            spec.check()
            spec.preflight()
            for question in (question for part in spec._questions()[::2] for question in part):
                assert all(isinstance(text, str) for text in (question.id, question.text, question.context))
                answers_found = zip(question.answers, question.starts, strict=True)
                assert all(question.context[start:].startswith(text) for text, start in answers_found)


@settings(max_examples=NUM_EXAMPLES)
@given(data=st.data())
def test_the_identity_and_the_lock_of_a_store_are_read_or_refused(data: st.DataObject) -> None:
    with tempfile.TemporaryDirectory() as made, lock_store_dir(Path(made), OURS, "a run") as store_dir:
        place = store_dir.path.relative_to(made)
    contents = {f"{place}/{IDENTITY}": OURS.to_json().encode(), f"{place}/{LOCK}": b'{"owner": "a run", "pid": 1}'}
    contents[f"{place}/features"] = b"features"
    with damaged(contents, data) as (folder, is_whole):
        with one_line(is_whole), lock_store_dir(folder, OURS, "another run") as again:
            assert json.loads((again.path / IDENTITY).read_text()) == json.loads(OURS.to_json())
        other_stores(folder, OURS)


@pytest.fixture(scope="module")
def store_files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    folder = tmp_path_factory.mktemp("stores")
    files = {}
    for name, disk in (("large", PLENTY), ("small", 300)):
        spec = make_spec(folder / name, 0, disk, persistent=True)
        store = FeatureStore.create(spec)
        fill(store, key=1)
        store.close()
        files[f"{name}/store/train.features"] = spec.path.read_bytes()
    shutil.rmtree(folder)
    return files


@settings(max_examples=NUM_EXAMPLES)
@given(data=st.data())
def test_features_of_a_store_are_right_or_missing(store_files: dict[str, bytes], data: st.DataObject) -> None:
    everything: Any = np.arange(len(LENGTHS))
    with damaged(store_files, data) as (folder, is_whole):
        for name, disk in (("large", PLENTY), ("small", 300)):
            spec = make_spec(folder / name, 0, disk, persistent=True)
            if not spec.path.is_file():  # a new one is made
                continue
            with one_line(is_whole):
                store = FeatureStore.reopen(spec)
                dropped = store.verify(key=1)
                features, found = store.read(everything, 6, key=1)
                assert torch.equal(features, padded(everything, 6, 1) * found[:, None, None])
                assert not is_whole or (dropped == 0 and found[np.concatenate(store.shards)].all())
                store.close()


@pytest.fixture(scope="module")
def checkpoint_files() -> dict[str, bytes]:
    stack = checkpointed()
    layers: dict[int, tuple[str, dict[str, torch.Tensor]]] = {}
    for index in range(len(stack)):
        named = {name: tensor.detach() for name, tensor in stack[index].tensors()}
        tensors = {WEIGHTS + name: tensor for name, tensor in named.items()}
        moments = {f"{OPTIMIZER}{name}/exp_avg": tensor + 1 for name, tensor in named.items()}
        layers[index] = stack[index].prefix, tensors | moments
    with tempfile.TemporaryDirectory() as folder:
        writer = CheckpointWriter(CheckpointFolder(Path(folder)), 0, 1, 60, torch.distributed.HashStore())
        writer.start(layers, replace(EXAMPLE, layers=()), Retention())
        writer.wait()
        (path,) = CheckpointFolder(Path(folder)).published()
        return {f"{path.name}/{file.name}": file.read_bytes() for file in path.iterdir()}


def checkpointed() -> LayerStack:
    return LayerStack.from_sequential(sequential())


def sign(folder: Path) -> None:
    """Gives each layer of a checkpoint the digest of its file, as somebody does who knows how it is made."""
    values = json.loads((folder / MANIFEST).read_bytes())
    values.pop("digest")
    for layer in values["layers"]:
        content = (folder / layer_file(layer["layer"])).read_bytes()
        layer |= {"digest": digest_of(content), "num_bytes": len(content)}
    own = json.dumps(values, sort_keys=True, separators=(",", ":")).encode()
    (folder / MANIFEST).write_bytes(json.dumps(values | {"digest": digest_of(own)}).encode())


@settings(max_examples=NUM_EXAMPLES)
@given(data=st.data(), signed=st.booleans())
def test_a_checkpoint_is_restored_whole_or_refused(
    checkpoint_files: dict[str, bytes], data: st.DataObject, signed: bool
) -> None:
    stack = checkpointed()
    with damaged(checkpoint_files, data) as (folder, is_whole), one_line(is_whole):
        if signed:
            with suppress(OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
                sign(folder / next(iter(checkpoint_files)).partition("/")[0])
        ((path, manifest),) = open_checkpoints(folder)
        if isinstance(manifest, DamagedCheckpoint):
            raise manifest
        check_files(path, manifest.layers)
        layers = CheckpointLayers(path, manifest, stack)
        for index in range(len(stack)):
            own, state = dict(stack[index].tensors()), layers.optimizer_state(index)
            found = dict(layers.weights(index))
            assert found.keys() == own.keys()
            assert signed or all(torch.equal(found[name], own[name]) for name in own)
            assert signed or sum(len(each) for each in state.values()) == len(own)
