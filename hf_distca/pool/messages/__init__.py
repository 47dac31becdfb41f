"""What ranks, servers and the directory say to one another: every message, and how it is checked."""
