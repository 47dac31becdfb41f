"""The joint layout: documents placed so that ranks have equal tokens and equal pairs. One file per phase."""
