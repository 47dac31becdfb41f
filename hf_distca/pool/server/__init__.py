"""Dedicated attention servers: processes without a model that compute core attention for ranks."""

from .server import AttentionServer

__all__ = ["AttentionServer"]
