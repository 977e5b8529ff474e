"""Offline preprocessing: tokenises, packs and writes token files, to be read memory-mapped in training."""

from aioloader.preprocess.options import PreprocessOptions
from aioloader.preprocess.result import Event, Preprocessed
from aioloader.preprocess.run import preprocess

__all__ = ["Event", "PreprocessOptions", "Preprocessed", "preprocess"]
