"""What importing hf_distca brings along; `make lint` checks which of its files import which."""

import subprocess
import sys

import pytest
from transformers import PreTrainedModel

import hf_distca
from hf_distca.checks.setting_names import CHECKPOINTING, LATER


def test_public_names():
    assert [name for name in dir(hf_distca) if not name.startswith("__")] == sorted(
        hf_distca.__all__
    )
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        hf_distca.__getattr__("nothing")


@pytest.mark.parametrize("name", hf_distca.__all__)
def test_public_names_are_those_of_their_objects(name):
    assert getattr(hf_distca, name).__name__ == name


def test_the_name_of_activation_checkpointing_is_that_of_models():
    assert hasattr(PreTrainedModel, f"{CHECKPOINTING}_enable")
    assert hasattr(PreTrainedModel, f"{LATER}_enable") is (CHECKPOINTING == LATER)


SCRIPT = """
import os, sys

def in_a_process_of_its_own(lines):
    if not os.fork():
        exec(lines)
        os._exit(0)
    assert os.wait()[1] == 0, lines

in_a_process_of_its_own("import hf_distca; assert not {'torch', 'transformers'} & set(sys.modules)")
# Every order needs these modules, and none of them imports transformers: one import saves time.
import accelerate, datasets, torch, torch._dynamo, torch.distributed.fsdp, torch.distributed.tensor
assert not {'hf_distca', 'transformers'} & set(sys.modules)
of_commands = "import hf_distca.cli.serve, hf_distca.pool.server, hf_distca.cli.doctor"
in_a_process_of_its_own(f"{of_commands}; assert 'transformers' not in sys.modules")
for first in (
    "import hf_distca",
    "import transformers.modeling_utils, hf_distca",
    "from hf_distca.patches.head import adapted_heads",
    "from hf_distca import DistCASFTTrainer",
):
    seen = "from transformers import AttentionInterface as A, AttentionMaskInterface as M"
    registered = "assert 'distca' in A().keys(); assert 'distca' in M().keys()"
    in_a_process_of_its_own(f"{first}; {seen}; {registered}")
"""


@pytest.mark.launches
def test_transformers_knows_the_implementation_whatever_is_imported_first():
    """And importing hf_distca alone imports no library, and servers import no model."""
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
