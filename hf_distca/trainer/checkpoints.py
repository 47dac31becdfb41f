"""Find the checkpoint to resume from, and check that it is complete and fits the number of ranks."""

import re
from pathlib import Path

from accelerate import Accelerator
from transformers.trainer_utils import get_last_checkpoint

from hf_distca.dispatch.groups import Groups
from hf_distca.trainer.arguments import DistCAArguments

STATE_FILE = "trainer_state.json"
"""File that Trainer writes last into a checkpoint."""
OPTIMIZER, SCHEDULE = "the optimizer's state", "the learning rate's schedule"
_ZERO_SHARD = re.compile(r"zero_pp_rank_(\d+)_mp_rank_\d+_optim_states\.pt$")


def agreed_checkpoint(
    resume_from_checkpoint: str | bool | None, args: DistCAArguments, accelerator: Accelerator, groups: Groups
) -> str | None:
    """Return the folder of the checkpoint to resume from; None to begin anew. A collective.

    Args:
        resume_from_checkpoint: as Trainer.train takes it.

    Raises:
        ValueError: on every rank, if any rank finds no complete checkpoint with optimizer state. Also if DeepSpeed
            cannot load that state on this number of ranks.
    """
    checkpoint, error, saved_by = None, None, 0
    if resume_from_checkpoint:
        try:
            checkpoint = _found(resume_from_checkpoint, str(args.output_dir))
            _check_state(Path(checkpoint), accelerator)
            saved_by = _zero_ranks(Path(checkpoint)) if _loads_zero_shards(accelerator) else 0
        except (ValueError, OSError) as caught:
            error = caught
    groups.raise_together(error, in_world=True)
    saved_by = max(groups.all_gather(saved_by))  # a host may hold only the shards of its own ranks
    if saved_by not in (0, groups.ranks):
        raise ValueError(
            f"DeepSpeed saved the optimizer state in {checkpoint} on {saved_by} ranks, but {groups.ranks} ranks "
            f"train: train on {saved_by}, or convert it to a universal checkpoint, which any number of ranks can "
            'load, and set {"checkpoint": {"load_universal": true}} in the configuration of DeepSpeed'
        )
    return checkpoint


def _found(resume_from_checkpoint: str | bool, output_dir: str) -> str:
    """Return the folder of a complete checkpoint."""
    checkpoint = get_last_checkpoint(output_dir) if resume_from_checkpoint is True else resume_from_checkpoint
    if not checkpoint:
        raise ValueError(f"there is no checkpoint in {output_dir}")
    if not (Path(checkpoint) / STATE_FILE).is_file():
        raise ValueError(
            f"{checkpoint} has no {STATE_FILE}: it is no checkpoint, or training ended while it was being saved. "
            "Remove it, and resume from the checkpoint before it"
        )
    return str(checkpoint)


def _check_state(checkpoint: Path, accelerator: Accelerator) -> None:
    """Raise if the checkpoint lacks optimizer state or schedule.

    Trainer would begin both anew without a warning.
    """
    deepspeed = getattr(accelerator.state, "deepspeed_plugin", None)
    needed = {OPTIMIZER: ["optimizer.pt"], SCHEDULE: ["scheduler.pt"]}
    if deepspeed is not None:
        needed[OPTIMIZER] = ["global_step*"]
        if "scheduler" in deepspeed.deepspeed_config:  # DeepSpeed saves the schedule beside the optimizer
            del needed[SCHEDULE]
    elif getattr(accelerator.state, "fsdp_plugin", None) is not None:
        needed[OPTIMIZER] = ["optimizer_0", "optimizer.bin"]
    for state, names in needed.items():
        if not any(found for name in names for found in checkpoint.glob(name)):
            load = f"from_pretrained('{checkpoint}')"
            if (checkpoint / "adapter_config.json").is_file():
                load = f"PeftModel.from_pretrained(model, '{checkpoint}', is_trainable=True)"
            raise ValueError(
                f"{checkpoint} has no {' or '.join(names)}, which holds {state}: it was saved with "
                "save_only_model=True or under another strategy, and training would start without that state. "
                f"Load it as the model, {load}, and train without resume_from_checkpoint; or resume from a checkpoint "
                "that was saved with save_only_model=False under the same strategy"
            )


def _loads_zero_shards(accelerator: Accelerator) -> bool:
    """Return whether DeepSpeed will load each rank's share of the optimizer state as that rank saved it."""
    plugin = getattr(accelerator.state, "deepspeed_plugin", None)
    return plugin is not None and not plugin.deepspeed_config.get("checkpoint", {}).get("load_universal", False)


def _zero_ranks(checkpoint: Path) -> int:
    """Return the number of ranks of a ZeRO checkpoint whose shards this host holds; 0 without shards."""
    found = [_ZERO_SHARD.search(file.name) for file in checkpoint.glob("global_step*/*")]
    return max((int(match[1]) + 1 for match in found if match), default=0)
