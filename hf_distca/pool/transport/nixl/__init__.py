"""Rows over NIXL: the server alone reads and writes them, in memory that both ends have registered."""
