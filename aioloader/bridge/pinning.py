"""Page-locked memory: the segments in which batches arrive are registered with CUDA once each, not copied for each batch."""

from __future__ import annotations

import logging

import torch

__all__ = ["CudaPageLock", "page_lock"]

_log = logging.getLogger("aioloader")


class CudaPageLock:
    """Registers memory with the CUDA driver (`cudaHostRegister`)."""

    def lock(self, address: int, nbytes: int) -> bool:
        """See `aioloader.runtime.segments.PageLock`."""
        error = int(torch.cuda.cudart().cudaHostRegister(address, nbytes, 0))  # type: ignore[no-untyped-call]
        if error:
            _log.warning("pin_memory: expected CUDA to lock %d bytes, got error %d; this memory stays pageable", nbytes, error)
        return error == 0

    def unlock(self, address: int) -> None:
        """See `aioloader.runtime.segments.PageLock`."""
        torch.cuda.cudart().cudaHostUnregister(address)  # type: ignore[no-untyped-call]


def page_lock() -> CudaPageLock | None:
    """Return the lock of this machine, None (and a log line) where CUDA is not present."""
    if torch.cuda.is_available():
        return CudaPageLock()
    _log.warning("pin_memory=True: expected a CUDA device, got none; batches stay in pageable memory")
    return None
