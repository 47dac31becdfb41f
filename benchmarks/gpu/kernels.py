"""Kernels against float64, on everything that dispatching may give them, and the profile of the
GPU.

Shape suffixes: Q packed query rows, K packed key/value rows, H query heads, G key/value heads, D
head dim of queries and keys, E head dim of values, N rows, B bytes of a row.
"""

import json
import math
import tempfile
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.gpu.findings import Findings, waits
from benchmarks.gpu.setting import Setting
from hf_distca.cli.main import main
from hf_distca.kernel_names import KERNEL_PACKAGES, MissingPackageError
from hf_distca.kernels import KERNEL_NAMES, AttentionParams, Kernel, Need, TaskShapes, get_kernel
from hf_distca.kernels.contract import ALIGNMENT, aligned

BOUNDS = {torch.float64: 1e-9, torch.float32: 3e-5, torch.bfloat16: 2e-2, torch.float16: 4e-3}
"""Largest deviation by dtype, over the largest magnitude in the tensor."""
LSE_BOUND, LEAST_R2 = 1e-3, 0.98
COMPILED = ("flash_attn_4",)
"""Kernels that compile a variant for every dtype, head dim, ratio of heads and mask: some 9 s each.
"""
VARIANTS = ("tasks of one row", "head dim 128, received", "window 128", "not causal")
"""Cases of them: in bfloat16 alone, with all other cases that need no further variant."""
SMALLEST = 0.1
"""Magnitude below which deviations count as if it were this: some gradients are 0 but for rounding.
"""


@dataclass(frozen=True)
class Case:
    """One kernel call.

    Attributes:
        q_lens, k_lens: query rows and K/V rows of the tasks.
        causal: False: every row sees every key.
        received: the rows are columns of wider rows, as an exchange hands them over; else
            transposed, as layers do.
    """

    q_lens: tuple[int, ...]
    k_lens: tuple[int, ...]
    heads: int = 8
    kv_heads: int = 2
    dim_qk: int = 64
    dim_v: int = 64
    window: int | None = None
    softcap: float | None = None
    causal: bool = True
    received: bool = False

    @property
    def params(self) -> AttentionParams:
        return AttentionParams(
            self.dim_qk**-0.5, window=self.window, softcap=self.softcap, causal=self.causal
        )

    @property
    def variant(self) -> tuple[object, ...]:
        """Sizes and options that a kernel is compiled for."""
        masked = (self.window is not None, self.softcap, self.causal)
        return (self.dim_qk, self.dim_v, self.heads // self.kv_heads, *masked)


def cases(setting: Setting) -> dict[str, Case]:
    n = setting.task_rows
    q_lens, k_lens = (n, 0, n // 4, n // 8, 1, 40), (n, 0, 2 * n + 3, n // 8, 9, 40)
    found = {f"head dim {d}": Case(q_lens, k_lens, dim_qk=d, dim_v=d) for d in setting.head_dims}
    found |= {
        f"head dim {d}, received": Case(q_lens, k_lens, dim_qk=d, dim_v=d, received=True)
        for d in (64, 128)
    }
    heads = {
        "one kv head": (8, 1),
        "as many kv heads": (4, 4),
        "9 heads": (9, 3),
        "14 heads": (14, 2),
    }
    for name, (q_heads, kv_heads) in heads.items():
        for received in (False, True):
            case = Case(q_lens, k_lens, q_heads, kv_heads, received=received)
            found[name + ", received" * received] = case
    for window in (1, 2, 128, n // 2, 4 * n):
        found[f"window {window}"] = Case(q_lens, k_lens, window=window)
    found["window, keys cut off"] = Case((n,), (n + 63,), window=64)
    return found | {
        "no tasks": Case((), ()),
        "no rows": Case((0, 0), (0, 5)),
        "tasks of one row": Case((1,) * (n // 5), tuple(range(1, n // 5 + 1))),
        "one row, many keys": Case((1, 0, 1), (4 * n, 3, 1)),
        "not causal": Case(q_lens, (n // 2, 7, 2 * n, 0, 9, 1), causal=False),
        "not causal, one row": Case((1, 0, 1), (3, 2, 0), causal=False),
        "one long task, many short": Case(
            (4 * n, *(3,) * (n // 10)), (4 * n, *(3,) * (n // 10)), 4, 1
        ),
        "values narrower": Case(q_lens, k_lens, 4, 4, dim_qk=192, dim_v=128),
        "softcap": Case(q_lens, k_lens, softcap=20.0),
        "softcap and window": Case(q_lens, k_lens, softcap=20.0, window=100),
    }


def calls_of(setting: Setting, name: str) -> dict[tuple[torch.dtype, str], Case]:
    found, dtypes = cases(setting), (torch.bfloat16, torch.float16, torch.float32)
    if name in COMPILED:
        variants = {found[case].variant for case in VARIANTS}
        found, dtypes = (
            {case: of for case, of in found.items() if of.variant in variants},
            dtypes[:1],
        )
    return {(dtype, case): of for dtype in dtypes for case, of in found.items()}


def side_by_side(
    shapes: list[tuple[int, ...]], dtype: torch.dtype, device: torch.device
) -> list[Tensor]:
    """Random tensors of equally many rows that lie beside each other in one buffer of bytes,
    aligned.
    """
    rows = shapes[0][0]
    widths = [aligned(math.prod(shape[1:]) * dtype.itemsize) for shape in shapes]
    # A column of another width comes first, as those of a message do.
    *offsets, row_bytes = accumulate(widths, initial=ALIGNMENT)
    buffer_NB = torch.zeros((rows, row_bytes), dtype=torch.uint8, device=device)
    views = [
        buffer_NB[:, offset : offset + math.prod(shape[1:]) * dtype.itemsize]
        .view(dtype)
        .view(shape)
        if rows
        else torch.empty(shape, dtype=dtype, device=device)
        for offset, shape in zip(offsets, shapes, strict=True)
    ]
    for view in views:
        view.copy_(torch.randn(view.shape, device=device))
    return views


def make_inputs(case: Case, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, ...]:
    q_rows, k_rows = sum(case.q_lens), sum(case.k_lens)
    of_queries = [(q_rows, case.heads, case.dim_v), (q_rows, case.heads, case.dim_qk)]
    of_keys = [(k_rows, case.kv_heads, case.dim_qk), (k_rows, case.kv_heads, case.dim_v)]
    torch.manual_seed(0)
    if case.received:
        return *side_by_side(of_queries, dtype, device), *side_by_side(of_keys, dtype, device)
    return tuple(
        torch.randn(heads, rows, dim, device=device).to(dtype).transpose(0, 1)
        for rows, heads, dim in [*of_queries, *of_keys]
    )


def errors(
    kernel: Kernel, case: Case, dtype: torch.dtype, device: torch.device
) -> dict[str, float]:
    """Largest deviations of o, lse and gradients from float64, over the largest magnitude."""
    do_QHE, *qkv = make_inputs(case, dtype, device)
    shapes, params = TaskShapes.build(case.q_lens, case.k_lens, device), case.params
    o_QHE, lse_QH = kernel.forward(*qkv, shapes, params)
    got = (o_QHE, lse_QH, *kernel.backward(do_QHE, *qkv, o_QHE, lse_QH, shapes, params))

    reference = get_kernel("reference", device)
    do_QHE, *qkv = (x.double() for x in (do_QHE, *qkv))
    o_QHE, lse_QH = reference.forward(*qkv, shapes, params)
    want = (o_QHE, lse_QH, *reference.backward(do_QHE, *qkv, o_QHE, lse_QH, shapes, params))
    return {
        name: deviation(mine, theirs)
        for name, mine, theirs in zip(("o", "lse", "dq", "dk", "dv"), got, want, strict=True)
    }


def deviation(got: Tensor, want: Tensor) -> float:
    """Largest difference over the largest magnitude; infinite where they are not finite in the same
    places.
    """
    got, finite = got.double(), want.isfinite()
    if got.shape != want.shape or not torch.equal(got[~finite], want[~finite]):
        return math.inf
    if not finite.any():
        return 0.0
    largest = want[finite].abs().max().clamp_min(SMALLEST)
    return ((got[finite] - want[finite]).abs().max() / largest).item()


def check_kernel(setting: Setting, name: str) -> Findings:
    """One kernel on all cases in all its dtypes; the host must not wait for the device."""
    findings, device = Findings(), setting.device
    try:
        kernel = get_kernel(name, device)
    except MissingPackageError as error:
        findings.skipped = str(error)
        return findings
    except ImportError as error:
        findings.check(False, str(error))
        return findings
    refused: set[str] = set()
    worst: dict[str, float] = {}
    ran = 0
    for (dtype, case_name), case in calls_of(setting, name).items():
        try:
            kernel.check(Need(dtype, case.dim_qk, case.dim_v, case.params), device)
        except ValueError as error:
            refused.add(str(error))
            continue
        what = f"{name}, {str(dtype).removeprefix('torch.')}, {case_name}"
        with findings.trying(what):
            ran += 1
            for tensor, error in errors(kernel, case, dtype, device).items():
                findings.at_most(
                    error, LSE_BOUND if tensor == "lse" else BOUNDS[dtype], f"{what}, {tensor}"
                )
                worst[f"{dtype}, {tensor}"] = max(worst.get(f"{dtype}, {tensor}", 0.0), error)
    if not ran:
        findings.check(
            get_kernel("auto", device).name != name,
            f"{name} is what 'auto' is here, and refuses everything",
        )
        findings.skipped = min(refused)
        return findings
    with findings.trying(f"{name}, once more"):
        _check_waits(kernel, setting, findings)
    findings.figures |= {"calls": ran, "reasons of refusals": sorted(refused), "errors": worst}
    return findings


def _check_waits(kernel: Kernel, setting: Setting, findings: Findings) -> None:
    """Run forward and backward of a case that has run before, and note where the host waits."""
    case = cases(setting)[f"head dim {setting.head_dims[0]}"]
    do_QHE, *qkv = make_inputs(case, setting.dtype, setting.device)
    shapes = TaskShapes.build(case.q_lens, case.k_lens, setting.device)
    with waits(setting.device) as places:
        o_QHE, lse_QH = kernel.forward(*qkv, shapes, case.params)
        kernel.backward(do_QHE, *qkv, o_QHE, lse_QH, shapes, case.params)
    findings.check(
        not places, f"{kernel.name}: the host waits for the device in {sorted(set(places))}"
    )


def why_missing(name: str) -> str:
    """Why this machine cannot have a kernel, without importing its package; empty if it can."""
    package = KERNEL_PACKAGES.get(name)
    return "" if package is None else package.missing()


def kernel_names(device: torch.device) -> list[str]:
    """Kernels to check on a device: all but "auto", which is one of them, and what they are
    compared with.
    """
    kinds = [name for name in KERNEL_NAMES if name not in ("auto", "reference")]
    return [name for name in kinds if (name == "cpu") == (device.type == "cpu")]


def check_profile(setting: Setting) -> Findings:
    """Figures of this GPU's profile by `hf-distca profile`; see docs/explanation/simulation.md."""
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
            findings.figures["profile"] = json.loads(path.read_text())
            r2 = findings.figures["profile"]["accuracy"]["r2"]
            good = r2 > LEAST_R2 or not setting.on_cuda
            findings.check(
                good, f"R² of the calls held out is {r2:.3f}, more than {LEAST_R2} is expected"
            )
    return findings
