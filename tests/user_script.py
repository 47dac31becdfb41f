"""A user's script for `make types`, which never runs: mypy finds each misspelt argument.

mypy fails if an `ignore` is not needed.
"""

from datasets import Dataset

import hf_distca


def main(documents: Dataset) -> None:
    args = hf_distca.DistCATrainingArguments("out", tokens_per_rank="32k", max_steps=3)
    trainer = hf_distca.DistCATrainer(model="name", args=args, train_dataset=documents)
    trainer.train()
    hf_distca.DistCATrainer(model="name", train_datasets=documents)  # type: ignore[call-arg]
    sft_args = hf_distca.DistCASFTConfig("out", tokens_per_rank=4096)
    hf_distca.DistCASFTTrainer(model="name", args=sft_args, train_dataset=documents)
    hf_distca.DistCASFTTrainer("name", sft_args, data=documents)  # type: ignore[call-arg]
    hf_distca.DistCADPOConfig("out", tokens_per_ranks=4096)  # type: ignore[call-arg]
    hf_distca.DistCADPOTrainer("name", beta=0.1)  # type: ignore[call-arg]
    raise hf_distca.RefusedError("a refusal is a ValueError")
