"""The version of hf_distca."""

__version__ = "0.1.0.dev0"
