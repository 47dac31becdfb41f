"""The CUDA kernels as far as that goes without a GPU: what they check, the arguments they make, and, with stand-ins
for the packages that compute on the CPU, all they do around them; and which of them "auto" is.
"""

import contextlib
import sys
from importlib import metadata
from types import SimpleNamespace

import pytest
import torch

from hf_distca.kernels import AttentionParams, Need, TaskShapes, choose_kernel, get_kernel, split, varlen
from hf_distca.kernels.varlen import MissingPackageError
from hf_distca.kernels.versions import PACKAGES
from tests.kernels.cases import CASES, Case, assert_matches_reference, make_inputs
from tests.kernels.stand_ins import FUNCTIONS, StandIn

CUDA = torch.device("cuda")


@pytest.fixture
def capability(monkeypatch):
    """Sets what GPU there is; at first one of Hopper's."""

    def have(major: int) -> None:
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (major, 0))

    have(9)
    return have


@pytest.fixture
def installed(monkeypatch, capability):
    """Stand-ins for all packages and torch's own operators, by kernel; the hub has none."""
    found = {name: StandIn(name) for name in FUNCTIONS}
    for name, package in PACKAGES.items():
        monkeypatch.setitem(sys.modules, package.module, found[name].module)
    monkeypatch.setitem(sys.modules, "kernels", None)
    monkeypatch.setattr(torch.ops, "flash_attn_3", found["flash_attn_3"].module)
    for name, function in vars(found["torch_varlen"].module).items():
        monkeypatch.setattr(torch.ops.aten, name, SimpleNamespace(default=function))
    return found


def need(head_dim=128, values=None, dtype=torch.bfloat16, **params) -> Need:
    return Need(dtype, head_dim, values or head_dim, AttentionParams(1.0, **params))


# One is tried on all, as what is around a kernel is the same for all but for what these show.
TELLING = ("gqa", "values_narrower", "no_rows_in_one", "one_row_each", "not_causal", "window_7", "softcap_window")
TRIED = [("flash_attn", case) for case in CASES] + [
    (name, case)
    for name in FUNCTIONS
    for case in TELLING
    if name != "flash_attn" and (name != "torch_varlen" or "softcap" not in case)
]


@pytest.mark.parametrize(("name", "case"), TRIED)
def test_matches_reference_around_a_stand_in(name, case, installed):
    assert_matches_reference(get_kernel(name, CUDA), CASES[case], torch.bfloat16)
    calls = installed[name].calls
    assert calls["forward"] == calls["backward"] == (0 if case in ("no_tasks", "no_rows", "no_keys") else 1)


@pytest.mark.parametrize(
    ("name", "case"),
    [("flash_attn", case) for case in TELLING] + [(name, "gqa") for name in FUNCTIONS if name != "flash_attn"],
)
def test_split_calls_match_reference(name, case, installed, monkeypatch):
    """As many calls as lengths allow: tasks of other lengths than their neighbours' are calls of their own."""
    monkeypatch.setattr(split, "CALL_NS", 0.0)
    monkeypatch.setattr(split, "BLOCK", 1)
    assert_matches_reference(get_kernel(name, CUDA), CASES[case], torch.bfloat16)
    if case == "gqa":
        lengths = {"torch_varlen": (4, 4), "flash_attn": (4, 4), "flash_attn_3": (1, 4), "flash_attn_4": (1, 1)}
        assert tuple(installed[name].calls.values()) == lengths[name]


@pytest.mark.parametrize("offset", [0, 4, 8])
def test_only_rows_that_are_not_dense_and_aligned_are_copied(offset, installed):
    """Kernels load 16 bytes at once: rows may begin at every eighth number of two bytes, and at no other."""
    case = Case(q_lens=(3, 4), k_lens=(3, 9), heads=(2, 1), dims=(16, 16))
    inputs, kernel = make_inputs(case, torch.bfloat16), get_kernel("flash_attn", CUDA)
    q = torch.zeros(7 * 32 + offset, dtype=torch.bfloat16)[offset:].view(7, 2, 16).copy_(inputs.q)
    k, v, do = (x.contiguous() for x in (inputs.k, inputs.v, inputs.do))

    def memory(*tensors):
        return [x.data_ptr() for x in tensors]

    def given(*names):
        return memory(*(installed["flash_attn"].given[name] for name in names))

    o, lse = kernel.forward(q, k, v, inputs.shapes, case.params)
    assert (given("q", "k", "v") == memory(q, k, v)) == (offset != 4)
    grads = kernel.backward(do, q, k, v, o, lse, inputs.shapes, case.params)
    assert (given("dout", "q", "k", "v", "out", "softmax_lse") == memory(do, q, k, v, o, lse)) == (offset != 4)
    assert given("dq", "dk", "dv") == memory(*grads)
    assert lse.T.is_contiguous()


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
def test_head_dims_are_padded_to_the_least_that_a_kernel_takes(name, asked, major, given, installed, capability):
    capability(major)
    case = Case(q_lens=(3,), k_lens=(4,), dims=asked, scale=0.07)
    assert_matches_reference(get_kernel(name, CUDA), case, torch.bfloat16)
    assert installed[name].head_dims == {given}


@contextlib.contextmanager
def deterministic():
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(before)


@pytest.mark.parametrize("name", PACKAGES)
def test_deterministic_when_torch_is(name, installed):
    for setting in (contextlib.nullcontext(), deterministic()):
        with setting:
            assert_matches_reference(get_kernel(name, CUDA), CASES["one_row_each"], torch.bfloat16)
            assert installed[name].given["deterministic"] == torch.are_deterministic_algorithms_enabled()


@pytest.mark.parametrize("name", [name for name in CASES if "softcap" not in name])
def test_torch_takes_the_arguments(name):
    """On the meta device torch checks the call and says what shapes come back."""
    case, kernel = CASES[name], get_kernel("torch_varlen", CUDA)
    q_rows, k_rows = sum(case.q_lens), sum(case.k_lens)
    q = torch.empty(q_rows, case.heads[0], case.dims[0], dtype=torch.bfloat16, device="meta")
    k = q.new_empty(k_rows, case.heads[1], case.dims[0])
    v = q.new_empty(k_rows, case.heads[1], case.dims[1])
    shapes = TaskShapes.build(case.q_lens, case.k_lens, "meta")
    o, lse = kernel.forward(q, k, v, shapes, case.params)
    assert (o.shape, o.dtype) == ((q_rows, case.heads[0], case.dims[1]), torch.bfloat16)
    assert (lse.shape, lse.dtype) == ((q_rows, case.heads[0]), torch.float32)
    grads = kernel.backward(o, q, k, v, o, lse, shapes, case.params)
    assert [x.shape for x in grads] == [q.shape, k.shape, v.shape]


# What a kernel can do.

CAPPED = {"softcap": 30.0, "window": None}
WIDE = {"head_dim": 256}
FULL = {"window": None}


def ask(name, message, *, device=CUDA, **change) -> None:
    """Ask for what all kernels can do, but for a change; expect an error with this message, or none."""
    with contextlib.nullcontext() if message is None else pytest.raises(ValueError, match=message):
        get_kernel(name, device, [need(**{"head_dim": 64, "window": 5} | change)])


@pytest.mark.parametrize(
    ("name", "change", "major", "message"),
    [
        ("flash_attn_4", {"device": torch.device("cpu")}, 9, "on CUDA, got cpu; on the CPU use 'cpu'"),
        ("flash_attn", {"dtype": torch.float32}, 9, "float16 and bfloat16, got torch.float32: train in"),
        ("flash_attn", {"head_dim": 264}, 9, "head dims up to 256, got 264 for queries"),
        ("flash_attn", {"values": 512}, 9, "up to 256, got 64 for queries and keys and 512"),
        ("torch_varlen", CAPPED, 9, "softcap, got 30.0; set .*flash_attn', 'flash_attn_3' or"),
        ("torch_varlen", {}, 7, r"compute capability 8.0 .* got 7\.0; 'reference' runs on any"),
        ("torch_varlen", WIDE, 12, None),
        ("flash_attn", {}, 7, "8.0"),
        ("flash_attn", CAPPED | WIDE, 8, None),
        ("flash_attn_3", {}, 8, r"9\.0 \(Hopper\), got 8\.0; 'torch_varlen' runs from 8\.0 on"),
        ("flash_attn_3", {}, 10, r"9\.0 \(Hopper\), got 10\.0"),
        ("flash_attn_3", CAPPED | WIDE, 9, None),
        ("flash_attn_4", {}, 8, r"9\.0 \(Hopper\) or 10\.x \(Blackwell\), got 8\.0"),
        ("flash_attn_4", {}, 12, r"got 12\.0"),
        ("flash_attn_4", CAPPED | WIDE, 10, "no softcap for head dims of 256 and 256 on Blackwell, got 30.0"),
        ("flash_attn_4", WIDE, 10, "no window for head dims of 256 and 256 on Blackwell, got 5; 'flash_attn' has"),
        ("flash_attn_4", CAPPED | WIDE, 9, None),
        ("flash_attn_4", CAPPED | {"dtype": torch.float16}, 10, None),
        ("flash_attn_4", WIDE | FULL, 10, None),
    ],
)
def test_what_a_kernel_can_do(name, change, major, message, installed, capability):
    capability(major)
    ask(name, message, **change)


def test_the_third_is_not_deterministic_for_wide_heads(installed):
    with deterministic():
        ask("flash_attn_3", None, head_dim=192)
        ask("flash_attn_3", "no deterministic backward for head dims above 192, got 200", head_dim=200)


@pytest.mark.parametrize(
    ("active", "version", "major", "change", "message"),
    [
        ("FA3", "2.11.0", 9, {}, None),
        ("FA3", "2.11.0", 8, {}, r"FA3 is activated in torch, .* 8\.0 .*restore_flash_attention_impl"),
        ("FA4", "2.11.0", 9, FULL, None),
        ("FA4", "2.11.0", 9, {}, r"torch 2\.11\.0 gives it no windows, got 5"),
        ("FA4", "2.13.0+cu130", 9, {}, None),
        ("FA4", "2.13.0", 10, WIDE | FULL, None),
        ("FA4", "2.13.0", 10, {"head_dim": 160}, r"FA4 .* no head dim of 160 .* 10\.0"),
    ],
)
def test_what_is_activated_in_torch(active, version, major, change, message, installed, capability, monkeypatch):
    capability(major)
    monkeypatch.setattr(torch.nn.attention._registry, "_FLASH_ATTENTION_ACTIVE", (active, None))
    monkeypatch.setattr(torch, "__version__", version)
    ask("torch_varlen", message, **change)


# Which kernel "auto" is.

ALL = "flash_attn flash_attn_3 flash_attn_4"
LLAMA = (need(),)
GEMMA2 = (need(256, softcap=50.0), need(256, softcap=50.0, window=4096))
GEMMA3 = (need(256), need(256, window=1024))
GPT_OSS = (need(64), need(64, window=128))
DEEPSEEK = (need(192, 128),)


@pytest.fixture
def only(installed, monkeypatch):
    """Leaves some packages and takes the others away."""

    def leave(names: str) -> None:
        for name, package in PACKAGES.items():
            if name not in names.split():
                monkeypatch.setitem(sys.modules, package.module, None)

    return leave


@pytest.mark.parametrize(
    ("major", "packages", "needs", "chosen"),
    [
        (8, "", (), "torch_varlen"),
        (8, ALL, LLAMA, "torch_varlen"),
        (8, ALL, GEMMA2, "flash_attn"),
        (9, "", (), "torch_varlen"),
        (9, "flash_attn", LLAMA, "torch_varlen"),
        (9, "flash_attn_4", (need(dtype=torch.float16),), "flash_attn_4"),
        (9, ALL, (), "flash_attn_3"),
        (9, ALL, GEMMA2, "flash_attn_3"),
        (9, "flash_attn", GEMMA2, "flash_attn"),
        (9, ALL, DEEPSEEK, "flash_attn_3"),
        (10, "", LLAMA, "torch_varlen"),
        (10, "flash_attn_3", LLAMA, "torch_varlen"),
        (10, ALL, (), "flash_attn_4"),
        (10, ALL, GPT_OSS, "flash_attn_4"),
        (10, ALL, GEMMA3, "torch_varlen"),
        (10, ALL, GEMMA2, "flash_attn"),
        (12, ALL, LLAMA, "torch_varlen"),
    ],
)
def test_the_fastest_that_can_do_it(major, packages, needs, chosen, only, capability):
    only(packages)
    capability(major)
    assert choose_kernel(CUDA, needs)[0].name == chosen
    assert get_kernel("auto", CUDA, needs).name == chosen


def test_no_kernel_that_is_there_has_softcap(only):
    only("")
    with pytest.raises(ValueError, match=r"GPU of compute capability 9\.0") as error:
        get_kernel("auto", CUDA, GEMMA2)
    lines = str(error.value).splitlines()[1:]
    assert [line.split("'")[1] for line in lines] == ["flash_attn_3", "flash_attn_4", "torch_varlen", "flash_attn"]
    assert "pip install flash-attn-3" in lines[0]
    assert "does not support softcap, got 50.0" in lines[2]


def test_the_exchange_is_left_room(installed):
    for name, margin in (("auto", 5), ("flash_attn_3", 8)):
        installed["flash_attn_3"].sm_margins.clear()
        assert_matches_reference(get_kernel(name, CUDA, sm_margin=margin), CASES["one_row_each"], torch.bfloat16)
        assert installed["flash_attn_3"].sm_margins == {margin}


def test_other_devices():
    assert get_kernel("auto", torch.device("cpu"), LLAMA).name == "cpu"
    with pytest.raises(ValueError, match="kernel 'cpu' computes in"):
        get_kernel("auto", torch.device("cpu"), (need(dtype=torch.int8),))
    with pytest.raises(ValueError, match="'auto' chooses for cpu and cuda devices only, got mps"):
        get_kernel("auto", torch.device("mps"))


# Packages that are missing, too old, or broken; and the hub.


def test_a_missing_or_old_package_names_what_to_install(installed, only):
    del installed["flash_attn"].module._wrapped_flash_attn_varlen_forward
    with pytest.raises(ImportError, match=r"2\.7 or later"):
        get_kernel("flash_attn", CUDA)
    only("")
    for name, message in (
        ("flash_attn", r"pip install 'hf-distca\[flash-attn\]'.*'torch_varlen'"),
        ("flash_attn_3", "pip install flash-attn-3 --find-links"),
        ("flash_attn_4", "pip install --pre flash-attn-4"),
    ):
        with pytest.raises(MissingPackageError, match=message):
            get_kernel(name, CUDA)


def test_the_hub_has_the_third_where_its_package_is_missing(only, installed, monkeypatch):
    only("")
    build, asked = installed["flash_attn_3"].module, []
    hub = SimpleNamespace(get_kernel=lambda *args, **kw: asked.append((args, kw)) or SimpleNamespace(ops=build))
    monkeypatch.setitem(sys.modules, "kernels", hub)
    monkeypatch.setattr(torch.ops, "flash_attn_3", SimpleNamespace())
    assert get_kernel("auto", CUDA).name == "torch_varlen"
    assert asked == []  # nothing is downloaded unasked
    assert_matches_reference(get_kernel("flash_attn_3", CUDA), CASES["gqa"], torch.bfloat16)
    assert asked == [(("kernels-community/flash-attn3",), {"version": 1})]
    del build.fwd
    with pytest.raises(ImportError, match="has no fwd; install a newer one"):
        get_kernel("flash_attn_3", CUDA)


def test_a_broken_hub_package_is_not_taken_for_none(only, monkeypatch, tmp_path):
    only("")
    monkeypatch.delitem(sys.modules, "kernels")
    (tmp_path / "kernels.py").write_text("import library_of_the_hub\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ModuleNotFoundError, match="library_of_the_hub"):
        get_kernel("flash_attn_3", CUDA)


SYMBOL = ImportError("_C.abi3.so: undefined symbol: _ZN3c104cuda")
NO_CUTLASS = ModuleNotFoundError("No module named 'cutlass'", name="cutlass")
BROKEN = "package is installed, but cannot be imported: "
ABSENT = r"needs the flash-attn-4 package: .*\[cu13\]'\)"


@pytest.fixture
def fails(monkeypatch, capability):
    """Lets the import of every package fail, of which pip knows or knows nothing; the hub must not be asked."""

    def fail(error: Exception, known: bool) -> None:
        def raising(name: str, of: Exception = error) -> None:
            raise of

        monkeypatch.setattr(varlen, "import_module", raising)
        unknown = metadata.PackageNotFoundError()
        monkeypatch.setattr(metadata, "distribution", str if known else lambda name: raising(name, unknown))

    hub = SimpleNamespace(get_kernel=lambda *_, **__: pytest.fail("the hub was asked"))
    monkeypatch.setitem(sys.modules, "kernels", hub)
    return fail


@pytest.mark.parametrize(
    ("error", "known", "message"),
    [
        (SYMBOL, True, f"{BROKEN}ImportError: _C.abi3.so: undefined .*; install a build for this torch and CUDA"),
        (OSError("no libcudart.so.12"), True, f"{BROKEN}OSError: no libcudart.so.12; install a build for"),
        (NO_CUTLASS, True, f"{BROKEN}ModuleNotFoundError: No module named 'cutlass'; install what has cutlass"),
        # As the folder of FlashAttention-4 that comes with flash-attn.
        (SYMBOL, False, rf"{ABSENT} \(ImportError: _C"),
        (NO_CUTLASS, False, rf"{ABSENT} \(ModuleNotFoundError: No module named 'cutlass'\)$"),
        (ModuleNotFoundError("No module named 'flash_attn'", name="flash_attn"), False, f"{ABSENT}$"),
    ],
)
def test_a_package_that_cannot_be_imported(error, known, message, fails):
    fails(error, known)
    with pytest.raises(ImportError, match=message) as raised:
        get_kernel("flash_attn_4", CUDA)
    assert isinstance(raised.value, MissingPackageError) == (not known)


def test_what_is_broken_is_passed_over_by_auto_alone(fails):
    fails(SYMBOL, known=True)
    kernel, passed_over = choose_kernel(CUDA)
    assert kernel.name == "torch_varlen"
    assert list(passed_over) == ["flash_attn_3", "flash_attn_4"]
    assert all(BROKEN in why for why in passed_over.values())
    with pytest.raises(ImportError, match="undefined symbol"):
        get_kernel("flash_attn_3", CUDA)
