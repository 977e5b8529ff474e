"""The .npy layout: a header of fixed length, so that the shape can be filled in at the end, and the values.

Source: NumPy Enhancement Proposal 1, version 1.0 of the format.
"""

from __future__ import annotations

from pathlib import Path
from tokenize import TokenError
from typing import Any, NoReturn

import numpy as np

from aioloader.errors import ConfigError, SourceError
from aioloader.tokens.extent import Extent
from aioloader.tokens.flat import FlatLayout

__all__ = ["NPY_HEADER_BYTES", "npy_header", "npy_layout", "read_npy_extent"]

NPY_HEADER_BYTES = 128
"""Room for two dimensions of 20 digits; a multiple of 64, so that the values are aligned."""

PREFIX = b"\x93NUMPY\x01\x00"


def npy_header(dtype: np.dtype[Any], shape: tuple[int, ...]) -> bytes:
    """Return the `NPY_HEADER_BYTES` bytes that come before the values of an array in C order."""
    fields = f"{{'descr': '{dtype.str}', 'fortran_order': False, 'shape': {shape}, }}".encode("ascii")
    num_text_bytes = NPY_HEADER_BYTES - len(PREFIX) - 2
    return PREFIX + num_text_bytes.to_bytes(2, "little") + fields.ljust(num_text_bytes - 1) + b"\n"


def npy_layout(path: Path, dtype: np.dtype[Any], seq_len: int | None, num_tokens: int | None) -> FlatLayout:
    """Return the layout of one .npy file of shape [tokens] or [rows, seq_len]."""

    def header(tokens: int) -> bytes:
        return npy_header(dtype, (tokens,) if seq_len is None else (tokens // seq_len, seq_len))

    return FlatLayout(path, dtype, num_tokens, header)


def read_npy_extent(path: Path) -> Extent:
    """Return where the values of a .npy file lie.

    Raises:
        ConfigError: It holds Python objects, or columns first.
        SourceError: It is no .npy file.
    """
    with open(path, "rb") as file:
        try:
            version = np.lib.format.read_magic(file)
            read_header = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
            shape, is_fortran, dtype = read_header(file)
        except (ValueError, SyntaxError, TokenError) as error:  # the header is a Python literal
            raise SourceError(f"{path}: expected a .npy file, got one with {error}; copy it again, or save it with numpy.save.") from error
        if dtype.hasobject:
            _refuse(path, "an array of Python objects, which is a pickle")
        if is_fortran and len(shape) > 1:
            _refuse(path, "an array in column-major order")
        return Extent(file.tell(), dtype, shape)


def _refuse(path: Path, got: str) -> NoReturn:
    raise ConfigError(str(path), expected="an array of integers in C order", got=got, do="save numpy.ascontiguousarray(tokens)")
