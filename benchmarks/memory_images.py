"""Counted memory of trainings with images beside what a process really takes, on the CPU.

Small models whose encoder is large beside the text model train for two steps, in a process of
their own. What is measured is the peak of resident memory, less what was resident before the model
was made. What is counted follows from the model's config, the plan, and the number of images and
patches.

Run: python benchmarks/memory_images.py
"""

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from harness import begin_peak, follow_tensors, options_parser, peak, print_json, run_ranks
from transformers import AutoConfig, AutoModelForImageTextToText

from hf_distca import DistCAConfig, make_dispatcher
from hf_distca.memory.counted_encoder import Encoded
from hf_distca.memory.counter import MemoryCounter
from hf_distca.models.describe import describe_run
from hf_distca.models.fake import model_of_config
from hf_distca.models.images import encoding_module, image_model
from hf_distca.models.loading import attention_of
from hf_distca.planner.micro_batch import plan_micro_batch

CPU = torch.device("cpu")
PATCH, SIDE, PLACEHOLDER = 14, 24, 1
"""Height of a patch in pixels, patches along each side of an image, and token of a placeholder."""
STEPS = 2
TEXT = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "vocab_size": 512,
    "use_cache": False,
}
ENCODER = {"hidden_size": 512, "intermediate_size": 2048}
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen2_5_vl": {
        "text_config": {
            **TEXT,
            "rope_parameters": {
                "mrope_section": [4, 6, 6],
                "rope_type": "default",
                "rope_theta": 1e6,
            },
        },
        "vision_config": {
            **ENCODER,
            "depth": 8,
            "num_heads": 8,
            "out_hidden_size": 256,
            "patch_size": PATCH,
            "window_size": 8 * PATCH,
            "fullatt_block_indexes": [3, 7],
        },
        "architectures": ["Qwen2_5_VLForConditionalGeneration"],
    },
    "internvl": {
        "text_config": {"model_type": "llama", **TEXT},
        "vision_config": {
            **ENCODER,
            "num_hidden_layers": 8,
            "num_attention_heads": 8,
            "image_size": [SIDE * PATCH] * 2,
            "patch_size": [PATCH] * 2,
        },
        "architectures": ["InternVLForConditionalGeneration"],
    },
}


@dataclass(frozen=True)
class Case:
    """A training on one rank, with one document that has all images."""

    family: str
    checkpointing: bool = False
    frozen: bool = False
    images: int = 4

    @property
    def tokens(self) -> int:
        return self.images * (1 + SIDE**2 // 4)

    @property
    def config(self) -> Any:
        return AutoConfig.for_model(
            self.family, **FAMILIES[self.family], image_token_id=PLACEHOLDER
        )

    def prepare(self, model: Any) -> None:
        """Freeze the encoder and set checkpoints."""
        if self.frozen:
            encoder: Any = encoding_module(model)
            tower = getattr(encoder, "visual", None) or encoder.vision_tower
            tower.requires_grad_(False)

    def batch(self, model: Any) -> dict[str, Any]:
        """Return the inputs of the model."""
        seen = image_model(model)
        assert seen is not None
        modality = seen.modalities[0]
        if modality.kind == "grid":
            width = modality.inputs[0].shape[1]
            example = {
                "pixel_values": torch.randn(self.images * SIDE**2, width),
                "image_grid_thw": torch.tensor([[1, SIDE, SIDE]] * self.images),
            }
        else:
            example = {"pixel_values": torch.randn(self.images, 3, SIDE * PATCH, SIDE * PATCH)}
        # A token of text before each image.
        ids = torch.tensor([[0, *[PLACEHOLDER] * (SIDE**2 // 4)] * self.images])
        fields = {name: value.numpy() for name, value in example.items()}
        positions = torch.from_numpy(np.array(seen.positions(ids[0].numpy(), fields)))
        labels = torch.ones_like(ids)
        return {
            **example,
            "input_ids": ids,
            "position_ids": positions[..., None, :] if positions.dim() > 1 else positions[None],
            "labels": labels,
            "shift_labels": labels,
        }


def train(case: Case) -> int:
    """Train; the most resident bytes above those at the start."""
    follow_tensors()
    _train(replace(case, images=1))  # loads libraries
    before = begin_peak()
    _train(case)
    return peak() - before


def _train(case: Case) -> None:
    config = case.config
    model = AutoModelForImageTextToText.from_config(
        config, attn_implementation=attention_of(config)
    ).train()
    case.prepare(model)
    if case.checkpointing:
        model.gradient_checkpointing_enable()
    dispatcher = make_dispatcher(model, DistCAConfig(tokens_per_rank=case.tokens), CPU)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, fused=True)
    plan = plan_micro_batch([case.tokens], dispatcher.settings)
    batch = case.batch(model)
    for _ in range(STEPS):
        bound = dispatcher.bind(plan)
        loss = model(**batch, num_items_in_batch=torch.tensor(case.tokens), distca_plan=bound).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)


def counted(case: Case) -> dict[str, int]:
    """Counted bytes of the whole training, and of the encoder without its weights."""
    model = model_of_config(case.config, torch.float32)
    case.prepare(model)
    run = describe_run(
        model,
        DistCAConfig(tokens_per_rank=case.tokens),
        ranks=1,
        device=CPU,
        checkpointing={} if case.checkpointing else None,
    )
    plan = plan_micro_batch([case.tokens], run.plans)
    encoded = Encoded(case.images, case.images * SIDE**2)
    memory = MemoryCounter(model).count(plan, run, 0, encoded)
    return {"total": memory.total, "encoder": memory.parts["encoder"]}


def main() -> None:
    options_parser(__doc__).parse_args()
    results = {}
    for family in FAMILIES:
        cases = {
            "trained": Case(family),
            "trained, checkpoints": Case(family, checkpointing=True),
            "frozen": Case(family, frozen=True),
        }
        for name, case in cases.items():
            guessed = counted(case)
            (taken,) = run_ranks(1, train, case)
            results[f"{family}, {name}"] = {
                "counted_mb": round(guessed["total"] / 1e6, 1),
                "encoder_mb": round(guessed["encoder"] / 1e6, 1),
                "measured_mb": round(taken / 1e6, 1),
                "counted_over_measured": round(guessed["total"] / taken, 3),
            }
            print(family, name, results[f"{family}, {name}"], flush=True)
    print_json(configurations=results)


if __name__ == "__main__":
    main()
