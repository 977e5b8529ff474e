"""Offline preprocessing: tokenises, packs and writes token files, to be read memory-mapped in training."""
