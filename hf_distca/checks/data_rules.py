"""Table of data sets that cannot be trained on exactly: their columns, documents and streams.

`batch_rules.py` has the table of tokens and batches.
"""

from hf_distca.checks.refusal import Refusal

REMOVE_EMPTY = "remove empty documents: dataset.filter(lambda e: e['input_ids'])"


class Data:
    """What is refused in a user's data sets."""

    # Data sets as wholes
    SPLITS = Refusal(
        "{name} is a dictionary ({kind}) of the data sets {keys}",
        "training takes the documents of one data set",
        "choose one: {name}[{first!r}]; several evaluation data sets are one dictionary: "
        "eval_dataset={{'name': dataset}}",
        condition="a `DatasetDict` whose split was forgotten, or a dictionary of data sets",
    )
    COLUMNS = Refusal(
        "{name} is a dictionary ({kind}) of the columns {keys}",
        "documents are read by number, not by column",
        "make a data set of the columns: datasets.Dataset.from_dict(dict({name}))",
        condition="columns in a dictionary, such as what a tokenizer returns",
    )
    A_NAME = Refusal(
        "{name} is the text {given!r}",
        "names and files are not loaded here",
        "load it: {name}=hf_distca.load_documents({given!r})",
        condition="the name or the path of a data set instead of the data set",
    )
    TABLE = Refusal(
        "{name} is a table ({kind} of {package})",
        "documents are read by number, not by column",
        "make a data set of it, such as datasets.Dataset.from_pandas(dataframe) or "
        "datasets.Dataset(table)",
        condition="a table of pandas, polars or pyarrow",
    )
    NOT_A_DATASET = Refusal(
        "{name} is {given}",
        "it gives no documents, neither by number nor one after another",
        "give a datasets.Dataset, a list of dictionaries, or a stream such as "
        "datasets.IterableDataset",
        condition="a number, a function, a class, a set or a DataLoader as a data set",
    )
    FUNCTION = Refusal(
        "{name} is the function {given}",
        "it gives no documents before it is called",
        "make a stream of it: datasets.IterableDataset.from_generator({given})",
        condition="a function that yields documents",
    )
    # Data sets of text
    CHATS = Refusal(
        "{name} has {columns} and no 'input_ids'",
        "chat templates and prompts are applied by TRL's SFTTrainer only",
        "use hf_distca.DistCASFTTrainer with DistCASFTConfig",
        condition="chats or prompts without tokens in `DistCATrainer`",
    )
    PREFERENCES = Refusal(
        "{name} has {columns} and no 'input_ids'",
        "these are preferences or prompts without an answer, and no documents",
        "use hf_distca.DistCADPOTrainer or DistCARewardTrainer for preferences, and "
        "DistCAGRPOTrainer or DistCARLOOTrainer for prompts",
        condition="preferences, or prompts without answers, in `DistCATrainer` or "
        "`DistCASFTTrainer`",
    )
    NO_TEXT = Refusal(
        "{name} has the columns {columns}",
        "it has neither tokens in 'input_ids' nor text in {field!r}",
        "set dataset_text_field to the column with the text",
    )
    NO_TEXT_IN_DOCUMENT = Refusal(
        "{name} has the columns {columns}",
        "it has no text in {field!r}, which the first document has",
        "give it a text there, or remove such documents",
        condition="a document without the column that the first document has",
    )
    MISSING_TEXT = Refusal(
        "{name} has None in {field!r}",
        "a document is a text",
        "remove such documents, as with dataset.filter(lambda e: e[{field!r}] is not None)",
        condition="a document with `None` in its column of text",
    )
    NOT_TEXT = Refusal(
        "{name} has a value of the type {kind} in {field!r}",
        "a document is a text",
        "set dataset_text_field to the column with the text, or make a text of each value",
        condition="a document with anything else than text in its column",
    )
    NOT_UTF8 = Refusal(
        "{name} has a text with the bytes {found}",
        "they are not UTF-8, which text must be",
        "convert the file that the data set was made of, such as with iconv -f LATIN1 -t UTF-8",
        condition="a data set made of a file in another encoding than UTF-8",
    )
    SURROGATE = Refusal(
        "{name} has {character} at character {at} of {field!r}",
        "that is half of a character (a lone surrogate), which no tokenizer can encode",
        "replace it: text.encode('utf-16', 'surrogatepass').decode('utf-16', 'replace')",
        condition="a text with a lone surrogate such as `'\\ud800'`",
    )
    NO_MESSAGES = Refusal(
        "{name} has no messages in {column!r}",
        "a chat has at least one message",
        "remove such documents: dataset.filter(lambda e: e[{column!r}])",
        condition="a chat without messages",
    )
    NO_TOKENIZER = Refusal(
        "{name} has text in {field!r} and no tokens in 'input_ids'",
        "there is no tokenizer",
        "pass the model's tokenizer as processing_class",
    )
    NO_SAVED_TOKENIZER = Refusal(
        "{name} needs a tokenizer for its text in {field!r}",
        "none can be loaded from {model} ({why})",
        "save the model's tokenizer there, tokenizer.save_pretrained({model!r}), or pass it as "
        "processing_class",
        condition="data of text, and a model's name or folder without a tokenizer",
    )
    NOT_A_TOKENIZER = Refusal(
        "processing_class is {given}",
        "it cannot tokenize the text in {field!r}",
        "pass the model's tokenizer: processing_class=AutoTokenizer.from_pretrained(name)",
        condition=(
            "a name, a class or a processor of images as `processing_class`, with data of text"
        ),
    )
    # Images
    PLACEHOLDERS = Refusal(
        "{name} has {placeholders} tokens of the id {token}, and {images} {modality}s with {rows} "
        "rows of features",
        "each row of features replaces one such token",
        "make input_ids and pixels by one call of the model's processor, and do not truncate "
        "input_ids",
        condition="placeholders of images that do not fit the images of the document",
    )
    MISSING_IMAGE_FIELD = Refusal(
        "{name} has images in {given} and no {missing}",
        "the model's encoder takes all of them",
        "give the document all that the model's processor returns",
        condition="a document with pixels and without another field that the encoder takes",
    )
    NOT_PROCESSED = Refusal(
        "document {index} of {name} cannot be read or processed ({why})",
        "its text and its images make one document",
        "mend it or leave it out; {name}[{index}] reads it alone",
        condition="a picture that is missing or broken, or that the processor refuses",
    )
    STREAM_OF_IMAGES = Refusal(
        "{name} is a stream of documents with images",
        "plans need the images of a whole micro-batch, and a rank reads its own part of a stream",
        "load the data set without streaming=True",
    )
    # Data sets of tokens
    NOT_A_ROW = Refusal(
        "{name} is of the type {kind}",
        "a document is a dictionary of columns, such as {{'input_ids': [1, 2]}} or {{'text': 'a "
        "b'}}",
        "give dictionaries, and leave out documents that are missing",
        condition="a document that is `None`, or no dictionary",
    )
    DIFFERENT = Refusal(
        "ranks were given different data sets ({found})",
        "every rank plans from the same documents in the same order",
        "give all ranks the whole data set, shuffled with one seed",
    )
    STREAMS_DIFFER = Refusal(
        "ranks {first} and {other} read different first documents of {name}",
        "every rank is given the same stream and takes its share of the documents: some would be "
        "lost, and others might come twice",
        "give every rank the whole stream, which does not divide itself by rank (as by "
        "split_dataset_by_node) and is shuffled with one seed; or set divided_streams=True if each "
        "rank's stream has documents of its own",
        condition="a stream that divides itself by rank, or that ranks shuffle differently",
    )
    STREAMS_EQUAL = Refusal(
        "ranks {first} and {other} read the same first document of {name}",
        "with divided_streams=True each rank trains on all documents that it reads: documents "
        "would be trained on several times",
        "set divided_streams=False, so that hf_distca divides streams, or divide this stream too",
        condition="`divided_streams=True` with a stream that does not divide itself by rank",
    )
    SHARED_ROWS = Refusal(
        "ranks {first} and {other} read different first documents of {name}",
        "they share one model and train on the same documents",
        "divide the stream into {ranks} parts, one for each rank that trains on its own documents",
        condition="`divided_streams=True` with a stream that tensor-parallel processes divide",
    )
    EMPTY = Refusal(
        "{name} has no documents", "training needs documents", "give at least one document"
    )
    NO_TARGETS = Refusal(
        "none of the {documents} documents of {name} has a target",
        "a training would have the loss 0 and change no weight: all labels are -100 after the "
        "first token of each document, which nothing predicts",
        "give labels to the tokens of the answers, or leave the column 'labels' out, where each "
        "token predicts the next",
        condition="a data set whose labels are all -100",
    )
    SINGLE_TOKENS = Refusal(
        "none of the {documents} documents of {name} has more than one token",
        "a token is predicted from tokens before it, so a training would change no weight",
        "give longer documents; an empty text is a single end-of-sequence token",
        condition="a data set whose documents have one token each",
    )
    NO_ANSWERS = Refusal(
        "TRL kept none of the {examples} examples of {name}",
        "max_length={max_length} cut every answer off, and examples without a target are dropped",
        "raise max_length, or leave it out: documents then stay whole",
        condition="`max_length` of DistCASFTConfig cuts every answer of a data set off",
    )
    NO_TOKENS = Refusal(
        "{name} has no column 'input_ids'; its columns are {columns}",
        "only tokens are planned",
        "tokenize it first, for example dataset.map(lambda e: tokenizer(e['text']), batched=True)",
    )
    UNKNOWN_COLUMNS = Refusal(
        "{name} has columns that a packed batch cannot carry: {unknown}",
        "it carries only 'input_ids', and optionally 'labels', an 'attention_mask' of ones and "
        "{length!r}",
        "remove them with dataset.remove_columns({unknown}), or set remove_unused_columns=True, "
        "which drops columns that the model does not take",
        condition=(
            "other columns than `input_ids`, `labels`, `attention_mask` and the length, with "
            "`remove_unused_columns=False`"
        ),
    )
    INPUT_COLUMNS = Refusal(
        "{name} has columns that the model takes and a packed batch cannot carry: {unknown}",
        "it carries only 'input_ids', and optionally 'labels', an 'attention_mask' of ones and "
        "{length!r}; positions are made in packing",
        "remove them, as with dataset.remove_columns({unknown})",
        condition=(
            "columns that the model takes, such as `position_ids`, besides `input_ids`, `labels`, "
            "`attention_mask` and the length"
        ),
    )
    NO_LENGTH = Refusal(
        "{name} has {given} in its column {column!r} of lengths",
        "a length is an integer",
        "remove the column: lengths are then computed from input_ids",
        condition="a document whose length is missing or no integer",
    )
    LENGTH_COLUMN = Refusal(
        "the column {column!r} of lengths of {name} has the type {kind}",
        "lengths are one integer per document",
        "remove the column: lengths are then computed from input_ids",
    )
    # Documents
    EMPTY_DOCUMENT = Refusal("{name} is empty{stated}", "a document needs a token", REMOVE_EMPTY)
    NO_LIST = Refusal(
        "{name} has {given} in {column!r}",
        "a document has one list of integers there, one for each token",
        "make tokens of a text with the tokenizer, or remove such documents",
        condition="tokens or labels that are missing, text or a single number",
    )
    ONE_LABEL = Refusal(
        "{name} has {given} in 'labels'",
        "classes of whole documents cannot be labels: each token needs one",
        "remove the column 'labels'; each token then predicts the next",
        condition="a class of a whole document as its label",
    )
    NESTED = Refusal(
        "{name} has lists of lists, or a tensor of several dimensions, in {column!r}",
        "a document has one list of integers there, one for each token",
        "tokenize each document by itself, without return_tensors",
        condition="tokens or labels in lists of lists, as of `return_tensors`",
    )
    NOT_INTEGERS = Refusal(
        "{name} has {given} at position {at} of {column!r}",
        "tokens and labels are integers",
        "give the ids that the tokenizer returns: tokenizer(text).input_ids",
        condition="tokens or labels that are fractions, text or missing",
    )
    LABELS = Refusal(
        "{name} has {labels} labels for {length} input_ids",
        "every token needs a label",
        "give one label per token, not shifted, and -100 for tokens without a loss; or remove the "
        "column 'labels'",
    )
    PADDED = Refusal(
        "{name} has an attention_mask other than a 1 for each of its {length} input_ids",
        "documents are packed without padding, and attend to themselves, causally",
        "remove the column, or tokenize with padding=False; to leave a prompt out of the loss set "
        "its labels to -100",
    )
    WRONG_LENGTH = Refusal(
        "{name} has {length} input_ids",
        "its column {column!r} says {stated}",
        "remove or recompute the column {column!r}",
        condition="a length column that disagrees with the tokens",
    )
    CHANGED_LENGTH = Refusal(
        "{name} has {length} tokens",
        "it had {planned} when its length was read, so the plans do not fit it",
        "tokenize the data set beforehand, so that it returns the same tokens each time",
        condition="documents that change when they are read again",
    )


class Source:
    """What is refused in the files and names of `load_documents`."""

    NONE = Refusal(
        "no source is named", "documents are read from it", "name a file, a folder or a data set"
    )
    MISSING = Refusal(
        "there is no file or folder {path!r}",
        "documents are read from it",
        "give the path of a file or a folder, or the name of a data set on the Hub, such as "
        "'trl-lib/Capybara'",
        condition="a file or folder that does not exist",
    )
    NO_WAY_TO_DIVIDE = Refusal(
        "sample_by is {given!r}",
        "a text file is one document, or each of its paragraphs is one",
        "set 'document' or 'paragraph'",
        condition="another `sample_by` of `load_documents`",
    )
    NO_MATCH = Refusal(
        "no file matches {pattern!r}", "documents are read from files", "give another pattern"
    )
    EMPTY_FOLDER = Refusal(
        "the folder {path!r} has no files, or only hidden ones",
        "documents are read from files",
        "name another folder",
    )
    WILDCARDS = Refusal(
        "the path of the folder {path!r} has one of the characters * ? [",
        "`datasets` takes it for a pattern, and might read another folder",
        "rename the folder, or name its files",
        condition="a folder with tables whose path has a character of patterns",
    )
    MIXED_FOLDER = Refusal(
        "the folder {path!r} has text files such as {text!r} and tables such as {table!r}",
        "a text file is one document and a table has one document a row",
        "name the files, or move one kind into another folder",
        condition="a folder with text files and tables; README and LICENSE do not count",
    )
    EMPTY_FILE = Refusal(
        "the file {path!r} is empty", "a document needs a text or a row", "leave the file out"
    )
    UNKNOWN_FORMAT = Refusal(
        "{path!r} has no suffix that `datasets` knows",
        "the suffix says how a file is read: .txt and .md as text, .jsonl or .csv as rows, each of "
        "them also compressed, such as .jsonl.gz",
        "leave the file out, rename it by what it holds, or load a text of another suffix with "
        "datasets.load_dataset('text', data_files=…, sample_by='document', split='train')",
        condition="a file whose suffix does not say what it holds, such as .py, .jsonlines or none",
    )
    NOT_UTF8 = Refusal(
        "{path} cannot be read as {kind}: it has the bytes {found}",
        "they are not UTF-8, which text must be",
        "convert the file, such as with iconv -f LATIN1 -t UTF-8, or leave it out",
        condition="a file of text in another encoding than UTF-8",
    )
    UNREADABLE = Refusal(
        "{path} cannot be read as {kind}: {why}",
        "a document that is left out in silence would be missing",
        "repair the file, install what reads it, or leave it out",
    )
    NOT_LOADED = Refusal(
        "{path!r} is no file here and cannot be loaded by `datasets` ({why})",
        "documents are read from it",
        "check the name, the path and the split; a private data set needs `hf auth login`, and one "
        "of several configurations datasets.load_dataset(name, configuration)",
        condition="a name that `datasets` cannot load from the Hub",
    )
    FOLDER_NOT_LOADED = Refusal(
        "the folder {path!r} cannot be loaded by `datasets` ({why})",
        "documents are read from its tables",
        "check the split and the tables, or name its files",
        condition="a folder whose tables `datasets` cannot load together",
    )
    NO_SPLIT = Refusal(
        "{path!r} has the splits {splits}",
        "the split {split!r} was asked for",
        "set split to one of them",
    )
    OTHER_COLUMNS = Refusal(
        "{path!r} has the columns {columns}",
        "{first_path!r} has the columns {first}, and a data set has the same columns everywhere",
        "give sources with the same columns, or load and join them with `datasets`",
    )
