"""The hf-distca command."""
