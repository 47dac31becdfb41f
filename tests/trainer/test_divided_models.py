"""Models that several ranks share: tensor parallelism beside FSDP2, replicas of shards, and what cannot be."""

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers
from accelerate.parallelism_config import ParallelismConfig
from torch import nn
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM
from transformers.distributed import DistributedConfig

from hf_distca.memory.model_state import parameter_bytes
from hf_distca.models.decoder import base_model
from hf_distca.models.fake import model_of_config
from hf_distca.models.kinds import layers_by_kind
from hf_distca.models.tensor_parallel import config_on_a_rank
from hf_distca.trainer.memory import log_memory, sharing_of
from tests.logged import Messages
from tests.models_and_batches import random_documents, reference_step, relative_error, small_model
from tests.ranks import RankPool
from tests.trainer.launches import HYBRID
from tests.trainer.small_trainers import LENGTHS, make_trainer

CHUNK_BYTES = 4 * 64 * 20  # logits of 20 rows
MAX_GRAD_NORM = 0.1
TP_FSDP = {"tp_size": 2, "fsdp_size": 2}
LORA = {"r": 4, "target_modules": ["q_proj", "o_proj"], "init_lora_weights": False}

ONE_MICRO_BATCH = {"gradient_accumulation_steps": 1, "tokens_per_rank": 640}
SAVED = "tensor parallelism and FSDP2"
CASES: dict[str, dict[str, Any]] = {
    SAVED: {
        "divided": TP_FSDP,
        "arguments": {"loss_chunk_bytes": CHUNK_BYTES, "mlp_chunk_rows": 32, "gradient_checkpointing": True},
    },
    "bf16, norms of heads, a stream": {
        "divided": TP_FSDP,
        "model": {"model_type": "qwen3"},
        "source": "stream",
        "arguments": {"loss_chunk_bytes": 0, "bf16": True, **ONE_MICRO_BATCH},
    },
    "tensor parallelism and replicas": {
        "divided": {"tp_size": 2, "dp_replicate_size": 2},
        "model": {"tie_word_embeddings": True},
        "source": "flattened",
        "arguments": {"loss_chunk_bytes": CHUNK_BYTES},
    },
    "tensor parallelism alone": {
        "divided": {"tp_size": 4},
        "model": {"num_key_value_heads": 4},
        "arguments": {"loss_chunk_bytes": CHUNK_BYTES, **ONE_MICRO_BATCH},
    },
    "experts of ranks that share a model": {
        "divided": {**TP_FSDP, "ep_size": 2},
        "model": {"model_type": "gpt_oss", "num_local_experts": 4, "layer_types": ["full_attention"] * 2},
        "arguments": {"gradient_checkpointing": True},
    },
    "a hybrid whose documents are cut": {
        "divided": TP_FSDP,
        "model": HYBRID,
        "arguments": {"document_layout": "joint", "gradient_checkpointing": True, **ONE_MICRO_BATCH},
    },
    "adapters": {
        "divided": {"fsdp_size": 4},
        "lora": True,
        "arguments": {"loss_chunk_bytes": CHUNK_BYTES, "gradient_checkpointing": True},
    },
}
SHARDED = {"fsdp": True, "fsdp_config": {"version": 2, "auto_wrap_policy": "TRANSFORMER_BASED_WRAP"}}
EVALUATED_FIRST = (SAVED, "adapters")
HEADS = {"tensor parallelism alone": (1, 1), "experts of ranks that share a model": (4, 2)}
"""Query and key/value heads of a rank, where they are neither those of two ranks that share the model nor all."""


def case_model(case: dict[str, Any], implementation: str = "eager") -> Any:
    return small_model(implementation=implementation, **case.get("model", {}))


def with_adapters(model: Any, case: dict[str, Any]) -> Any:
    torch.manual_seed(0)
    return peft.get_peft_model(model, peft.LoraConfig(**LORA)) if case.get("lora") else model


def divided_model(folder: Path, divided: dict[str, int], **config: Any) -> Any:
    return AutoModelForCausalLM.from_pretrained(
        folder,
        attn_implementation="distca",
        distributed_config=DistributedConfig(**divided),
        use_cache=False,
        dtype=torch.float32,
        **config,
    )


class Gradients(transformers.TrainerCallback):
    """Keeps the gradients that the optimizer gets."""

    def __init__(self) -> None:
        self.whole: dict[str, torch.Tensor] = {}

    def on_pre_optimizer_step(self, args, state, control, model: nn.Module, **kwargs) -> None:
        """Gather them."""
        for name, parameter in model.named_parameters():
            if (grad := parameter.grad) is not None:
                self.whole[name] = (grad.full_tensor() if isinstance(grad, DTensor) else grad).detach().clone()


def _train(trainer: Any) -> dict[str, Any]:
    """One step over all documents, evaluations around it, and how rows were planned."""
    gradients = Gradients()
    trainer.add_callback(gradients)
    trainer.train()
    settings, groups = trainer.dispatcher.settings, trainer.dispatcher.groups
    return {
        "gradients": gradients.whole,
        "evaluation": trainer.evaluate()["eval_loss"],
        "log": trainer.state.log_history[0],
        "heads": {(kind.q_heads, kind.kv_heads) for kind in settings.kinds},
        "place": (groups.rank, groups.ranks),
    }


ONE_STEP = {
    "max_steps": 1,
    "gradient_accumulation_steps": 8,
    "learning_rate": 1.0,
    "optim": "sgd",
    "max_grad_norm": MAX_GRAD_NORM,
    "save_strategy": "no",
    "sharded": True,
}


def _memory(trainer: Any) -> dict[str, Any]:
    """What is logged of a rank's memory, and how many heads, features and numbers of the model a rank has."""
    messages = Messages("hf_distca.trainer.memory")
    if torch.distributed.get_rank() == 0:  # alone, as in a training
        log_memory(trainer.model, trainer.dispatcher, trainer.args, trainer.accelerator, 10**10)
    messages.end()
    base = base_model(trainer.model)
    alone = model_of_config(config_on_a_rank(base), torch.float32)
    (kind,) = layers_by_kind(alone)
    return {
        "logged": messages.lines,
        "heads": (kind.q_heads, kind.kv_heads),
        "features": alone.config.intermediate_size,
        "numbers": parameter_bytes(base, 1),
        "shards": sharing_of(trainer.accelerator, trainer.model, trainer.dispatcher.groups.ranks)[1],
    }


def _train_divided(folder: str, name: str) -> dict[str, Any]:
    """The result of a case on this rank."""
    case = CASES[name]
    model = with_adapters(divided_model(Path(folder) / name, case["divided"]), case)
    batch = {"per_device_train_batch_size": 2, "per_device_eval_batch_size": 2}
    arguments = {**ONE_STEP, **case.get("arguments", {}), **(batch if case.get("source") == "flattened" else {})}
    trainer = make_trainer(f"{folder}/{name}", case.get("source", "packed"), model=model, **arguments)
    before = trainer.evaluate()["eval_loss"] if name in EVALUATED_FIRST else None
    result = {**_train(trainer), "before": before}
    if name == SAVED:
        trainer.save_model(f"{folder}/saved")
        result["memory"] = _memory(trainer)
    return result


def _refusals(folder: str) -> list[str]:
    """Errors of this rank for models, data and settings that cannot be trained."""
    rank = torch.distributed.get_rank()
    errors = []
    for name, divided, arguments in [
        ("one head", TP_FSDP, {}),
        ("pipeline", {"pp_size": 4}, {}),
        (SAVED, TP_FSDP, {"lengths": LENGTHS[: 11 if rank == 3 else 12]}),
        # Ranks 1 and 3 have the same heads, and agree with each other.
        (SAVED, TP_FSDP, {"tokens_per_rank": 96 if rank % 2 else 160}),
    ]:
        with pytest.raises(ValueError, match="ranks") as error:
            make_trainer(
                f"{folder}/refused",
                model=divided_model(Path(folder) / name, divided),
                save_strategy="no",
                sharded=True,
                **arguments,
            ).get_train_dataloader()
        errors.append(str(error.value))
    return errors


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Folder with the whole model of each case."""
    folder = tmp_path_factory.mktemp("divided")
    for name, case in {**CASES, "one head": {"model": {"num_key_value_heads": 1}}, "pipeline": {}}.items():
        case_model(case).save_pretrained(folder / name)
    return folder


@pytest.fixture(scope="module")
def four_ranks() -> Iterator[RankPool]:
    """A pool of its own, which ends with its tests: the groups that it keeps take most of a core while it lives."""
    pool = RankPool(4)
    yield pool
    pool.close()


@pytest.fixture(scope="module")
def divided(four_ranks, folder) -> list[dict[str, dict[str, Any]]]:
    """The results of all cases on each of four ranks."""
    by_case = {name: four_ranks.run(_train_divided, str(folder), name, keeps_groups=True) for name in CASES}
    return [{name: ranks[rank] for name, ranks in by_case.items()} for rank in range(4)]


def reference(case: dict[str, Any]) -> tuple[float, dict[str, torch.Tensor], float, float]:
    """Loss, clipped gradients, their norm before, and the loss after the step, in one process with "sdpa"."""
    model, documents = with_adapters(case_model(case), case), random_documents(LENGTHS)
    loss, _ = reference_step(model, documents)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    norm = nn.utils.clip_grad_norm_(trained, MAX_GRAD_NORM).item()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    torch.optim.SGD(trained, lr=1.0).step()
    return loss, gradients, norm, reference_step(model, documents)[0]


@pytest.mark.parametrize("name", CASES)
def test_it_trains_as_one_process_does(divided, name):
    loss, gradients, norm, after = reference(CASES[name])
    # Gradients of a hybrid's decays are a millionth of others, and as rough as float32.
    rounding = 2e-2 if name.startswith("bf16") else 2e-4 if "hybrid" in name else 5e-6
    for rank, results in enumerate(divided):
        result = results[name]
        assert result["log"]["loss"] == pytest.approx(loss, rel=rounding / 100 + 5e-7)
        assert name not in EVALUATED_FIRST or result["before"] == pytest.approx(loss, rel=1e-6)
        assert result["evaluation"] == pytest.approx(after, rel=rounding / 100 + 5e-7)
        assert result["log"]["grad_norm"] == pytest.approx(norm, rel=rounding)
        assert result["gradients"].keys() == gradients.keys()
        for parameter, expected in gradients.items():
            assert relative_error(result["gradients"][parameter], expected) < rounding, (rank, parameter)


@pytest.mark.parametrize("name", CASES)
def test_rows_are_planned_for_the_heads_and_the_data_of_a_rank(divided, name):
    sizes = CASES[name]["divided"]
    replicas = math.prod(size for kind, size in sizes.items() if kind[:2] in ("fs", "dp"))
    heads = HEADS.get(name, (4, 2) if replicas == 4 else (2, 1))
    for rank, results in enumerate(divided):
        assert results[name]["place"] == (rank // (4 // replicas), replicas)
        assert results[name]["heads"] == {heads}
        # Ranks with the same rows log the same figures.
        assert results[name]["log"]["loss"] == divided[0][name]["log"]["loss"]
        assert results[name]["log"]["distca/exchange_bytes"] == divided[0][name]["log"]["distca/exchange_bytes"]
    log = divided[0][name]["log"]
    assert (log["distca/exchange_bytes"] == 0) is (replicas == 1)
    if name == SAVED or "experts" in name:  # FSDP2 has hooks of its own on the experts
        assert log["distca/ping_pong_share"] > 0


def _train_sharded(folder: str, sizes: dict[str, int]) -> tuple[dict[str, Any], str]:
    """Train with what accelerate makes of these sizes; the result, and the shape of its mesh."""
    arguments = {
        **ONE_STEP,
        **SHARDED,
        "loss_chunk_bytes": CHUNK_BYTES,
        "parallelism_config": ParallelismConfig(**sizes),
    }
    trainer = make_trainer(folder, **arguments)
    return _train(trainer), str(trainer.accelerator.torch_device_mesh)


def test_replicas_of_shards_as_accelerate_makes_them(four_ranks, tmp_path):
    loss, gradients, norm, after = reference({})
    sizes = {"dp_replicate_size": 2, "dp_shard_size": 2}
    results = four_ranks.run(_train_sharded, str(tmp_path), sizes, keeps_groups=True)
    for rank, (result, mesh) in enumerate(results):
        assert "dp_replicate=2, dp_shard=2" in mesh
        assert result["place"] == (rank, 4)
        assert result["log"]["loss"] == pytest.approx(loss, rel=1e-6)
        assert result["evaluation"] == pytest.approx(after, rel=1e-6)
        assert result["log"]["grad_norm"] == pytest.approx(norm, rel=1e-6)
        for parameter, expected in gradients.items():
            assert relative_error(result["gradients"][parameter], expected) < 5e-6, (rank, parameter)


def test_memory_is_of_a_ranks_share(divided):
    whole = sum(parameter.numel() for parameter in case_model({}).parameters())
    norms = 5 * 32
    memory = divided[0][SAVED]["memory"]
    assert memory["logged"][0].startswith("INFO memory with ")
    assert (memory["heads"], memory["features"]) == ((2, 1), 24)
    assert (memory["numbers"], memory["shards"]) == ((whole - norms) // 2 + norms, 2)


def test_it_is_saved_whole(divided, folder):
    model = AutoModelForCausalLM.from_pretrained(folder / "saved", dtype=torch.float32)
    loss, _ = reference_step(model, random_documents(LENGTHS))
    assert loss == pytest.approx(divided[0][SAVED]["evaluation"], rel=1e-6)


def test_every_rank_refuses(four_ranks, folder):
    for heads, pipeline, data, settings in four_ranks.run(_refusals, str(folder), keeps_groups=True):
        assert (
            "layers.0.self_attn has 1 key/value heads, which tensor parallelism cannot divide among 2 ranks" in heads
        )
        assert "(pp_size=4) gives ranks different layers" in pipeline
        assert "different data sets (rank 0: 12 documents, 621 tokens; " in data
        assert "rank 3: 11 documents, 590 tokens" in data
        assert "settings of plans differs between ranks" in settings
