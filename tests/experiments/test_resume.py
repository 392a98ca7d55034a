"""The benchmark of checkpoints runs, and reports every model on every world."""

from pathlib import Path

from support.pool import Pool

from experiments.resume.resume import HEADER, Case, measure, row

SMALL = Case("small", {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 16})


def test_saving_and_resuming_are_timed(pool: Pool, tmp_path: Path) -> None:
    found = pool.run(2, measure, SMALL, tmp_path / "run")[0]
    cells = row(SMALL, 2, found)
    assert len(cells) == len(HEADER)
    assert cells[:2] == ("small", "2")
    assert found.num_bytes > 3 * 4 * 30522 * 16, "weights and two moments of the embedding"
    assert 0 < found.waited_s < found.written_s
