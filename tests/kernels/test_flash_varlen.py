"""The CUDA kernels as far as that goes without a GPU: what they check, the arguments they make,
and, with stand-ins for the packages that compute on the CPU, all they do around them; and which of
them "auto" is."""

import contextlib
import sys
from importlib import metadata
from types import SimpleNamespace

import pytest
import torch

from hf_distca.kernel_names import MissingPackageError
from hf_distca.kernels import (
    AttentionParams,
    Need,
    TaskShapes,
    choose_kernel,
    get_kernel,
    split_calls,
    varlen,
)
from hf_distca.kernels.versions import PACKAGES
from tests.kernels.cases import CASES, Case, assert_matches_reference, make_inputs
from tests.kernels.stand_ins import SIGNATURES, StandIn

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


class Machine:
    """A GPU that is not there, at first one of Hopper's, with stand-ins for all packages and
    torch's own operators.
    """

    def __init__(self, patched: pytest.MonkeyPatch) -> None:
        self.patched, self.found = patched, {name: StandIn(name) for name in SIGNATURES}
        self.have_gpu(9)
        for name, kernel in PACKAGES.items():
            patched.setitem(sys.modules, kernel.package.module, self.found[name].module)
        patched.setitem(sys.modules, "kernels", None)  # the hub
        patched.setattr(torch.ops, "flash_attn_3", self.found["flash_attn_3"].module)
        for name, function in vars(self.found["torch_varlen"].module).items():
            patched.setattr(torch.ops.aten, name, SimpleNamespace(default=function))

    def have_gpu(self, major: int) -> None:
        self.patched.setattr(torch.cuda, "get_device_capability", lambda device: (major, 0))

    def have_packages(self, names: str) -> None:
        for name in PACKAGES.keys() - set(names.split()):
            self.patched.setitem(sys.modules, PACKAGES[name].package.module, None)

    def given(self, name: str, argument: str) -> tuple:
        """What the last forward and backward were given."""
        return tuple(given.get(argument) for given in self.found[name].given)


@pytest.fixture
def machine(monkeypatch):
    return Machine(monkeypatch)


def need(head_dim=128, values=None, dtype=torch.bfloat16, **params) -> Need:
    return Need(dtype, head_dim, values or head_dim, AttentionParams(1.0, **params))


# One is tried on all, as what is around a kernel is the same for all but for what these show.
TELLING = (
    "gqa",
    "values_narrower",
    "no_rows_in_one",
    "one_row_each",
    "not_causal",
    "window_7",
    "softcap_window",
)
TRIED = [("flash_attn", case) for case in CASES] + [
    (name, case)
    for name in SIGNATURES
    for case in TELLING
    if name != "flash_attn" and (name != "torch_varlen" or "softcap" not in case)
]


@pytest.mark.parametrize(("name", "case"), TRIED)
def test_matches_reference_around_a_stand_in(name, case, machine, monkeypatch):
    assert_matches_reference(get_kernel(name, CUDA), CASES[case], torch.bfloat16)
    assert machine.found[name].calls == (
        [0, 0] if case in ("no_tasks", "no_rows", "no_keys") else [1, 1]
    )
    if case == "gqa" or (name == "flash_attn" and case in TELLING):
        # As many calls as lengths allow: tasks of other lengths than their neighbours' are calls of
        # their own.
        monkeypatch.setattr(split_calls, "CALL_NS", 0.0)
        monkeypatch.setattr(split_calls, "BLOCK", 1)
        assert_matches_reference(get_kernel(name, CUDA), CASES[case], torch.bfloat16)
    if case == "gqa":
        many = {
            "torch_varlen": [5, 5],
            "flash_attn": [5, 5],
            "flash_attn_3": [2, 5],
            "flash_attn_4": [2, 2],
        }
        assert machine.found[name].calls == many[name]


@pytest.mark.parametrize("offset", [0, 4, 8])
def test_only_rows_that_are_not_dense_and_aligned_are_copied(offset, machine):
    """Kernels load 16 bytes at once: rows may begin at every eighth number of two bytes, and at no
    other.
    """
    case, kernel = Case((7,), (9,), heads=(2, 1), dims=(16, 16)), get_kernel("flash_attn", CUDA)
    do, q, k, v, shapes = make_inputs(case, torch.bfloat16)
    q = torch.zeros(7 * 32 + offset, dtype=torch.bfloat16)[offset:].view(7, 2, 16).copy_(q)
    k, v, do = (x.contiguous() for x in (k, v, do))
    o, lse = kernel.forward(q, k, v, shapes, case.params)
    dq, dk, dv = kernel.backward(do, q, k, v, o, lse, shapes, case.params)
    rows = {"dout": do, "q": q, "k": k, "v": v, "out": o, "lse": lse, "dq": dq, "dk": dk, "dv": dv}
    for given in machine.found["flash_attn"].given:
        copied = [
            name
            for name in rows
            if name in given and given[name].data_ptr() != rows[name].data_ptr()
        ]
        assert copied == (["q"] if offset == 4 else [])


@pytest.mark.parametrize(
    ("name", "asked", "major", "given"),
    [
        ("flash_attn_3", (192, 128), 9, (192, 128)),
        ("flash_attn_4", (20, 12), 9, (24, 16)),
        ("flash_attn_4", (20, 12), 10, (24, 16)),
        ("flash_attn_4", (80, 80), 10, (80, 80)),
        ("flash_attn_4", (160, 96), 10, (192, 128)),
        ("flash_attn_4", (160, 160), 10, (256, 256)),
        ("flash_attn_4", (160, 160), 9, (160, 160)),
    ],
)
def test_head_dims_are_padded_to_the_least_that_a_kernel_takes(name, asked, major, given, machine):
    machine.have_gpu(major)
    case = Case(q_lens=(3,), k_lens=(4,), dims=asked, scale=0.07)
    assert_matches_reference(get_kernel(name, CUDA), case, torch.bfloat16)
    for q, v in zip(machine.given(name, "q"), machine.given(name, "v"), strict=True):
        assert (q.shape[2], v.shape[2]) == given


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("name", PACKAGES)
def test_deterministic_when_torch_is_and_the_exchange_is_left_room(
    name, deterministic, machine, monkeypatch
):
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: deterministic)
    asked = name if name != "flash_attn_3" or deterministic else "auto"
    assert_matches_reference(
        get_kernel(asked, CUDA, sm_margin=8), CASES["one_row_each"], torch.bfloat16
    )
    assert machine.given(name, "deterministic") == (None, deterministic)
    assert machine.given(name, "sm_margin") == ((8, 8) if name == "flash_attn_3" else (None, None))


@pytest.mark.parametrize("name", [name for name in CASES if "softcap" not in name])
def test_torch_takes_the_arguments(name):
    """On the meta device torch checks the call and says what shapes come back."""
    case, kernel = CASES[name], get_kernel("torch_varlen", CUDA)
    q_rows, k_rows = sum(case.q_lens), sum(case.k_lens)
    q = torch.empty(q_rows, case.heads[0], case.dims[0], dtype=torch.bfloat16, device="meta")
    k, v = (q.new_empty(k_rows, case.heads[1], dim) for dim in case.dims)
    shapes = TaskShapes.build(case.q_lens, case.k_lens, "meta")
    o, lse = kernel.forward(q, k, v, shapes, case.params)
    assert (o.shape, o.dtype) == ((q_rows, case.heads[0], case.dims[1]), torch.bfloat16)
    assert (lse.shape, lse.dtype) == ((q_rows, case.heads[0]), torch.float32)
    grads = kernel.backward(o, q, k, v, o, lse, shapes, case.params)
    assert [x.shape for x in grads] == [q.shape, k.shape, v.shape]


CAPPED, WIDE, FULL = {"softcap": 30.0, "window": None}, {"head_dim": 256}, {"window": None}
FA3, FA4, NEWER_FA4 = (
    {"active": implementation}
    for implementation in (("FA3", "2.11.0"), ("FA4", "2.11.0"), ("FA4", "2.13.0+cu130"))
)


@pytest.mark.parametrize(
    ("name", "change", "major", "message"),
    [
        (
            "flash_attn_4",
            {"device": CPU},
            9,
            r"is cpu, but .*; on the CPU use 'cpu'",
        ),
        (
            "flash_attn",
            {"dtype": torch.float32},
            9,
            "computed in torch.float32, but .* float16 and bfloat16; train in",
        ),
        ("flash_attn", {"head_dim": 264}, 9, "are 264 for queries .* at most 256"),
        (
            "flash_attn",
            {"values": 512},
            9,
            "are 64 for .* 512 for .* at most 256",
        ),
        (
            "torch_varlen",
            CAPPED,
            9,
            "softcap=30.0, but .*; set .*flash_attn', 'flash_attn_3' or",
        ),
        (
            "torch_varlen",
            {},
            7,
            r"7\.0, but .* needs 8\.0 .*; use 'reference', which",
        ),
        ("torch_varlen", WIDE, 12, None),
        ("flash_attn", CAPPED | WIDE, 8, None),
        (
            "flash_attn_3",
            {},
            8,
            r"8\.0, but .* 9\.0 \(Hopper\); use 'torch_varlen', which",
        ),
        ("flash_attn_3", {}, 10, r"10\.0, but .* 9\.0 \(Hopper\)"),
        ("flash_attn_3", CAPPED | WIDE, 9, None),
        ("flash_attn_3", {"head_dim": 192, "deterministic": True}, 9, None),
        (
            "flash_attn_3",
            {"head_dim": 200, "deterministic": True},
            9,
            "of 200 for .* no deterministic .* dims above 192",
        ),
        ("flash_attn_4", {}, 8, r"8\.0, but .* 9\.0 \(Hopper\) or 10\.x \(Blackwell\)"),
        ("flash_attn_4", {}, 12, r"capability 12\.0, but"),
        (
            "flash_attn_4",
            CAPPED | WIDE,
            10,
            "softcap=30.0 and head dims of 256 .* no softcap for such head dims on Blackwell",
        ),
        (
            "flash_attn_4",
            WIDE,
            10,
            "window=5 and head dims of 256 .* no window for .* on Blackwell; use 'flash_attn'",
        ),
        ("flash_attn_4", CAPPED | WIDE, 9, None),
        ("flash_attn_4", CAPPED | {"dtype": torch.float16}, 10, None),
        ("flash_attn_4", WIDE | FULL, 10, None),
        ("torch_varlen", FA3, 9, None),
        (
            "torch_varlen",
            FA3,
            8,
            r"FA3 is activated in torch, .* 8\.0 .*restore_flash_attention_impl",
        ),
        ("torch_varlen", FA4 | FULL, 9, None),
        ("torch_varlen", FA4, 9, r"window=5, but torch 2\.11\.0 gives it no windows"),
        ("torch_varlen", NEWER_FA4, 9, None),
        ("torch_varlen", NEWER_FA4 | WIDE | FULL, 10, None),
        ("torch_varlen", NEWER_FA4 | {"head_dim": 160}, 10, r"FA4 .* no head dim of 160 .* 10\.0"),
    ],
)
def test_what_a_kernel_can_do(name, change, major, message, machine, monkeypatch):
    """A need of what all kernels can do, but for a change."""
    asked = {"head_dim": 64, "window": 5, "device": CUDA, "deterministic": False} | change
    machine.have_gpu(major)
    deterministic = asked.pop("deterministic")
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: deterministic)
    if "active" in asked:
        active, version = asked.pop("active")
        monkeypatch.setattr(torch.nn.attention._registry, "_FLASH_ATTENTION_ACTIVE", (active, None))
        monkeypatch.setattr(torch, "__version__", version)
    with contextlib.nullcontext() if message is None else pytest.raises(ValueError, match=message):
        get_kernel(name, asked.pop("device"), [need(**asked)])


# Which kernel "auto" is.

ALL = "flash_attn flash_attn_3 flash_attn_4"
LLAMA = (need(),)
GEMMA2 = (need(256, softcap=50.0), need(256, softcap=50.0, window=4096))
GEMMA3 = (need(256), need(256, window=1024))
GPT_OSS = (need(64), need(64, window=128))
DEEPSEEK = (need(192, 128),)


@pytest.mark.parametrize(
    ("major", "packages", "needs", "chosen"),
    [
        (8, ALL, LLAMA, "torch_varlen"),
        (8, ALL, GEMMA2, "flash_attn"),
        (9, "flash_attn", LLAMA, "torch_varlen"),
        (9, "flash_attn_4", (need(dtype=torch.float16),), "flash_attn_4"),
        (9, ALL, (), "flash_attn_3"),
        (9, ALL, GEMMA2, "flash_attn_3"),
        (9, "flash_attn", GEMMA2, "flash_attn"),
        (9, ALL, DEEPSEEK, "flash_attn_3"),
        (10, "flash_attn_3", LLAMA, "torch_varlen"),
        (10, ALL, GPT_OSS, "flash_attn_4"),
        (10, ALL, GEMMA3, "torch_varlen"),
        (10, ALL, GEMMA2, "flash_attn"),
        (12, ALL, LLAMA, "torch_varlen"),
    ],
)
def test_the_fastest_that_can_do_it(major, packages, needs, chosen, machine):
    machine.have_packages(packages)
    machine.have_gpu(major)
    assert choose_kernel(CUDA, needs)[0].name == chosen
    assert get_kernel("auto", CUDA, needs).name == chosen


def test_where_no_kernel_can_do_it(machine):
    machine.have_packages("")
    with pytest.raises(ValueError, match=r"GPU of compute capability 9\.0") as error:
        get_kernel("auto", CUDA, GEMMA2)
    lines = str(error.value).splitlines()[1:]
    assert [line.split("'")[1] for line in lines] == [
        "flash_attn_3",
        "flash_attn_4",
        "torch_varlen",
        "flash_attn",
    ]
    assert "pip install flash-attn-3" in lines[0]
    assert "softcap=50.0, but" in lines[2]
    assert get_kernel("auto", CPU, LLAMA).name == "cpu"
    with pytest.raises(ValueError, match="kernel 'cpu' computes in"):
        get_kernel("auto", CPU, (need(dtype=torch.int8),))
    with pytest.raises(ValueError, match="is mps, but kernel 'auto' chooses for cpu and cuda"):
        get_kernel("auto", torch.device("mps"))


# Packages that are missing, too old, or broken; and the hub.


def test_an_old_package_names_what_to_install(machine):
    del machine.found["flash_attn"].module._wrapped_flash_attn_varlen_forward
    with pytest.raises(ImportError, match=r"2\.7 or later"):
        get_kernel("flash_attn", CUDA)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("flash_attn", r"pip install 'hf-distca\[flash-attn\]'.*'torch_varlen'"),
        ("flash_attn_3", "pip install flash-attn-3 --find-links"),
        ("flash_attn_4", "pip install --pre flash-attn-4"),
    ],
)
def test_a_missing_package_names_what_to_install(machine, name, message):
    machine.have_packages("")
    with pytest.raises(MissingPackageError, match=message):
        get_kernel(name, CUDA)


def test_the_hub_has_the_third_where_its_package_is_missing(machine, monkeypatch, tmp_path):
    machine.have_packages("")
    build, asked = machine.found["flash_attn_3"].module, []
    hub = SimpleNamespace(
        get_kernel=lambda *args, **kw: asked.append((args, kw)) or SimpleNamespace(ops=build)
    )
    monkeypatch.setitem(sys.modules, "kernels", hub)
    monkeypatch.setattr(torch.ops, "flash_attn_3", SimpleNamespace())
    assert get_kernel("auto", CUDA).name == "torch_varlen"
    assert asked == []  # nothing is downloaded unasked
    assert_matches_reference(get_kernel("flash_attn_3", CUDA), CASES["gqa"], torch.bfloat16)
    assert asked == [(("kernels-community/flash-attn3",), {"version": 1})]
    del build.fwd
    with pytest.raises(ImportError, match="has no fwd; install a newer one"):
        get_kernel("flash_attn_3", CUDA)
    # A package of the hub that is broken is not taken for none.
    monkeypatch.delitem(sys.modules, "kernels")
    (tmp_path / "kernels.py").write_text("import library_of_the_hub\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ModuleNotFoundError, match="library_of_the_hub"):
        get_kernel("flash_attn_3", CUDA)


SYMBOL = ImportError("_C.abi3.so: undefined symbol: _ZN3c104cuda")
NO_CUTLASS = ModuleNotFoundError("No module named 'cutlass'", name="cutlass")
BROKEN = "package is installed, but cannot be imported: "
ABSENT = r"needs the flash-attn-4 package: .*\[cu13\]'\)"


@pytest.mark.parametrize(
    ("error", "known", "message"),
    [
        (
            SYMBOL,
            True,
            f"{BROKEN}ImportError: _C.abi3.so: undefined .*; install a build for this torch and "
            "CUDA",
        ),
        (
            OSError("no libcudart.so.12"),
            True,
            f"{BROKEN}OSError: no libcudart.so.12; install a build for",
        ),
        (
            NO_CUTLASS,
            True,
            f"{BROKEN}ModuleNotFoundError: No module named 'cutlass'; install what has cutlass",
        ),
        # As the folder of FlashAttention-4 that comes with flash-attn.
        (SYMBOL, False, rf"{ABSENT} \(ImportError: _C"),
        (NO_CUTLASS, False, rf"{ABSENT} \(ModuleNotFoundError: No module named 'cutlass'\)$"),
        (
            ModuleNotFoundError("No module named 'flash_attn'", name="flash_attn"),
            False,
            f"{ABSENT}$",
        ),
    ],
)
def test_packages_that_cannot_be_imported_are_passed_over_by_auto_alone(
    error, known, message, machine, monkeypatch
):
    """Every import fails, of packages of which pip knows or knows nothing."""

    def fail(error: Exception) -> None:
        raise error

    monkeypatch.setattr(varlen, "import_module", lambda name: fail(error))
    unknown = metadata.PackageNotFoundError()
    monkeypatch.setattr(metadata, "distribution", str if known else lambda name: fail(unknown))
    with pytest.raises(ImportError, match=message) as raised:
        get_kernel("flash_attn_4", CUDA)
    assert isinstance(raised.value, MissingPackageError) == (not known)
    kernel, passed_over = choose_kernel(CUDA)
    assert kernel.name == "torch_varlen"
    assert passed_over["flash_attn_4"] == str(raised.value)
    assert list(passed_over) == ["flash_attn_3", "flash_attn_4"]
    if known:  # the hub is not asked
        hub = SimpleNamespace(get_kernel=lambda *_, **__: pytest.fail("the hub was asked"))
        monkeypatch.setitem(sys.modules, "kernels", hub)
        with pytest.raises(ImportError, match=BROKEN):
            get_kernel("flash_attn_3", CUDA)
