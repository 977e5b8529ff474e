"""Opens a data set by its Hugging Face name, streaming, for `aioloader preprocess`."""

from __future__ import annotations

from aioloader.errors import ConfigError
from aioloader_adapters.huggingface import HuggingFaceStream

__all__ = ["open_stream"]

WHERE = "input"


def open_stream(name: str, *, config: str | None, split: str, field: str) -> HuggingFaceStream:
    """Return the column `field` of one split of a data set, by the name or path that `datasets.load_dataset` takes.

    Nothing is downloaded whole, and code that comes with a data set is never run.

    Raises:
        ConfigError: There is no such data set, split or column, or `datasets` is not installed.
    """
    try:
        import datasets
    except ImportError as error:
        raise ConfigError(WHERE, expected="the library datasets", got="none", do="pip install 'aioloader[hf]'") from error
    try:
        dataset = datasets.load_dataset(name, config, split=split, streaming=True)
    except Exception as error:  # all sorts, of datasets and of huggingface_hub
        reason = str(error).partition("\n")[0]
        raise ConfigError(
            WHERE,
            expected=f"a data set that datasets.load_dataset({name!r}, {config!r}, split={split!r}) opens",
            got=f"{type(error).__name__}: {reason}",
            do="check the name, the configuration and the split",
        ) from error
    if dataset.column_names is not None:
        if field not in dataset.column_names:
            raise ConfigError(
                WHERE, expected=f"a column {field!r} in {name!r}", got=", ".join(dataset.column_names), do="name the one with the text"
            )
        dataset = dataset.select_columns([field])
    return HuggingFaceStream(dataset)
