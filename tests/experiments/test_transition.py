"""The benchmark of transitions runs, and reports every kind of them."""

from support.pool import Pool

from experiments.transition.transition import NUM_ROUNDS, Case, measure, rows

SIZES = {"vocab_size": 1000, "hidden_size": 16, "num_attention_heads": 2, "intermediate_size": 16}
SMALL = Case("small", 4, SIZES, 2, ((0, 2, 1), (2, 1, 2)))


def test_every_transition_is_timed_in_every_round(pool: Pool) -> None:
    reports = pool.run(2, measure, SMALL)[0]
    assert len(reports) == 2 * NUM_ROUNDS - 1, "the first plan is no transition"
    assert [cells[1] for cells in rows(SMALL, reports)] == [
        "2 x 1, 0 frozen to 1 x 2, 2 frozen",
        "1 x 2, 2 frozen to 2 x 1, 0 frozen",
    ]
