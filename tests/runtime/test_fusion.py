"""Finding and making fused modules: names, options, conflicts, and what is left when something goes wrong."""

from __future__ import annotations

import copy
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from fusable import FUSABLE
from torch import nn

from loadplan.runtime import (
    FusionError,
    find_fusion,
    find_fusions,
    fuse_modules,
    register_fusion,
    unregister_fusion,
)
from loadplan.runtime.fusion import FusionRequest, fusion_rules, known_fusions, parse_fusion_config
from loadplan.runtime.plan import FusedModule

_QKV = '{"bias":false,"parts":["q_proj","k_proj","v_proj"]}'
_BUILT_IN = ["conv_bn", "gate_up", "patch_embeddings", "patch_embeddings_2d", "qkv"]


class Attention(nn.Module):
    def __init__(self, size: int = 4) -> None:
        super().__init__()
        self.q_proj = nn.Linear(size, size, bias=False)
        self.k_proj = nn.Linear(size, 2, bias=False)
        self.v_proj = nn.Linear(size, 2, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([self.q_proj(x), self.k_proj(x), self.v_proj(x)], -1)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attn = Attention()
        self.cross = Attention()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.attn(x) + self.cross(x)  # type: ignore[no-any-return]


class Scaled(nn.Module):
    """What `Scale` makes of a module: one more parameter, and no other."""

    def fuse_(self) -> None:
        self.register_parameter("scale", nn.Parameter(torch.ones(1)))


class Scale:
    """The smallest family: everything the protocol asks for and no more."""

    def __init__(self, wanted: type[nn.Module] = Attention) -> None:
        self.wanted = wanted

    def is_fusable(self, module: nn.Module) -> bool:
        return type(module) is self.wanted

    def make_fused_class(self, original_cls: type[nn.Module]) -> type[nn.Module]:
        return type("Scaled", (Scaled, original_cls), {})


class Failing(Scale):
    """Fails when the second module is fused, after it has changed it."""

    def __init__(self) -> None:
        super().__init__()
        self.made = 0

    def make_fused_class(self, original_cls: type[nn.Module]) -> type[nn.Module]:
        def fuse_(module: nn.Module) -> None:
            self.made += 1
            del module.q_proj
            module.register_buffer("extra", torch.zeros(1), persistent=False)
            module.k_proj.bias = nn.Parameter(torch.zeros(2))  # type: ignore[union-attr]
            module.note = "changed"  # type: ignore[assignment]
            if self.made == 2:
                raise OSError("disk on fire")

        return type("Failing", (original_cls,), {"fuse_": fuse_})


@pytest.fixture(autouse=True)
def _nothing_stays_registered() -> Iterator[None]:
    yield
    for name in set(known_fusions()) - set(_BUILT_IN):
        unregister_fusion(name)
    assert known_fusions() == _BUILT_IN


def shape_of(model: nn.Module) -> list[object]:
    """Everything that fusing could change: classes, names, objects, in order."""
    return [
        (path, type(module), list(module.__dict__), *(list(module.__dict__[name].items()) for name in ("_parameters", "_buffers", "_modules")))
        for path, module in model.named_modules()
    ]  # fmt: skip


def test_the_built_in_families_are_found_by_name() -> None:
    assert known_fusions() == _BUILT_IN
    for name in _BUILT_IN:
        assert find_fusion(name) is find_fusion(name)


def test_unknown_names_are_answered_with_near_ones() -> None:
    with pytest.raises(FusionError, match=r"no fusion is known as 'patch_embedding'; near ones: patch_embeddings"):
        find_fusion("patch_embedding")
    with pytest.raises(FusionError, match=r"unknown fusion 'gateup'; near ones: gate_up"):
        parse_fusion_config({"gateup": False})
    with pytest.raises(FusionError, match=r"no fusion was registered as 'qkv'"):
        unregister_fusion("qkv")


def test_a_name_is_registered_once() -> None:
    family = Scale()
    register_fusion("scale", family)
    assert find_fusion("scale") is family
    with pytest.raises(FusionError, match="known as 'scale' already"):
        register_fusion("scale", Scale())
    with pytest.raises(FusionError, match="known as 'qkv' already"):
        register_fusion("qkv", family)
    other = Scale()
    register_fusion("scale", other, overwrite=True)
    assert find_fusion("scale") is other
    register_fusion("qkv", family, overwrite=True)
    assert find_fusion("qkv") is family
    unregister_fusion("qkv")
    assert find_fusion("qkv") is not family
    for wrong in (object(), None, SimpleNamespace(is_fusable=len)):
        with pytest.raises(FusionError, match="needs a name, and methods is_fusable and make_fused_class"):
            register_fusion("wrong", wrong)  # type: ignore[arg-type]


def test_a_configuration_is_parsed_by_name() -> None:
    assert parse_fusion_config({"qkv": True, "gate_up": False, "conv_bn": {"modules": r"\.0$"}}) == (
        FusionRequest("conv_bn", (r"\.0$",)),
        FusionRequest("qkv"),
    )
    assert parse_fusion_config({"qkv": {}}) == (FusionRequest("qkv"),)
    assert parse_fusion_config({}) == ()


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (["qkv"], "fusion_config is a mapping"),
        ({"qkv": None}, "is True, False or a mapping of options, not None"),
        ({"qkv": 1}, "is True, False or a mapping of options, not 1"),
        ({"qkv": {"module": "x"}}, "unknown option 'module'; near ones: modules"),
        ({"qkv": {"modules": 3}}, "is a regular expression or a list of them, not 3"),
        ({"qkv": {"modules": ["x", ""]}}, "is a regular expression or a list of them"),
        ({"qkv": {"modules": []}}, "is empty: leave it out"),
        ({"qkv": {"modules": "("}}, r"'\(' is not a regular expression"),
        ({3: True}, "unknown fusion 3"),
    ],
)
def test_what_a_configuration_may_not_say(wrong: object, message: str) -> None:
    with pytest.raises(FusionError, match=message):
        find_fusions(Block(), wrong)


def test_modules_are_found_in_the_order_of_their_paths_and_left_alone() -> None:
    model = Block()
    before = shape_of(model)
    assert find_fusions(model, {"qkv": True}) == (
        FusedModule("attn", "qkv", _QKV),
        FusedModule("cross", "qkv", _QKV),
    )
    assert [fused.path for fused in find_fusions(model, {"qkv": {"modules": ["^cross", "nowhere"]}})] == ["cross"]
    assert find_fusions(model, {"qkv": False}) == find_fusions(model, {}) == find_fusions(model) == ()
    assert shape_of(model) == before


def test_the_argument_comes_before_the_models_config() -> None:
    model = Block()
    model.config = SimpleNamespace(fusion_config={"qkv": {"modules": "cross"}})  # type: ignore[assignment]
    assert [fused.path for fused in find_fusions(model)] == ["cross"]
    assert find_fusions(model, {}) == ()
    assert [fused.path for fused in find_fusions(model, {"qkv": {"modules": "attn"}})] == ["attn"]


def test_discovery_looks_at_the_instance_not_at_its_class() -> None:
    model = Block()
    model.cross.k_proj = nn.Linear(4, 2, bias=True)
    assert [fused.path for fused in find_fusions(model, {"qkv": True})] == ["attn"]
    assert [fused.path for fused in find_fusions(Block(), {"qkv": True})] == ["attn", "cross"]


def test_a_fusion_that_finds_nothing_is_refused() -> None:
    with pytest.raises(
        FusionError, match=r"'gate_up' finds nothing to fuse in Block; it looks for child Linears gate_proj/up_proj or"
    ):
        find_fusions(Block(), {"gate_up": True})
    with pytest.raises(FusionError, match="'qkv' finds nothing to fuse in Block in modules 'mlp'"):
        find_fusions(Block(), {"qkv": {"modules": "mlp"}})


def test_two_fusions_of_one_module_are_refused() -> None:
    register_fusion("scale", Scale())
    with pytest.raises(FusionError, match="'qkv' and 'scale' both claim 'attn'"):
        find_fusions(Block(), {"qkv": True, "scale": True})
    model = Block()
    model.again = model.attn
    fusions = [FusedModule("attn", "qkv", _QKV), FusedModule("again", "scale")]
    with pytest.raises(FusionError, match="'attn' and 'again' are one module, claimed by 'qkv' and 'scale'"):
        fuse_modules(model, fusions)


def test_a_fusion_inside_what_another_takes_over_is_refused() -> None:
    register_fusion("whole", Scale(Block))  # it does not say what it replaces: all children
    with pytest.raises(FusionError, match="'whole' of '' takes over 'attn', which 'qkv' claims"):
        find_fusions(Block(), {"qkv": True, "whole": True})
    own = Scale(Block)
    own.replaces = lambda module: ["cross"]  # type: ignore[attr-defined]
    register_fusion("whole", own, overwrite=True)
    found = find_fusions(Block(), {"qkv": {"modules": "attn"}, "whole": True})
    assert [(fused.path, fused.family) for fused in found] == [("", "whole"), ("attn", "qkv")]


def test_tied_and_shared_weights_are_not_fused() -> None:
    model = Block()
    model.cross.q_proj.weight = model.attn.q_proj.weight
    with pytest.raises(FusionError, match=r"weight of attn.q_proj is tied to another"):
        find_fusions(model, {"qkv": True})
    model = Block()
    model.cross.q_proj = model.attn.q_proj
    with pytest.raises(FusionError, match=r"attn.q_proj is also elsewhere in the model"):
        fuse_modules(model, [FusedModule("attn", "qkv", _QKV)])


def test_a_module_at_two_paths_is_fused_once() -> None:
    model = Block()
    model.cross = model.attn
    x = torch.randn(3, 4)
    wanted = model(x)
    found = find_fusions(model, {"qkv": True})
    assert [fused.path for fused in found] == ["attn"]
    fuse_modules(model, found)
    assert model.cross is model.attn and type(model.cross).__name__ == "FusedAttention"
    torch.testing.assert_close(model(x), wanted)


def test_a_fused_module_is_a_subclass_and_others_stay_as_they_are() -> None:
    model, other = Block(), Block()
    before = shape_of(other)
    fuse_modules(model, [FusedModule("attn", "qkv", _QKV)])
    assert isinstance(model.attn, Attention) and type(model.attn) is not Attention
    assert type(model.cross) is Attention
    assert type(model.attn) is find_fusion("qkv").make_fused_class(Attention)
    assert list(model.state_dict()) == ["attn.qkv_proj.weight", *(f"cross.{p}_proj.weight" for p in "qkv")]
    assert shape_of(other) == before
    assert type(Block().attn) is Attention


def test_on_the_meta_device_fused_weights_are_shapes() -> None:
    with torch.device("meta"):
        model = Block().to(torch.bfloat16)
    model.attn.requires_grad_(False)
    fuse_modules(model, find_fusions(model, {"qkv": True}))
    weight, cross = model.attn.get_parameter("qkv_proj.weight"), model.cross.get_parameter("qkv_proj.weight")
    assert weight.is_meta and weight.dtype == torch.bfloat16 and weight.shape == (8, 4)
    assert (weight.requires_grad, cross.requires_grad) == (False, True)


@pytest.mark.parametrize("name", sorted(FUSABLE))
def test_the_meta_model_has_the_names_and_types_of_the_real_one(name: str) -> None:
    case = FUSABLE[name]
    real = case.build()
    with torch.device("meta"):
        meta = case.model().double()
    fusions = find_fusions(meta, case.fusion_config)
    assert fusions == find_fusions(real, case.fusion_config)
    for model in (meta, real):
        fuse_modules(model, fusions)
    assert [(n, t.shape, t.dtype) for n, t in meta.state_dict().items()] == [
        (n, t.shape, t.dtype) for n, t in real.state_dict().items()
    ]
    assert all(tensor.is_meta for tensor in meta.state_dict().values())


def test_an_error_leaves_the_whole_model_as_it_was() -> None:
    register_fusion("failing", Failing())
    model = Block()
    before, state = shape_of(model), copy.deepcopy(model.state_dict())
    with pytest.raises(OSError, match="disk on fire"):
        fuse_modules(model, [FusedModule("attn", "failing"), FusedModule("cross", "failing")])
    assert shape_of(model) == before
    for key, value in model.state_dict().items():
        assert torch.equal(value, state[key])
    model(torch.zeros(1, 4))


def test_modules_that_are_not_what_the_plan_says_are_refused() -> None:
    model = Block()
    before = shape_of(model)
    good = FusedModule("attn", "qkv", _QKV)
    for wrong, message in [
        (FusedModule("atn", "qkv", _QKV), r"Block has no module 'atn'; near ones: attn"),
        (FusedModule("attn.q_proj", "qkv", _QKV), r"cannot fuse 'attn.q_proj', a Linear; it looks for child Linears"),
        (FusedModule("attn", "qvk", _QKV), r"no fusion is known as 'qvk'; near ones: qkv"),
        (FusedModule("attn", "qkv", _QKV.replace("false", "true")), r"the plan is for .*true.*the module has .*false"),
        (good, r"'attn' and 'attn' are one module"),
    ]:
        with pytest.raises(FusionError, match=message):
            fuse_modules(model, [good, wrong])
        assert shape_of(model) == before
    fuse_modules(model, [good])
    with pytest.raises(FusionError, match="cannot fuse 'attn', a FusedAttention"):
        fuse_modules(model, [good])


def test_a_whole_model_with_recorders_is_not_fused() -> None:
    """transformers finds recorders by the text of the class: a fused one would record nothing, and say nothing."""
    model = FUSABLE["llama"].build()
    inner = model.get_submodule("model")
    register_fusion("whole", Scale(type(inner)))
    with pytest.raises(FusionError, match="claims 'model', a whole model with outputs to record"):
        find_fusions(model, {"whole": True})


def test_a_family_of_ones_own_is_complete_in_one_object() -> None:
    class Complete(Scale):
        target_modules_patterns = "^at"

        def describe(self, module: nn.Module) -> dict[str, object]:
            return {"rows": 4}

        def make_transforms(self, config: object, *, rows: int) -> list[object]:
            return [("rule", config, rows)]

    register_fusion("complete", Complete())
    model = Block()
    (fused,) = find_fusions(model, {"complete": True})
    assert fused == FusedModule("attn", "complete", '{"rows":4}')
    assert fusion_rules(fused, "config") == (("rule", "config", 4),)
    fuse_modules(model, [fused])
    assert isinstance(model.attn, Scaled)


@pytest.mark.parametrize("wrong", [nn.Linear, Attention])
def test_a_fused_class_is_a_subclass_that_fuses(wrong: type[nn.Module]) -> None:
    family = Scale()
    family.make_fused_class = lambda original_cls: wrong  # type: ignore[method-assign]
    register_fusion("wrong", family)
    model = Block()
    before = shape_of(model)
    with pytest.raises(FusionError, match=r"not a subclass of it with a fuse_\(\)"):
        fuse_modules(model, [FusedModule("cross", "qkv", _QKV), FusedModule("attn", "wrong")])
    assert shape_of(model) == before


_PACKAGE = """
from torch import nn
class Family:
    def is_fusable(self, module):
        return isinstance(module, nn.ReLU)
    def make_fused_class(self, original_cls):
        return type("FusedReLU", (original_cls,), {"fuse_": lambda self: None})
    def make_transforms(self, config):
        return [("a rule", config)]
FAMILIES = {NAME: Family()}
"""

_USE = """
from torch import nn
from loadplan.runtime import find_fusions, fuse_modules, FusionError
from loadplan.runtime.fusion import known_fusions, fusion_rules
try:
    print(known_fusions())
    model = nn.Sequential(nn.ReLU())
    found = find_fusions(model, {"theirs": True})
    fuse_modules(model, found)
    print(found[0].path, type(model[0]).__name__, fusion_rules(found[0], 7))
except FusionError as error:
    print(error)
"""


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("theirs", [str(sorted([*_BUILT_IN, "theirs"])), "0 FusedReLU (('a rule', 7),)"]),
        ("qkv", ["loadplan and their_package both have a fusion 'qkv'; remove one of them"]),
    ],
)
def test_families_of_installed_packages(name: str, said: list[str], tmp_path: Path) -> None:
    (tmp_path / "their_package.py").write_text(f"NAME = {name!r}\n{_PACKAGE}", encoding="utf-8")
    info = tmp_path / "their_package-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: their-package\nVersion: 1.0\n", encoding="utf-8")
    points = "[loadplan.fusions]\ntheir_package = their_package:FAMILIES\n"
    (info / "entry_points.txt").write_text(points, encoding="utf-8")
    found = subprocess.run(
        [sys.executable, "-c", _USE],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
    )
    assert found.stdout.splitlines() == said


@pytest.mark.parametrize(
    ("fused", "message"),
    [
        (FusedModule("a", "qkv", "{"), "options are not JSON"),
        (FusedModule("a", "qkv", "[]"), "options are not a JSON object"),
        (FusedModule("a", "qkv", "{}"), r"cannot use \{\}: .*missing 2 required"),
        (FusedModule("a", "qkv", '{"bias":true,"parts":[],"more":1}'), "unexpected keyword argument 'more'"),
        (FusedModule("a", "scale"), "'scale' has no make_transforms"),
    ],
)
def test_rules_that_cannot_be_made(fused: FusedModule, message: str) -> None:
    register_fusion("scale", Scale())
    with pytest.raises(FusionError, match=message):
        fusion_rules(fused)


def test_threads_that_build_and_run_see_nothing_of_a_fusion() -> None:
    """While one thread is in the midst of fusing, another builds, runs and fuses its own model."""
    inside, go_on = threading.Event(), threading.Event()

    class Waiting(Scale):
        def make_fused_class(self, original_cls: type[nn.Module]) -> type[nn.Module]:
            def fuse_(module: nn.Module) -> None:
                inside.set()
                assert go_on.wait(60)

            return type("Waiting", (original_cls,), {"fuse_": fuse_})

    register_fusion("waiting", Waiting())
    first = Block()
    worker = threading.Thread(target=fuse_modules, args=(first, [FusedModule("attn", "waiting")]))
    worker.start()
    assert inside.wait(60)
    try:
        second = Block()
        assert type(second.attn) is Attention
        x = torch.randn(2, 4)
        wanted = second(x)
        fuse_modules(second, find_fusions(second, {"qkv": True}))
        torch.testing.assert_close(second(x), wanted)
    finally:
        go_on.set()
        worker.join()
    assert type(first.attn).__name__ == "Waiting" and type(Block().attn) is Attention


def test_many_threads_register_and_find() -> None:
    start = threading.Barrier(8)
    found: list[bool] = []

    def work(number: int) -> None:
        family = Scale()
        start.wait(60)
        for turn in range(50):
            register_fusion(f"scale{number}.{turn}", family)
            found.append(find_fusion(f"scale{number}.{turn}") is family and "qkv" in known_fusions())
            unregister_fusion(f"scale{number}.{turn}")

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [True] * 400
