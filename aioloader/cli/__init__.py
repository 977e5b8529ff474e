"""The command line: `aioloader preprocess`, `aioloader check`."""
