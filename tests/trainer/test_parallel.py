"""Ranks never train apart, and what cannot run in planned steps is refused; see `test_launch.py` for real launches."""

from types import SimpleNamespace

import pytest
from accelerate.parallelism_config import ParallelismConfig

from hf_distca.dispatch.groups import mesh_ranks
from hf_distca.trainer.parallel import data_parallel_mesh, trained_towers
from tests.models import random_documents, small_model
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
        assert message.startswith("LlamaForCausalLM is not wrapped for 2 ranks")
        assert "each would train apart" in message
        assert not has_gradients


def test_one_rank_needs_no_wrapping(tmp_path):
    trainer = make_trainer(str(tmp_path), max_steps=1, save_strategy="no")
    trainer.evaluate()
    trainer.train()
    assert trainer.state.global_step == 1


def test_torch_compile(tmp_path):
    with pytest.raises(ValueError, match=r"leaves out planned attention.*layer\.mlp\.compile\(\)"):
        make_trainer(str(tmp_path), torch_compile=True)


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
