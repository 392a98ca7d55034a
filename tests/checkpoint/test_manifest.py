"""A manifest holds what was written, or is refused in one line."""

import json
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipetransformer.checkpoint.manifest import LARGEST, MANIFEST, LayerFile, Manifest, digest_of, read_manifest
from pipetransformer.errors import DamagedCheckpoint

FILES = tuple(LayerFile(layer, f"blocks.{layer}.", 10 + layer, digest_of(bytes([layer]))) for layer in range(3))
EXAMPLE = Manifest(
    step=7,
    layers=FILES,
    train={"step": 7, "norm_sums": [0.1, 1e-300], "metrics": {"test": {"loss": 1 / 3}}},
    settings={"optim.lr": 1e-3},
    overrides=["model=vit_tiny"],
    data={"train": "ab", "num_samples": 64},
    cache={},
    versions={"torch": "2"},
    logger={},
    log_bytes=12,
    sample_ids="",
    metric=0.5,
    seconds=1.5,
)


def test_a_manifest_comes_back_as_it_was_written() -> None:
    assert Manifest.from_json(EXAMPLE.to_json(), Path("manifest.json")) == EXAMPLE


@given(st.floats(allow_nan=False))
def test_floats_keep_every_bit(value: float) -> None:
    manifest = replace(EXAMPLE, train={"value": value})
    assert Manifest.from_json(manifest.to_json(), Path("manifest.json")).train["value"] == value


@given(st.data())
def test_a_manifest_that_was_changed_is_refused(data: st.DataObject) -> None:
    content = EXAMPLE.to_json()
    position = data.draw(st.integers(0, len(content) - 1))
    kind = data.draw(st.sampled_from(["cut", "flip", "replace"]))
    if kind == "cut":
        changed = content[:position]
    elif kind == "flip":
        bit = data.draw(st.integers(0, 7))
        changed = content[:position] + bytes([content[position] ^ (1 << bit)]) + content[position + 1 :]
    else:
        changed = content[:position] + data.draw(st.binary(min_size=1, max_size=40)) + content[position:]
    with suppress(DamagedCheckpoint):
        found = Manifest.from_json(changed, Path("manifest.json"))
        assert found == EXAMPLE  # white space between two values


def signed(values: dict[str, object]) -> bytes:
    """A manifest whose digest fits, by somebody who knows how it is made."""
    own = json.dumps(values, sort_keys=True, separators=(",", ":")).encode()
    return json.dumps(values | {"digest": digest_of(own)}).encode()


def hostile() -> dict[str, dict[str, object]]:
    good = json.loads(EXAMPLE.to_json())
    good.pop("digest")
    layer = good["layers"][0]
    return {
        "another schema": good | {"schema": 2},
        "no layers": good | {"layers": []},
        "a layer twice": good | {"layers": [layer, layer]},
        "a layer below 0": good | {"layers": [layer | {"layer": -1}]},
        "a path for a layer": good | {"layers": [layer | {"layer": "../../etc/passwd"}]},
        "a step that is no number": good | {"step": {}},
        "no digest": good | {"layers": [layer | {"digest": "0"}]},
        "numbers for layers": good | {"layers": 3},
        "another entry": good | {"more": 1},
        "an entry less": {name: value for name, value in good.items() if name != "train"},
    }


@pytest.mark.parametrize("kind", hostile())
def test_a_manifest_with_other_values_is_refused(kind: str) -> None:
    with pytest.raises(DamagedCheckpoint, match=r"manifest\.json"):
        Manifest.from_json(signed(hostile()[kind]), Path("manifest.json"))


@pytest.mark.parametrize("content", [b"", b"[]", b"null", b"{", b'{"digest": 1}', b"\xff\xfe", b"[" * 100_000])
def test_what_is_no_manifest_is_refused(content: bytes) -> None:
    with pytest.raises(DamagedCheckpoint, match=r"manifest\.json"):
        Manifest.from_json(content, Path("manifest.json"))


def test_a_huge_file_is_not_read(tmp_path: Path) -> None:
    with (tmp_path / MANIFEST).open("wb") as file:
        file.truncate(LARGEST + 1)
    with pytest.raises(DamagedCheckpoint, match="which no manifest has"):
        read_manifest(tmp_path)
