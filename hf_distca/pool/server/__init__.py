"""The end of a server."""
