"""A device whose kernel takes a second for a pair, and whose links take no time."""

import numpy as np

from hf_distca.plan import AttentionKind
from hf_distca.predict.device_profile import DeviceProfile
from hf_distca.predict.seconds import KernelCost, LinkCost, Links

KIND = AttentionKind(None, 2, 1, 4, 4)
FREE = Links(LinkCost(0, np.inf), LinkCost(0, np.inf))
PROFILE = DeviceProfile(
    "unit", "a pair takes a second", "float32",
    KIND, KernelCost(0, 0, 0, 1.0), KernelCost(0, 0, 0, 2.0),
    np.inf, np.inf, 10.0, FREE, FREE,
)  # fmt: skip
