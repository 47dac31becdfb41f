"""Loaders of data sets, without a training."""

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from torch.utils.data import IterableDataset

from hf_distca.collator.padding_free import CollatorWithLengths
from hf_distca.planner.micro_batch import PlanSettings
from hf_distca.trainer.loaders import PackedLoaders, is_stream, lengths_read_on_host
from tests.trainer.small_trainers import make_trainer


class Stream(IterableDataset):
    """A stream that says how much it has, as some do."""

    def __iter__(self) -> Iterator[Any]:
        return iter([])

    def __len__(self) -> int:
        return 2


def test_a_stream_that_has_a_length_is_a_stream():
    assert is_stream(Stream())
    assert is_stream(iter([]))
    assert not is_stream([])


def test_loaders_are_made_as_the_arguments_say(tmp_path):
    trainer = make_trainer(
        str(tmp_path),
        dataloader_num_workers=1,
        dataloader_persistent_workers=True,
        dataloader_prefetch_factor=3,
        accelerator_config={"non_blocking": True},
    )
    trainer.args.dataloader_pin_memory = True
    loader = trainer.get_train_dataloader()
    assert (loader.num_workers, loader.persistent_workers, loader.prefetch_factor) == (1, True, 3)
    assert (loader.pin_memory, loader._non_blocking, loader.device) == (True, True, trainer.args.device)


def test_documents_that_stay_whole_fill_ranks_and_not_their_sum(tmp_path):
    trainer = make_trainer(str(tmp_path), tokens_per_rank=8)
    groups = SimpleNamespace(
        rank=0, ranks=2, raise_together=lambda *_, **__: None, all_gather=lambda value, **_: [value] * 2
    )
    settings = PlanSettings(2, 8, document_layout="whole")
    dispatcher: Any = SimpleNamespace(
        groups=groups, settings=settings, device=trainer.args.device, choices=lambda: settings.choices
    )
    loaders = PackedLoaders(trainer, dispatcher)
    documents = [{"input_ids": [0] * length} for length in (6, 5, 4)]
    assert len(loaders.loader(documents, shuffle=False)) == 2  # 15 tokens, but 4 more fit beside neither 6 nor 5
    with pytest.raises(ValueError, match="longer than tokens_per_rank = 8 tokens"):
        loaders.loader([{"input_ids": [0] * 9}], shuffle=False)


def test_whatever_a_data_set_raises_reaches_all_processes_of_the_world(tmp_path, monkeypatch):
    class Faulty(list[Any]):
        def __getitem__(self, index: Any) -> Any:
            raise OSError("stale file handle")

    trainer, seen = make_trainer(str(tmp_path)), []
    groups = trainer.dispatcher.groups
    monkeypatch.setattr(groups, "raise_together", lambda error, **options: seen.append((error, options)))
    trainer._loaders.lengths(Faulty([{"input_ids": [1]}]))
    ((error, options),) = seen
    assert (str(error), options) == ("stale file handle", {"in_world": True})


@pytest.mark.parametrize(
    ("dataset", "dispatch_batches", "expected"),
    [([], None, False), (Stream(), None, True), (Stream(), False, False), ([], True, True)],
)
def test_lengths_are_read_by_the_collator_unless_rank_0_reads_for_all(dataset, dispatch_batches, expected):
    args: Any = SimpleNamespace(accelerator_config=SimpleNamespace(dispatch_batches=dispatch_batches))
    trainer: Any = SimpleNamespace(data_collator=list, args=args)
    with lengths_read_on_host(trainer, dataset):
        assert isinstance(trainer.data_collator, CollatorWithLengths) is not expected
    assert trainer.data_collator is list
