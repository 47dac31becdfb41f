"""Table of what a model, a batch or a loss does in a step that its plan cannot express."""

from hf_distca.checks.refusal import Refusal
from hf_distca.checks.run_rules import STOCK_TRAINER

PING_PONG = "set planning={{'ping_pong': False}} for this model"
NO_MASK = "pack documents without padding and leave attention_mask out"


class PlannedStep:
    """What is refused while a step runs."""

    # Plan and batch
    OTHER_ROWS = Refusal(
        "the model runs on {rows} rows",
        "the plan gives this rank {planned} rows",
        "use each plan only with the batch that it was made for",
        condition="a plan with the batch of another plan",
    )
    OTHER_KIND = Refusal(
        "a layer has {kind}",
        "the plan was made for {planned}",
        "list the kinds of all layers in PlanSettings.kinds",
        condition="a plan without a layer's kind of attention",
    )
    OTHER_NODES = Refusal(
        "the plan is made for ranks on the nodes {planned}",
        "the dispatcher's settings have the nodes {nodes}",
        "use the same ranks_per_node for both",
        condition="a plan for other nodes than the dispatcher's",
    )
    UNPLANNED_ITEMS = Refusal(
        "DistCACollator got {count} items of type {kind}",
        "it collates one PlannedDocuments",
        "give the DataLoader RankDocuments as its data set and GlobalBatchSampler as its "
        "batch_sampler",
        condition="`DistCACollator` in a loader of other data",
    )
    # Attention
    DROPOUT = Refusal(
        "{module} uses attention dropout {dropout} in a planned step",
        "ranks cannot draw the same dropped attention weights",
        "set model.config.attention_dropout = 0.0",
        condition="attention dropout in a planned step",
    )
    SEVERAL_ROWS = Refusal(
        "{module} got a batch of {rows} rows",
        "a planned step needs batch size 1 (rows packed without padding)",
        "pack all documents into one row",
        condition="a planned step of several rows",
    )
    MASK = Refusal(
        "{module} got an attention_mask of shape {shape}",
        "a planned step has no padding to mask",
        NO_MASK,
        condition="a mask in a planned step",
    )
    ADDED_MASK = Refusal(
        "{module} adds a custom mask to the causal mask",
        "a plan cannot express it",
        STOCK_TRAINER,
    )
    LOCAL_MASK = Refusal(
        "{module} masks by a local size of {size}, but has sliding_window={window} and chunks of "
        "{chunk} rows",
        "a plan supports only full, sliding-window and chunked attention",
        STOCK_TRAINER,
        condition="a mask of another local size than the layer's window",
    )
    NOT_CAUSAL = Refusal(
        "{module} is not causal", "a plan supports causal attention only", STOCK_TRAINER
    )
    LONGEST_OF_ROWS = Refusal(
        "{module} gets a rotary embedding for the longest position of the rank's rows",
        "it needs one for the length of each document",
        "prepare the model with make_dispatcher before its forward is wrapped or replaced",
        condition="a rotary embedding of the longest position, in a model that was not prepared",
    )
    OTHER_INPUT = Refusal(
        "{module} passes {name}",
        "planned attention does not support it",
        STOCK_TRAINER,
        condition="a bias of positions, or a cache, in planned attention",
    )
    POSITIONS = Refusal(
        "{module} was called with {positions} positions",
        "the plan has {rows} rows on this rank, so the document of each position is unknown",
        STOCK_TRAINER,
        condition="a rotary embedding that gets other positions than those of the rows",
    )
    # Layers
    CACHE = Refusal(
        "a layer gets a cache in a planned step",
        "a planned step cannot use cached keys and values",
        "set model.config.use_cache = False",
    )
    LOST_PLAN = Refusal(
        "{layer} did not pass its plan to every module that attends or mixes along the row",
        "documents would not be kept apart",
        STOCK_TRAINER,
    )
    OTHER_MIXING = Refusal(
        "{module} mixes rows by {found}",
        "a planned step knows it with {known}, so documents would not be kept apart",
        "use another version of transformers, or train this model with stock attention and "
        "transformers' Trainer",
        condition="a module that mixes rows by other functions than hf_distca knows",
    )
    CUT_DOCUMENTS = Refusal(
        "a layer mixes the rows of a document other than by attention",
        "the plan cuts documents between ranks or shares prefixes",
        "plan with document_layout='whole' and share_prefixes=False",
        condition="a plan that cuts documents or shares prefixes, with a module that needs whole "
        "documents",
    )
    NOT_DIVIDED = Refusal(
        "{name} of {owner} is {found}",
        "a planned step cannot divide it into parts of its {rows} rows",
        "{remedy}",
        condition="an argument of a layer whose rows are unknown",
    )
    NOT_JOINED = Refusal(
        "{name} of {owner} is {found} for parts of {sizes} rows",
        "a planned step cannot join it",
        "{remedy}",
        condition="a result of a layer whose rows are unknown",
    )
    OPEN_CONTEXT = Refusal(
        "a decoder layer has a checkpoint, or a context that handles saved tensors, around its "
        "attention",
        "ping-pong cannot pause inside it",
        "put it around the whole layer, or set planning={{'ping_pong': False}}",
        condition="a checkpoint around the attention inside a layer, with ping-pong",
    )
    # Images
    OTHER_FEATURES = Refusal(
        "the encoder made {rows} rows of features of images",
        "the images have {placeholders} placeholders",
        "report this model, since hf_distca does not know how many rows its encoder makes",
        condition="an encoder that makes other numbers of rows than a document has placeholders",
    )
    # Logits and loss
    LATE_LOGITS = Refusal(
        "logits of a planned step are read after the model's forward, with gradients",
        "FSDP2 has sharded the head's weights again, so they would get no gradient",
        "read them under torch.no_grad(), or set loss_chunk_bytes=0",
    )
    SECOND_BACKWARD = Refusal(
        "the backward of a loss computed in chunks runs a second time",
        "the first backward freed the gradients",
        "set loss_chunk_bytes=0 to use retain_graph=True",
    )
