"""A plugin that lets axolotl start several processes without GPUs, for the comparison alone."""

from typing import Any

import torch
from axolotl.integrations.base import BasePlugin


class OnCPUs(BasePlugin):
    def register(self, _: Any) -> None:
        # axolotl asks torch's CUDA build for links between GPUs, which fails without a driver.
        torch.cuda.can_device_access_peer = lambda *_: True

    def load_datasets(self, cfg: Any, preprocess: bool = False) -> None:
        # axolotl's default is the GPU with the number of the process.
        cfg.device_map = {"": "cpu"}
