"""The clock of communication counts each second once, however many are under way."""

from __future__ import annotations

import math

import pytest

from aioloader.training.gradients.sync_stats import CommunicationClock, SyncStats


def test_overlapping_transfers_count_once() -> None:
    clock = CommunicationClock()
    for now_s, starts in ((1.0, True), (2.0, True), (3.0, False), (5.0, False), (7.0, True), (8.0, False)):
        (clock.start if starts else clock.finish)(now_s)
    assert clock.busy_s == 5.0


@pytest.mark.parametrize(("exposed_s", "communication_s", "overlap"), [(1.0, 4.0, 0.75), (5.0, 4.0, 0.0), (0.0, 0.0, math.nan)])
def test_overlap_is_the_hidden_part(exposed_s: float, communication_s: float, overlap: float) -> None:
    stats = SyncStats(num_rounds=1, num_bytes=1, num_late_buckets=0, exposed_s=exposed_s, communication_s=communication_s)
    assert stats.overlap == pytest.approx(overlap, nan_ok=True)
