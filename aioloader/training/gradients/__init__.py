"""The gradients of a step: flat buckets, averaged over the ranks while the backward pass runs."""
