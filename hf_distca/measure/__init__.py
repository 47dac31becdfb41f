"""Measurements of a device and its links, from which plans are chosen and steps are predicted."""
