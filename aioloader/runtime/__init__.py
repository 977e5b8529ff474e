"""What the engine stands on: messages between processes, shared memory, the fork server, the in-flight budget."""

__all__: list[str] = []
