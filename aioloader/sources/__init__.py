"""Sources: where records come from. Each has a stable order and can be opened at a cursor."""

from aioloader.sources.async_iterable import AsyncIterableSource
from aioloader.sources.iterable import IterableSource
from aioloader.sources.json_lines import JsonLines
from aioloader.sources.parquet import ParquetFiles
from aioloader.sources.resolve import resolve_source
from aioloader.sources.sequence import SequenceSource
from aioloader.sources.text_files import TextFiles

__all__ = ["AsyncIterableSource", "IterableSource", "JsonLines", "ParquetFiles", "SequenceSource", "TextFiles", "resolve_source"]
