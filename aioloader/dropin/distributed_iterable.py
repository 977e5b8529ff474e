"""`DistributedIterableDataset`: every data-parallel rank reads its own records of a stream."""

from __future__ import annotations

from typing import Any

import torch.utils.data

from aioloader.dropin.chain import stages_of
from aioloader.dropin.dealing import as_source, part_of_rank, size_of
from aioloader.dropin.record_stream import RecordIterator, RecordStream
from aioloader.errors import ConfigError
from aioloader.options import check_choice
from aioloader.order.mesh import Mesh
from aioloader.protocols import Json, Record, Source

__all__ = ["DistributedIterableDataset"]

_WHERE = "DistributedIterableDataset"


class DistributedIterableDataset(torch.utils.data.IterableDataset[Record]):
    """Yields the raw records i of `dataset` with `i % mesh.dp_size == mesh.dp_rank`, in their order, before any work is done on them.

    By the data-parallel coordinate, never by a rank: ranks that share it (tensor, pipeline, context parallel) get the same records. Over
    the coordinates every record is given once.

    *Ends.* With `tail="keep"` all records are given, so the first `n % dp_size` ranks have one more; a loop with a collective in each step
    would wait for ever at the end. `tail="drop"` leaves out the last `n % dp_size` records of a dataset whose size is known. After
    preprocessing that filters, or for a stream, let `aioloader.Loader` read the undealt dataset: its ranks agree on the end.

    *State.* `state_dict()` is as of the last record handed out, JSON-compatible, and good for the same coordinate of as many: it holds
    the dataset's own state where it has one that is exact (Hugging Face streams have), else records are counted, and passed over at a
    resume. A state saved at the end begins the epoch again (in a DataLoader worker: it gives nothing, since other workers may have more).
    The epoch changes with `set_epoch` only, which is passed on to the dataset.

    *DataLoader workers* get parts of the rank's records, none twice, also of datasets that look at the worker themselves; each worker
    reads through the whole stream. With `outer_batch_size` told, the order is that of `num_workers=0`.

    Args:
        dataset: A Hugging Face `IterableDataset` or `Dataset`, any iterable, a function that returns one, or what `align_dataset`
            returned. An indexed one is read by index: nobody reads what is another's.
        mesh: The coordinates of this rank, an `aioloader.Mesh`.
        tail: "keep" or "drop", see above.
        allow_postshard: Accept a dataset that is preprocessed already: each rank then does the work of all and throws most of it away,
            and filtering shifts what is whose.
        outer_batch_size: The `batch_size` of the DataLoader around it, 1 if that is None; needed for the order with several workers.

    Raises:
        ConfigError: An argument is something else, the dataset is dealt out already, or preprocessed without `allow_postshard`.
    """

    aioloader_stage = "shard"

    def __init__(
        self,
        dataset: Any,
        mesh: Mesh,
        *,
        tail: str = "keep",
        allow_postshard: bool = False,
        outer_batch_size: int | None = None,
    ) -> None:
        if not isinstance(mesh, Mesh):
            raise ConfigError(
                f"{_WHERE}(mesh=)", expected="a Mesh", got=repr(mesh), do="pass e.g. Mesh.from_env() or Mesh(dp_rank=0, dp_size=4)"
            )
        _check_stages(stages_of(dataset), allow_postshard=allow_postshard)
        self.dataset = dataset
        self.mesh = mesh
        source = as_source(f"{_WHERE}(dataset=)", dataset)
        self._size = size_of(dataset, source)
        self._is_even = check_choice(f"{_WHERE}(tail=)", tail, ("keep", "drop")) == "drop"
        self._records = RecordStream(_WHERE, part_of_rank(source, mesh.dp_rank, mesh.dp_size, self._limit()), outer_batch_size)

    def record_source(self) -> Source:
        """Return the source of the rank's records, for stages around this one."""
        return self._records.source

    def __iter__(self) -> RecordIterator:
        """Start a pass at the loaded state, or at the beginning of the epoch; an earlier iterator ends."""
        return self._records.start()

    def __len__(self) -> int:
        """Return the number of records of this rank.

        Raises:
            TypeError: The dataset does not say how many it has.
        """
        if self._size is None:
            raise TypeError(f"len({_WHERE}): expected a dataset of known size, got a stream; count the records, or iterate until the end")
        limit = self._limit()
        return len(range(self.mesh.dp_rank, self._size if limit is None else limit, self.mesh.dp_size))

    def state_dict(self) -> Json:
        """Return the state as of the last record handed out."""
        return self._records.state()

    def load_state_dict(self, state: Json) -> None:
        """Load a state for the next pass; a pass that runs ends.

        Raises:
            ResumeError: It is not of these records of this rank.
        """
        self._records.load(state)

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the next passes, also in persistent (forked) DataLoader workers. A loaded state of another epoch goes."""
        self._records.epoch.set(epoch)

    def _limit(self) -> int | None:
        """Return the number of records that are dealt out, None for all."""
        if not self._is_even:
            return None
        if self._size is None:
            raise ConfigError(
                f"{_WHERE}(tail=)",
                expected="'keep' for a stream, whose end nobody knows beforehand",
                got="'drop'",
                do="leave it out, or let aioloader.Loader deal the records, whose ranks agree on the end",
            )
        return self._size - self._size % self.mesh.dp_size


def _check_stages(stages: list[str], *, allow_postshard: bool) -> None:
    if "shard" in stages:
        raise ConfigError(
            f"{_WHERE}(dataset=)", expected="a dataset that is not dealt to the ranks yet", got="one that is", do="leave out one of the two"
        )
    if "preprocess" in stages and not allow_postshard:
        raise ConfigError(
            f"{_WHERE}(dataset=)",
            expected="raw records: deal them to the ranks first, preprocess then",
            got="an AsyncPreprocessIterableDataset, so that each rank would preprocess everything and throw most of it away",
            do="write AsyncPreprocessIterableDataset(DistributedIterableDataset(dataset, mesh), fn), or pass allow_postshard=True",
        )
