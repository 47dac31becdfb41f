"""hf_distca: core attention disaggregation for Hugging Face.

Importing it makes `attn_implementation="distca"` known to transformers.
"""

from hf_distca.patches.register import register

register()
