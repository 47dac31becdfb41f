"""Table of data that cannot be trained on exactly: columns, documents, streams and batches of collators."""

from hf_distca.refusal import Refusal

REMOVE_EMPTY = "remove empty documents: dataset.filter(lambda e: e['input_ids'])"
CUT = "'truncate' keeps the first tokens of a long document, 'split' cuts it into excerpts"
FLATTEN = "use a padding-free collator such as transformers' DataCollatorWithFlattening"


class Data:
    """What is refused in a user's data. Entries without a condition are mistakes in calls of the Python interface."""

    # Data sets of text
    CHATS = Refusal(
        "chats or prompts without tokens in `DistCATrainer`",
        "{name} has {columns} and no 'input_ids'",
        "chat templates and prompts are applied by TRL's SFTTrainer only",
        "use hf_distca.DistCASFTTrainer with DistCASFTConfig",
    )
    NO_TEXT = Refusal(
        "neither tokens nor text",
        "{name} has the columns {columns}",
        "it has neither tokens in 'input_ids' nor text in {field!r}",
        "set dataset_text_field to the column with the text, or tokenize it: "
        "dataset.map(lambda e: tokenizer(e[{field!r}]), batched=True)",
    )
    NO_TOKENIZER = Refusal(
        "text without a tokenizer",
        "{name} has text in {field!r} and no tokens in 'input_ids'",
        "there is no tokenizer",
        "pass the model's tokenizer as processing_class",
    )
    # Data sets of tokens
    DIFFERENT = Refusal(
        "data sets that differ between ranks",
        "ranks were given different data sets ({found})",
        "every rank plans from the same documents in the same order",
        "give all ranks the whole data set, shuffled with one seed",
    )
    EMPTY = Refusal(
        "an empty data set",
        "the data set is empty",
        "training needs documents",
        "give at least one document",
    )
    NO_LENGTH = Refusal(
        "",
        "{kind} has no length",
        "documents are planned in advance",
        "use StreamPacker for a stream, or a data set with a length",
    )
    NO_TOKENS = Refusal(
        "no column `input_ids`",
        "the data set has no column 'input_ids'; its columns are {columns}",
        "only tokens are planned",
        "tokenize it first, for example dataset.map(lambda e: tokenizer(e['text']), batched=True)",
    )
    UNKNOWN_COLUMNS = Refusal(
        "columns besides `input_ids`, `labels`, `attention_mask` and the length, if the model takes them or "
        "`remove_unused_columns=False`",
        "the data set has columns that a packed batch cannot carry: {unknown}",
        "it carries only 'input_ids', and optionally 'labels', an 'attention_mask' of ones and {length!r}",
        "remove the others with dataset.remove_columns({unknown}), or set remove_unused_columns=True to drop columns "
        "that the model does not take",
    )
    LENGTH_COLUMN = Refusal(
        "a length column that is not of integers",
        "the column {column!r} has the type {kind}",
        "lengths are one integer per document",
        "remove the column: lengths are then computed from input_ids",
    )
    # Documents
    EMPTY_DOCUMENT = Refusal("an empty document", "{name} is empty{stated}", "a document needs a token", REMOVE_EMPTY)
    NOT_INTEGERS = Refusal(
        "tokens or labels that are not one list of integers",
        "{name} has {column!r} of shape {shape} and type {kind}",
        "a document is one list of integers",
        "tokenize each document by itself, without return_tensors",
    )
    LABELS = Refusal(
        "labels of another number than tokens",
        "{name} has {labels} labels for {length} input_ids",
        "every token needs a label",
        "give one label per token, not shifted, and -100 for tokens without a loss; or remove the column 'labels'",
    )
    MASK = Refusal(
        "an attention mask of another shape than the tokens",
        "{name} has an attention_mask of shape {shape} for {length} input_ids",
        "a packed document attends to itself, causally, and needs no other mask",
        "remove the column, or give a 1 for each token",
    )
    PADDED = Refusal(
        "padded documents",
        "{name} has an attention_mask with zeros",
        "documents are packed without padding",
        "tokenize with padding=False; to leave a prompt out of the loss set its labels to -100",
    )
    WRONG_LENGTH = Refusal(
        "a length column that disagrees with the tokens",
        "{name} has {length} input_ids",
        "its column {column!r} says {stated}",
        "remove or recompute the column {column!r}",
    )
    CHANGED_LENGTH = Refusal(
        "documents that change when they are read again",
        "document {index} has {length} tokens",
        "it had {planned} when its length was read, so the plans do not fit it",
        "tokenize the data set beforehand, so that it returns the same tokens each time; recompute or remove the "
        "column {column!r}",
    )
    LONG = Refusal(
        "a document of more tokens than fit, with `long_documents='error'`",
        "{count} of {documents} documents are longer than {limit_name} = {limit} tokens, such as document {longest} "
        "with {length}",
        "a document must fit",
        f"raise tokens_per_rank, use more ranks, or set long_documents: {CUT}",
    )
    LONG_IN_STREAM = Refusal(
        "a streamed document of more than `tokens_per_rank` tokens, with `long_documents='error'`",
        "{name} has {length} tokens",
        "a streamed document must fit into tokens_per_rank = {limit}",
        f"raise tokens_per_rank, use a data set with a length (its documents may span ranks), or set long_documents: "
        f"{CUT}",
    )
    # Batches of collators
    ROWS = Refusal(
        "batches of several rows",
        "input_ids has the shape {shape}",
        "all documents of a batch must be packed into one row, [1, tokens]",
        "use transformers' DataCollatorWithFlattening, or the collator of hf_distca",
    )
    BATCH_MASK = Refusal(
        "batches with an attention mask of their own",
        "attention_mask has the shape {mask} for input_ids of {shape}",
        "packed documents attend to themselves, causally, and need no other mask",
        "leave attention_mask out",
    )
    PADDED_BATCH = Refusal(
        "padded batches",
        "the batch has an attention_mask with zeros",
        "documents are packed without padding",
        FLATTEN,
    )
    NO_BOUNDARIES = Refusal(
        "batches that do not show where documents begin",
        "the batch has only {fields}",
        "they do not show where documents begin",
        "return position_ids that restart at 0 with each document, or cu_seq_lens_q; "
        "DataCollatorWithFlattening(return_position_ids=True) returns position_ids",
    )
    WRONG_BOUNDARIES = Refusal(
        "batches whose document lengths do not sum to their tokens",
        "{name} gives document lengths {lengths} with a sum of {total} for {tokens} tokens",
        "the lengths must be positive and sum to the tokens of the batch",
        FLATTEN,
    )
    POSITIONS_SHAPE = Refusal(
        "batches with positions of another shape than the tokens",
        "position_ids has the shape {shape} for {tokens} tokens",
        "every token needs one position, [1, {tokens}]",
        FLATTEN,
    )
    POSITIONS_START = Refusal(
        "batches whose positions do not start at 0",
        "position_ids begin with {first}",
        "the first token of each document, including the first document, is at 0",
        "use DataCollatorWithFlattening with position_ids_start=0",
    )
    POSITIONS_GAP = Refusal(
        "batches whose positions have gaps",
        "position_ids go from {before} to {after} at row {row}",
        "they must count on inside a document, and be 0 at the start of one",
        FLATTEN,
    )
    # Calls
    POLICY = Refusal(
        "",
        "the policy for long documents is {policy!r}",
        "there is no such policy",
        "give 'error', 'truncate' or 'split'",
    )
    LIMIT = Refusal("", "{limit_name} is {limit}", "a rank must hold at least one token", "give a positive number")
    RANK = Refusal("", "the rank is {rank} of {ranks}", "ranks count from 0", "give one from 0 to {last}")
    NO_DOCUMENTS = Refusal(
        "", "there are no documents", "a micro-batch needs at least one", "give at least one document"
    )
    OVER_CAPACITY = Refusal(
        "",
        "document {document} has {length} tokens",
        "a micro-batch holds at most {capacity}",
        "call fit_documents with this capacity first",
    )
    NOT_PLANNED = Refusal(
        "",
        "DistCACollator got {count} items of type {kind}",
        "it collates one PlannedDocuments",
        "give the DataLoader RankDocuments as its data set and GlobalBatchSampler as its batch_sampler",
    )
