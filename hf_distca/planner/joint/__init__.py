"""The joint layout: placing documents so that ranks have equal tokens and equal pairs. One file a phase."""
