"""Where the time of steps went: traces of ranks, joined and drawn."""
