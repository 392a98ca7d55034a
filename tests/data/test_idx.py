import gzip
import struct
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as st_numpy

from pipetransformer.data.idx import FILES, find_files, packaged_folder, read_idx


def idx_bytes(array: np.ndarray) -> bytes:
    return struct.pack(f">HBB{array.ndim}I", 0, 8, array.ndim, *array.shape) + array.tobytes()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("idx")


@given(st_numpy.arrays(np.uint8, st_numpy.array_shapes(max_dims=3, max_side=5)), st.booleans())
def test_what_was_written_is_read(folder: Path, array: np.ndarray, zipped: bool) -> None:
    file = folder / ("some.gz" if zipped else "some")
    file.write_bytes(gzip.compress(idx_bytes(array), mtime=0) if zipped else idx_bytes(array))
    np.testing.assert_array_equal(read_idx(file), array)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("text", b"hello", "not an IDX file of unsigned bytes; it starts with 68656c6c"),
        ("empty", b"", "not an IDX file"),
        ("short", idx_bytes(np.zeros((3, 4), np.uint8))[:-1], r"23 bytes, which does not fit its shape \(3, 4\)"),
        ("header", idx_bytes(np.zeros((3, 4), np.uint8))[:6], r"does not fit its shape \(\)"),
        ("plain.gz", b"hello", "cannot be unpacked"),
        ("cut.gz", gzip.compress(idx_bytes(np.zeros(9, np.uint8)), mtime=0)[:-12], "cannot be unpacked"),
    ],
)
def test_a_damaged_file_is_refused(tmp_path: Path, name: str, content: bytes, message: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=message):
        read_idx(tmp_path / name)


def test_the_four_files_are_found_in_order_zipped_or_not(tmp_path: Path) -> None:
    names = [FILES[0], f"{FILES[1]}.gz", FILES[2], f"{FILES[3]}.gz"]
    for name in names:
        (tmp_path / name).touch()
    assert [file.name for file in find_files(tmp_path)] == names


def test_missing_files_are_named(tmp_path: Path) -> None:
    (tmp_path / FILES[0]).touch()
    with pytest.raises(ValueError, match=f"dataset.path={tmp_path} lacks {FILES[1]}, {FILES[2]}, {FILES[3]}"):
        find_files(tmp_path)


def test_the_package_manager_knows_where_the_packaged_files_are(tmp_path: Path) -> None:
    listing = tmp_path / "dataset-fashion-mnist.list"
    assert packaged_folder(listing) is None
    listing.write_text(f"/.\n/usr\n/usr/share/somewhere\n/usr/share/somewhere/{FILES[0]}.gz\n")
    assert packaged_folder(listing) == Path("/usr/share/somewhere")
