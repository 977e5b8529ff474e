"""Packing: documents one after another in rows of fixed length.

    documents   aaaa bbbbbbb cc ddd          Pack(6, rows=2)
    greedy      aaaabb | bbbbbc              one group; `c ddd` waits for more
    best_fit    bbbbbb | aaaacc              one group; `b ddd` waits for more: only `b`, longer than a row, is cut

`"greedy"` lays all documents of a lane end to end and cuts that stream every `seq_len` tokens: rows are always full, no token
is lost, and at most one document per row is cut. The fits never cut a document that fits in a row: a number of documents is
held, and as a row closes it takes the oldest of them and others that fit. In lognormal lengths `"best_fit"` fills 99.5 % or
more of all rows, `"first_fit"` 97 to 99.8 % with less reordering (tests/benchmarks/packing_table.py).
"""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from typing import Final, Literal

from aioloader.batching.options import require_choice, require_positive
from aioloader.batching.pack_fit import FitPacker
from aioloader.batching.pack_greedy import GreedyPacker
from aioloader.errors import ConfigError
from aioloader.protocols import Batcher, Json

__all__ = ["Pack"]

_STRATEGIES: Final = ("greedy", "first_fit", "best_fit")
_OVERFLOWS: Final = ("split", "truncate", "drop", "error")


@dataclass(frozen=True, slots=True)
class Pack:
    """Fills `rows` rows of `seq_len` tokens per micro-batch; the collator gets one `PackedRow` for each.

    Samples are mappings with a 1-D list or array of tokens in `field`; all other fields must be of the same length (`labels`,
    `loss_mask`, ...) and are cut alike. Rows name the tokens `input_ids`. Samples of length zero are skipped and counted.

    Order: greedy keeps it. With a fit, documents of a row are in the order in which they came, and rows in the order in which they
    closed. Every row takes the oldest document, so none waits for more rows than documents are held before it.

    State: references to the documents held. By default a fit holds 64 documents (more while they are not worth two rows), with
    `open_bins` so many rows' worth of tokens, and the rows of the group that is not complete yet.

    Attributes:
        seq_len: Tokens per row.
        rows: Rows per micro-batch.
        strategy: `"greedy"` fills rows in order by cutting documents at row ends; `"first_fit"` gives a row the oldest document
            and then each in order that fits; `"best_fit"` gives it the oldest and then those that leave the least room.
        overflow: What happens to a document longer than a row: `"split"` lets it span rows (with a fit: full rows are cut off it
            and the rest is packed as a document), `"truncate"` keeps its first `seq_len` tokens, `"drop"` leaves it out (both
            are counted), `"error"` raises `BatchError`.
        field: The field that holds the tokens.
        open_bins: For the fits: how many rows are open, as tokens held in units of `seq_len`. More fill rows better, hold
            more records in flight and make the state longer. None chooses.
        max_age: For the fits: a row closes, full or not, when so many documents came after its oldest one. It bounds what a
            resume reads again where the documents that follow a long one are tiny. None for no limit but that of `open_bins`.
        separator: Token id, or ids, that end every document, such as EOS. They count as its tokens and belong to its segment:
            a separator is cut off with the end of a truncated document, is attended to only inside its document, and is a
            target of the loss if the document's last token is one.

    Raises:
        ConfigError: An option is out of range, unknown, or means nothing for this strategy.
    """

    seq_len: int
    rows: int = 1
    _: KW_ONLY
    strategy: Literal["greedy", "first_fit", "best_fit"] = "greedy"
    overflow: Literal["split", "truncate", "drop", "error"] = "split"
    field: str = "input_ids"
    open_bins: int | None = None
    max_age: int | None = None
    separator: int | tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        """Check the options."""
        require_positive("Pack(seq_len=...)", self.seq_len)
        require_positive("Pack(rows=...)", self.rows)
        require_choice("Pack(strategy=...)", self.strategy, _STRATEGIES)
        require_choice("Pack(overflow=...)", self.overflow, _OVERFLOWS)
        if not self.field:
            raise ConfigError("Pack(field=...)", expected="a field name", got=repr(self.field), do="name the field that holds the tokens")
        for name, value in (("open_bins", self.open_bins), ("max_age", self.max_age)):
            if value is None:
                continue
            require_positive(f"Pack({name}=...)", value)
            if self.strategy == "greedy":
                do = "leave it out, as greedy has one open row, or use strategy='best_fit'"
                raise ConfigError(f"Pack({name}=...)", expected="None with strategy='greedy'", got=repr(value), do=do)
        _check_separator(self.separator)

    @property
    def separator_tokens(self) -> tuple[int, ...]:
        """Return the tokens that end every document."""
        if self.separator is None:
            return ()
        return self.separator if isinstance(self.separator, tuple) else (self.separator,)

    def start(self) -> Batcher:
        """Return a fresh batcher for one lane."""
        return GreedyPacker(self) if self.strategy == "greedy" else FitPacker(self, self.strategy)

    def fingerprint(self) -> dict[str, Json]:
        """Return the options that decide the groups."""
        names = ("seq_len", "rows", "strategy", "overflow", "field", "open_bins", "max_age")
        return {"kind": "Pack", **{name: getattr(self, name) for name in names}, "separator": list(self.separator_tokens)}


def _check_separator(separator: object) -> None:
    tokens = separator if isinstance(separator, tuple) else (separator,)
    are_ints = all(isinstance(token, int) and not isinstance(token, bool) for token in tokens)
    if separator is not None and not (tokens and are_ints):
        do = "give the id of the end-of-sequence token"
        raise ConfigError("Pack(separator=...)", expected="a token id, a tuple of them, or None", got=repr(separator), do=do)
