"""Where the documents of a token file lie in its flat stream, without reading a token."""

from __future__ import annotations

from bisect import bisect_right
from pathlib import Path
from typing import SupportsIndex

import numpy as np
import numpy.typing as npt

from aioloader.errors import ConfigError
from aioloader.tokens.indexing import checked_index
from aioloader.tokens.reading import TokenFile

__all__ = ["DocumentOffsets"]


class DocumentOffsets:
    """The documents of a .npy, .pt or MDS data set, from the offsets that were written beside it. Mapped on first use; pickles as its path.

    Args:
        path: The file of offsets, int64[documents + 1], as `documents_path` names it.

    Raises:
        ConfigError: There is no such file, or it holds something else.
        SourceError: It is damaged.
    """

    def __init__(self, path: str | Path) -> None:
        self._file = TokenFile(path)
        if self._file.dtype != np.int64 or len(self._file.shape) != 1 or not self._file.shape[0]:
            got = f"{self._file.dtype.name}{list(self._file.shape)}"
            raise ConfigError(str(path), expected="offsets, int64[documents + 1]", got=got, do="pass documents_path(format, path)")

    def __len__(self) -> int:
        return self._file.shape[0] - 1

    @property
    def num_tokens(self) -> int:
        """Return the number of tokens in all documents."""
        return int(self._offsets[-1])

    @property
    def _offsets(self) -> npt.NDArray[np.int64]:
        return self._file.array

    def span(self, document: SupportsIndex) -> tuple[int, int]:
        """Return (start, stop) of a document in the flat stream."""
        place = checked_index(self._file, document, len(self))
        return int(self._offsets[place]), int(self._offsets[place + 1])

    def length(self, document: SupportsIndex) -> int:
        """Return the number of tokens of a document."""
        start, stop = self.span(document)
        return stop - start

    def seek_tokens(self, num_tokens: int) -> tuple[int, int]:
        """Return (document, offset in it) of the token before which there are `num_tokens`; for all tokens (number of documents, 0).

        Raises:
            IndexError: There are not so many tokens.
        """
        if num_tokens == self.num_tokens:
            return len(self), 0
        place = checked_index(self._file, num_tokens, self.num_tokens)
        document = bisect_right(self._offsets, place) - 1
        return document, place - int(self._offsets[document])

    def close(self) -> None:
        """Let go of the mapping; the next use maps again."""
        self._file.close()
