"""The page of tested features: `python -m tests.trainer.features_page` writes docs/reference/features.md."""

from pathlib import Path

from tests.trainer.features import FEATURES, STRATEGIES, Feature

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "features.md"
TOP = """\
# Feature compatibility

What users turn on beside planned attention, and the result. Each row is trained with a tiny LLaMA on two ranks with
ping-pong and gradient checkpointing, and compared with transformers' `Trainer` and "sdpa" in one process on the same
documents. Computation is in float32 unless the row says otherwise.

- *equal*: losses, gradient norms and the change of each weight are those of one process, within 1e-4. A bfloat16 run
  is at most twice as far from one process in float32 as one process in bfloat16 is.
- *refused*: every rank raises an error before the first step that says why and what to set.
- *–*: not tested; the last column says why.

`tests/trainer/test_features.py` trains each row, and `python -m tests.trainer.features_page` writes this page.

"""
ARGUMENTS_TOP = """
## Arguments of Trainer

This table has all of transformers' `TrainingArguments` that affect data, loss or model. All others work as in
`Trainer`.

| argument | result |
| --- | --- |
"""
TABLE = "see the table above"
METRICS = "no effect, because `compute_metrics` is refused"
UNTRIED = "passed on to `Trainer`; not tested here"
ARGUMENTS: dict[str, tuple[str, ...]] = {
    TABLE: (
        *("bf16", "fp16", "gradient_accumulation_steps", "max_grad_norm", "neftune_noise_alpha", "use_liger_kernel"),
        "liger_kernel_config",
        *(
            "torch_compile",
            "torch_compile_backend",
            "torch_compile_mode",
            "debug",
        ),
        *("activation_checkpointing", "gradient_checkpointing", "optim", "use_cache", "average_tokens_across_devices"),
        *("label_smoothing_factor", "label_names", "auto_find_batch_size"),
        *("per_device_train_batch_size", "train_sampling_strategy", "accelerator_config", "dataloader_num_workers"),
        *(
            "dataloader_persistent_workers",
            "dataloader_prefetch_factor",
            "dataloader_in_order",
            "dataloader_drop_last",
        ),
    ),
    "as `per_device_train_batch_size`": ("per_device_eval_batch_size",),
    "counted over all ranks; an epoch is one pass over all documents": ("num_train_epochs", "max_steps"),
    "seed of the order of documents": ("seed", "data_seed"),
    "see [Resuming](../guides/resuming.md)": ("ignore_data_skip", "resume_from_checkpoint"),
    "columns that the model does not take are removed, or refused": ("remove_unused_columns",),
    "name of the column with document lengths": ("length_column_name",),
    "tested in launches and by other tests": (
        *("activation_checkpointing_kwargs", "gradient_checkpointing_kwargs", "eval_on_start", "eval_strategy"),
        *("ddp_find_unused_parameters", "ddp_backend", "fsdp", "fsdp_config", "deepspeed", "use_cpu"),
        *("parallelism_config", "dataloader_pin_memory", "logging_nan_inf_filter"),
    ),
    METRICS: (
        *("prediction_loss_only", "eval_do_concat_batches", "eval_use_gather_object", "eval_accumulation_steps"),
        *("include_for_metrics", "batch_eval_metrics"),
    ),
    UNTRIED: (
        *("ddp_static_graph", "full_determinism", "include_num_input_tokens_seen"),
        *("bf16_full_eval", "fp16_full_eval", "tf32", "torch_empty_cache_steps", "optim_args"),
        *("optim_target_modules", "dataloader_multiprocessing_context", "ddp_bucket_cap_mb", "ddp_broadcast_buffers"),
    ),
}
"""What becomes of arguments that touch data, loss or model."""
OTHERS = (
    *("output_dir", "learning_rate", "lr_scheduler_type", "lr_scheduler_kwargs", "warmup_steps", "weight_decay"),
    *("adam_beta1", "adam_beta2", "adam_epsilon", "logging_strategy", "logging_steps", "logging_first_step"),
    *("log_on_each_node", "log_level", "log_level_replica", "disable_tqdm", "report_to", "run_name", "project"),
    *("trackio_space_id", "trackio_bucket_id", "trackio_static_space_id", "eval_steps", "eval_delay"),
    *("save_only_model", "save_strategy", "save_steps", "save_on_each_node", "save_total_limit"),
    *("enable_jit_checkpoint", "push_to_hub", "hub_token", "hub_private_repo", "hub_model_id", "hub_strategy"),
    *("hub_always_push", "hub_revision", "load_best_model_at_end", "metric_for_best_model", "greater_is_better"),
    *("restore_callback_states_from_checkpoint", "ddp_timeout", "skip_memory_metrics", "do_train", "do_eval"),
    *("do_predict", "local_rank"),
)
"""Arguments that touch neither data nor loss nor model: of optimizers, logs, checkpoints and the hub."""


def page() -> str:
    """The page of what is tested."""
    head = f"| feature | {' | '.join(STRATEGIES.values())} | note |\n|{' --- |' * (len(STRATEGIES) + 2)}\n"
    features = "".join(_row(name, feature) for name, feature in FEATURES.items())
    arguments = "".join(
        f"| {', '.join(f'`{name}`' for name in names)} | {what} |\n" for what, names in ARGUMENTS.items()
    )
    return TOP + head + features + ARGUMENTS_TOP + arguments


def _row(name: str, feature: Feature) -> str:
    told = [f"{cause}: {remedy}" for cause, remedy in feature.refused.values()]
    notes = "; ".join(dict.fromkeys([*told, *([feature.note] if feature.note else [])]))
    return f"| {name} | {' | '.join(_outcome(feature, strategy) for strategy in STRATEGIES)} | {notes} |\n"


def _outcome(feature: Feature, strategy: str) -> str:
    if feature.refusal(strategy) is not None:
        return "refused"
    return "equal" if strategy in feature.only else "–"


if __name__ == "__main__":
    PAGE.write_text(page())
