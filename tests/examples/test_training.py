"""The training examples as a user starts them, with small settings."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.ranks import free_port

EXAMPLES = Path(__file__).parents[2] / "examples"


def run(command, ranks=1):
    """Run an example on the CPU; what it printed."""
    if ranks > 1:
        launch = ["--multi_gpu", "--num_machines", "1", "--mixed_precision", "no", "--dynamo_backend", "no"]
        ports = ["--num_processes", str(ranks), "--main_process_port", str(free_port())]
        command = ["-m", "accelerate.commands.launch", *launch, *ports, *command]
    environment = {"ACCELERATE_USE_CPU": "true", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, *command],
        cwd=EXAMPLES,
        env={**os.environ, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stdout
    return done.stdout


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    folder = tmp_path_factory.mktemp("checkpoint")
    sizes = "--hidden_size 64 --layers 2 --heads 4 --kv_heads 2 --vocab_size 512"
    run(["make_checkpoint.py", "--output", str(folder), *sizes.split()])
    return folder


def finetune(checkpoint, output, *options, ranks=1):
    settings = "--learning_rate 1e-2 --logging_steps 1 --save_strategy no --report_to none"
    paths = ["--model", str(checkpoint), "--output_dir", str(output)]
    printed = run(["finetune_llama.py", *paths, *settings.split(), *options], ranks)
    return json.loads((output / "summary.json").read_text()), printed


def test_two_ranks_on_the_standard_library(checkpoint, tmp_path):
    options = "--max_documents 20 --tokens_per_rank 512 --long_documents split --max_steps 12"
    summary, printed = finetune(checkpoint, tmp_path, *options.split(), ranks=2)
    assert summary["documents"] == 19
    assert summary["tokens"] > 19 * 30
    assert summary["loss_first"] == pytest.approx(6.2, abs=0.3)  # ln 512
    assert summary["loss_last"] < summary["loss_first"] - 0.5
    assert summary["eval_loss"] < summary["loss_first"]
    assert summary["pairs_max_over_mean_as_packed"] > 1.1
    # With 512 tokens per rank a block of 128 rows is a large part of a rank's share.
    assert 1 <= summary["pairs_max_over_mean_planned"] < summary["pairs_max_over_mean_as_packed"]
    assert summary["tokens_per_second"] > 0
    assert f"{summary['eval_loss']:.3f}" in printed
    assert (tmp_path / "model.safetensors").exists()


def test_lora_on_a_file_of_documents(checkpoint, tmp_path):
    data = tmp_path / "documents.jsonl"
    data.write_text(
        "".join(json.dumps({"body": f"def f{i}():\n    return {i}\n" * (i + 1)}) + "\n" for i in range(20))
    )
    options = ["--dataset", str(data), "--text_column", "body", "--lora", "--tokens_per_rank", "1024"]
    summary, _ = finetune(checkpoint, tmp_path / "run", *options, "--num_train_epochs", "3")
    assert summary["documents"] == 19
    assert summary["loss_last"] < summary["loss_first"]
    assert (tmp_path / "run" / "adapter_model.safetensors").exists()


def test_chats_about_the_standard_library(checkpoint, tmp_path):
    settings = "--learning_rate 1e-2 --logging_steps 1 --save_strategy no --report_to none --bf16 False --lora"
    options = "--max_chats 20 --tokens_per_rank 512 --long_documents split --max_steps 12 --assistant_only_loss"
    paths = ["--model", str(checkpoint), "--output_dir", str(tmp_path)]
    printed = run(["sft_chat.py", *paths, *settings.split(), *options.split()], ranks=2)
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["chats"] == 19
    assert 12 * 512 < summary["tokens"] <= 12 * 1024
    assert summary["loss_first"] == pytest.approx(6.2, abs=0.3)  # ln 512
    assert summary["loss_last"] < summary["loss_first"]
    assert 0 < summary["eval_mean_token_accuracy"] < 1
    assert f"{summary['eval_loss']:.6g}" in printed
    assert (tmp_path / "adapter_model.safetensors").exists()


def test_a_chat_of_a_module(monkeypatch):
    monkeypatch.syspath_prepend(EXAMPLES)
    from sft_chat import library_chats

    source = 'def f(x, *, y=1):\n    """Add."""\n    return x + y\n\n\ndef g():\n    pass\n'
    (chat,) = library_chats([source, "not Python", "x = 1\n"])
    question = {"role": "user", "content": "What does `f(x, *, y=1)` do?"}
    assert chat == {"messages": [question, {"role": "assistant", "content": "Add."}]}


def test_a_loop_of_ones_own(checkpoint):
    options = "--steps 4 --documents_per_rank 2 --max_length 512"
    printed = run(["accelerate_loop.py", "--model", str(checkpoint), *options.split()], ranks=2)
    losses = [float(line.split()[3]) for line in printed.splitlines() if line.startswith("step ")]
    assert len(losses) == 4
    assert losses[-1] < losses[0]


def test_no_model_where_there_are_no_weights(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(EXAMPLES)
    from finetune_llama import check_weights

    (tmp_path / "config.json").touch()
    with pytest.raises(FileNotFoundError, match="there are no weights in"):
        check_weights(tmp_path)
    (tmp_path / "model.safetensors").touch()
    check_weights(tmp_path)
