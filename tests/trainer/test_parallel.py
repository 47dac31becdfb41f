"""Ranks never train apart, and what cannot run in planned steps is refused; see `test_launch.py` for real launches."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate import DistributedType
from accelerate.parallelism_config import ParallelismConfig
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, StateDictType
from torch.nn.parallel import DistributedDataParallel

from hf_distca.dispatch.groups import mesh_ranks
from hf_distca.trainer.parallel import (
    data_parallel_mesh,
    dtype_of_computation,
    forget_evaluation,
    gather_whole_layers,
    gathers_parameters,
    is_wrapped,
    prepares_with_optimizer,
    trained_towers,
    whole_weights,
)
from tests.models_and_batches import random_documents, small_model
from tests.trainer.features import with_frozen_tower, with_tower
from tests.trainer.small_trainers import make_trainer


def _step_of_a_bare_model(folder: str) -> tuple[str, bool]:
    """The error of a step whose model nothing has wrapped, and whether any gradient was taken."""
    trainer = make_trainer(folder)
    with pytest.raises(ValueError, match="not wrapped") as error:
        trainer.training_step(trainer.model, next(iter(trainer.get_train_dataloader())))
    return str(error.value), any(parameter.grad is not None for parameter in trainer.model.parameters())


def test_ranks_do_not_train_apart(rank_pools, tmp_path):
    for message, has_gradients in rank_pools[2].run(_step_of_a_bare_model, str(tmp_path)):
        assert message.startswith(
            "LlamaForCausalLM is to train on 2 ranks (DistributedType.MULTI_CPU), but it is not wrapped"
        )
        assert "each rank would train apart" in message
        assert not has_gradients


def test_one_rank_needs_no_wrapping(tmp_path):
    trainer = make_trainer(str(tmp_path), max_steps=1, save_strategy="no")
    trainer.evaluate()
    trainer.train()
    assert trainer.state.global_step == 1


def test_compiling_by_the_launch(tmp_path, monkeypatch):
    monkeypatch.setenv("ACCELERATE_DYNAMO_BACKEND", "inductor")
    with pytest.raises(ValueError, match="accelerate's --dynamo_backend at no"):
        make_trainer(str(tmp_path))


def _ranks_that_train_together(sizes: dict[str, int]) -> list[int]:
    """What accelerate's mesh of these sizes says, on this rank."""
    config = ParallelismConfig(**sizes)
    accelerator = SimpleNamespace(parallelism_config=config, torch_device_mesh=config.build_device_mesh("cpu"))
    return mesh_ranks(data_parallel_mesh(accelerator))


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        ({"dp_replicate_size": 2, "dp_shard_size": 2}, [[0, 1, 2, 3]] * 4),
        ({"dp_shard_size": 2, "tp_size": 2}, [[0, 2], [1, 3], [0, 2], [1, 3]]),
    ],
)
def test_ranks_that_train_together(rank_pools, sizes, expected):
    assert rank_pools[4].run(_ranks_that_train_together, sizes) == expected


def test_all_ranks_train_together_without_a_mesh():
    assert data_parallel_mesh(SimpleNamespace(parallelism_config=None, torch_device_mesh=None)) is None
    assert mesh_ranks(None) == [0]


def test_towers_are_what_text_gives_no_gradient():
    model = with_tower("distca")
    tokens = random_documents([20])[0][None]
    model(input_ids=tokens, labels=tokens).loss.backward()
    assert trained_towers(model) == ["model.vision_tower", "model.multi_modal_projector"]
    missing = {name for name, parameter in model.named_parameters() if parameter.grad is None}
    assert missing == {name for name, _ in model.named_parameters() if name.startswith(tuple(trained_towers(model)))}
    assert trained_towers(with_frozen_tower("distca")) == trained_towers(small_model()) == []


@pytest.mark.parametrize(
    ("argument", "launch", "divided", "expected"),
    [
        ("bf16", "no", None, torch.bfloat16),
        ("fp16", "no", None, torch.float16),
        ("", "bf16", None, torch.bfloat16),
        ("", "fp16", None, torch.float16),
        ("", "no", None, torch.float32),
        ("", "no", (2, True), torch.bfloat16),
        ("", "no", (2, False), torch.float32),
        ("", "no", (1, True), torch.float32),
        ("fp16", "no", (2, True), torch.float16),
    ],
)
def test_the_dtype_of_computation(argument, launch, divided, expected):
    args: Any = SimpleNamespace(bf16=argument == "bf16", fp16=argument == "fp16")
    model: Any = SimpleNamespace(dtype=torch.float32, is_distributed_loading_by_transformers=divided is not None)
    if divided is not None:
        sizes = SimpleNamespace(dp_size=divided[0], fsdp_mixed_precision=divided[1])
        model.config = SimpleNamespace(distributed_config=sizes)
    accelerator: Any = SimpleNamespace(mixed_precision=launch)
    assert dtype_of_computation(model, args, accelerator) is expected


@pytest.mark.parametrize(
    ("kind", "cls", "engine", "expected"),
    [
        ("NO", nn.Module, None, True),
        ("MULTI_GPU", nn.Module, None, False),
        ("MULTI_GPU", DistributedDataParallel, None, True),
        ("FSDP", nn.Module, None, False),
        ("FSDP", FullyShardedDataParallel, None, True),
        ("DEEPSPEED", nn.Module, None, False),
        ("DEEPSPEED", nn.Module, object(), True),
    ],
)
def test_what_brings_gradients_together(kind, cls, engine, expected):
    model = cls.__new__(cls)  # without a group
    nn.Module.__init__(model)
    model._fsdp_wrapped_module = nn.Module()
    accelerator: Any = SimpleNamespace(distributed_type=DistributedType[kind], deepspeed_engine_wrapped=engine)
    assert is_wrapped(model, accelerator) is expected


@pytest.mark.parametrize(("sizes", "expected"), [(None, True), (1, True), (2, False)])
def test_a_model_divided_at_load_is_wrapped_by_fsdp_or_trains_on_the_same_data(sizes, expected):
    model: Any = nn.Module()
    model.is_distributed_loading_by_transformers = True
    config = None if sizes is None else SimpleNamespace(data_parallel_size=sizes)
    accelerator: Any = SimpleNamespace(distributed_type=DistributedType.MULTI_GPU, parallelism_config=config)
    assert is_wrapped(model, accelerator) is expected


@pytest.mark.parametrize(("kind", "forgotten"), [("MULTI_CPU", True), ("FSDP", False)])
def test_ddp_wraps_a_model_that_was_evaluated_before(kind, forgotten):
    model: Any = nn.Linear(2, 2)
    original = model.forward
    model._original_forward, model.forward, model._is_accelerate_prepared = original, len, True
    forget_evaluation(model, SimpleNamespace(distributed_type=DistributedType[kind]))
    assert model._is_accelerate_prepared is not forgotten
    assert (model.forward == original, hasattr(model, "_original_forward")) == (forgotten, not forgotten)


@pytest.mark.parametrize(
    ("plugins", "gathers", "with_optimizer"),
    [
        ({}, False, False),
        ({"fsdp": None}, False, True),
        ({"deepspeed": 2}, False, True),
        ({"deepspeed": 3}, True, False),
    ],
)
def test_who_prepares_a_model_with_its_optimizer(plugins, gathers, with_optimizer):
    state = SimpleNamespace()
    for name, stage in plugins.items():
        config = SimpleNamespace(is_zero3=lambda stage=stage: stage == 3)
        setattr(state, f"{name}_plugin", SimpleNamespace(hf_ds_config=config))
    accelerator: Any = SimpleNamespace(state=state)
    assert gathers_parameters(accelerator) is gathers
    assert prepares_with_optimizer(accelerator) is with_optimizer


def test_what_is_saved_is_whole_and_checkpoints_are_as_they_were():
    fsdp = SimpleNamespace(state_dict_type=StateDictType.SHARDED_STATE_DICT)
    zero = SimpleNamespace(gather_16bit_weights_on_model_save=False)
    engine = SimpleNamespace(_config=SimpleNamespace(zero_config=zero))
    by_fsdp, by_another = (SimpleNamespace(state=SimpleNamespace(fsdp_plugin=plugin)) for plugin in (fsdp, None))
    saved = []

    def save() -> None:
        with whole_weights(by_fsdp, None):
            saved.append(fsdp.state_dict_type)
            raise OSError("disk full")

    with pytest.raises(OSError, match="disk"):
        save()
    assert saved == [StateDictType.FULL_STATE_DICT]
    assert fsdp.state_dict_type is StateDictType.SHARDED_STATE_DICT
    with whole_weights(by_another, engine):
        assert zero.gather_16bit_weights_on_model_save is True
    assert zero.gather_16bit_weights_on_model_save is False
    with whole_weights(by_another, None):
        pass


def test_layers_that_deepspeed_gathers_whole_have_an_input_with_a_gradient():
    utils = pytest.importorskip("deepspeed.utils")
    model = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2), nn.Embedding(3, 2)])
    gather_whole_layers(model, [])  # no class at all, which DeepSpeed refuses
    gather_whole_layers(model, [nn.Linear, nn.Embedding])
    layer, frozen, embedding = model
    frozen.requires_grad_(False)
    seen: list[bool] = []
    for module in model:
        assert utils.z3_leaf_module(module)
        module.register_forward_hook(lambda module, args, output: seen.append(args[0].requires_grad))
    rows = torch.ones(1, 2)
    layer(rows)
    frozen(rows)
    embedding(torch.tensor([1]))
    with torch.no_grad():
        layer(rows)
    assert seen == [True, False, False, False]
    assert not rows.requires_grad
