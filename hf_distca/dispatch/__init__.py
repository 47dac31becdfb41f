"""Carrying a plan out: process groups, exchanges, and the autograd functions. The only user of torch.distributed."""
