"""The CUDA kernels as far as that goes without a GPU: what they check, the arguments they make, and, with stand-ins
for the packages that compute on the CPU, all they do around them.
"""

import contextlib
import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from hf_distca.kernels import AttentionParams, Need, TaskShapes, choose_kernel, get_kernel, split
from hf_distca.kernels.versions import PACKAGES, MissingPackageError
from tests.kernels.cases import CASES, Case, assert_matches_reference, make_inputs
from tests.kernels.stand_ins import FlashAttn2, FlashAttn3, hub

CUDA = torch.device("cuda")
NAMES = ("torch_varlen", "flash_attn", "flash_attn_3", "flash_attn_4")


# One is tried on all, as what is around a kernel is the same for all but for what these show.
TELLING = ("gqa", "values_narrower", "no_rows_in_one", "one_row_each", "not_causal", "window_7", "softcap_window")
TRIED = [("flash_attn", case) for case in CASES] + [
    (name, case)
    for name in NAMES
    for case in TELLING
    if name != "flash_attn" and (name != "torch_varlen" or "softcap" not in case)
]


@pytest.mark.parametrize(("name", "case"), TRIED)
def test_matches_reference_around_a_stand_in(name, case, installed):
    assert_matches_reference(get_kernel(name, CUDA), CASES[case], torch.bfloat16)
    calls = installed[name].calls
    assert calls["forward"] == calls["backward"] == (0 if case in ("no_tasks", "no_rows") else 1)


@pytest.mark.parametrize(
    ("name", "case"),
    [("flash_attn", case) for case in TELLING] + [(name, "gqa") for name in NAMES if name != "flash_attn"],
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
    case = Case(q_lens=(3, 4), k_lens=(3, 9), heads=2, kv_heads=1, head_dim_qk=16, head_dim_v=16)
    inputs, kernel = make_inputs(case, torch.bfloat16), get_kernel("flash_attn", CUDA)
    q = torch.zeros(7 * 32 + offset, dtype=torch.bfloat16)[offset:].view(7, 2, 16).copy_(inputs.q)
    k, v, do = (x.contiguous() for x in (inputs.k, inputs.v, inputs.do))
    seen, ours = [], (kernel._call_forward, kernel._call_backward)
    kernel._call_forward = lambda *args: seen.append((args[:3], ours[0](*args))) or seen[-1][1]
    kernel._call_backward = lambda *args: seen.append((args[0], ours[1](*args))) or seen[-1][1]
    o, lse = kernel.forward(q, k, v, inputs.shapes, case.params)
    grads = kernel.backward(do, q, k, v, o, lse, inputs.shapes, case.params)

    def memory(*tensors):
        return [x.data_ptr() for x in tensors]

    (forward, results), (backward, gradients) = seen
    assert (memory(*forward) == memory(q, k, v)) == (offset != 4)
    assert (memory(*backward) == memory(do, q, k, v, o, lse)) == (offset != 4)
    assert memory(*results, *gradients) == memory(o, lse, *grads)
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
    case = Case(q_lens=(3,), k_lens=(4,), head_dim_qk=asked[0], head_dim_v=asked[1], params=AttentionParams(0.07))
    assert_matches_reference(get_kernel(name, CUDA), case, torch.bfloat16)
    assert installed[name].head_dims == {given}


@pytest.fixture
def deterministic():
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(before)


@pytest.mark.parametrize("name", ["flash_attn", "flash_attn_3", "flash_attn_4"])
def test_deterministic_when_torch_is(name, installed, request):
    assert_matches_reference(get_kernel(name, CUDA), CASES["gqa"], torch.bfloat16)
    assert not installed[name].deterministic
    request.getfixturevalue("deterministic")
    assert_matches_reference(get_kernel(name, CUDA), CASES["gqa"], torch.bfloat16)
    assert installed[name].deterministic


def test_the_hub_has_the_third_where_its_package_is_missing(monkeypatch, capability):
    build = FlashAttn3("flash_attn_3_of_the_hub")
    monkeypatch.setitem(sys.modules, "flash_attn_interface", None)
    monkeypatch.setitem(sys.modules, "kernels", hub(build.operators))
    assert_matches_reference(get_kernel("flash_attn_3", CUDA), CASES["gqa"], torch.bfloat16)
    assert build.calls == {"forward": 1, "backward": 1}
    build.library._destroy()


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("flash_attn", r"pip install 'hf-distca\[flash-attn\]'.*'torch_varlen'"),
        ("flash_attn_3", "pip install flash-attn-3 --find-links"),
        ("flash_attn_4", "pip install --pre flash-attn-4"),
    ],
)
def test_a_missing_package_names_what_to_install(name, message, installed, monkeypatch):
    monkeypatch.setitem(sys.modules, PACKAGES[name].module, None)
    monkeypatch.setitem(sys.modules, "kernels", None)
    with pytest.raises(MissingPackageError, match=message):
        get_kernel(name, CUDA)


def test_an_old_package_is_refused(installed, monkeypatch):
    monkeypatch.delattr(FlashAttn2, "_wrapped_flash_attn_varlen_forward")
    with pytest.raises(ImportError, match=r"2\.7 or later"):
        get_kernel("flash_attn", CUDA)
    monkeypatch.setitem(sys.modules, "flash_attn_interface", None)
    monkeypatch.setitem(sys.modules, "kernels", hub(torch.ops.namespace_without_operators))
    with pytest.raises(ImportError, match="has no fwd and bwd; install a newer one"):
        get_kernel("flash_attn_3", CUDA)


@pytest.mark.parametrize("name", [name for name in CASES if "softcap" not in name])
def test_torch_takes_the_arguments(name: str) -> None:
    """On the meta device torch checks the call and says what shapes come back."""
    case, kernel = CASES[name], get_kernel("torch_varlen", CUDA)
    q_rows, k_rows = sum(case.q_lens), sum(case.k_lens)
    q = torch.empty(q_rows, case.heads, case.head_dim_qk, dtype=torch.bfloat16, device="meta")
    k = q.new_empty(k_rows, case.kv_heads, case.head_dim_qk)
    v = q.new_empty(k_rows, case.kv_heads, case.head_dim_v)
    shapes = TaskShapes.build(case.q_lens, case.k_lens, "meta")
    o, lse = kernel.forward(q, k, v, shapes, case.params)
    assert (o.shape, o.dtype) == ((q_rows, case.heads, case.head_dim_v), torch.bfloat16)
    assert (lse.shape, lse.dtype) == ((q_rows, case.heads), torch.float32)
    grads = kernel.backward(o, q, k, v, o, lse, shapes, case.params)
    assert [x.shape for x in grads] == [q.shape, k.shape, v.shape]


def ask(name: str, *, device=CUDA, **change) -> None:
    """Check a kernel for what all can do, but for a change."""
    usual = Need(torch.bfloat16, 64, 64, AttentionParams(1.0, window=5))
    get_kernel(name, CUDA).check(replace(usual, **change), device)


CAPPED = {"params": AttentionParams(1.0, softcap=30.0)}
WIDE = {"head_dim_qk": 256, "head_dim_v": 256}
FULL = {"params": AttentionParams(1.0)}


@pytest.mark.parametrize(
    ("name", "change", "major", "message"),
    [
        *((name, {"device": torch.device("cpu")}, 9, "on CUDA, got cpu; on the CPU use 'cpu'") for name in NAMES),
        *((name, {"dtype": torch.float32}, 9, "float16 and bfloat16, got torch.float32: train in") for name in NAMES),
        ("flash_attn", {"head_dim_qk": 264}, 9, "head dims up to 256, got 264 for queries"),
        ("flash_attn", {"head_dim_v": 512}, 9, "up to 256, got 64 for queries and keys and 512"),
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
    with contextlib.nullcontext() if message is None else pytest.raises(ValueError, match=message):
        ask(name, **change)


@pytest.mark.parametrize(("head_dim", "refused"), [(192, False), (200, True)])
def test_the_third_is_not_deterministic_for_wide_heads(head_dim, refused, installed, deterministic):
    message = "no deterministic backward for head dims above 192, got 200"
    with pytest.raises(ValueError, match=message) if refused else contextlib.nullcontext():
        ask("flash_attn_3", head_dim_qk=head_dim)


@pytest.mark.parametrize(
    ("active", "version", "major", "change", "message"),
    [
        ("FA3", "2.11.0", 9, {}, None),
        ("FA3", "2.11.0", 8, {}, r"FA3 is activated in torch, .* 8\.0 .*restore_flash_attention_impl"),
        ("FA4", "2.11.0", 9, FULL, None),
        ("FA4", "2.11.0", 9, {}, r"torch 2\.11\.0 gives it no windows, got 5"),
        ("FA4", "2.13.0+cu130", 9, {}, None),
        ("FA4", "2.13.0", 10, WIDE | FULL, None),
        ("FA4", "2.13.0", 10, {"head_dim_qk": 160}, r"FA4 .* no head dim of 160 .* 10\.0"),
    ],
)
def test_what_is_activated_in_torch(active, version, major, change, message, installed, capability, monkeypatch):
    capability(major)
    monkeypatch.setattr(torch.nn.attention._registry, "_FLASH_ATTENTION_ACTIVE", (active, None))
    monkeypatch.setattr(torch, "__version__", version)
    with contextlib.nullcontext() if message is None else pytest.raises(ValueError, match=message):
        ask("torch_varlen", **change)


# Packages that are not installed, and installed ones that cannot be imported.

SYMBOL = 'raise ImportError("_C.abi3.so: undefined symbol: _ZN3c104cuda")'
LIBRARY = 'raise OSError("libcudart.so.12: cannot open shared object file")'
NO_CUTLASS = "import cutlass_of_a_pth_file"


@pytest.fixture
def package(tmp_path, monkeypatch, capability):
    """Puts a package on disk whose module fails; without a distribution pip knows nothing of it."""

    def put(name: str, fails: str, distribution: bool = True) -> None:
        *parents, module = PACKAGES[name].module.split(".")
        folder = tmp_path.joinpath(*parents)
        folder.mkdir(parents=True, exist_ok=True)
        for parent in [folder, *folder.parents][: len(parents)]:
            (parent / "__init__.py").touch()
        (folder / f"{module}.py").write_text(fails + "\n")
        if distribution:
            known = PACKAGES[name].distribution
            info = tmp_path / f"{known.replace('-', '_')}-3.0.0.dist-info"
            info.mkdir()
            (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {known}\nVersion: 3.0.0\n")

    def forget() -> None:
        for loaded in [name for name in sys.modules if name.split(".")[0] in ("flash_attn", "flash_attn_interface")]:
            del sys.modules[loaded]

    forget()
    monkeypatch.setitem(sys.modules, "kernels", None)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield put
    forget()


@pytest.mark.parametrize("name", PACKAGES)
@pytest.mark.parametrize(
    ("fails", "says"),
    [
        (SYMBOL, "ImportError: _C.abi3.so: undefined symbol: _ZN3c104cuda; install a build for this torch and CUDA"),
        (LIBRARY, "OSError: libcudart.so.12: cannot open shared object file; install a build for"),
        (NO_CUTLASS, "No module named 'cutlass_of_a_pth_file'; install what has cutlass_of_a_pth_file"),
    ],
)
def test_a_broken_package_is_an_error_that_says_why(name, fails, says, package):
    package(name, fails)
    with pytest.raises(ImportError, match="package is installed, but cannot be imported: ") as error:
        get_kernel(name, CUDA)
    assert says in str(error.value)
    assert not isinstance(error.value, MissingPackageError)


def test_auto_says_what_is_broken_and_takes_the_next(package):
    package("flash_attn_3", SYMBOL)
    kernel, passed_over = choose_kernel(CUDA)
    assert kernel.name == "torch_varlen"
    assert "installed, but cannot be imported: ImportError: _C.abi3.so" in passed_over["flash_attn_3"]
    assert "needs the flash-attn-4 package" in passed_over["flash_attn_4"]


def test_the_hub_does_not_take_the_place_of_what_is_broken(package, monkeypatch):
    package("flash_attn_3", SYMBOL)
    hub = SimpleNamespace(get_kernel=lambda *_, **__: pytest.fail("the hub was asked"))
    monkeypatch.setitem(sys.modules, "kernels", hub)
    with pytest.raises(ImportError, match="undefined symbol"):
        get_kernel("flash_attn_3", CUDA)


def test_a_broken_hub_package_is_not_taken_for_none(package, monkeypatch, tmp_path):
    monkeypatch.delitem(sys.modules, "kernels")
    (tmp_path / "kernels.py").write_text("import library_of_the_hub\n")
    with pytest.raises(ModuleNotFoundError, match="library_of_the_hub"):
        get_kernel("flash_attn_3", CUDA)


@pytest.mark.parametrize("fails", [SYMBOL, NO_CUTLASS])
def test_what_pip_does_not_know_is_missing_and_says_why_too(fails, package):
    """As the folder of FlashAttention-4 that comes with flash-attn."""
    package("flash_attn_4", fails, distribution=False)
    with pytest.raises(MissingPackageError, match=r"needs the flash-attn-4 package: .*\(\w*Error: "):
        get_kernel("flash_attn_4", CUDA)
