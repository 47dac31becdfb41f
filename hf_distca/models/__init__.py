"""What a transformers model is: its decoder, kinds of attention, shape and heads, and why it may be refused."""
