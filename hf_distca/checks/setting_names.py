"""Names of settings that differ between versions of transformers."""

from importlib.metadata import version

from packaging.version import Version

LATER = "activation_checkpointing"
"""Name since transformers 5.23."""
EARLIER = "gradient_checkpointing"
"""Name before transformers 5.23, of which later versions warn."""
# By the version: transformers' models take seconds to import, and servers need none.
CHECKPOINTING = LATER if Version(version("transformers")) >= Version("5.23") else EARLIER
"""Name of the setting of `TrainingArguments`, and part of the names of methods."""
