"""What the plugins do with configurations.

`make axolotl` and `make swift` train with the real packages, which this environment does not have.
Here other base classes take their place.
"""

import pickle
import sys
from dataclasses import fields
from importlib import import_module
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import transformers
import trl

from hf_distca import DistCAConfig
from hf_distca.checks.integration_rules import SWIFT, SWIFT_PACKED
from hf_distca.checks.refusal import RefusedError, check


def module(name: str, **members: Any) -> ModuleType:
    made = ModuleType(name)
    vars(made).update(members)
    return made


@pytest.fixture
def axolotl(monkeypatch):
    """The module of the plugin, with the names that it imports from axolotl."""
    logger = SimpleNamespace(lines=[])
    logger.warning = lambda *parts: logger.lines.append(parts[0] % parts[1:])
    for made in (
        *(module("axolotl"), module("axolotl.integrations"), module("axolotl.utils")),
        module("axolotl.integrations.base", BasePlugin=object),
        module("axolotl.utils.logging", get_logger=lambda _: logger),
    ):
        monkeypatch.setitem(sys.modules, made.__name__, made)
    yield import_module("hf_distca.integrations.axolotl")
    del sys.modules["hf_distca.integrations.axolotl"]


@pytest.fixture
def swift(monkeypatch):
    """The module of the plugin, with the names that it imports from ms-swift."""
    classes = {"causal_lm": "swift's", "dpo": "swift's", "kto": "swift's"}
    factory = SimpleNamespace(TRAINER_MAPPING=dict(classes), TRAINING_ARGS_MAPPING=dict(classes))
    for made in (
        module("swift"),
        module("swift.dataset", LazyLLMDataset=SimpleNamespace),
        module("swift.rlhf_trainers", DPOConfig=trl.DPOConfig, DPOTrainer=trl.DPOTrainer),
        module(
            "swift.trainers",
            Seq2SeqTrainer=transformers.Seq2SeqTrainer,
            Seq2SeqTrainingArguments=transformers.Seq2SeqTrainingArguments,
            TrainerFactory=factory,
        ),
    ):
        monkeypatch.setitem(sys.modules, made.__name__, made)
    yield import_module("hf_distca.integrations.swift")
    del sys.modules["hf_distca.integrations.swift"]


class Configuration(dict[str, Any]):
    """A configuration as axolotl has it: a key that is not there is None."""

    def __missing__(self, _: str) -> None:
        return None

    def __getattr__(self, name: str) -> Any:
        return self[name]

    def __setattr__(self, name: str, value: Any) -> None:
        self[name] = value


def test_axolotl_packs_nothing_and_takes_the_settings(axolotl):
    given = {"sample_packing": True, "flash_attention": True, "tokens_per_rank": "32k"}
    plugin, cfg = axolotl.DistCAPlugin(), Configuration(given)
    plugin.register(cfg)
    assert (cfg.sample_packing, cfg.flash_attention, cfg.batch_flattening) == (False, None, None)
    assert axolotl.logger.lines == [
        "No effect with hf_distca: flash_attention: True, sample_packing: True"
    ]
    assert plugin.get_training_args_mixin().endswith(".DistCAArguments")
    assert plugin.get_training_args(cfg) == {
        "tokens_per_rank": "32k",
        "max_steps": -1,
        "average_tokens_across_devices": True,
        "warmup_steps": 0.03,
    }
    plugin.pre_model_load(cfg)
    assert cfg.trainer_cls is None


def test_axolotl_counts_steps_that_are_set(axolotl):
    plugin = axolotl.DistCAPlugin()
    arguments = plugin.get_training_args(Configuration(max_steps=7, warmup_ratio=0.0))
    assert (arguments["max_steps"], arguments["warmup_steps"]) == (7, 0.0)
    assert "warmup_steps" not in plugin.get_training_args(Configuration(warmup_steps=3))


def test_axolotl_names_its_trainer_of_dpo(axolotl):
    plugin, cfg = axolotl.DistCAPlugin(), Configuration(rl="dpo", share_prefixes=False)
    plugin.register(cfg)
    plugin.pre_model_load(cfg)
    assert plugin.get_trainer_cls(cfg) is None
    assert cfg.trainer_cls == "hf_distca.integrations.axolotl_trainers.DistCAAxolotlDPOTrainer"
    assert plugin.get_training_args_mixin().endswith(".DistCAPaddedArguments")
    assert plugin.get_training_args(cfg) == {"share_prefixes": False}


def test_schema_of_axolotl_has_every_setting(axolotl):
    path = axolotl.DistCAPlugin().get_input_args()
    schema = getattr(axolotl, path.rpartition(".")[2])
    assert set(schema.model_fields) == {setting.name for setting in fields(DistCAConfig)}
    given = {"tokens_per_rank": "32k", "planning": {"ping_pong": False}}
    assert schema(**given).model_dump(exclude_none=True) == given


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"rl": "grpo"}, "rl: grpo is set"),
        ({"reward_model": True}, "another trainer is chosen"),
        ({"pretraining_dataset": ["text"]}, "axolotl packs its streams itself"),
    ],
)
def test_configurations_of_axolotl_that_are_refused(axolotl, given, message):
    with pytest.raises(RefusedError, match=message):
        axolotl.DistCAPlugin().register(Configuration(given))


def test_ms_swift_gets_classes_with_the_settings(swift, tmp_path):
    swift.plan_attention(__name__, tokens_per_rank="32k", planning={"ping_pong": False})
    named = swift.TrainerFactory.TRAINING_ARGS_MAPPING
    assert named["kto"] == "swift's"
    assert named["causal_lm"] == f"{__name__}.DistCASwiftArguments"
    made = sys.modules[__name__].DistCASwiftArguments
    args = made(output_dir=str(tmp_path), use_cpu=True)
    assert (args.tokens_per_rank, args.long_documents) == (32768, "error")
    assert args.planning.ping_pong is False
    assert pickle.loads(pickle.dumps(args)).tokens_per_rank == 32768
    trainer = swift.TrainerFactory.TRAINER_MAPPING["dpo"]
    assert trainer == "hf_distca.integrations.swift.DistCASwiftDPOTrainer"


def test_ms_swift_is_refused_a_setting_that_does_not_exist(swift):
    with pytest.raises(RefusedError, match="plan_attention is given tokens, but"):
        swift.plan_attention(__name__, tokens="32k")


def test_weights_of_tokens_are_refused(swift):
    encoder = swift._Encoder(lambda chat: {**chat, "input_ids": [1, 2]}, "train_dataset")
    assert encoder({"labels": [-100, 2]}) == {"input_ids": [1, 2], "labels": [-100, 2]}
    with pytest.raises(RefusedError, match="train_dataset has weights of tokens"):
        encoder({"loss_scale": [0.0, 0.5]})


@pytest.mark.parametrize(
    ("template", "args", "message"),
    [
        ({"padding_free": True}, {}, "--packing or --padding_free of ms-swift is set"),
        ({"sequence_parallel_size": 2}, {}, "sequence_parallel_size=2 divides documents"),
        ({}, {"enable_dft_loss": True}, "ms-swift is given another loss"),
    ],
)
def test_trainings_of_ms_swift_that_are_refused(template, args, message):
    usual = {"packing": False, "padding_free": False, "sequence_parallel_size": 1}
    given = {
        "template": SimpleNamespace(**usual),
        "args": SimpleNamespace(
            **dict.fromkeys(("enable_channel_loss", "enable_dft_loss", "predict_with_generate")),
            **dict.fromkeys(("loss_type", "router_aux_loss_coef")),
        ),
        "model": SimpleNamespace(model_meta=SimpleNamespace(is_multimodal=False)),
    }
    rules = (*SWIFT, *SWIFT_PACKED)
    check(rules, given)
    vars(given["template"]).update(template)
    vars(given["args"]).update(args)
    with pytest.raises(RefusedError, match=message):
        check(rules, given)
