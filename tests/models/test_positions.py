"""Which models have hidden states that depend on differences of positions alone."""

import types

import pytest
import torch

from hf_distca.models.positions import are_relative
from tests.models_and_batches import small_model
from tests.patches.test_rotary import LONGROPE
from tests.survey.test_survey import UNTESTED
from tests.survey.tiny import OF_TEXT, tiny_model

TAKING_BYTES = {"blt"}
"""Models that the survey trains on tokens of another kind."""

KNOWN = {
    "llama": True,
    "gemma3_text": True,
    "llama4_text": True,
    "qwen3_5_text": True,  # positions in time, height and width
    "gpt2": False,  # a table
    "opt": False,  # a table in a module of its own
    "xglm": False,  # sines and cosines
    "ministral3": False,  # queries grow with their positions
    "beam": False,  # likewise, by a function of the decoder
    "recurrent_gemma": False,  # states begin anew at position 0
    "mamba2": False,  # no positions: nothing to count
}


def test_models_whose_positions_can_be_counted_from_the_first_token():
    assert {name: are_relative(tiny_model(name, "eager")) for name in KNOWN} == KNOWN
    assert not are_relative(small_model("llama", rope_parameters=LONGROPE))


def test_code_without_source_is_not_trusted():
    model = small_model("llama")
    assert are_relative(model)
    scope: dict[str, object] = {"__name__": "__main__"}
    exec("def forward(self, hidden_states, position_ids=None, **kwargs): pass", scope)
    mlp = type(model.model.layers[0].mlp)
    typed = types.new_class(
        "Typed", (mlp,), exec_body=lambda namespace: namespace.update(forward=scope["forward"])
    )
    model.model.layers[0].mlp.__class__ = typed
    assert not are_relative(model)


def shifted_difference(name: str) -> float | None:
    """How far logits move if all positions grow by 20,000; None if positions are not relative."""
    torch.manual_seed(0)
    model = tiny_model(name, "eager").eval().double()
    if not are_relative(model):
        return None
    tokens = torch.randint(3, 60, (1, 24))
    with torch.no_grad():
        near, far = (
            model(tokens, position_ids=torch.arange(first, first + 24)[None]).logits
            for first in (0, 20000)
        )
    return float((near - far).abs().max() / near.abs().max())


@pytest.mark.survey
@pytest.mark.parametrize("name", sorted({*OF_TEXT} - UNTESTED - TAKING_BYTES))
def test_relative_models_give_equal_logits_at_other_positions(name):
    difference = shifted_difference(name)
    # Angles are computed in float32: of 20,000 some 1e-3 is rounding.
    assert difference is None or difference < 5e-3
