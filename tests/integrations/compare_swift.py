"""Train with ms-swift and its plugin, and compare the losses: `make swift`."""

from same_losses import (
    DPO_BOUND,
    HERE,
    compare,
    compare_with_trainers,
    folder_of,
    free_port,
    make_inputs,
    run,
)

PLUGIN = ("--external_plugins", str(HERE / "distca_plugin.py"), "--attn_impl", "distca")
OPTIONS = """
--model checkpoint --model_type llama --template dummy --tuner_type full --torch_dtype float32
--check_model false --max_length 4096 --split_dataset_ratio 0 --lr_scheduler_type constant
--weight_decay 0 --adam_beta2 0.999 --optim adamw_torch --logging_steps 1 --save_strategy epoch
--fp16 false --bf16 false --seed 42 --report_to none --add_version false --dataloader_num_workers 0
"""
PRETRAINING = """
--dataset messages.jsonl --per_device_train_batch_size 1 --gradient_accumulation_steps 8
--num_train_epochs 4 --learning_rate 1e-3
"""
DPO = """
--rlhf_type dpo --dataset chats.jsonl --per_device_train_batch_size 2
--gradient_accumulation_steps 1 --num_train_epochs 2 --learning_rate 1e-4
"""

folder = folder_of(__doc__)
make_inputs(folder)


def swift(task: str, output: str, options: str, *others: str) -> None:
    command = ("swift", task, *OPTIONS.split(), *options.split(), "--output_dir", output, *others)
    run(folder, output, *command, NPROC_PER_NODE="2", MASTER_PORT=free_port())


compare_with_trainers(
    "ms-swift, pretraining", folder, lambda: swift("pt", "program", PRETRAINING, *PLUGIN), 1e-5
)
swift("rlhf", "program-dpo", DPO, *PLUGIN)
swift("rlhf", "stock-dpo", DPO)
trainings = {"with the plugin": folder / "program-dpo", "ms-swift": folder / "stock-dpo"}
compare("ms-swift, DPO", trainings, bound=DPO_BOUND)
