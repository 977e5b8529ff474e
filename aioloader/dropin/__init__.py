"""Classes with the names people know, thin over the engine, for code that is written around torch's own.

It imports nothing by itself: what workers need of it works without torch.
"""
