"""Rules of a run that begins, trains, evaluates or resumes."""

from hf_distca.checks.refusal import Refusal, Rule
from hf_distca.checks.setting_names import CHECKPOINTING

STOCK_TRAINER = "train this model with stock attention and transformers' Trainer"
"""Remedy where a plan cannot express a model."""
WHOLE_WEIGHTS = frozenset(
    (
        *("adafactor", "came", "grokadamw", "lamb", "lars", "muon", "prodigy", "shampoo", "soap"),
        *("stableadamw", "apollo_torch", "galore_torch", "lomo_optim"),
    )
)
"""Optimizers whose steps need whole weights: names of their classes, or of their packages.

They step by rows, columns, matrices or norms of a weight, or in the backward pass.
"""
EXACT_BY_ROWS = frozenset(("galore_torch", "grokadamw", "muon"))
"""Optimizers of that list whose steps are exact where a rank holds rows of a weight as a DTensor,
as under FSDP2."""
INEXACT = {"whole": frozenset(), "rows": WHOLE_WEIGHTS - EXACT_BY_ROWS, "flat": WHOLE_WEIGHTS}
"""Optimizers that are refused, by what a rank has: whole weights, rows of them, or flat shards."""


class Run:
    """What is refused when training or an evaluation begins."""

    DIFFERENT_ARGUMENTS = Refusal(
        "{name} differs between ranks ({by_rank})",
        "all ranks must train on the same micro-batches, with the same plans",
        "start all ranks with the same {name}",
    )
    NO_CHECKPOINTS = Refusal(
        "offload_activations=True is set without gradient checkpointing",
        "only activation checkpoints go to the host",
        f"set {CHECKPOINTING}=True",
    )
    NO_STEPS = Rule(
        "num_train_epochs={0.epochs} and max_steps={0.steps} are set",
        "training would end before its first step",
        "set one of them above 0; evaluate() needs no training",
        lambda facts: facts.epochs <= 0 and facts.steps <= 0,
        condition="`num_train_epochs=0` without `max_steps`",
    )
    ALL_FROZEN = Rule(
        "every weight of {0.model} is frozen",
        "training would change nothing",
        "call requires_grad_() on the weights to train; an adapter whose folder is given as model "
        "is loaded frozen: load it with peft.PeftModel.from_pretrained(model, folder, "
        "is_trainable=True)",
        lambda facts: facts.all_frozen,
        condition="a model whose weights are all frozen, such as an adapter given by its folder",
    )
    SECOND_TRAINING = Rule(
        "train() was called a second time under DeepSpeed",
        "its engine and optimizer serve one call only",
        "train all epochs in one call; or make a new {0.trainer} with the same model, whose "
        "optimizer starts anew",
        lambda facts: facts.had_deepspeed,
    )
    NOT_WRAPPED = Refusal(
        "{model} is not wrapped for {processes} ranks ({strategy})",
        "each rank would train apart",
        "give the trainer a model that no Accelerator has prepared, and call train()",
    )
    NEEDS_WHOLE_WEIGHTS = Rule(
        "{0.optimizer} is the optimizer where a rank has shards of weights",
        "its steps on shards of weights are not its steps on whole weights",
        "set another optimizer, such as optim='adamw_torch', or train under DDP",
        lambda facts: not INEXACT[facts.weights].isdisjoint(facts.names),
        condition=(
            "Adafactor, GaLore, Shampoo or another optimizer of rows, columns, matrices or norms "
            "of whole weights under DeepSpeed or FSDP2"
        ),
    )
    LOST_PLAN = Refusal(
        "{model} did not pass {key} on to its decoder layers",
        "they need it to keep documents apart",
        "train it with transformers' Trainer and attn_implementation='sdpa'",
    )
    LOST_TARGETS = Refusal(
        "{model} computed a loss from other rows than its decoder returned",
        "documents with an equal prefix share rows, and a row comes once for each of its targets",
        "set share_prefixes=False",
    )
    NO_TARGETS = Refusal(
        "no document of the first optimizer step has a target ({tokens} tokens on all ranks)",
        "its loss would be 0 and change no weight: every label is -100, or documents have a single "
        "token",
        "check the labels that the stream or data_collator gives, and leave the column 'labels' "
        "out where each token predicts the next; if later documents have targets, shuffle the "
        "data",
        condition=(
            "a stream, or the batches of a custom collator, without any target in the first "
            "optimizer step"
        ),
    )
    ALL_LOGITS = Refusal(
        "predict() is called without preprocess_logits_for_metrics",
        "it would return the logits of all tokens, which take memory for tokens × vocabulary "
        "values on every rank",
        "give the trainer a preprocess_logits_for_metrics that makes them small token by token, "
        "such as lambda logits, labels: logits.argmax(-1); evaluate() reports the exact loss, "
        "token accuracy and entropy",
    )
    NO_LOGITS_OF_TRL = Refusal(
        "predict() of {trainer} is called",
        "TRL computes the loss without logits",
        "tokenize the chats and predict with DistCATrainer; evaluate() reports the exact loss, "
        "token accuracy and entropy",
        condition="`predict()` of `DistCASFTTrainer`",
    )
    NO_ORDER = Refusal(
        "predictions are asked for documents of a stream, or with a data_collator",
        "documents are numbered in a data set with a length only, so that predictions could not be "
        "put in order",
        "evaluate on a data set with a length, such as datasets.Dataset.from_list(list(stream)), "
        "and leave data_collator out; or leave compute_metrics out",
        condition="`compute_metrics` or `predict()` with a stream or a custom collator",
    )
    OTHER_ROWS = Refusal(
        "{function} returned {what} for logits of the shape {logits}",
        "a document's rows lie on several ranks, so that its results are joined token by token",
        "return one value or one vector for each token, [1, tokens] or [1, tokens, …], such as "
        "logits.argmax(-1); labels are unshifted: shift where compute_metrics compares",
        condition=(
            "`preprocess_logits_for_metrics` that returns another number of tokens than it gets"
        ),
    )
    NOT_BY_ROWS = Refusal(
        "{function} returns other values for a token when it gets fewer tokens around it",
        "a document's rows lie on several ranks and in several chunks, so that the function gets "
        "parts of documents",
        "compute each token's value from its own logits, such as logits.argmax(-1), and shift and "
        "average in compute_metrics",
    )
    NO_LOGITS = Refusal(
        "{function} saw the logits of {seen} of {rows} tokens",
        "the model does not compute its loss by one cross entropy of all logits",
        "leave compute_metrics out; or set loss_chunk_bytes=0",
        condition=(
            "`preprocess_logits_for_metrics` with a model whose loss is not one cross entropy of "
            "its logits"
        ),
    )
    EARLY_EVALUATION = Refusal(
        "evaluate() was called before train()",
        "FSDP, ZeRO-1 and ZeRO-2 prepare a model only together with its optimizer",
        "set eval_on_start=True to evaluate before the first training step",
    )


class Resume:
    """What is refused when training resumes."""

    NO_CHECKPOINT = Refusal(
        "resume_from_checkpoint={given} is set",
        "ranks have no complete checkpoint in common, with the {file} that is written last (found: "
        "{found})",
        "name a complete checkpoint such as '{folder}/checkpoint-500', set output_dir to the "
        "folder of the earlier run, or leave resume_from_checkpoint out",
        condition=(
            "`resume_from_checkpoint` without a complete checkpoint, or without the same one on "
            "every rank"
        ),
    )
    NO_STATE = Refusal(
        "the checkpoint {checkpoint} has no {files}",
        "the optimizer and the learning rate would begin anew: the checkpoint was saved with "
        "save_only_model=True or under another strategy",
        "load its weights as the model and train without resume_from_checkpoint; or resume from a "
        "checkpoint that was saved with save_only_model=False under the same strategy",
        condition=(
            "a checkpoint without the state of the optimizer or of the learning rate, or of "
            "DeepSpeed under another strategy"
        ),
    )
    NO_PLACE = Refusal(
        "the checkpoint {checkpoint} has no {file}",
        "that file records the place in the training data: another trainer or an earlier version "
        "saved the checkpoint",
        "set ignore_data_skip=True to begin a new pass over the data",
        condition="a checkpoint of another trainer",
    )
    OTHER_ORDER = Refusal(
        "settings differ from those of the checkpoint: {differences}",
        "documents would come in another order, so that training would skip some documents and "
        "repeat others",
        "set them as they were, or set ignore_data_skip=True to begin a new pass over the data",
    )


TRAINING: tuple[Rule, ...] = (Run.NO_STEPS, Run.ALL_FROZEN, Run.SECOND_TRAINING)
"""Trainings that would change nothing, or fail, when `train()` is called."""
