"""Rules of configurations of axolotl and ms-swift."""

from collections.abc import Mapping
from typing import Any

from hf_distca.checks.launch_rules import PLACED
from hf_distca.checks.refusal import Refusal, Rule

PREFERENCES = (None, False, "", "dpo", "ipo")
"""Values of axolotl's `rl` that the plugin trains."""


OTHER_TRAINERS = ("reward_model", "process_reward_model", "diffusion_lm", "trainer_cls")
"""Keys of axolotl that choose another trainer."""
STREAMS = ("streaming", "pretraining_dataset")
"""Keys of axolotl by which a data set is a stream."""


AXOLOTL: tuple[Rule, ...] = (
    Rule(
        "rl: {0[rl]} is set in a configuration of axolotl",
        "the plugin trains supervised, or with rl: dpo and rl: ipo",
        "leave DistCAPlugin out; DistCAGRPOTrainer, DistCARLOOTrainer and DistCAKTOTrainer train "
        "in scripts",
        lambda cfg: cfg.get("rl") not in PREFERENCES,
        condition="another `rl` than `dpo` and `ipo` in a configuration of axolotl",
    ),
    Rule(
        "another trainer is chosen in a configuration of axolotl by reward_model, "
        "process_reward_model, diffusion_lm or trainer_cls",
        "the plugin has a trainer of its own",
        "leave these keys out, or leave DistCAPlugin out",
        lambda cfg: any(map(cfg.get, OTHER_TRAINERS)),
    ),
    Rule(
        "streaming or pretraining_dataset is set in a configuration of axolotl",
        "axolotl packs its streams itself",
        "name the data under datasets, with type: completion for plain text",
        lambda cfg: any(map(cfg.get, STREAMS)),
    ),
)
"""Configurations of axolotl that the plugin cannot train."""


def _asks_for_other_loss(given: Mapping[str, Any]) -> bool:
    """Return whether arguments of ms-swift ask for another loss than the model's."""
    names = ("enable_channel_loss", "enable_dft_loss", "loss_type", "router_aux_loss_coef")
    return any(getattr(given["args"], name) for name in names)


class Swift:
    """Data of ms-swift that its plugin cannot train, and settings that do not exist."""

    WEIGHTS = Refusal(
        "{name} has weights of tokens (loss_scale)",
        "the loss of packed documents is a mean over targets of equal weight",
        "set --loss_scale default, last_round or another that only leaves tokens out",
    )
    UNKNOWN = Refusal(
        "plan_attention is given {name}",
        "hf_distca has no setting of this name",
        "the settings are {names}",
    )


SWIFT: tuple[Rule, ...] = (
    Rule(
        "--packing or --padding_free of ms-swift is set",
        "hf_distca packs documents, and removes the padding of preferences, itself",
        "leave both out",
        lambda given: given["template"].packing or given["template"].padding_free,
    ),
    Rule(
        "sequence_parallel_size={0[template].sequence_parallel_size} divides documents among ranks",
        PLACED,
        "leave --sequence_parallel_size out",
        lambda given: given["template"].sequence_parallel_size > 1,
    ),
    Rule(
        "ms-swift trains {0[model].__class__.__name__}, which takes images or sound",
        "the plugin packs tokens alone",
        "train it with DistCATrainer or DistCASFTTrainer in a script",
        lambda given: given["model"].model_meta.is_multimodal,
        condition="a model of images or sound in ms-swift",
    ),
)
"""What trainers of ms-swift are given and the plugin cannot train."""
SWIFT_PACKED: tuple[Rule, ...] = (
    Rule(
        "ms-swift is given another loss by enable_channel_loss, enable_dft_loss, loss_type or "
        "router_aux_loss_coef",
        "the loss of packed documents is the model's own",
        "leave these arguments out; a model's config may have a router_aux_loss_coef",
        _asks_for_other_loss,
    ),
    Rule(
        "predict_with_generate=True is set with ms-swift",
        "evaluation computes packed documents and generates nothing",
        "leave --predict_with_generate out",
        lambda given: given["args"].predict_with_generate,
    ),
)
"""The same for the trainer with packed documents."""
SWIFT_DOCUMENTS: tuple[Rule, ...] = (
    Rule(
        "{0[name]} of ms-swift is a stream, or --truncation_strategy split has cut it",
        "the plugin reads the chats of a stored data set",
        "leave --streaming out, and set --truncation_strategy delete, left or right",
        lambda given: not given["has_chats"],
        condition="`--streaming` or `--truncation_strategy split` of ms-swift",
    ),
)
"""Data sets of ms-swift that the plugin cannot read."""
