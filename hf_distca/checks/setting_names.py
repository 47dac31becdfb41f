"""Names of settings that differ between versions of transformers."""

from transformers import PreTrainedModel

LATER = "activation_checkpointing"
"""Name since transformers 5.23."""
EARLIER = "gradient_checkpointing"
"""Name before transformers 5.23, of which later versions warn."""
CHECKPOINTING = LATER if hasattr(PreTrainedModel, f"{LATER}_enable") else EARLIER
"""Name of the setting of `TrainingArguments`, and part of the names of methods."""
