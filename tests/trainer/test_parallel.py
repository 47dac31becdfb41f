"""Ranks never train apart, on GPUs or CPUs, and log their memory; see `test_features.py` for whole
trainings.
"""

import os
import re
import warnings
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import peft
import pytest
import torch
import torch.distributed as dist
from accelerate import DistributedType, PartialState
from accelerate.parallelism_config import ParallelismConfig
from accelerate.state import AcceleratorState
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.nn.parallel import DistributedDataParallel
from transformers import AutoModelForCausalLM, LlamaForCausalLM

from hf_distca import DistCAConfig, DistCATrainingArguments
from hf_distca.checks.launch_rules import NOT_CONNECTED, PROCESSES, TRAINER
from hf_distca.checks.run_rules import Run
from hf_distca.checks.setting_names import CHECKPOINTING
from hf_distca.memory.counter import MemoryCounter, RankMemory
from hf_distca.memory.fitting import log_memory, warn_of_memory
from hf_distca.memory.model_state import ModelState
from hf_distca.models.checkpointing import is_checkpointing
from hf_distca.models.model_facts import trained_towers
from hf_distca.server_settings import AttentionServers
from hf_distca.trainer import assembly
from hf_distca.trainer.assembly import make_dispatcher, smallest_memory
from hf_distca.trainer.launch_facts import refused_processes
from hf_distca.trainer.parallel import (
    LAUNCHED,
    ProcessCounts,
    checkpointing_of,
    data_parallel_mesh,
    dtype_of_computation,
    facts_of_launch,
    is_wrapped,
    join_on_cpu,
    launched_processes,
    search_for_unused_parameters,
    share_on_cpu,
    sharing_of,
)
from tests.models_and_batches import small_model
from tests.ranks import RankPool
from tests.refused import refused
from tests.survey.tiny import tiny_config
from tests.trainer.features import with_frozen_tower, with_tower
from tests.trainer.small_trainers import make_trainer


def _step_of_a_bare_model(folder: str) -> bool:
    """Whether a step takes a gradient of a model that nothing has wrapped."""
    trainer = make_trainer(folder)
    with refused(
        Run.NOT_WRAPPED, model="LlamaForCausalLM", processes=2, strategy="DistributedType.MULTI_CPU"
    ):
        trainer.training_step(trainer.model, next(iter(trainer.get_train_dataloader())))
    return any(parameter.grad is not None for parameter in trainer.model.parameters())


def _data_parallel_ranks(sizes: dict[str, int]) -> list[int]:
    config = ParallelismConfig(**sizes)
    accelerator = SimpleNamespace(
        torch_device_mesh=config.build_device_mesh("cpu"), parallelism_config=config
    )
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # torch warns of names of flattened dimensions
        mesh = data_parallel_mesh(accelerator)
    return dist.get_process_group_ranks(mesh.get_group())


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        ({"dp_replicate_size": 2, "dp_shard_size": 2}, [[0, 1, 2, 3]] * 4),
        ({"dp_shard_size": 4}, [[0, 1, 2, 3]] * 4),
        ({"dp_shard_size": 2, "tp_size": 2}, [[0, 2], [1, 3]] * 2),
        ({"tp_size": 4}, [[0], [1], [2], [3]]),
    ],
    ids=["replicas of shards", "shards", "shards of groups", "one group"],
)
def test_ranks_that_train_on_different_data(rank_pools, sizes, expected):
    assert rank_pools[4].run(_data_parallel_ranks, sizes) == expected


def test_ranks_do_not_train_apart(rank_pools, tmp_path):
    for has_gradients in rank_pools[2].run(_step_of_a_bare_model, str(tmp_path)):
        assert has_gradients is False


def _limit_of_collectives(folder: str) -> float:
    """Seconds after which a collective of the training framework fails on CPUs."""
    make_trainer(folder, ddp_timeout=77)
    world: Any = dist.group.WORLD
    return float(world._get_backend(torch.device("cpu")).options._timeout.total_seconds())


def test_the_time_out_of_collectives_counts_on_cpus(rank_pools, tmp_path):
    assert rank_pools[2].run(_limit_of_collectives, str(tmp_path)) == [77.0, 77.0]


def test_compiling_by_the_launch(tmp_path, monkeypatch):
    monkeypatch.setenv("ACCELERATE_DYNAMO_BACKEND", "inductor")
    with refused(TRAINER[5]):
        make_trainer(str(tmp_path))


class OfAUser(LlamaForCausalLM):
    """A model that transformers does not have."""


def tiny(model_type: str, **changes: Any) -> Any:
    """A tiny model on the meta device, with changes to its config."""
    config = tiny_config(model_type)
    vars(config).update(changes)
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config)


@pytest.mark.parametrize(
    ("make", "kind", "asked", "before", "after"),
    [
        (small_model, "MULTI_CPU", None, True, False),
        (small_model, "MULTI_CPU", True, True, True),
        (small_model, "FSDP", None, True, True),
        (lambda: with_frozen_tower("distca"), "MULTI_GPU", None, True, False),
        (lambda: with_tower("distca"), "MULTI_GPU", None, False, True),
        # What is not known to get a gradient: parts of a user's own model, skipped layers, parts in
        # no text model.
        (lambda: OfAUser(small_model().config), "MULTI_CPU", None, True, True),
        (lambda: tiny("opt", layerdrop=0.1), "MULTI_CPU", None, True, True),
        (lambda: tiny("phi4_multimodal"), "MULTI_CPU", None, True, True),
    ],
)
def test_ddp_looks_for_unused_parameters_where_there_may_be_some(make, kind, asked, before, after):
    accelerator = accelerator_of(kind)
    accelerator.ddp_handler = SimpleNamespace(find_unused_parameters=before)
    search_for_unused_parameters(make(), accelerator, asked)
    assert accelerator.ddp_handler.find_unused_parameters is after


def test_towers_are_what_text_gives_no_gradient():
    assert trained_towers(with_tower("distca")) == ["model.visual"]
    assert trained_towers(with_frozen_tower("distca")) == trained_towers(small_model()) == []


@pytest.mark.parametrize(
    ("argument", "precision", "sizes", "expected"),
    [
        ("bf16", "no", None, torch.bfloat16),
        ("", "bf16", None, torch.bfloat16),
        ("", "fp16", None, torch.float16),
        ("", "no", None, torch.float32),
        ("", "no", 2, torch.bfloat16),
        ("", "no", 1, torch.float32),
        ("fp16", "no", 2, torch.float16),
    ],
    ids=[
        "argument",
        "launch",
        "launch in fp16",
        "none",
        "FSDP of the model",
        "one GPU",
        "argument before FSDP",
    ],
)
def test_the_dtype_of_computation(argument, precision, sizes, expected):
    args: Any = SimpleNamespace(bf16=argument == "bf16", fp16=argument == "fp16")
    config = SimpleNamespace(
        distributed_config=SimpleNamespace(fsdp_size=sizes, fsdp_mixed_precision=True)
    )
    model: Any = SimpleNamespace(dtype=torch.float32, config=config)
    model.is_distributed_loading_by_transformers = sizes is not None
    accelerator: Any = SimpleNamespace(mixed_precision=precision)
    assert dtype_of_computation(model, args, accelerator) is expected


def accelerator_of(kind: str, parallelism_config: Any = None, **plugins: Any) -> Any:
    return SimpleNamespace(
        distributed_type=DistributedType[kind],
        deepspeed_engine_wrapped=None,
        parallelism_config=parallelism_config,
        state=SimpleNamespace(**plugins),
    )


def test_what_brings_gradients_together():
    """What whole trainings do not show: FSDP1, a model that is not wrapped, and one whose replicas
    are not.
    """
    wrapped: Any = FullyShardedDataParallel.__new__(FullyShardedDataParallel)  # without a group
    nn.Module.__init__(wrapped)
    wrapped._fsdp_wrapped_module = nn.Module()
    assert is_wrapped(wrapped, accelerator_of("FSDP"))
    model: Any = nn.Module()
    assert not any(
        is_wrapped(model, accelerator_of(kind)) for kind in ("MULTI_GPU", "FSDP", "DEEPSPEED")
    )
    model.is_distributed_loading_by_transformers = True
    one_replica = SimpleNamespace(data_parallel_size=1)
    two_replicas = SimpleNamespace(data_parallel_size=2)
    assert is_wrapped(model, accelerator_of("MULTI_GPU", one_replica)) is True
    assert is_wrapped(model, accelerator_of("MULTI_GPU", two_replicas)) is False


@pytest.fixture
def launched(monkeypatch):
    """Arguments of one of some processes that were launched with a strategy, here on a host with or
    without a GPU.
    """

    def arguments(processes=2, strategy="", gpu=False, **given):
        monkeypatch.setenv("WORLD_SIZE", str(processes))
        for name in ("DEEPSPEED", "FSDP"):
            monkeypatch.setenv(f"ACCELERATE_USE_{name}", str(name == strategy).lower())
        monkeypatch.setattr(torch.accelerator, "is_available", lambda: gpu)
        unset = {"ddp_backend": None, "deepspeed": None, "fsdp": None}
        unset["attention_servers"] = AttentionServers()
        return SimpleNamespace(
            **{"use_cpu": False, "dataloader_pin_memory": True, **unset, **given}
        )

    return arguments


def test_processes_on_cpus_share_a_model(launched):
    args = launched(strategy="FSDP")
    args.distributed_state = SimpleNamespace(
        distributed_type=DistributedType.MULTI_CPU, num_processes=2
    )
    share_on_cpu(args, SimpleNamespace(is_distributed_loading_by_transformers=True))
    assert args.distributed_state.distributed_type == DistributedType.MULTI_GPU


@pytest.mark.parametrize(
    ("launch", "use_cpu", "backend"),
    [
        ({"strategy": "FSDP"}, True, None),
        ({"deepspeed": "config.json"}, False, "gloo"),
        ({"strategy": "DEEPSPEED", "ddp_backend": "mpi"}, False, "mpi"),
        ({"gpu": True}, False, None),
        ({"gpu": True, "strategy": "DEEPSPEED"}, False, None),
        ({"processes": 1}, False, None),
    ],
    ids=[
        "FSDP",
        "DeepSpeed's config",
        "DeepSpeed and MPI",
        "GPU",
        "GPU with DeepSpeed",
        "one process",
    ],
)
def test_processes_on_cpus_join(launched, launch, use_cpu, backend):
    args = launched(**launch)
    join_on_cpu(args)
    assert args.use_cpu == use_cpu
    assert args.ddp_backend == backend
    assert args.dataloader_pin_memory is (backend is None)  # Trainer sees to it with use_cpu


def test_deepspeed_in_the_arguments_needs_gpus(launched, monkeypatch, tmp_path):
    given = {"deepspeed": {"zero_optimization": {"stage": 2}}}
    for strategy in ("", "DEEPSPEED"):
        launched(strategy=strategy)
        with refused(PROCESSES[2]):
            DistCATrainingArguments(output_dir=str(tmp_path), use_cpu=True, **given)
    assert not refused_processes(launched(gpu=True, **given))
    assert not refused_processes(launched(processes=1, **given))
    assert not refused_processes(launched(strategy="DEEPSPEED"))


def test_launches_that_would_train_alone_or_without_deepspeed(launched):
    args = launched(strategy="DEEPSPEED", use_cpu=True)
    (error,) = refused_processes(args)
    assert str(error) == str(PROCESSES[1].error())
    with refused(NOT_CONNECTED):
        make_dispatcher(small_model(), DistCAConfig(), torch.device("cpu"))
    assert not refused_processes(launched(strategy="DEEPSPEED", use_cpu=True, processes=1))


@pytest.mark.parametrize(
    ("launched", "in_torch", "in_accelerate", "differ"),
    [
        (1, 1, None, False),
        (1, 1, 1, False),
        (2, 2, 2, False),
        (2, 2, None, False),  # a loop without accelerate
        (1, 2, 2, False),  # started by a script itself, without variables
        (2, 1, None, True),
        (2, 1, 1, True),
        (2, 2, 1, True),
        (1, 2, 1, True),
        (4, 2, 2, True),
    ],
)
def test_processes_that_are_counted_differently(launched, in_torch, in_accelerate, differ):
    assert ProcessCounts(launched, in_torch, in_accelerate).differ is differ


def test_launchers_that_say_how_many_processes_they_started(monkeypatch):
    for name in LAUNCHED:
        monkeypatch.delenv(name, raising=False)
    assert launched_processes() == 1
    for number, name in enumerate(
        reversed(LAUNCHED), 2
    ):  # a launcher's own variable counts before that of MPI or srun
        monkeypatch.setenv(name, str(number))
        assert launched_processes() == number


@pytest.mark.parametrize(
    ("variables", "has_terminal", "launched"),
    [
        ({"SLURM_STEP_NUM_TASKS": "8"}, False, 8),  # srun --ntasks 8 python train.py
        ({"SLURM_STEP_NUM_TASKS": "8"}, True, 1),  # srun --ntasks 8 --pty bash, and python there
        ({"SLURM_STEP_NUM_TASKS": "8", "WORLD_SIZE": "2"}, True, 2),  # and torchrun there
        ({"SLURM_NTASKS": "8"}, False, 1),  # sbatch --ntasks 8 with python in its script
    ],
)
def test_a_process_that_is_started_by_hand_in_a_step_of_slurm(
    monkeypatch, variables, has_terminal, launched
):
    for name in LAUNCHED:
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(os, "isatty", lambda descriptor: has_terminal and descriptor == 0)
    assert launched_processes() == launched


def _message_for_prepared(prepare: Callable[[Any], Any]) -> str:
    """The error of a custom loop that prepares a model too early."""
    with pytest.raises(ValueError, match="wrapped") as error:
        make_dispatcher(prepare(small_model()), DistCAConfig(), torch.device("cpu"))
    return str(error.value)


def _as_engine(model: Any) -> Any:
    """What Accelerator.prepare makes of a model under DeepSpeed."""
    import deepspeed

    config = {
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": {"stage": 2},
        "zero_allow_untested_optimizer": True,
    }
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return deepspeed.initialize(model=model, optimizer=optimizer, config=config)[0]


def _as_shards(model: Any) -> Any:
    """What Accelerator.prepare makes of a model under FSDP2."""
    for layer in model.model.layers:
        fully_shard(layer)
    return fully_shard(model)


@pytest.mark.launches
def test_models_that_are_prepared_too_early_are_refused():
    pytest.importorskip("deepspeed")
    pool = RankPool(1)  # of its own, because DeepSpeed leaves its state in a process
    try:
        messages = {
            prepare: pool.run(_message_for_prepared, prepare)[0]
            for prepare in (DistributedDataParallel, _as_shards, _as_engine)
        }
    finally:
        pool.close()
    wrapper = {
        DistributedDataParallel: "LlamaForCausalLM is wrapped or compiled already, as "
        "DistributedDataParallel",
        _as_shards: "FSDPLlamaForCausalLM is wrapped or compiled already, as FSDPLlamaForCausalLM",
        _as_engine: "LlamaForCausalLM is wrapped or compiled already, as DeepSpeedEngine",
    }
    for prepare, message in messages.items():
        assert message.startswith(f"{wrapper[prepare]}, but hf_distca changes the model before")
        assert "call make_dispatcher, or make the trainer, before Accelerator.prepare" in message


def _refusal_of_ranks_that_accelerate_does_not_connect(lost: int) -> tuple[str, int]:
    """The error of a custom loop, and the ranks that accelerate counts where rank `lost`, or every
    rank, is alone.
    """
    AcceleratorState._reset_state(reset_partial_state=True)
    try:
        state = PartialState(cpu=lost not in (-1, dist.get_rank()))
        with pytest.raises(ValueError, match="would each train alone") as error:
            make_dispatcher(small_model(), DistCAConfig(), torch.device("cpu"))
        return str(error.value), state.num_processes
    finally:
        AcceleratorState._reset_state(reset_partial_state=True)


def test_ranks_that_torch_connects_and_accelerate_does_not_are_refused_together(rank_pools):
    """As `accelerate launch` starts two processes on CPUs without ACCELERATE_USE_CPU."""
    counts = (
        "the launcher started 2 processes, torch.distributed connects 2 and accelerate connects "
        "1, but"
    )
    for message, counted in rank_pools[2].run(
        _refusal_of_ranks_that_accelerate_does_not_connect, -1
    ):
        assert counted == 1
        assert message.startswith(counts)
    one, other = rank_pools[2].run(_refusal_of_ranks_that_accelerate_does_not_connect, 1)
    assert one[1] == 2
    assert other[1] == 1
    assert one[0] == other[0]
    assert one[0].startswith(f"rank 1: {counts}")


def test_a_training_of_one_rank_says_that_nothing_is_balanced(caplog):
    for settings in ({}, {"attention_servers": "external"}):
        make_dispatcher(
            small_model(), DistCAConfig(tokens_per_rank=64, **settings), torch.device("cpu")
        ).close()
    assert [record.message for record in caplog.records if record.levelname == "WARNING"] == [
        assembly.ONE_RANK
    ]


# Memory


def test_memory_is_logged_with_a_warning_if_it_does_not_fit(tmp_path, caplog, monkeypatch):
    model = small_model(hidden_size=64, intermediate_size=8192)
    model = peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=["q_proj", "up_proj"]))
    arguments = {"tokens_per_rank": 8192, "activation_checkpointing": True, "bf16": True}
    trainer = make_trainer(str(tmp_path), model=model, max_steps=1, save_strategy="no", **arguments)
    run = trainer.dispatcher.run
    caplog.clear()
    with caplog.at_level("INFO", "hf_distca.memory.fitting"):
        for memory in (10**10, 10**8):
            warn_of_memory(log_memory(trainer.model, run, memory), offloaded=0)
    messages = [f"{record.levelname} {record.message}" for record in caplog.records]
    assert re.match(r"INFO memory with 8192 tokens on each rank: .* of 10\.0 GB \(", messages[0])
    assert messages[2].startswith("WARNING tokens_per_rank=8192 will not fit: ")
    # Counted is the last of all ranks, and a little of the memory stays free.
    counted = []
    with monkeypatch.context() as patch:
        memory_of_rank = RankMemory(ModelState(96, 0, 0), {})
        patch.setattr(
            MemoryCounter, "count", lambda *_, rank: counted.append(rank) or memory_of_rank
        )
        caplog.clear()
        of_three = replace(run, plans=replace(run.plans, ranks=3))
        for memory in (102, 100):  # 96 is more than 0.95 of 100
            counted_memory = log_memory(trainer.model, of_three, memory)
            for offloaded in (0, 1):  # a byte on the host is enough
                warn_of_memory(counted_memory, offloaded)
    assert counted == [2, 2]
    assert [record.levelname for record in caplog.records if "will not fit" in record.message] == [
        "WARNING"
    ]
    # The model is as it was.
    assert not is_checkpointing(model)
    assert next(model.parameters()).grad is None
    trainer.train()
    # A model that cannot be counted trains nevertheless.
    assert log_memory(torch.nn.Linear(1, 1), run, 10**10) is None
    message = caplog.records[-1].message
    assert message.startswith("cannot estimate the memory for training Linear: ")
    assert message.endswith(" (in enable_checkpointing of hf_distca/models/checkpointing.py)")


OF_TWO = SimpleNamespace(dp_shard_enabled=True, dp_shard_size=2)


@pytest.mark.parametrize(
    ("kind", "stage", "config", "expected"),
    [
        ("MULTI_GPU", None, None, ("ddp", None)),
        ("FSDP", None, None, ("fsdp2", None)),
        ("FSDP", None, OF_TWO, ("fsdp2", 2)),
        ("DEEPSPEED", 2, None, ("zero2", None)),
        ("DEEPSPEED", 0, None, ("ddp", None)),
    ],
    ids=["DDP", "FSDP", "shards of two ranks", "ZeRO-2", "ZeRO-0"],
)
def test_how_ranks_share_a_model(kind, stage, config, expected):
    plugin = SimpleNamespace(zero_stage=stage)
    accelerator = accelerator_of(kind, config, deepspeed_plugin=plugin)
    assert sharing_of(accelerator, nn.Module()) == expected


@pytest.mark.parametrize(
    ("given", "dtype", "expected"),
    [
        ({}, torch.float32, {"mixed": False, "accumulates": False, "liger": None}),
        ({"bf16": True, "gradient_accumulation_steps": 2}, torch.float32, {"mixed": True}),
        ({"gradient_accumulation_steps": 2}, torch.float32, {"accumulates": True}),
        ({}, torch.bfloat16, {"mixed": True}),  # whoever asks for it
        ({"use_liger_kernel": True}, torch.float32, {"liger": {}}),
        (
            {"use_liger_kernel": True, "liger_kernel_config": {"rope": False}},
            torch.float32,
            {"liger": {"rope": False}},
        ),
    ],
    ids=["defaults", "bf16", "accumulated", "autocast", "Liger", "some of Liger"],
)
def test_what_a_trainer_knows_of_its_launch(given, dtype, expected):
    default = {"bf16": False, "fp16": False, "gradient_accumulation_steps": 1}
    default |= {"use_liger_kernel": False, "liger_kernel_config": None, CHECKPOINTING: False}
    args: Any = SimpleNamespace(**{**default, **given})
    facts = facts_of_launch(small_model(), args, accelerator_of("NO"), dtype)
    assert {name: facts[name] for name in expected} == expected


EVERY_SECOND = {"every_n_layers": 2}
BY_FSDP = SimpleNamespace(activation_checkpointing=True)


@pytest.mark.parametrize(
    ("asked", "options", "fsdp", "expected"),
    [
        (False, None, None, None),
        (True, EVERY_SECOND, BY_FSDP, EVERY_SECOND),
        (False, None, BY_FSDP, {}),
    ],
    ids=["none", "arguments before FSDP", "FSDP"],
)
def test_how_ranks_checkpoint_layers(asked, options, fsdp, expected):
    args: Any = SimpleNamespace(**{CHECKPOINTING: asked, f"{CHECKPOINTING}_kwargs": options})
    assert checkpointing_of(args, accelerator_of("FSDP", fsdp_plugin=fsdp)) == expected


def test_gpus_agree_on_the_smallest_memory(monkeypatch):
    """By which each chooses the same chunks of the loss."""
    gathered = []
    groups = SimpleNamespace(
        all_gather=lambda mine: gathered.append(mine) or [mine, 24 * 10**9, 141 * 10**9]
    )
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda _: SimpleNamespace(total_memory=80 * 10**9)
    )
    assert smallest_memory(groups, torch.device("cuda", 0)) == 24 * 10**9
    groups = SimpleNamespace(all_gather=lambda mine: gathered.append(mine) or [mine, mine])
    assert smallest_memory(groups, torch.device("cpu")) is None
    assert gathered == [80 * 10**9, None]


def test_chunks_of_the_loss_are_chosen_by_the_smallest_memory(monkeypatch):
    monkeypatch.setattr(assembly, "smallest_memory", lambda *_: 10**12)
    model = small_model(vocab_size=2**15)
    make_dispatcher(model, DistCAConfig(tokens_per_rank=64), torch.device("cpu")).close()
    assert model.lm_head.chunk_bytes == 4 * 2**15 * 4096
