"""The training examples as a user starts them, with small settings."""

import ast
import json
import sys
from dataclasses import fields
from importlib import import_module

import pytest
import trl
from datasets import Dataset

from tests.examples.running import EXAMPLES, finetune, finetune_command, run_forked, summary_of


@pytest.fixture
def examples(monkeypatch):
    monkeypatch.syspath_prepend(EXAMPLES)
    import finetune_llama
    import sft_chat

    return finetune_llama, sft_chat


def test_lora_on_a_file_of_documents(checkpoint, tmp_path):
    data = tmp_path / "documents.jsonl"
    data.write_text(
        "".join(json.dumps({"body": f"def f{i}():\n    return {i}\n" * (i + 1)}) + "\n" for i in range(20))
    )
    options = f"--dataset_name {data} --dataset_text_field body --use_peft --tokens_per_rank 1024 --num_train_epochs 3"
    summary, _ = finetune(checkpoint, tmp_path / "run", options)
    assert summary["documents"] == 19
    assert summary["loss_last"] < summary["loss_first"]
    assert (tmp_path / "run" / "adapter_model.safetensors").exists()


def test_ranks_that_share_layers(checkpoint, tmp_path):
    options = "--tp_size 2 --max_documents 40 --tokens_per_rank 512 --long_documents split"
    options += " --max_steps 4 --logging_steps 1"
    run_forked(finetune_command(checkpoint, tmp_path, options), tmp_path / "printed", ranks=4, config="tp")
    summary = summary_of(tmp_path)
    assert summary["loss_first"] == pytest.approx(6.2, abs=0.3)  # ln 512
    assert summary["loss_last"] < summary["loss_first"]
    assert summary["imbalance_degree_planned"] < 1.05 < summary["imbalance_degree_as_packed"]
    assert (tmp_path / "model.safetensors").exists()


def test_chats_about_the_standard_library(checkpoint, tmp_path):
    settings = "--learning_rate 1e-2 --logging_steps 1 --save_strategy no --report_to none --bf16 False --use_peft"
    options = "--max_chats 20 --tokens_per_rank 512 --long_documents split --max_steps 12 --assistant_only_loss"
    paths = ["--model_name_or_path", str(checkpoint), "--output_dir", str(tmp_path)]
    printed = run_forked(["sft_chat.py", *paths, *settings.split(), *options.split()], tmp_path / "printed")
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["chats"] == 19
    assert 12 * 512 < summary["tokens"] <= 12 * 1024
    assert summary["loss_first"] == pytest.approx(6.2, abs=0.3)  # ln 512
    assert summary["loss_last"] < summary["loss_first"]
    assert 0 < summary["eval_mean_token_accuracy"] < 1
    assert f"{summary['eval_loss']:.6g}" in printed
    assert (tmp_path / "adapter_model.safetensors").exists()


def test_a_chat_of_a_module(examples):
    source = 'def f(x, *, y=1):\n    """Add."""\n    return x + y\n\n\ndef g():\n    pass\n'
    (chat,) = examples[1].library_chats([source, "not Python", "x = 1\n"])
    question = {"role": "user", "content": "What does `f(x, *, y=1)` do?"}
    assert chat == {"messages": [question, {"role": "assistant", "content": "Add."}]}


def test_a_loop_of_ones_own(checkpoint, tmp_path):
    options = "--steps 4 --documents_per_rank 2 --max_length 512"
    command = ["accelerate_loop.py", "--model_name_or_path", str(checkpoint), *options.split()]
    printed = run_forked(command, tmp_path, ACCELERATE_USE_CPU="true")
    losses = [float(line.split()[3]) for line in printed.splitlines() if line.startswith("step ")]
    assert len(losses) == 4
    assert losses[-1] < losses[0]


def test_a_run_that_logged_nothing(examples, capsys):
    finetune_llama, sft_chat = examples
    metrics = {"eval_loss": 2.5, "eval_mean_token_accuracy": 0.5}
    documents = Dataset.from_dict({"input_ids": [[1] * 3, [1] * 4]})
    summary = finetune_llama.summarize([{"epoch": 1.0}], metrics, documents)
    assert summary == {"eval_loss": 2.5, "documents": 2, "tokens": 7}
    finetune_llama.print_table(summary, 2, "out")
    assert "not logged: see --logging_steps" in capsys.readouterr().out
    assert sft_chat.summarize([], metrics, 2) == {**metrics, "chats": 2}


def test_adapters_without_peft(examples, monkeypatch):
    import_module("hf_distca.trainer.sft")  # while peft is there, which transformers and TRL import for themselves
    monkeypatch.setitem(sys.modules, "peft", None)
    monkeypatch.setattr(
        sys, "argv", ["x", "--model_name_or_path", "/no", "--use_peft", "--use_cpu", "--output_dir", "/no"]
    )
    for example in examples:
        with pytest.raises(SystemExit, match=r"^--use_peft needs peft, .*: pip install peft$"):
            example.main()


def test_each_example_stands_alone():
    names = {path.stem for path in EXAMPLES.glob("*.py")}
    for path in EXAMPLES.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import | ast.ImportFrom):
                assert not names & {getattr(node, "module", None), *(alias.name for alias in node.names)}, path


def test_options_are_called_as_trl_calls_them(examples):
    theirs = {each.name for each in (*fields(trl.ScriptArguments), *fields(trl.ModelConfig))}
    ours = [{each.name for each in fields(example.ScriptArguments)} - theirs for example in examples]
    assert ours == [{"max_documents", "eval_fraction", "tp_size"}, {"max_chats", "eval_fraction"}]


def test_no_model_where_there_are_no_weights(tmp_path, examples):
    finetune_llama, _ = examples
    (tmp_path / "config.json").touch()
    with pytest.raises(FileNotFoundError, match="there are no weights in"):
        finetune_llama.check_weights(tmp_path)
    (tmp_path / "model.safetensors").touch()
    finetune_llama.check_weights(tmp_path)
