from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from aioloader import FixedBatch, Loader, PreferenceCollator, SftCollator
from aioloader.errors import BatchError, ConfigError

COLLATE = PreferenceCollator(SftCollator(pad_token_id=0))
PAIRS: list[dict[str, Any]] = [
    {"chosen": {"input_ids": [1, 2, 3, 4], "prompt_length": 2}, "rejected": {"input_ids": [1, 2, 5], "prompt_length": 2}},
    {"chosen": {"input_ids": [6, 7], "loss_mask": [0, 1]}, "rejected": {"input_ids": [6, 8, 9, 9, 9], "loss_mask": [0, 1, 1, 1, 1]}},
]


def test_chosen_rows_come_before_rejected_ones_and_prompts_are_not_trained() -> None:
    arrays = COLLATE(PAIRS)
    assert arrays["input_ids"].tolist() == [[1, 2, 3, 4, 0], [6, 7, 0, 0, 0], [1, 2, 5, 0, 0], [6, 8, 9, 9, 9]]
    ignored = -100
    assert arrays["labels"].tolist() == [
        [ignored, ignored, 3, 4, ignored],
        [ignored, 7, ignored, ignored, ignored],
        [ignored, ignored, 5, ignored, ignored],
        [ignored, 8, 9, 9, 9],
    ]
    assert arrays["attention_mask"].sum(1).tolist() == [4, 2, 3, 5]
    assert all(array.dtype == np.int64 for array in arrays.values())


def test_each_side_is_what_the_collator_of_answers_makes_of_it() -> None:
    both = COLLATE(PAIRS)
    for rows, side in ((slice(0, 2), "chosen"), (slice(2, 4), "rejected")):
        alone = SftCollator(pad_token_id=0, pad_to_multiple_of=5)([pair[side] for pair in PAIRS])
        assert all(np.array_equal(both[name][rows], alone[name]) for name in alone)


@pytest.mark.parametrize(
    ("pair", "message"),
    [
        ({"chosen": PAIRS[0]["chosen"]}, r"pair 1: expected 'chosen' and 'rejected', got \['chosen'\]"),
        (7, "pair 1: expected 'chosen' and 'rejected', got int"),
        (
            {"chosen": {"input_ids": [1]}, "rejected": {"input_ids": [1]}},
            r"PreferenceCollator: pair 1\['chosen'\]: expected 'input_ids' and one",
        ),
    ],
)
def test_a_malformed_pair_is_named(pair: Any, message: str) -> None:
    with pytest.raises(BatchError, match=message):
        COLLATE([PAIRS[0], pair])


def test_it_takes_a_collator_of_answers_only() -> None:
    with pytest.raises(ConfigError, match=r"PreferenceCollator\(answers\): expected an SftCollator, got 3"):
        PreferenceCollator(3)  # type: ignore[arg-type]


def test_a_loader_delivers_pairs_and_counts_them_once() -> None:
    with Loader(PAIRS * 3, batch=FixedBatch(2), collate=COLLATE, workers=0) as loader:
        batches = list(loader)
    assert [(batch.num_samples, tuple(batch["input_ids"].shape)) for batch in batches] == [(2, (4, 5))] * 3
    assert batches[0].num_targets == 2 + 1 + 1 + 4
