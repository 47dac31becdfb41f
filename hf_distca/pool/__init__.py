"""Dedicated attention servers."""
