"""Where batches become tensors and meet the trainer."""
