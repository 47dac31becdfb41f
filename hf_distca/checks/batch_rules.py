"""Table of tokens and batches that cannot be trained on exactly.

`data_rules.py` has the table of data sets, documents and streams.
"""

from hf_distca.checks.capacity_rules import CUT
from hf_distca.checks.refusal import Refusal

FLATTEN = "use a padding-free collator such as transformers' DataCollatorWithFlattening"
UNPACKED = "or train without hf_distca.pack_padded"
NO_OTHER_MASK = "packed documents attend to themselves, causally, and need no other mask"


class Batch:
    """What is refused in the tokens of documents, and in batches."""

    # Tokens of documents and of batches
    TOKEN_ID = Refusal(
        "{name} has the token id {token}{at}",
        "the model's embedding has the ids 0 to {last}",
        "use the model's own tokenizer, or enlarge the embedding: "
        "model.resize_token_embeddings(len(tokenizer))",
    )
    NEGATIVE_TOKEN = Refusal(
        "{name} has the token id {token}{at}",
        "token ids begin at 0",
        "give the ids of the tokenizer; -100 is for labels alone",
        condition="a token id below 0, in documents or padded batches",
    )
    TARGET_ID = Refusal(
        "{name} has the label {label} at position {at}",
        "the model's output head predicts the ids 0 to {last}",
        "give token ids as labels, and -100 for tokens without a loss",
    )
    BEYOND_POSITIONS = Refusal(
        "{name} has {length} tokens",
        "the model has only {positions} positions, in a table that it learned or computed once",
        f"use a model with more positions, or set long_documents: {CUT}",
        condition=(
            "a document with more tokens than the model has positions (GPT-2, OPT, BERT, CTRL)"
        ),
    )
    # Padding-free batches of collators
    ROWS = Refusal(
        "input_ids of a batch has the shape {shape}",
        "all documents of a batch must be packed into one row, [1, tokens]",
        FLATTEN,
    )
    BATCH_MASK = Refusal(
        "a batch has an attention_mask other than a 1 for each token",
        NO_OTHER_MASK,
        f"leave attention_mask out, and {FLATTEN}",
    )
    NO_BOUNDARIES = Refusal(
        "a batch has only {fields}",
        "they do not show where documents begin",
        "return position_ids that restart at 0 with each document, or cu_seq_lens_q; "
        "DataCollatorWithFlattening(return_position_ids=True) returns position_ids",
    )
    WRONG_BOUNDARIES = Refusal(
        "{name} gives document lengths {lengths} with a sum of {total} for {tokens} tokens",
        "the lengths must be positive and sum to the tokens of the batch",
        FLATTEN,
    )
    POSITIONS = Refusal(
        "position_ids {found}",
        "each token needs a position, which begins at 0 with each document and counts on inside",
        FLATTEN,
        condition="batches with other positions than 0, 1, 2, … in each document",
    )
    # Padded batches
    PASSED_BY = Refusal(
        "{model} computed a padded batch without its backbone {backbone}",
        "padded batches are packed in the backbone, so nothing was packed",
        "call the backbone and compute the loss of its hidden states, or train documents with "
        "DistCATrainer",
        condition="models whose head calls a part of the backbone, such as OPT",
    )
    NO_TOKEN_IDS = Refusal(
        "a padded batch has no input_ids [B, L]",
        "ranks exchange token ids to balance a batch, and no embeddings",
        f"pass input_ids, {UNPACKED}",
        condition="`inputs_embeds` in place of `input_ids`",
    )
    OTHER_MASK = Refusal(
        "the attention_mask of a padded batch is {found}",
        "only a mask {shape}, with a 1 for each token and a 0 for padding, says where "
        "sequences are",
        f"pass such a mask, {UNPACKED}",
        condition="masks of four dimensions in a padded batch",
    )
    HOLES = Refusal(
        "the mask of sequence {sequence} of a padded batch has {tokens} tokens from column {first} "
        "to column {last}",
        "a sequence lies in consecutive columns, with padding only before and after it",
        f"remove the padding inside, {UNPACKED}",
        condition="a mask with holes in a padded batch",
    )
    OTHER_INPUT = Refusal(
        "the model is called with {name} of the shape {found} beside a padded batch {shape}",
        "a packed batch takes only integers of that shape, one for each token",
        f"leave {{name}} out, {UNPACKED}",
        condition=(
            "inputs that are not one integer for each token beside a padded batch, such as images "
            "for a model whose encoder hf_distca does not know"
        ),
    )
    IMAGES_TOGETHER = Refusal(
        "a padded batch has images and {sequences} sequences",
        "it is not known how many placeholders each image of this model has, so that no one can "
        "say of which sequence an image is",
        "take a model of the Qwen-VL, GLM-V, InternVL, LLaVA or Mistral families, or pack the "
        "documents with DistCASFTTrainer",
        condition="padded batches of images whose numbers of placeholders are not known",
    )
    CUT_IMAGE = Refusal(
        "an image of sequence {sequence} of a padded batch has more rows of features than the "
        "sequence has placeholders left",
        "its other rows would replace placeholders of the next sequence",
        "make input_ids and pixels by one call of the model's processor, and do not truncate "
        "input_ids",
        condition="an image whose placeholders lie in two sequences of a padded batch",
    )
    OTHER_OUTPUT = Refusal(
        "the model returns a tensor of the shape {found} for {rows} packed rows",
        "it cannot be put back into a padded batch",
        f"ask the model for hidden states only, {UNPACKED}",
        condition="outputs of a backbone that do not have a row for each token",
    )
    LOST_PADDED_PLAN = Refusal(
        "the model did not pass the plan of a padded batch on to its attention layers",
        "they need it to keep sequences apart",
        "train without hf_distca.pack_padded",
    )
