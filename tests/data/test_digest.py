"""Different values never look alike, whatever their bytes have in common."""

import tracemalloc

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from pipetransformer.data.digest import Digest, Plain

VALUES = st.sampled_from([None, 0, 1, 11, 1.0, "", "1", "11", "None", (1,), (1, 1)])


def digest(*values: Plain | np.ndarray, kind: str = "test") -> str:
    made = Digest(kind)
    made.add(*values)
    return made.hex()


@example([1, 1], [11])
@given(st.lists(VALUES, max_size=4), st.lists(VALUES, max_size=4))
def test_two_lists_have_one_digest_only_if_they_are_equal(one: list[Plain], two: list[Plain]) -> None:
    assert (digest(*one) == digest(*two)) == (repr(one) == repr(two))


@pytest.mark.parametrize(
    "other",
    [
        np.array([[1, 2]], dtype=np.int32),
        np.array([1, 2], dtype=np.int64),
        np.array([1, 3], dtype=np.int32),
        np.array([1, 2, 0], dtype=np.int32),
        np.array([1, 2], dtype=np.uint32),
        np.array([1, 2], dtype=">i4"),
    ],
    ids=["shape", "width", "value", "length", "type", "byte order"],
)
def test_an_array_counts_by_type_shape_and_bytes(other: np.ndarray) -> None:
    array = np.array([1, 2], dtype=np.int32)
    assert digest(array) == digest(array.copy())
    assert digest(array) != digest(other)


def test_where_an_array_ends_counts() -> None:
    whole = np.arange(6, dtype=np.uint8)
    splits = {digest(whole[:cut], whole[cut:]) for cut in range(7)}
    assert len(splits) == 7


def test_the_kind_counts() -> None:
    assert digest(1, kind="tokens") != digest(1, kind="pictures")


def test_an_array_with_gaps_is_the_same_as_without() -> None:
    table = np.arange(24).reshape(4, 6)
    assert digest(table[:, ::2]) == digest(table[:, ::2].copy())


def test_an_array_is_not_copied() -> None:
    array = np.zeros(8 << 20, dtype=np.uint8)
    tracemalloc.start()
    try:
        digest(array.reshape(8, -1))
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < array.nbytes / 8


def test_addresses_of_objects_are_refused() -> None:
    with pytest.raises(AssertionError, match="addresses"):
        digest(np.array([object()]))
