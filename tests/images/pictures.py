"""Chats about pictures, and a processor for them, for tests."""

from typing import Any

import datasets
import numpy as np
from PIL import Image
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen2VLImageProcessorPil, Qwen3VLProcessor
from transformers.processing_utils import ProcessorMixin

from tests.images.families import BEGIN, END, IMAGE, SIDE, VIDEO

NAMED = {IMAGE: "<|image_pad|>", VIDEO: "<|video_pad|>"}
SPECIAL = {0: "[pad]", 1: "[begin]", 2: "[end]", **NAMED, BEGIN: "<|vision_start|>"}
SPECIAL |= {END: "<|vision_end|>"}
TEMPLATE = """\
{%- for message in messages -%}
{%- if message.role == 'assistant' -%}
{% generation %}{{ content(message) }}{{ '[end]' }}{% endgeneration %}{{ ' ' }}
{%- else -%}{{ content(message) }}{%- endif -%}
{%- endfor -%}
"""
CONTENT = """\
{%- macro content(message) -%}
{%- for part in message.content -%}
{%- if part.type == 'image' -%}{{ '<|vision_start|> <|image_pad|> <|vision_end|> ' }}
{%- else -%}{{ part.text + ' ' }}{%- endif -%}
{%- endfor -%}
{%- endmacro -%}
"""


class PictureProcessor(Qwen3VLProcessor):
    """Qwen3-VL's processor without videos, whose processor needs torchvision."""

    def __init__(
        self, image_processor: Any = None, tokenizer: Any = None, chat_template: str | None = None
    ) -> None:
        self.image_token, self.video_token = NAMED.values()
        self.image_token_id, self.video_token_id = NAMED
        ProcessorMixin.__init__(self, image_processor, tokenizer, chat_template=chat_template)


def processor(image_processor: Any = Qwen2VLImageProcessorPil) -> PictureProcessor:
    """Tokens are words, 100 in all; patches are those of `families`."""
    names = [SPECIAL.get(number, f"w{number}") for number in range(100)]
    words = Tokenizer(
        models.WordLevel({name: number for number, name in enumerate(names)}, unk_token="[pad]")
    )
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=words,
        pad_token="[pad]",
        bos_token="[begin]",
        eos_token="[end]",
        extra_special_tokens=list(SPECIAL.values()),
    )
    images = image_processor(
        patch_size=SIDE,
        merge_size=2,
        temporal_patch_size=2,
        size={"shortest_edge": 4 * SIDE**2, "longest_edge": 64 * SIDE**2},
    )
    return PictureProcessor(images, tokenizer, chat_template=CONTENT + TEMPLATE)


def says(draw: np.random.Generator, role: str, most: int) -> dict[str, str]:
    """A message of fewer than `most` words."""
    words = draw.integers(3, 90, int(draw.integers(2, most)))
    return {"role": role, "content": " ".join(f"w{word}" for word in words)}


def picture(draw: np.random.Generator) -> Image.Image:
    """A picture of noise."""
    height, width = (draw.integers(1, 5, 2) * 2 * SIDE).tolist()
    return Image.fromarray(draw.integers(0, 255, (height, width, 3), dtype=np.uint8))


def chats(counts: list[int]) -> datasets.Dataset:
    """Chats with these numbers of pictures of different sizes; the same every time."""
    draw = np.random.default_rng(3)
    rows = [
        {
            "messages": [says(draw, "user", 9), says(draw, "assistant", 30)],
            "images": [picture(draw) for _ in range(count)],
        }
        for count in counts
    ]
    return datasets.Dataset.from_list(rows, features=_features("messages"))


def prompts(counts: list[int]) -> datasets.Dataset:
    """The same as prompts with completions."""
    return chats(counts).map(
        lambda row: {"prompt": row["messages"][:-1], "completion": row["messages"][-1:]},
        remove_columns="messages",
    )


def preferences(counts: list[int]) -> datasets.Dataset:
    """Questions about these numbers of pictures with two answers, one of them better."""
    draw = np.random.default_rng(4)
    rows = [
        {
            "prompt": [says(draw, "user", 9)],
            "chosen": [says(draw, "assistant", 30)],
            "rejected": [says(draw, "assistant", 12)],
            "images": [picture(draw) for _ in range(count)],
        }
        for count in counts
    ]
    return datasets.Dataset.from_list(rows, features=_features("prompt", "chosen", "rejected"))


def judged(counts: list[int]) -> datasets.Dataset:
    """The same questions with one answer, wanted or not."""
    rows = preferences(counts).rename_columns({"chosen": "completion"})
    wanted = [number % 2 == 0 for number in range(len(counts))]
    return rows.remove_columns("rejected").add_column("label", wanted)


def _features(*messages: str) -> datasets.Features:
    """Columns of messages, and of pictures."""
    message = {"role": datasets.Value("string"), "content": datasets.Value("string")}
    return datasets.Features(
        {**{name: [message] for name in messages}, "images": [datasets.Image()]}
    )
