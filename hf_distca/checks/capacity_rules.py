"""Table of documents, sequences and micro-batches that do not fit, and sentences about them.

Ranks hold tokens_per_rank tokens each, and a device holds the memory that these need.
"""

from hf_distca.checks.refusal import Refusal
from hf_distca.checks.setting_names import CHECKPOINTING

A_RANK, ALL_RANKS = "tokens_per_rank", "ranks · tokens_per_rank"
"""Names of what a document must fit into: a rank, or all ranks together."""
CUT = "'truncate' keeps the first tokens of a long document, 'split' cuts it into spans"
CUT_IN_SIMULATION = (
    "{count:,} of {documents:,} documents {are} longer than the {tokens:,} tokens that all ranks "
    "hold; the longest has {longest:,}. Here they are cut to {tokens:,}. Training refuses them by "
    "default: raise tokens_per_rank or the number of ranks, or set long_documents to 'split' or "
    "'truncate'."
)
"""Advice of a simulation with documents that are longer than a micro-batch."""
BEYOND_DEVICE = (
    "tokens_per_rank={rows} will not fit: a document that fills all ranks needs {needed:.1f} GB on "
    "a device of {memory:.1f} GB ({parts}). Lower tokens_per_rank, set "
    f"{CHECKPOINTING}=True, or train under FSDP2 or ZeRO-3; `hf-distca plan --device-memory` shows "
    "the most tokens that fit"
)
"""Warning of a training that takes more memory than the device has."""


class Capacity:
    """What is refused because ranks cannot hold it."""

    # Documents
    LONG = Refusal(
        "{count} of {documents} documents of {name} are longer than {limit_name} = {limit} tokens, "
        "such as document {longest} with {length}",
        "a document must fit",
        f"raise tokens_per_rank, use more ranks, or set long_documents: {CUT}",
    )
    LONG_WHOLE = Refusal(
        "{count} of {documents} documents of {name} are longer than tokens_per_rank = {limit} "
        "tokens, such as document {longest} with {length}",
        "documents stay whole on a rank",
        "raise tokens_per_rank, set document_layout='auto' where the model allows that, or set "
        f"long_documents: {CUT}",
        condition="documents of more than `tokens_per_rank` tokens that must stay whole on a rank",
    )
    LONG_IN_STREAM = Refusal(
        "{name} has {length} tokens",
        "a streamed document must fit into tokens_per_rank = {limit}",
        "raise tokens_per_rank, use a data set with a length (its documents may span ranks), or "
        f"set long_documents: {CUT}",
        condition=(
            "a streamed document of more than `tokens_per_rank` tokens, with "
            "`long_documents='error'`"
        ),
    )
    CUT_IMAGES = Refusal(
        "{name} has images and {length} tokens, more than {limit} ({capacity})",
        "a document with images is not cut",
        "raise tokens_per_rank, or leave such documents out",
        condition="a document with images that `long_documents` would cut",
    )
    TARGETS_CUT = Refusal(
        "none of the {documents} documents of {name} has a target",
        "a training would have the loss 0 and change no weight: long_documents='truncate' cuts "
        "documents to {longest} tokens, and all labels before are -100",
        "raise tokens_per_rank, or set long_documents='split'",
        condition="a data set whose answers are cut off by `long_documents='truncate'`",
    )
    NOT_FITTED = Refusal(
        "there are {documents} documents of at most {longest} tokens",
        "a micro-batch needs a document and holds at most {capacity} tokens",
        "call fit_documents with this capacity first",
        condition="`GlobalBatchSampler` with no documents, or with longer ones than it can place",
    )
    # Micro-batches
    DOCUMENTS_BEYOND_RANKS = Refusal(
        "a micro-batch has {documents} of {tokens}",
        "{ranks} of {rows} rows hold {capacity}",
        "use fewer documents or more ranks, or raise tokens_per_rank",
        condition="a micro-batch of more tokens than all ranks hold",
    )
    DOCUMENT_BEYOND_RANK = Refusal(
        "document {document} has {tokens} tokens",
        "with document_layout='whole' a document stays on one rank, which holds {rows}",
        "raise tokens_per_rank, or set long_documents to 'truncate' or 'split'",
        condition="`document_layout='whole'` and a document that is longer than `tokens_per_rank`",
    )
    ONLY_CUT = Refusal(
        "a micro-batch has {documents} of {tokens} that stay whole",
        "they do not fit on {ranks} of {rows} rows without cutting a document",
        "use fewer documents or more ranks, or raise tokens_per_rank",
        condition="`document_layout='whole'` and documents that only fit if one is cut",
    )
    # Padded batches
    LONG_SEQUENCE = Refusal(
        "a sequence of a padded batch has {length} tokens",
        "{where} may hold {limit} tokens",
        "set a larger tokens_per_rank, or cut the sequence",
        condition="a sequence of a padded batch that does not fit",
    )
    SEVERAL_MICRO_BATCHES = Refusal(
        "the padded batches of all ranks have {tokens} tokens, more than the {limit} of one "
        "micro-batch",
        "a weight would get a gradient for each micro-batch, and only the first would count, "
        "because {why}",
        "raise tokens_per_rank, or lower per_device_train_batch_size; {remedy}",
        condition=(
            "padded batches of more than one micro-batch with reentrant checkpoints, or under "
            "ZeRO-3 where it gathers whole layers"
        ),
    )
    # Memory
    HOST_MEMORY = Refusal(
        "activation checkpoints of {layers} layers take {needed} GB on the host {host} (ranks "
        "there: {ranks})",
        "{available} GB can be used, {fraction} of what is available",
        "lower tokens_per_rank, train on more hosts, or set offload_activations='auto', which "
        "moves as many layers as fit",
        condition="`offload_activations=True` with too little host memory",
    )
