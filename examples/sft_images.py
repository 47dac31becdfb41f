"""Fine-tune a vision-language model on chats with images, by TRL and hf_distca.

    accelerate launch --config_file examples/configs/fsdp2.yaml examples/sft_images.py \
        --model_name_or_path Qwen/Qwen3-VL-2B-Instruct \
        --dataset_name HuggingFaceH4/llava-instruct-mix-vsft --output_dir runs/images \
        --assistant_only_loss --tokens_per_rank 32768 --learning_rate 1e-5

Without --dataset_name the script draws the images: circles and squares of several colours. A chat
has 0 to 12 images of different sizes, and its answer says what is in each. A small checkpoint for
them:

    python examples/make_checkpoint.py --images --output runs/seeing --hidden_size 64 --layers 2 \
        --vocab_size 512

Every option of trl.SFTConfig and of hf_distca.DistCAConfig is one here too; --help lists them. At
the end a table is printed, and written to summary.json in the output folder.
"""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import datasets
import numpy as np
from PIL import Image, ImageDraw
from transformers import AutoProcessor, HfArgumentParser

import hf_distca

MOST_IMAGES = 12
SIDES = (28, 161)
"""Least height and width of a drawn image in pixels, and one more than the most."""
COLOURS = ("red", "green", "blue", "yellow")
SHAPES = ("circle", "square")
FEATURES = datasets.Features(
    {
        "messages": [{"role": datasets.Value("string"), "content": datasets.Value("string")}],
        "images": [datasets.Image()],
    }
)
"""Columns as TRL takes them. TRL puts the images of a chat before the text of its first message."""


@dataclass
class ScriptArguments:
    """What to train, on what."""

    model_name_or_path: str = field(
        metadata={
            "help": "Checkpoint of a vision-language model: a name on the Hub or a folder, with a "
            "processor."
        }
    )
    dataset_name: str | None = field(
        default=None,
        metadata={
            "help": "Chats with images: a .parquet file, a folder or a name on the Hub. Columns as "
            "TRL takes them: messages, or prompt and completion, and images or image. Without it, "
            "chats about images that are drawn here."
        },
    )
    max_chats: int | None = field(
        default=None,
        metadata={"help": "Take so many chats. Without it all, or 200 that are drawn."},
    )


@hf_distca.record  # an error is reported once, and not by every process
def main() -> None:
    """Read the options, prepare chats and processor, train, report."""
    parser = HfArgumentParser(
        (ScriptArguments, hf_distca.DistCASFTConfig), usage="%(prog)s [OPTIONS]"
    )
    parser.set_defaults(
        logging_steps=5, logging_first_step=True
    )  # the table is made of what is logged
    script_args, training_args, unknown = parser.parse_args_into_dataclasses(
        return_remaining_strings=True
    )
    if unknown:
        parser.error(f"unrecognized arguments: {' '.join(unknown)}; --help lists all")
    training_args.serve_if_server()

    # Every rank gets all chats, in the same order. It reads the images of all chats for their sizes
    # once, and later those that it encodes.
    with training_args.main_process_first(desc="loading"):
        chats = load_chats(script_args, training_args.seed)

    trainer = hf_distca.DistCASFTTrainer(
        model=script_args.model_name_or_path,  # loaded with attn_implementation="distca"
        args=training_args,
        train_dataset=chats,
        processing_class=AutoProcessor.from_pretrained(script_args.model_name_or_path),
    )
    trainer.train(resume_from_checkpoint=training_args.resume_from_checkpoint)
    trainer.save_model()

    if trainer.is_world_process_zero():
        summary = summarize(trainer.state.log_history, len(chats))
        Path(training_args.output_dir, "summary.json").write_text(
            json.dumps(summary, indent=2) + "\n"
        )
        width = max(map(len, summary))
        print("\n" + "\n".join(f"{name:<{width}}  {value:.6g}" for name, value in summary.items()))
    trainer.accelerator.wait_for_everyone()
    trainer.accelerator.end_training()


def load_chats(script_args: ScriptArguments, seed: int) -> datasets.Dataset:
    """Load the chats in random order, or draw them."""
    if script_args.dataset_name is None:
        count = 200 if script_args.max_chats is None else script_args.max_chats
        random = np.random.default_rng(seed)
        chats = [drawn_chat(random) for _ in range(count)]
        return datasets.Dataset.from_list(chats, features=FEATURES)
    chats = hf_distca.load_documents(script_args.dataset_name)
    count = len(chats) if script_args.max_chats is None else min(script_args.max_chats, len(chats))
    return chats.shuffle(seed=seed).select(range(count))


def drawn_chat(random: np.random.Generator) -> dict[str, Any]:
    """Return a chat about 0 to 12 images.

    Half of all chats have at most two images, so lengths are uneven.
    """
    most = 3 if random.random() < 0.5 else MOST_IMAGES + 1
    drawn = [drawn_image(random) for _ in range(random.integers(most))]
    answer = "".join(
        f"Image {number} has {what}.\n" for number, (_, what) in enumerate(drawn, start=1)
    )
    return {
        "messages": [
            {"role": "user", "content": "What is in each image?"},
            {"role": "assistant", "content": answer or "There is no image.\n"},
        ],
        "images": [image for image, _ in drawn],
    }


def drawn_image(random: np.random.Generator) -> tuple[Image.Image, str]:
    """Return an image of one to three equal shapes, and words for them."""
    width, height = random.integers(*SIDES, 2).tolist()
    count = int(random.integers(1, 4))
    colour, shape = str(random.choice(COLOURS)), str(random.choice(SHAPES))
    image = Image.new("RGB", (width, height), "white")
    draw = ImageDraw.Draw(image)
    side = min(width / (count + 1), height / 2)
    for number in range(count):
        left, top = (number + 0.5) * width / count - side / 2, (height - side) / 2
        box = (left, top, left + side, top + side)
        (draw.ellipse if shape == "circle" else draw.rectangle)(box, fill=colour)
    return image, f"{count} {colour} {shape}{'s' if count > 1 else ''}"


def summarize(log_history: list[dict[str, float]], chats: int) -> dict[str, float]:
    """Summarise the run; without logged steps only the chats."""
    steps = [entry for entry in log_history if "loss" in entry]
    if not steps:
        return {"chats": chats}
    last = steps[-1]
    return {
        "loss_first": steps[0]["loss"],
        "loss_last": last["loss"],
        "mean_token_accuracy": last["mean_token_accuracy"],
        "chats": chats,
        "tokens": last["num_tokens"],
        "imbalance_degree": last["distca/imbalance_degree"],
        "tokens_per_second": last["distca/tokens_per_second"],
    }


if __name__ == "__main__":
    main()
