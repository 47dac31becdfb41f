"""Measure a device and its links, to choose plans and predict steps."""
