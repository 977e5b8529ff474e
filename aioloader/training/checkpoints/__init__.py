"""Checkpoints: model, optimizer, scheduler and loader at the border of a step, whole or not at all."""
