"""Join the traces of ranks and draw where the time of steps went."""
