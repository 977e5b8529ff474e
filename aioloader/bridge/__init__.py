"""Where batches become tensors and meet the trainer."""

__all__: list[str] = []
