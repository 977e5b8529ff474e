"""The quarantine log: one JSON line per record that was left out, in the order of the data."""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from pathlib import Path

from aioloader.errors import PreprocessError
from aioloader.pools.chunk import Quarantined

__all__ = ["log_quarantined"]

_log = logging.getLogger("aioloader")


def log_quarantined(entries: Sequence[Quarantined]) -> None:
    """Append the records to the log of their policy and say so in one line each.

    After a resume, records that had failed between the state and the interruption are written again.
    """
    for entry in entries:
        error = entry.error
        if error is None or entry.quarantine is None:
            continue
        _log.warning("quarantined: %s", str(error).partition("\n")[0])
        if entry.quarantine.log is not None:
            line = {
                "record": getattr(error, "record", None),
                "seq": getattr(error, "seq", None),
                "lane": getattr(error, "lane", None),
                "error": getattr(error, "message", str(error)),
                "traceback": error.remote_traceback if isinstance(error, PreprocessError) else None,
            }
            with Path(entry.quarantine.log).open("a", encoding="utf-8") as file:
                file.write(json.dumps(line) + "\n")
