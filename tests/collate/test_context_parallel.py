"""ContextParallel: the ranks' parts are the whole, with the right targets at their borders and equal work."""

from __future__ import annotations

import itertools
import json
import pickle
from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn.functional import cross_entropy

from aioloader import Loader, Pack, Shuffle
from aioloader.collate import PretrainCollator, SftCollator, count_tokens, varlen_arguments
from aioloader.collate.context_parallel import ContextParallel, context_parallel_indices
from aioloader.errors import BatchError, ConfigError
from aioloader.order.mesh import Mesh
from aioloader.protocols import PackedRow
from aioloader.state.fingerprint import object_fingerprint

IGN = -100
LayoutName = Literal["zigzag", "contiguous"]
LAYOUTS: tuple[LayoutName, ...] = ("zigzag", "contiguous")


def packed(*lengths: int, seq_len: int, first: int = 1) -> PackedRow:
    """Return a row of documents of these lengths, whose tokens count through from `first`."""
    starts = np.cumsum([first, *lengths])
    pieces = [{"input_ids": np.arange(start, start + length)} for start, length in zip(starts, lengths, strict=False)]
    return PackedRow(pieces, [0] * len(pieces), sum(lengths), seq_len)


def ranks(cp_size: int, collate: Any = None, **options: Any) -> list[ContextParallel]:
    """Return the collators of all ranks of the axis."""
    collate = PretrainCollator() if collate is None else collate
    return [ContextParallel(collate, Mesh(cp_rank=rank, cp_size=cp_size), **options) for rank in range(cp_size)]


def parts_of(samples: Sequence[Any], cp_size: int, collate: Any = None, **options: Any) -> list[dict[str, Any]]:
    return [one(list(samples)) for one in ranks(cp_size, collate, **options)]


@st.composite
def packed_rows(draw: st.DrawFn) -> list[PackedRow]:
    """Return 1 to 3 rows of 24 tokens, full or not."""
    rows = []
    for number in range(draw(st.integers(1, 3))):
        lengths: list[int] = []
        while (room := 24 - sum(lengths)) and draw(st.booleans()):
            lengths.append(draw(st.integers(1, room)))
        rows.append(packed(*(lengths or [5]), seq_len=24, first=1 + 100 * number))
    return rows


def test_zigzag_and_contiguous_over_a_row() -> None:
    zigzag = parts_of([packed(8, seq_len=8)], 2)
    assert [part["input_ids"].tolist() for part in zigzag] == [[[1, 2, 7, 8]], [[3, 4, 5, 6]]]
    assert [part["labels"].tolist() for part in zigzag] == [[[2, 3, 8, IGN]], [[4, 5, 6, 7]]]
    assert [part["position_ids"].tolist() for part in zigzag] == [[[0, 1, 6, 7]], [[2, 3, 4, 5]]]
    contiguous = parts_of([packed(8, seq_len=8)], 2, layout="contiguous")
    assert [part["input_ids"].tolist() for part in contiguous] == [[[1, 2, 3, 4]], [[5, 6, 7, 8]]]
    assert [part["labels"].tolist() for part in contiguous] == [[[2, 3, 4, 5]], [[6, 7, 8, IGN]]]


def test_borders_of_the_whole_are_kept_under_names_that_no_local_kernel_takes() -> None:
    for part in parts_of([packed(3, 4, seq_len=8)], 2):
        assert part["global_cu_seqlens"].tolist() == [0, 3, 7, 8]
        assert part["global_max_seqlen"] == 4
        with pytest.raises(ConfigError, match="expected a packed micro-batch"):
            varlen_arguments(part)


def test_each_document_by_itself() -> None:
    rows = [packed(4, 5, seq_len=10), packed(3, 7, seq_len=10, first=21)]
    zigzag = parts_of(rows, 2, PretrainCollator(pad_token_id=99), per_document=True)
    # Documents of 4, 5, (1 of padding), 3 and 7 tokens become 4, 8, 4, 4, 8.
    assert zigzag[0]["global_cu_seqlens"].tolist() == [0, 4, 12, 16, 20, 28]
    assert zigzag[0]["global_cu_seqlens"].dtype == np.int32
    assert zigzag[0]["global_max_seqlen"] == 8
    assert zigzag[0]["input_ids"].tolist() == [[1, 4, 5, 6, 99, 99, 99, 99, 21, 99, 24, 25, 30, 99]]
    assert zigzag[1]["input_ids"].tolist() == [[2, 3, 7, 8, 9, 99, 99, 99, 22, 23, 26, 27, 28, 29]]
    assert zigzag[0]["document_ids"].tolist() == [[0, 0, 1, 1, -1, -1, -1, -1, 2, -1, 3, 3, 3, -1]]
    assert zigzag[1]["position_ids"].tolist() == [[1, 2, 2, 3, 4, 0, 0, 0, 1, 2, 2, 3, 4, 5]]
    assert zigzag[0]["labels"].tolist() == [[2, IGN, 6, 7, IGN, IGN, IGN, IGN, 22, IGN, 25, 26, IGN, IGN]]
    contiguous = parts_of(rows, 2, layout="contiguous", per_document=True)
    assert contiguous[0]["global_cu_seqlens"].tolist() == [0, 4, 10, 12, 16, 24]
    assert contiguous[0]["input_ids"].tolist() == [[1, 2, 5, 6, 7, 0, 21, 22, 24, 25, 26, 27]]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_local_borders_are_the_global_ones_divided(layout: LayoutName) -> None:
    for part in parts_of([packed(5, 9, 1, seq_len=24)], 3, layout=layout, per_document=True):
        local = part["global_cu_seqlens"] // 3
        assert local[-1] == part["input_ids"].shape[1]
        for document, (start, end) in enumerate(itertools.pairwise(local[:-1])):
            assert set(part["document_ids"][0, start:end].tolist()) <= {document, -1}


@given(rows=packed_rows(), cp_size=st.sampled_from([1, 2, 3, 4]), layout=st.sampled_from(LAYOUTS), per_document=st.booleans())
def test_the_parts_are_the_whole_each_token_once(rows: list[PackedRow], cp_size: int, layout: LayoutName, per_document: bool) -> None:
    plain = PretrainCollator(shift_labels=True)(rows)
    collators = ranks(cp_size, layout=layout, per_document=per_document)
    parts = [one(rows) for one in collators]
    whole = collators[0].gather(parts)
    assert whole.keys() == parts[0].keys()
    for name, value in collators[0].whole(rows).items():
        np.testing.assert_array_equal(whole[name], value)
    is_token = whole["document_ids"] >= 0
    for name in ("input_ids", "labels", "position_ids"):
        np.testing.assert_array_equal(whole[name][is_token], plain[name][plain["document_ids"] >= 0])
        assert {part[name].dtype for part in parts} == {plain[name].dtype}
    assert len({part["input_ids"].shape for part in parts}) == 1
    counts = [count_tokens(part) for part in parts]
    assert sum(one.num_tokens for one in counts) == count_tokens(plain).num_tokens
    assert sum(one.num_targets for one in counts) == count_tokens(plain).num_targets


@given(cp_size=st.integers(1, 8), lengths=st.lists(st.integers(1, 5), min_size=1, max_size=5))
def test_zigzag_gives_every_rank_the_same_causal_work(cp_size: int, lengths: list[int]) -> None:
    borders = np.cumsum([0, *(2 * cp_size * length for length in lengths)])
    keys = np.arange(borders[-1]) - np.repeat(borders[:-1], np.diff(borders)) + 1  # that a token looks at, in its document
    zigzag, contiguous = (keys[context_parallel_indices(borders, cp_size, layout)].sum(axis=1) for layout in LAYOUTS)
    assert len(set(zigzag.tolist())) == 1
    assert cp_size == 1 or len(set(contiguous.tolist())) > 1


@pytest.mark.parametrize("per_document", [False, True])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_losses_of_the_ranks_add_up_to_that_of_the_whole(layout: LayoutName, per_document: bool) -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Embedding(64, 8), torch.nn.Linear(8, 64)).double()
    rows = [packed(7, 2, 11, seq_len=24), packed(17, 7, seq_len=24, first=30)]
    whole = {name: torch.from_numpy(value) for name, value in PretrainCollator()(rows).items() if value.ndim}
    logits, labels = model(whole["input_ids"])[:, :-1], whole["labels"][:, 1:]  # as causal language models shift
    expected = cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
    parts = parts_of(rows, 4, layout=layout, per_document=per_document)
    total = torch.zeros((), dtype=torch.float64)
    for part in parts:
        inputs, targets = torch.from_numpy(part["input_ids"]), torch.from_numpy(part["labels"])
        total = total + cross_entropy(model(inputs).flatten(0, 1), targets.flatten(), reduction="sum")
    torch.testing.assert_close(total, expected, rtol=1e-12, atol=0)
    # What it is for: with the labels cut first and shifted later, each chunk's last target is lost.
    unshifted = parts_of(rows, 4, layout=layout, per_document=per_document, labels_shifted=True)
    assert sum(int((part["labels"][:, 1:] != IGN).sum()) for part in unshifted) < int((labels != IGN).sum())


def test_padded_samples_get_the_positions_that_a_model_cannot_count_on_a_part() -> None:
    samples = [{"input_ids": [1, 2, 3, 4, 5], "prompt_length": 2}, {"input_ids": [6, 7, 8], "prompt_length": 1}]
    parts = parts_of(samples, 2, SftCollator(pad_token_id=0, pad_to_multiple_of=4))
    assert parts[0]["position_ids"].tolist() == [[0, 1, 6, 7], [0, 1, 6, 7]]
    assert parts[1]["attention_mask"].tolist() == [[1, 1, 1, 0], [1, 0, 0, 0]]
    assert parts[0]["labels"].tolist() == [[IGN, 3, IGN, IGN], [7, 8, IGN, IGN]]
    assert parts[1]["labels"].tolist() == [[4, 5, IGN, IGN], [IGN, IGN, IGN, IGN]]


def test_every_field_of_a_token_is_cut_and_others_are_left_whole() -> None:
    def collate(samples: list[Any]) -> dict[str, Any]:
        ids = np.arange(16).reshape(2, 8)
        return {
            "input_ids": ids,
            "features": np.stack([ids, ids + 100], axis=2),
            "loss_mask": ids % 2,
            "weights": np.ones(2),
            "names": ["a", "b"],
        }

    part = parts_of([], 2, collate)[1]
    assert part["features"][0].tolist() == [[2, 102], [3, 103], [4, 104], [5, 105]]
    assert part["loss_mask"].tolist() == [[0, 1, 0, 1], [0, 1, 0, 1]]
    assert part["weights"].shape == (2,)
    assert part["names"] == ["a", "b"]


def test_labels_are_shifted_once() -> None:
    rows = [packed(3, 5, seq_len=8)]
    expected = [part["labels"].tolist() for part in parts_of(rows, 2)]
    assert [part["labels"].tolist() for part in parts_of(rows, 2, PretrainCollator(shift_labels=True))] == expected
    own = PretrainCollator(shift_labels=True)
    assert [part["labels"].tolist() for part in parts_of(rows, 2, lambda samples: own(samples), labels_shifted=True)] == expected


def test_one_rank_gets_the_same_fields_as_many() -> None:
    rows = [packed(3, 5, seq_len=8)]
    (alone,), several = parts_of(rows, 1), parts_of(rows, 2)
    assert alone.keys() == several[0].keys()
    assert alone["labels"].tolist() == [[2, 3, IGN, 5, 6, 7, 8, IGN]]


def test_cut_takes_tensors() -> None:
    first, second = ranks(2, per_document=True)
    rows = [packed(3, 5, seq_len=8)]
    tensors = {name: torch.from_numpy(np.asarray(value)) for name, value in first.whole(rows).items()}
    assert second.cut(tensors)["input_ids"].equal(torch.from_numpy(second(rows)["input_ids"]))
    assert first.cut(tensors, cp_rank=1)["labels"].equal(torch.from_numpy(second(rows)["labels"]))


def test_the_fingerprint_is_the_same_on_every_rank_and_for_every_number_of_them() -> None:
    collators = [*ranks(4), *ranks(2)]
    fingerprints = {json.dumps(object_fingerprint(one), sort_keys=True) for one in collators}
    assert len(fingerprints) == 1
    others = [*ranks(2, layout="contiguous"), *ranks(2, per_document=True), *ranks(2, PretrainCollator(pad_token_id=1))]
    assert len(fingerprints | {json.dumps(object_fingerprint(one), sort_keys=True) for one in others}) == 4
    assert object_fingerprint(ContextParallel(max, Mesh()))["collate"] == object_fingerprint(max)


def test_loaders_of_context_parallel_peers_deliver_parts_of_the_same_micro_batches() -> None:  # B021
    def loader(rank: int, cp_size: int = 2) -> Loader:
        collate = ContextParallel(PretrainCollator(), Mesh(cp_rank=rank, cp_size=cp_size))
        source = [{"input_ids": list(range(1, 4 + number % 5))} for number in range(40)]
        return Loader(source, batch=Pack(16), collate=collate, mesh=collate.mesh, shuffle=Shuffle(window=8), workers=0, host="thread")

    with loader(0) as first, loader(1) as second:
        pairs = list(zip(first, second, strict=True))
        assert len(pairs) > 3
        for one, other in pairs:
            assert [sample.record for sample in one.samples] == [sample.record for sample in other.samples]
            assert one["input_ids"].shape == other["input_ids"].shape == (1, 8)
            assert one.num_tokens + other.num_tokens + one.num_padding + other.num_padding == 16
        state = first.state_dict(after=pairs[1][0])
    with loader(0, cp_size=1) as whole:  # goes on with another number of context-parallel ranks
        whole.load_state_dict(state)
        batch = next(iter(whole))
        assert [sample.record for sample in batch.samples] == [sample.record for sample in pairs[2][0].samples]


@pytest.mark.parametrize("sizes", [{"pp": 2, "dp": 2, "tp": 2}, {"dp": 2, "cp": 2, "tp": 2}])
def test_one_data_coordinate_means_the_same_samples_and_borders_on_every_rank(sizes: dict[str, int]) -> None:  # B021, K20
    seen: dict[int, set[str]] = {0: set(), 1: set()}
    records: dict[int, set[Any]] = {0: set(), 1: set()}
    for rank in range(8):
        mesh = Mesh.from_layout(rank, sizes)
        collate = ContextParallel(PretrainCollator(), mesh)
        source = [{"input_ids": list(range(1, 4 + number % 5))} for number in range(60)]
        with Loader(
            source, batch=Pack(16, strategy="best_fit", open_bins=2), collate=collate, mesh=mesh, workers=0, host="thread"
        ) as loader:
            batches = list(itertools.islice(loader, 5))
        assert len(batches) == 5
        described = [([sample.record for sample in batch.samples], batch["global_cu_seqlens"].tolist()) for batch in batches]
        seen[mesh.dp_rank].add(json.dumps(described))
        records[mesh.dp_rank] |= {sample.record for batch in batches for sample in batch.samples}
    assert {dp_rank: len(different) for dp_rank, different in seen.items()} == {0: 1, 1: 1}
    assert not records[0] & records[1]


def test_it_moves_to_another_process() -> None:
    collator = ranks(2)[1]
    assert pickle.loads(pickle.dumps(collator)) == collator


@pytest.mark.parametrize(
    ("samples", "options", "message"),
    [
        (
            [packed(6, seq_len=6)],
            {},
            r"seq_len to be a multiple of 4 for cp_size=2 and layout='zigzag', got 6; choose such a seq_len or pad_",
        ),
        ([packed(7, seq_len=7)], {"layout": "contiguous"}, r"seq_len to be a multiple of 2 for cp_size=2 and layout='contiguous', got 7"),
        (
            [[1, 2, 3, 4]],
            {"per_document": True},
            r"a packed micro-batch with 'cu_seqlens', got fields \['attention_mask', .*; batch with Pack",
        ),
        ([1], {"collate": lambda samples: {"labels": np.ones((2, 4))}}, r"'input_ids' of shape \[rows, seq_len\], got fields \['labels'\]"),
        ([1], {"collate": lambda samples: {"input_ids": np.ones(4)}}, r"'input_ids' of shape \[rows, seq_len\], got shape \[4\]; collate"),
    ],
)
def test_what_cannot_be_cut_is_refused(samples: list[Any], options: dict[str, Any], message: str) -> None:
    with pytest.raises(BatchError, match=rf"ContextParallel.*: expected {message}"):
        parts_of(samples, 2, **options)


@pytest.mark.parametrize(
    ("arguments", "options", "message"),
    [
        ((None, Mesh()), {}, r"\(collate\): expected a collator, got None"),
        ((max, (0, 2)), {}, r"\(mesh\): expected a Mesh, got \(0, 2\)"),
        ((max, Mesh()), {"layout": "ring"}, r"\(layout=\): expected 'zigzag' or 'contiguous', got 'ring'"),
        ((max, Mesh()), {"per_document": 1}, r"\(per_document=\): expected True or False, got 1"),
        ((max, Mesh()), {"labels_shifted": "no"}, r"\(labels_shifted=\): expected True or False, got 'no'"),
    ],
)
def test_wrong_options_are_refused(arguments: tuple[Any, Any], options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=rf"^ContextParallel{message}"):
        ContextParallel(*arguments, **options)
