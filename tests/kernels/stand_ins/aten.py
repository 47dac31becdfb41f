"""The FlashAttention that comes with torch."""

import torch

from tests.kernels.stand_ins.asked import backward, called, forward


class Aten:
    """`aten::_flash_attention_forward` and `_backward` for CPU tensors, behind torch's own schemas."""

    def __init__(self) -> None:
        self.calls = {"forward": 0, "backward": 0}
        self._library = torch.library.Library("aten", "IMPL")
        self._library.impl("_flash_attention_forward", self._forward, "CPU")
        self._library.impl("_flash_attention_backward", self._backward, "CPU")

    def remove(self) -> None:
        self._library._destroy()

    def _forward(self, q, k, v, cu_q, cu_k, max_q, max_k, dropout_p, is_causal, return_debug_mask, **options):
        assert dropout_p == 0
        self.calls["forward"] += 1
        asked = self._asked((q, k, v), (cu_q, cu_k), (max_q, max_k), is_causal, options)
        return *forward(q, k, v, *asked), torch.zeros(2, dtype=torch.uint64), torch.empty(0), torch.empty(0)

    def _backward(
        self, do, q, k, v, o, lse, cu_q, cu_k, max_q, max_k, dropout_p, is_causal, rng_state, unused, **options
    ):
        assert dropout_p == 0
        self.calls["backward"] += 1
        asked = self._asked((q, k, v, do, o), (cu_q, cu_k), (max_q, max_k), is_causal, options)
        return backward(do, q, k, v, o, lse, *asked)

    def _asked(self, tensors, cumulative, longest, is_causal, options):
        return called(
            tensors,
            cumulative,
            longest,
            scale=options["scale"],
            causal=is_causal,
            window=(options.get("window_size_left"), options.get("window_size_right")),
        )
