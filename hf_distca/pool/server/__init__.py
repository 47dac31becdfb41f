"""Dedicated attention servers: processes without a model that compute core attention for trainers."""

from .server import AttentionServer

__all__ = ["AttentionServer"]
