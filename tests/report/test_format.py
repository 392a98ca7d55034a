import pytest

from pipetransformer.report.units import byte_size, duration, number, plural


@pytest.mark.parametrize(
    ("seconds", "words"),
    [
        (None, "-"),
        (0.0, "0 ms"),
        (0.00000042, "0.42 us"),
        (0.0421, "42.1 ms"),
        (0.9994, "999 ms"),
        (0.9996, "1 s"),
        (12.34, "12.3 s"),
        (59.94, "59.9 s"),
        (59.96, "1m00s"),
        (743.2, "12m23s"),
        (3599.6, "1h00m"),
        (18440, "5h07m"),
    ],
)
def test_a_duration_shows_its_two_largest_units(seconds: float | None, words: str) -> None:
    assert duration(seconds) == words


@pytest.mark.parametrize(
    ("num_bytes", "words"),
    [
        (0, "0 bytes"),
        (1023, "1023 bytes"),
        (1536, "1.5 KiB"),
        (3 * 2**20, "3 MiB"),
        (388 * 2**30, "388 GiB"),
        (2**42, "4 TiB"),
    ],
)
def test_a_byte_size_is_shown_in_binary_units(num_bytes: int, words: str) -> None:
    assert byte_size(num_bytes) == words


def test_a_number_that_is_not_known_is_a_dash() -> None:
    assert [number(None), number(0.123456), number(float("nan"))] == ["-", "0.1235", "nan"]


def test_counts_agree_with_their_nouns() -> None:
    assert [plural(1, "stage"), plural(2, "stage"), plural(1200, "micro-batch")] == [
        "1 stage",
        "2 stages",
        "1,200 micro-batches",
    ]
