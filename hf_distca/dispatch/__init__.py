"""Execution of a plan: process groups, exchanges and autograd functions.

The only user of torch.distributed.
"""
