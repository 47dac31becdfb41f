"""The example that trains a model on images, on a checkpoint that an example makes."""

import numpy as np
import pytest
from PIL import Image
from transformers import AutoModelForImageTextToText, AutoProcessor

from examples import sft_images
from tests.examples.running import run_forked, summary_of

pytestmark = pytest.mark.launches

SIZES = "--hidden_size 64 --layers 2 --heads 4 --kv_heads 2 --vocab_size 512"


@pytest.fixture(scope="module")
def seeing(tmp_path_factory):
    """A small LLaVA checkpoint with its processor."""
    folder = tmp_path_factory.mktemp("seeing")
    command = ["make_checkpoint.py", "--images", "--output", str(folder), *SIZES.split()]
    run_forked(command, folder / "printed", ranks=1)
    return folder


def test_the_checkpoint_answers_about_images(seeing):
    processor = AutoProcessor.from_pretrained(seeing)
    model = AutoModelForImageTextToText.from_pretrained(seeing)
    assert len(processor.tokenizer) == model.config.text_config.vocab_size == 512
    images = [Image.new("RGB", size, "red") for size in ((30, 80), (100, 56))]
    shown = [{"type": "image", "image": image} for image in images]
    text = {"type": "text", "text": "What is it?"}
    inputs = processor.apply_chat_template(
        [{"role": "user", "content": [*shown, text]}],
        add_generation_prompt=True,
        tokenize=True,
        return_dict=True,
        return_tensors="pt",
    )
    placeholders = inputs["input_ids"] == model.config.image_token_index
    assert placeholders.sum() == 2 * 16
    decoded = processor.decode(inputs["input_ids"][0])
    assert decoded == (f"<|begin_of_text|><user>\n{'<image>' * 32}What is it?\n<assistant>\n")
    output = model.generate(**inputs, max_new_tokens=2, do_sample=False)
    assert output.shape[1] <= inputs["input_ids"].shape[1] + 2


def test_chats_about_drawn_images(seeing, tmp_path):
    options = (
        "--max_chats 40 --tokens_per_rank 512 --max_steps 12 --assistant_only_loss "
        "--learning_rate 1e-2 --logging_steps 1 --save_strategy no --report_to none --bf16 False"
    )
    paths = ["--model_name_or_path", str(seeing), "--output_dir", str(tmp_path)]
    printed = run_forked(["sft_images.py", *paths, *options.split()], tmp_path / "printed")
    summary = summary_of(tmp_path)
    assert summary["chats"] == 40
    assert 6 * 1024 < summary["tokens"] <= 12 * 1024
    assert 0 < summary["mean_token_accuracy"] < 1
    assert summary["imbalance_degree"] >= 1
    assert f"{summary['loss_last']:.6g}" in printed
    assert AutoProcessor.from_pretrained(tmp_path).chat_template
    AutoModelForImageTextToText.from_pretrained(tmp_path)


def test_drawn_chats_have_uneven_numbers_of_images():
    random = np.random.default_rng(0)
    chats = [sft_images.drawn_chat(random) for _ in range(60)]
    counts = [len(chat["images"]) for chat in chats]
    assert (min(counts), max(counts)) == (0, sft_images.MOST_IMAGES)
    assert sum(count <= 2 for count in counts) >= 30
    for chat in chats:
        question, answer = chat["messages"]
        assert (question["role"], answer["role"]) == ("user", "assistant")
        assert answer["content"].count("Image ") == len(chat["images"])
    assert len({image.size for chat in chats for image in chat["images"]}) > 100
