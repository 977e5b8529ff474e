"""Token files on disk: layouts, memory-mapped readers and writers, in NumPy only."""
