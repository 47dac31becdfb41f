"""Small chats, and a tokenizer for them, for tests."""

import datasets
import numpy as np
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

SPECIAL = ["[pad]", "[begin]", "[end]", "[user]", "[assistant]"]
WORDS = [f"w{number}" for number in range(59)]
FREQUENT = WORDS[:5]
"""Those that chats are made of, so that a model soon predicts some."""
TEMPLATE = """\
{%- for message in messages -%}
{{ '[' + message.role + '] ' }}
{%- if message.role == 'assistant' -%}
{% generation %}{{ message.content + ' [end]' }}{% endgeneration %}{{ ' ' }}
{%- else -%}
{{ message.content + ' ' }}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '[assistant] ' }}{%- endif -%}
"""


def tokenizer() -> PreTrainedTokenizerFast:
    """One token a word, 64 in all; its chat template says what the assistant writes."""
    words = Tokenizer(
        models.WordLevel({word: i for i, word in enumerate([*SPECIAL, *WORDS])}, unk_token="[pad]")
    )
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    made = PreTrainedTokenizerFast(
        tokenizer_object=words,
        pad_token="[pad]",
        bos_token="[begin]",
        eos_token="[end]",
        extra_special_tokens=SPECIAL,
    )
    made.chat_template = TEMPLATE
    return made


def chats(count: int = 12) -> datasets.Dataset:
    """Chats of one to three turns, some much longer than others; the same every time."""
    random = np.random.default_rng(1)

    def says(role: str, most: int) -> dict[str, str]:
        return {
            "role": role,
            "content": " ".join(random.choice(FREQUENT, int(random.integers(1, most)))),
        }

    rows = []
    for number in range(count):
        longest = 90 if number % 4 == 0 else 20
        turns = [[says("user", 20), says("assistant", longest)] for _ in range(1 + number % 3)]
        rows.append({"messages": [message for turn in turns for message in turn]})
    return datasets.Dataset.from_list(rows)


def prompts(count: int = 12) -> datasets.Dataset:
    """The same as prompts with completions, which are the last answers."""
    return chats(count).map(
        lambda row: {"prompt": row["messages"][:-1], "completion": row["messages"][-1:]},
        remove_columns="messages",
    )
