"""Make a small LLaMA checkpoint in the real format, with random weights and a tokenizer of its own.

    python examples/make_checkpoint.py --output runs/checkpoint

The folder then holds what a checkpoint from the Hub holds: config.json, generation_config.json,
model.safetensors and the tokenizer's files. The tokenizer is a byte-level BPE, trained on some of
the sources of the Python standard library.

With --images it is a LLaVA checkpoint: the same LLaMA model with an encoder for images. The folder
then has the files of a processor too.
"""

import argparse
import sys
import sysconfig
from contextlib import suppress
from pathlib import Path

import torch
from datasets import Dataset
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from tqdm.auto import tqdm
from transformers import (
    CLIPVisionConfig,
    LlamaConfig,
    LlamaForCausalLM,
    LlavaConfig,
    LlavaForConditionalGeneration,
    LlavaProcessor,
    PreTrainedTokenizerFast,
)

BEGIN, END = "<|begin_of_text|>", "<|end_of_text|>"
IMAGE = "<image>"
"""Placeholder of a row of features."""
CONTEXT = 131_072
"""Tokens; the longest file of the standard library has about 100,000."""
TOKENIZER_DOCUMENTS = 200
"""Documents, drawn at random, that make a tokenizer.

All documents take seven times as long for 2 % fewer tokens.
"""
SIDE, PATCH = 56, 14
"""Height and width of an image and of a patch, in pixels: 16 placeholders for each image."""
CHAT_TEMPLATE = """\
{{- bos_token }}
{%- macro content(message) -%}
    {%- if message.content is string %}
        {{- message.content }}
    {%- else %}
        {%- for part in message.content %}
            {{- '<image>' if part.type == 'image' else part.text }}
        {%- endfor %}
    {%- endif %}
{%- endmacro %}
{%- for message in messages %}
    {{- '<' + message.role + '>\\n' }}
    {%- if message.role == 'assistant' %}
        {%- generation %}{{ content(message) + eos_token }}{% endgeneration %}
    {%- else %}
        {{- content(message) }}
    {%- endif %}
    {{- '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<assistant>\\n' }}{% endif %}"""
"""Chat template of the processor.

What stands between generation and endgeneration is the assistant's.
"""


def standard_library(progress: bool = True) -> Dataset:
    """Return the sources of the Python standard library, one document per file.

    Files of 100 bytes to 300 kB: a few are hundreds of times as long as most, as in long-context
    data. Installed packages are left out, and files that are not UTF-8, which the standard library
    tests its parser with.
    """
    root = Path(sysconfig.get_paths()["stdlib"])
    texts = []
    for path in tqdm(
        sorted(root.rglob("*.py")),
        "Reading the standard library",
        unit=" files",
        disable=not progress,
    ):
        installed = {"site-packages", "dist-packages"} & set(path.relative_to(root).parts)
        if not installed and 100 <= path.stat().st_size <= 300_000:
            with suppress(UnicodeDecodeError):
                texts.append(path.read_text(encoding="utf-8"))
    if not texts:
        raise FileNotFoundError(
            f"found no .py files under {root}, where the standard library should be"
        )
    return Dataset.from_dict({"text": texts})


def train_tokenizer(
    documents: Dataset, vocab_size: int, images: bool = False
) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE tokenizer that puts a begin-of-text token first, as LLaMA 3's does.

    Args:
        vocab_size: number of tokens, at least the 256 bytes and the special tokens.
        images: whether there is a token for placeholders of images.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[BEGIN, END, *([IMAGE] if images else [])],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=sys.stderr.isatty(),
    )
    tokenizer.train_from_iterator(documents["text"], trainer, length=len(documents))
    begin = (BEGIN, tokenizer.token_to_id(BEGIN))
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BEGIN} $A", special_tokens=[begin]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=BEGIN,
        eos_token=END,
        extra_special_tokens=[IMAGE] if images else [],
        model_max_length=CONTEXT,
        clean_up_tokenization_spaces=False,
    )


def text_config(
    tokenizer: PreTrainedTokenizerFast, hidden_size: int, layers: int, heads: int, kv_heads: int
) -> LlamaConfig:
    """Return the config of a LLaMA model.

    Args:
        tokenizer: gives the size of the vocabulary and the special tokens.
        hidden_size: width of the hidden states, a multiple of `heads`.
    """
    return LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=hidden_size,
        # LLaMA's 8/3, to a multiple of 64.
        intermediate_size=-(-hidden_size * 8 // (3 * 64)) * 64,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        max_position_embeddings=CONTEXT,
        rope_parameters={"rope_type": "default", "rope_theta": 500_000.0},
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        tie_word_embeddings=True,
    )


def image_config(text: LlamaConfig, tokenizer: PreTrainedTokenizerFast) -> LlavaConfig:
    """Return the config of a LLaVA model, whose encoder is as wide and as deep as its text model.

    Args:
        text: config of the text model.
        tokenizer: has the token of placeholders.
    """
    return LlavaConfig(
        text_config=text,
        vision_config=CLIPVisionConfig(
            hidden_size=text.hidden_size,
            intermediate_size=4 * text.hidden_size,
            num_hidden_layers=text.num_hidden_layers,
            num_attention_heads=text.num_attention_heads,
            image_size=SIDE,
            patch_size=PATCH,
        ),
        image_token_index=tokenizer.convert_tokens_to_ids(IMAGE),
        bos_token_id=text.bos_token_id,
        eos_token_id=text.eos_token_id,
        tie_word_embeddings=True,
    )


def make_processor(tokenizer: PreTrainedTokenizerFast) -> LlavaProcessor:
    """Return a processor of chats with images, which resizes each image to one size."""
    # transformers has it only where Pillow is installed.
    from transformers import CLIPImageProcessorPil

    images = CLIPImageProcessorPil(
        size={"shortest_edge": SIDE}, crop_size={"height": SIDE, "width": SIDE}
    )
    return LlavaProcessor(
        images,
        tokenizer,
        patch_size=PATCH,
        vision_feature_select_strategy="default",  # without the feature of the whole image
        num_additional_image_tokens=1,
        chat_template=CHAT_TEMPLATE,
        image_token=IMAGE,
    )


def main() -> None:
    """Read the options, train the tokenizer, save the checkpoint."""
    parser = argparse.ArgumentParser(
        description=(
            "Make a small LLaMA checkpoint with a tokenizer trained on the Python standard library."
        ),
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument(
        "--output", type=Path, required=True, help="folder to write the checkpoint to"
    )
    parser.add_argument("--hidden_size", type=int, default=256, help="width of the hidden states")
    parser.add_argument("--layers", type=int, default=4, help="number of decoder layers")
    parser.add_argument("--heads", type=int, default=4, help="number of query heads")
    parser.add_argument("--kv_heads", type=int, default=2, help="number of key and value heads")
    parser.add_argument("--vocab_size", type=int, default=4096, help="number of tokens")
    parser.add_argument(
        "--images", action="store_true", help="make a LLaVA checkpoint, which takes images"
    )
    parser.add_argument("--seed", type=int, default=0, help="seed of the weights")
    options = parser.parse_args()
    if options.hidden_size % (2 * options.heads) or options.heads % options.kv_heads:
        parser.error(
            f"got hidden_size {options.hidden_size}, heads {options.heads}, kv_heads "
            f"{options.kv_heads}; expected hidden_size to be a multiple of 2 · heads, and heads "
            "one of kv_heads"
        )

    documents = standard_library().shuffle(seed=0)
    read = documents.select(range(min(TOKENIZER_DOCUMENTS, len(documents))))
    print(f"Training a tokenizer on {len(read)} of {len(documents)} documents")
    tokenizer = train_tokenizer(read, options.vocab_size, options.images)
    text = text_config(
        tokenizer, options.hidden_size, options.layers, options.heads, options.kv_heads
    )
    torch.manual_seed(options.seed)
    if options.images:
        model = LlavaForConditionalGeneration(image_config(text, tokenizer))
        make_processor(tokenizer).save_pretrained(options.output)
    else:
        model = LlamaForCausalLM(text)
        tokenizer.save_pretrained(options.output)
    model.save_pretrained(options.output)
    print(f"{model.num_parameters():,} parameters, {len(tokenizer)} tokens: {options.output}")


if __name__ == "__main__":
    main()
