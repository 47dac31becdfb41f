"""What this GPU takes, by `hf-distca profile`, for hf_distca/sim/profiles, see docs/explanation/simulation.md."""

import json
import tempfile
from pathlib import Path

from benchmarks.gpu.findings import Findings
from benchmarks.gpu.setting import Setting
from hf_distca.cli.main import main

LEAST_R2 = 0.98
"""Of the calls that are held out, as the profiles that come along have it."""


def check_profile(setting: Setting) -> Findings:
    """The profile itself, as figures."""
    findings, wide = Findings(), setting.wide
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "profile.json"
        options = {
            "output": path,
            "q-heads": wide["num_attention_heads"],
            "kv-heads": wide["num_key_value_heads"],
            "head-dim": wide["head_dim"],
            "hidden": wide["hidden_size"],
        }
        status = main(["profile", *(f"--{name}={value}" for name, value in options.items())])
        findings.check(status == 0, f"hf-distca profile ended with status {status}")
        if path.exists():
            profile = findings.figures["profile"] = json.loads(path.read_text())
            r2 = profile["accuracy"]["r2"]
            if setting.device.type == "cuda":
                findings.check(
                    r2 > LEAST_R2, f"R² of the calls held out is {r2:.3f}, more than {LEAST_R2} is expected"
                )
    return findings
