from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import cloudpickle
import numpy as np
import pytest

from aioloader.errors import ConfigError, SourceError
from aioloader.sources import resolve_source
from aioloader_adapters.huggingface import HuggingFaceDataset, HuggingFaceStream, adapt
from tests.sources.conformance import check_failure, check_foreign_cursors, check_source, read_all, read_with_cursors, run, same

datasets = pytest.importorskip("datasets")
split_dataset_by_node = pytest.importorskip("datasets.distributed").split_dataset_by_node
pytest.importorskip("tqdm").tqdm.monitor_interval = 0  # its thread outlives every progress bar

ROWS: list[dict[str, Any]] = [
    {"id": number, "tags": ["x"] * (number % 3), "deep": None if number % 4 == 0 else {"value": number, "none": None}}
    for number in range(60)
]


def generate(shards: list[int]) -> Iterator[dict[str, Any]]:
    for shard in shards:
        yield from ROWS[15 * shard : 15 * shard + 15]


def from_generator() -> Any:
    return datasets.IterableDataset.from_generator(generate, gen_kwargs={"shards": [0, 1, 2, 3]})


def from_table() -> Any:
    return datasets.Dataset.from_list(ROWS).to_iterable_dataset(num_shards=4)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    directory = tmp_path_factory.mktemp("rows")
    for shard in range(4):
        lines = "".join(json.dumps(row) + "\n" for row in generate([shard]))
        directory.joinpath(f"{shard}.jsonl").write_text(lines)
    return [str(path) for path in sorted(directory.iterdir())]


def from_files(files: list[str]) -> Any:
    return datasets.load_dataset("json", data_files=files, split="train", streaming=True)


def double(batch: dict[str, list[Any]]) -> dict[str, list[Any]]:
    return {"id": [number for number in batch["id"] for _ in range(2)]}


def interleave(dataset: Any) -> Any:
    parts = [dataset.take(13), dataset.skip(30)]
    return datasets.interleave_datasets(parts, probabilities=[0.3, 0.7], seed=3, stopping_strategy="all_exhausted")


STEPS: dict[str, Callable[[Any], Any]] = {
    "plain": lambda dataset: dataset,
    "map": lambda dataset: dataset.map(lambda row: {"id": 2 * row["id"]}),
    "map with index": lambda dataset: dataset.map(lambda row, index: {"index": index}, with_indices=True),
    "map of batches": lambda dataset: dataset.map(double, batched=True, batch_size=7, remove_columns=["tags", "deep"]),
    "filter": lambda dataset: dataset.filter(lambda row: row["id"] % 3 == 0),
    "map and filter": lambda dataset: dataset.map(lambda row: {"odd": row["id"] % 2}).filter(lambda row: row["odd"]),
    "skip and take": lambda dataset: dataset.skip(17).take(20),
    "repeat": lambda dataset: dataset.take(20).repeat(2),
    "columns": lambda dataset: dataset.select_columns(["id"]),
    "interleave": interleave,
    "concatenate": lambda dataset: datasets.concatenate_datasets([dataset.take(13), dataset.skip(30)]),
    "numpy": lambda dataset: dataset.select_columns(["id"]).with_format("numpy"),
    "every third": lambda dataset: split_dataset_by_node(dataset, rank=1, world_size=3),
}


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("make", [from_generator, from_table])
def test_streams_keep_the_contract_at_every_record(make: Callable[[], Any], step: str) -> None:
    dataset = STEPS[step](make())
    expected = list(dataset)
    source = HuggingFaceStream(dataset)
    assert source.resumes_exactly
    run(check_source(source, expected, other=HuggingFaceStream(STEPS[step](make())), sizes=(1,)))


def test_streams_of_files_keep_the_contract_at_every_record(files: list[str]) -> None:
    source = HuggingFaceStream(from_files(files).map(lambda row: {"id": -row["id"]}))
    run(check_source(source, [{**row, "id": -row["id"]} for row in ROWS], sizes=(1, 8)))
    run(check_foreign_cursors(source))
    assert source.num_shards == 4
    assert source.fingerprint()["name"] == "json/train"


def test_a_mapped_stream_resumes_inside_a_large_chunk(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(f'{{"id": {number}}}\n' for number in range(3000)))
    source = HuggingFaceStream(from_files([str(path)]).map(lambda row: row))
    reader = source.open(0, None)
    while reader.cursor()["count"] < 130:
        reader.read(130 - reader.cursor()["count"])
    cursor = reader.cursor()
    assert cursor["skip"] == 0
    again = source.open(0, cursor)
    span = again.read(1)
    assert span is not None
    assert span.records == [{"id": 130}]
    reader.close()
    again.close()


def test_behind_a_shuffle_buffer_records_are_counted() -> None:
    source = HuggingFaceStream(from_table().shuffle(seed=1, buffer_size=10))
    assert not source.resumes_exactly
    found, cursors = run(read_with_cursors(source))
    assert sorted(record["id"] for _, record in found) == list(range(60))
    for before, cursor in cursors[::7]:
        assert cursor["state"] is None
        assert cursor["skip"] == before
        assert same(run(read_all(source, cursor=cursor)), found[before:])


@pytest.mark.parametrize("buffer_size", [1, 10])
def test_each_epoch_has_its_order_and_the_dataset_stays_as_it_was(buffer_size: int) -> None:
    dataset = from_table().shuffle(seed=1, buffer_size=buffer_size)
    source = HuggingFaceStream(dataset)
    orders = {epoch: run(read_all(source, epoch=epoch)) for epoch in (2, 0, 1)}
    for epoch, order in orders.items():
        assert run(read_all(source, epoch=epoch)) == order
        dataset.set_epoch(epoch)
        assert list(dataset) == [record for _, record in order]
        _, cursors = run(read_with_cursors(source, epoch=epoch, size=20))
        assert run(read_all(source, epoch=epoch, cursor=cursors[1][1])) == order[cursors[1][0] :]
    assert buffer_size == 1 or orders[0] != orders[1] != orders[2]


def test_two_readers_do_not_disturb_each_other() -> None:
    source = HuggingFaceStream(from_generator().map(lambda row: row))
    first, second = source.open(0, None), source.open(0, None)
    first.read(20)
    second.read(5)
    for reader in (first, second):
        rest = run(read_all(source, cursor=reader.cursor()))
        assert [record for _, record in rest] == ROWS[reader.cursor()["count"] :]
        reader.close()


def fail_at_23(row: dict[str, Any]) -> dict[str, Any]:
    if row["id"] == 23:
        raise ValueError("boom")
    return row


def test_a_failure_of_a_stream_keeps_its_place() -> None:
    source = HuggingFaceStream(from_generator().map(fail_at_23), name="rows")
    error = run(check_failure(source, before=ROWS[:23], match=r"record rows\[23\].*boom", kind=SourceError))
    assert isinstance(error.__cause__, ValueError)


def test_older_releases_count_records(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets, "__version__", "4.9.dev0")
    assert not HuggingFaceStream(from_generator()).resumes_exactly


def test_batched_maps_over_tables_count_records() -> None:
    tables = from_table().with_format("arrow").map(lambda table: table, batched=True)
    assert not HuggingFaceStream(tables).resumes_exactly


def test_a_data_loader_worker_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    torch_data = pytest.importorskip("torch.utils.data")
    monkeypatch.setattr(torch_data, "get_worker_info", lambda: object())
    with pytest.raises(ConfigError, match="HuggingFaceStream: expected to be read outside of DataLoader workers"):
        HuggingFaceStream(from_generator()).open(0, None).read(1)


def test_a_dataset_keeps_the_contract() -> None:
    source = HuggingFaceDataset(datasets.Dataset.from_list(ROWS))
    run(check_source(source, ROWS, other=HuggingFaceDataset(datasets.Dataset.from_list(ROWS))))
    run(check_foreign_cursors(source))
    assert source.num_records == 60
    assert repr(source) == "HuggingFaceDataset('huggingface', num_records=60)"


def test_a_dataset_with_selected_rows_and_columns() -> None:
    dataset = datasets.Dataset.from_list(ROWS).shuffle(seed=1).select(range(10)).with_format(None, columns=["id"])
    run(check_source(HuggingFaceDataset(dataset), [dataset[index] for index in range(10)]))


def test_the_format_gives_every_row_as_the_dataset_does_alone() -> None:
    """A slice would make one array of the first two rows and a list of arrays with the third."""
    dataset = datasets.Dataset.from_dict({"tokens": [[1, 2], [3, 4], [5], [], [6]]}).with_format("numpy")
    found = [record for _, record in run(read_all(HuggingFaceDataset(dataset), sizes=(2, 3)))]
    assert same(found, [dataset[index] for index in range(5)])
    assert all(type(record["tokens"]) is np.ndarray for record in found)


def test_a_transform_is_called_with_one_row() -> None:
    sizes: list[int] = []

    def transform(batch: dict[str, list[int]]) -> dict[str, list[int]]:
        sizes.append(len(batch["id"]))
        return batch

    dataset = datasets.Dataset.from_dict({"id": [1, 2, 3]})
    dataset.set_transform(transform)
    assert [record["id"] for _, record in run(read_all(HuggingFaceDataset(dataset)))] == [1, 2, 3]
    assert set(sizes) == {1}


@pytest.mark.parametrize("make", [lambda: datasets.Dataset.from_list(ROWS), from_generator])
def test_datasets_find_their_source(make: Callable[[], Any]) -> None:
    dataset = make()
    kind = HuggingFaceDataset if isinstance(dataset, datasets.Dataset) else HuggingFaceStream
    assert type(adapt(dataset)) is kind
    assert type(resolve_source(dataset)) is kind
    assert adapt([1]) is None


def test_splits_are_to_be_chosen() -> None:
    splits = datasets.DatasetDict(train=datasets.Dataset.from_list(ROWS))
    with pytest.raises(ConfigError, match=r"got a DatasetDict of 'train'; pass one of its values"):
        resolve_source(splits)


CHILD = """
import json, sys
import cloudpickle
source, cursor = cloudpickle.load(sys.stdin.buffer)
reader = source.open(0, cursor)
ids = []
while (span := reader.read(7)) is not None:
    ids.extend(record["id"] for record in span.records)
reader.close()
print(json.dumps([ids, source.fingerprint()]))
"""


@pytest.mark.timeout(120)
@pytest.mark.parametrize("make", [from_generator, from_table, lambda: datasets.Dataset.from_list(ROWS)])
def test_sources_travel_to_another_process(make: Callable[[], Any]) -> None:
    source = adapt(make().map(lambda row: {"id": row["id"] + 1}))
    assert source is not None
    _, cursors = run(read_with_cursors(source, size=20))
    cloudpickle.register_pickle_by_value(sys.modules[__name__])
    try:
        payload = cloudpickle.dumps((source, cursors[1][1]))
    finally:
        cloudpickle.unregister_pickle_by_value(sys.modules[__name__])
    done = subprocess.run([sys.executable, "-c", CHILD], input=payload, capture_output=True, check=False)
    assert done.returncode == 0, done.stderr.decode()
    ids, fingerprint = json.loads(done.stdout)
    before = cursors[1][0]
    assert ids == [number + 1 for number in range(before, 60)]
    assert fingerprint == source.fingerprint()


def test_the_adapter_does_not_import_datasets() -> None:
    probe = "import sys, aioloader_adapters.huggingface as h; assert h.adapt(object()) is None; print('datasets' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"
