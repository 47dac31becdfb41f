"""The training examples as a user starts them, with small settings."""

import ast
import json
import re
import sys
from dataclasses import fields
from importlib import import_module

import pytest
import trl
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer

from examples import dpo, finetune_llama, grpo, make_checkpoint, sft_chat
from hf_distca.checks.setting_names import CHECKPOINTING
from tests.examples.running import EXAMPLES, finetune, run_forked, summary_of
from tests.launch import run_in_forks

pytestmark = pytest.mark.launches

PRINTED = (
    r"The {}: ([\d.]+) at first, ([\d.]+) at last\nPadding: (\d+)% of the batches, which was not"
    r" computed\n"
)
"""Last lines of a training with padded batches."""


def test_the_checkpoint_loads_like_any_other(checkpoint):
    model, tokenizer = (
        kind.from_pretrained(checkpoint) for kind in (AutoModelForCausalLM, AutoTokenizer)
    )
    sizes = {
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    }
    assert (
        model.config.to_dict().items()
        >= {"model_type": "llama", "vocab_size": 512, **sizes}.items()
    )
    assert len(tokenizer) == 512
    printed = (checkpoint / "printed/output-0").read_text()
    assert re.search(r"^Training a tokenizer on 200 of \d+ documents$", printed, re.M)
    inputs = tokenizer("def main():", return_tensors="pt")
    assert model.generate(**inputs, max_new_tokens=3).shape[1] <= inputs["input_ids"].shape[1] + 3
    text = (EXAMPLES / "make_checkpoint.py").read_text(encoding="utf-8") + "\t ünïcödé ✓\n\n"
    tokens = tokenizer(text)["input_ids"]
    assert tokens[0] == tokenizer.bos_token_id
    assert tokenizer.decode(tokens[1:]) == text
    assert len(tokens) < len(text.encode()) / 1.5


def test_sizes_that_do_not_divide_and_documents(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(
        sys, "argv", ["make_checkpoint.py", "--output", str(tmp_path), "--heads", "3"]
    )
    with pytest.raises(SystemExit):
        make_checkpoint.main()
    assert "got hidden_size 256, heads 3, kv_heads 2; expected" in capsys.readouterr().err
    texts = make_checkpoint.standard_library(progress=False)["text"][:]
    assert len(texts) > 300
    assert any("def dumps(obj, *," in text for text in texts)  # whole files
    sizes = [len(text.encode()) for text in texts]
    assert 50 < min(sizes) <= max(sizes) <= 300_000


def test_all_weights_on_the_standard_library(checkpoint, tmp_path):
    options = (
        "--max_documents 20 --tokens_per_rank 512 --long_documents split --max_steps 12 "
        "--logging_steps 1"
    )
    printed = run_forked(finetune(checkpoint, tmp_path, options), tmp_path / "printed")
    summary = summary_of(tmp_path)
    assert summary["documents"] == 19
    assert summary["tokens"] > 19 * 30
    assert summary["tokens_per_second"] > 0
    assert max(summary["loss_last"] + 0.5, summary["eval_loss"]) < summary["loss_first"]
    # With 512 tokens per rank a block of 128 rows is a large part of a rank's share.
    assert 1 <= summary["imbalance_degree_planned"] < summary["imbalance_degree_as_packed"] > 1.1
    assert f"{summary['eval_loss']:.3f}" in printed
    assert (tmp_path / "model.safetensors").exists()


def test_lora_on_a_file_of_documents(checkpoint, tmp_path):
    data = tmp_path / "documents.jsonl"
    bodies = (f"def f{i}():\n    return {i}\n" * (i + 1) for i in range(20))
    data.write_text("".join(json.dumps({"body": body}) + "\n" for body in bodies))
    options = (
        f"--dataset_name {data} --dataset_text_field body --use_peft --tokens_per_rank 512 "
        "--num_train_epochs 3"
    )
    run_forked(finetune(checkpoint, tmp_path, options), tmp_path / "printed")
    assert summary_of(tmp_path)["documents"] == 19
    assert (tmp_path / "adapter_model.safetensors").exists()


def test_ranks_that_share_layers(checkpoint, tmp_path):
    options = (
        "--tp_size 2 --max_documents 40 --tokens_per_rank 512 --long_documents split --max_steps 4"
    )
    command = finetune(checkpoint, tmp_path, f"{options} --logging_steps 1")
    run_forked(command, tmp_path / "printed", ranks=4, config="tp")
    summary = summary_of(tmp_path)
    assert summary["imbalance_degree_planned"] < 1.05 < summary["imbalance_degree_as_packed"]
    assert (tmp_path / "model.safetensors").exists()


def test_chats_about_the_standard_library(checkpoint, tmp_path):
    settings = (
        "--learning_rate 1e-2 --logging_steps 1 --save_strategy no --report_to none --bf16 False "
        "--use_peft"
    )
    options = (
        "--max_chats 20 --tokens_per_rank 512 --long_documents split --max_steps 12 "
        "--assistant_only_loss"
    )
    paths = ["--model_name_or_path", str(checkpoint), "--output_dir", str(tmp_path)]
    printed = run_forked(
        ["sft_chat.py", *paths, *settings.split(), *options.split()], tmp_path / "printed"
    )
    summary = summary_of(tmp_path)
    assert summary["chats"] == 19
    assert 12 * 512 < summary["tokens"] <= 12 * 1024
    assert 0 < summary["eval_mean_token_accuracy"] < 1
    assert f"{summary['eval_loss']:.6g}" in printed
    assert (tmp_path / "adapter_model.safetensors").exists()
    source = 'def f(x, *, y=1):\n    """Add."""\n    return x + y\n\n\ndef g():\n    pass\n'
    (chat,) = sft_chat.library_chats([source, "not Python", "x = 1\n"])
    question = {"role": "user", "content": "What does `f(x, *, y=1)` do?"}
    assert chat == {"messages": [question, {"role": "assistant", "content": "Add."}]}


def test_rewards_of_a_program(checkpoint, tmp_path):
    # TRL turns checkpoints off and on around generation, by names of which transformers 5.23 warns.
    options = (
        "--max_prompts 8 --max_steps 2 --max_completion_length 8 --num_generations 2 "
        f"--{CHECKPOINTING} False"
    )
    paths = ["--model_name_or_path", str(checkpoint), "--output_dir", str(tmp_path)]
    printed = run_forked(
        ["grpo.py", *paths, *options.split(), "--report_to", "none"], tmp_path / "printed"
    )
    first, last, padding = re.search(PRINTED.format("reward"), printed).groups()
    assert 0 <= float(first) <= 1
    assert 0 <= float(last) <= 1
    assert 0 < int(padding) < 100
    assert (tmp_path / "model.safetensors").exists()


def test_preferences_with_adapters(checkpoint, tmp_path):
    options = f"--max_pairs 16 --max_steps 1 --max_length 256 --{CHECKPOINTING} False --use_peft"
    paths = ["--model_name_or_path", str(checkpoint), "--output_dir", str(tmp_path)]
    printed = run_forked(
        ["dpo.py", *paths, *options.split(), "--report_to", "none"], tmp_path / "printed"
    )
    first, _, padding = re.search(PRINTED.format("loss"), printed).groups()
    assert float(first) == pytest.approx(0.693, abs=1e-3)  # ln 2: the model is its own reference
    assert 0 < int(padding) < 100
    assert (tmp_path / "adapter_model.safetensors").exists()


def test_what_the_parser_reads_of_a_completion():
    prompt = "def f():\n"
    messages = [{"role": "user", "content": "def f():\n"}]
    completions = ["    return 1", "    return 1\n)", " ", "    \0", "    )"]
    assert grpo.reward([prompt] * 5, completions) == [1.0, 13 / 14, 0.0, 0.0, 4 / 5]
    assert grpo.reward([messages], [[{"role": "assistant", "content": "    return 1\n)"}]]) == [
        13 / 14
    ]


def test_functions_of_the_standard_library():
    first, second = 'def f(x):\n    """Add."""\n', 'def g():\n    """Say."""\n'
    source = (
        f"{first}    x += 1\n    return x\n\n\n@h\n{second}    pass\n\n\ndef h(g):\n    return g\n"
    )
    assert list(grpo.function_heads([source, "not Python"])) == [
        {"prompt": first},
        {"prompt": second},
    ]
    pair = {"prompt": first, "chosen": "    x += 1\n    return x", "rejected": "    pass"}
    assert list(dpo.function_pairs([source, "not Python"])) == [pair]


def test_a_loop_of_ones_own(checkpoint, tmp_path):
    options = "--steps 4 --documents_per_rank 2 --max_length 512"
    command = ["accelerate_loop.py", "--model_name_or_path", str(checkpoint), *options.split()]
    printed = run_forked(command, tmp_path, ACCELERATE_USE_CPU="true")
    losses = [float(line.split()[3]) for line in printed.splitlines() if line.startswith("step ")]
    assert len(losses) == 4
    assert losses[-1] < losses[0]


def test_a_refusal_is_one_line_of_rank_0(checkpoint, tmp_path):
    (tmp_path / "text.txt").write_text("A text.")
    options = ["--output_dir", str(tmp_path / "run"), "--label_smoothing_factor", "0.1"]
    command = [str(checkpoint), str(tmp_path / "text.txt"), *options]
    assert run_in_forks("ddp", EXAMPLES / "train.py", command, tmp_path) == [1, 1]
    printed, others = (
        (tmp_path / f"output-{rank}").read_text(errors="replace") for rank in range(2)
    )
    assert [line for line in printed.splitlines() if "label_smoothing_factor" in line] == [
        "label_smoothing_factor=0.1 is set, but targets of packed documents are already shifted, "
        "and it shifts again; set 0.0"
    ]
    assert "label_smoothing_factor" not in others
    assert "Traceback" not in printed + others


@pytest.mark.parametrize("name", ["train", "finetune_llama", "sft_chat", "grpo", "dpo"])
def test_a_misspelt_option_is_one_line(monkeypatch, capsys, name):
    """Without the usage of two hundred options."""
    example = import_module(f"examples.{name}")
    needed = ["model", "text.txt"] if name == "train" else ["--model_name_or_path", "model"]
    options = ["--use_cpu", "--output_dir", "/no", "--nosuch"]
    monkeypatch.setattr(sys, "argv", [f"{name}.py", *needed, *options])
    with pytest.raises(SystemExit, match=r"^1$"):
        example.main()
    output = capsys.readouterr().err
    assert "usage:" not in output
    assert (
        output.splitlines()[-1]
        == f"{name}.py: error: unrecognized arguments: --nosuch; --help lists all"
    )


@pytest.mark.parametrize(
    "name", ["train", "finetune_llama", "sft_chat", "grpo", "dpo", "accelerate_loop"]
)
def test_every_example_that_is_launched_reports_errors_once(name):
    tree = ast.parse((EXAMPLES / f"{name}.py").read_text())
    (main,) = (
        node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == "main"
    )
    assert [ast.unparse(decorator) for decorator in main.decorator_list] == ["hf_distca.record"], (
        name
    )


def test_a_run_that_logged_nothing(capsys):
    metrics = {"eval_loss": 2.5, "eval_mean_token_accuracy": 0.5}
    documents = Dataset.from_dict({"input_ids": [[1] * 3, [1] * 4]})
    summary = finetune_llama.summarize([{"epoch": 1.0}], metrics, documents)
    assert summary == {"eval_loss": 2.5, "documents": 2, "tokens": 7}
    finetune_llama.print_table(summary, 2, "out")
    assert "not logged: see --logging_steps" in capsys.readouterr().out
    assert sft_chat.summarize([], metrics, 2) == {**metrics, "chats": 2}


@pytest.mark.parametrize("example", [grpo, dpo], ids=["grpo", "dpo"])
def test_a_preference_run_that_logged_nothing(capsys, example):
    example.print_summary([{"epoch": 1.0}], "out")
    assert capsys.readouterr().out == "The model: out\n"


@pytest.mark.parametrize(
    "example",
    [finetune_llama, sft_chat, grpo, dpo],
    ids=["finetune_llama", "sft_chat", "grpo", "dpo"],
)
def test_adapters_without_peft(monkeypatch, capsys, example):
    for trainers in ("sft", "preference"):
        import_module(
            f"hf_distca.trainer.trl.{trainers}"
        )  # while peft is there, which transformers and TRL import for themselves
    monkeypatch.setitem(sys.modules, "peft", None)
    options = ["--model_name_or_path", "/no", "--use_peft", "--use_cpu", "--output_dir", "/no"]
    monkeypatch.setattr(sys, "argv", ["x", *options])
    with pytest.raises(SystemExit):
        example.main()
    (sentence,) = capsys.readouterr().err.splitlines()
    assert re.search("error: --use_peft needs peft, .*: pip install peft$", sentence)
    # Another rank ends as well, and leaves the sentence to rank 0.
    monkeypatch.setenv("RANK", "1")
    with pytest.raises(SystemExit):
        example.main()
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.py")), ids=lambda path: path.stem)
def test_each_example_stands_alone(path):
    imported = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import | ast.ImportFrom):
            imported |= {getattr(node, "module", None), *(alias.name for alias in node.names)}
    assert imported & {example.stem for example in EXAMPLES.glob("*.py")} == set()


@pytest.mark.parametrize(
    ("example", "further_options"),
    [
        (finetune_llama, {"max_documents", "eval_fraction", "tp_size"}),
        (sft_chat, {"max_chats", "eval_fraction"}),
        (grpo, {"max_prompts"}),
        (dpo, {"max_pairs"}),
    ],
    ids=["finetune_llama", "sft_chat", "grpo", "dpo"],
)
def test_options_are_called_as_in_trl(example, further_options):
    of_trl = {field.name for field in (*fields(trl.ScriptArguments), *fields(trl.ModelConfig))}
    options = {field.name for field in fields(example.ScriptArguments)}
    assert options - of_trl == further_options


def test_no_model_where_there_are_no_weights(tmp_path):
    (tmp_path / "config.json").touch()
    with pytest.raises(FileNotFoundError, match="there are no weights in"):
        finetune_llama.check_weights(tmp_path)
    (tmp_path / "model.safetensors").touch()
    finetune_llama.check_weights(tmp_path)
