"""The engine: producer, offload, ordered heap, assembly, and the host that runs them beside the trainer."""

__all__: list[str] = []
