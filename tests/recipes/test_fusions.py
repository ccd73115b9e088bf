"""The rules of the built-in fusions, compiled and executed, against the fusions that torch makes of the live weights."""

from __future__ import annotations

from pathlib import Path
from typing import cast

import pytest
import torch
from fusable import FUSABLE
from safetensors.torch import save_file
from torch import nn

from loadplan.compiler import CompileError, Signature, compile_plan
from loadplan.compiler.rules import Rule
from loadplan.recipes import Recipe, find_fusion, register_fusion, unregister_fusion
from loadplan.recipes.fusions import FAMILIES
from loadplan.runtime import FusionError, find_fusions, fuse_modules, load_state_dict
from loadplan.runtime.fusion import fusion_rules
from loadplan.runtime.plan import FusedModule

_RULES = {name: case for name, case in FUSABLE.items() if set(case.fusions) & set(FAMILIES)}


def rules_of(fused: FusedModule) -> tuple[Rule, ...]:
    return cast("tuple[Rule, ...]", fusion_rules(fused))


@pytest.mark.parametrize("name", sorted(_RULES))
def test_rules_make_the_fused_weights(name: str, tmp_path: Path) -> None:
    """Of each fused module, its own weights stored apart: what the plan loads is what the live module was given."""
    case = _RULES[name]
    model = case.build()
    fusions = [one for one in find_fusions(model, case.fusion_config) if one.family in FAMILIES]
    stored = {fused.path: model.get_submodule(fused.path).state_dict() for fused in fusions}
    fuse_modules(model, fusions)
    for number, fused in enumerate(fusions):
        folder = tmp_path / str(number)
        folder.mkdir()
        save_file({key: value.contiguous() for key, value in stored[fused.path].items()}, folder / "model.safetensors")
        module = model.get_submodule(fused.path)
        plan = compile_plan(folder, recipe=Recipe(rules=rules_of(fused)), signature=Signature.from_module(module))
        loaded, wanted = load_state_dict(plan, folder), module.state_dict()
        assert loaded.keys() == wanted.keys() != stored[fused.path].keys()
        for key, value in wanted.items():
            assert torch.equal(loaded[key], value), (fused, key)


def test_names_are_taken_whole(tmp_path: Path) -> None:
    """`q_proj` is the module's own child: neither `my_q_proj` nor one further down."""
    save_file(
        {f"{front}{part}_proj.weight": torch.rand(2, 2) for front in ("", "my_", "inner.") for part in "qkv"},
        tmp_path / "model.safetensors",
    )
    rules = rules_of(FusedModule("", "qkv", '{"bias":false,"parts":["q_proj","k_proj","v_proj"]}'))
    plan = compile_plan(tmp_path, recipe=Recipe(rules=rules))
    names = {f"{front}{part}_proj.weight" for front in ("my_", "inner.") for part in "qkv"}
    assert load_state_dict(plan, tmp_path).keys() == {*names, "qkv_proj.weight"}


def test_a_part_that_is_missing_is_refused(tmp_path: Path) -> None:
    save_file({f"{part}_proj.weight": torch.rand(2, 2) for part in "qk"}, tmp_path / "model.safetensors")
    rules = rules_of(FusedModule("", "qkv", '{"bias":false,"parts":["q_proj","k_proj","v_proj"]}'))
    with pytest.raises(CompileError, match=r"v_proj"):
        compile_plan(tmp_path, recipe=Recipe(rules=rules), signature=Signature.of({"qkv_proj.weight": ((6, 2), "F32")}))


@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("qkv", '{"bias":false,"parts":["q","k"],"eps":"1"}'),
        ("patch_embeddings", '{"child":"proj"}'),
        ("gate_up", '{"parts":["gate_proj","up_proj"]}'),
    ],
)
def test_options_of_another_family_are_refused(family: str, options: str) -> None:
    with pytest.raises(FusionError, match=f"fusion '{family}' of 'a.b' cannot use"):
        fusion_rules(FusedModule("a.b", family, options))


def test_a_registered_family_brings_its_own_rules() -> None:
    """Under the name of a built-in one, too: its rules are never taken for another's."""

    class Mine:
        def is_fusable(self, module: nn.Module) -> bool:
            return False

        def make_fused_class(self, original_cls: type[nn.Module]) -> type[nn.Module]:
            return original_cls

    register_fusion("qkv", Mine(), overwrite=True)
    try:
        assert isinstance(find_fusion("qkv"), Mine)
        with pytest.raises(FusionError, match="'qkv' has no make_transforms"):
            fusion_rules(FusedModule("a", "qkv", '{"bias":false,"parts":["q_proj"]}'))
    finally:
        unregister_fusion("qkv")
    assert len(fusion_rules(FusedModule("a", "qkv", '{"bias":true,"parts":["q_proj"]}'))) == 2
