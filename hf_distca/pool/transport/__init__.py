"""What carries the rows of a call between a rank and a server."""
