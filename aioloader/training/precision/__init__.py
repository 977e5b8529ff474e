"""Mixed precision: float32 masters, transforms of the gradients, loss scaling."""
