"""Where preprocessing runs: inline, in threads, in processes. All give the same results."""

__all__: list[str] = []
