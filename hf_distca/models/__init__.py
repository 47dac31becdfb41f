"""What a transformers model is, and why it may be refused.

The package reads its decoder, kinds of attention, shape and heads.
"""
