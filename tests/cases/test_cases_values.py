"""Cases whose fault is a wrong value without a word: ties, empty slots, overflow, bytes taken for numbers, files.

The other side is literal tensors, made here. B-numbers are the cases' own.
"""

from __future__ import annotations

from itertools import permutations
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import save_file
from torch import nn

from loadplan.compiler import CompileError, Signature, Target, compile_plan, convert
from loadplan.compiler.ops import Concatenate, MergeModulelist
from loadplan.recipes import Recipe, Shard, WeightConverter, WeightRenaming
from loadplan.runtime import CastOverflow, TieConflict, load_into, load_state_dict, save_checkpoint

NAMES = ("shared", "enc.emb", "dec.emb", "head")


def _save(folder: Path, tensors: dict[str, torch.Tensor], name: str = "model.safetensors") -> Path:
    folder.mkdir(exist_ok=True, parents=True)
    save_file(tensors, folder / name)
    return folder


def _tied(order: tuple[str, ...]) -> Signature:
    return Signature.of(dict.fromkeys(order, ((3, 2), "F32")), [order])


@pytest.mark.parametrize("order", list(permutations(NAMES)))
def test_b25_no_name_takes_one_of_two_different_tensors(order: tuple[str, ...], tmp_path: Path) -> None:
    stored = {"dec.emb": torch.full((3, 2), 250.0), "head": torch.full((3, 2), 2.0)}
    plan = compile_plan(_save(tmp_path, stored), signature=_tied(order))
    with pytest.raises(TieConflict, match=r"enc\.emb, shared should be tied to"):
        load_state_dict(plan, tmp_path)
    with pytest.raises(TieConflict):
        load_state_dict(convert(plan, tmp_path, tmp_path / "converted"))


@pytest.mark.parametrize("order", [NAMES, NAMES[::-1]])
def test_b25_equal_tensors_tie_all_names_and_a_choice_decides(order: tuple[str, ...], tmp_path: Path) -> None:
    equal = {name: torch.full((3, 2), 7.0) for name in ("dec.emb", "head")}
    plan = compile_plan(_save(tmp_path / "equal", equal), signature=_tied(order))
    loaded = load_state_dict(plan, tmp_path / "equal")
    assert {id(loaded[name]) for name in NAMES} == {id(loaded["shared"])}

    different = {"dec.emb": torch.full((3, 2), 250.0), "head": torch.full((3, 2), 2.0)}
    signature = Signature.of(dict.fromkeys(NAMES, ((3, 2), "F32")), [("shared", "enc.emb", "dec.emb")])
    loaded = load_state_dict(
        compile_plan(_save(tmp_path / "untied", different), signature=signature), tmp_path / "untied"
    )
    assert [loaded[name][0, 0].item() for name in NAMES] == [250.0, 250.0, 250.0, 2.0]


def test_b27_a_tie_flag_in_a_nested_config_counts(tmp_path: Path) -> None:
    text = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1}
    text |= {"intermediate_size": 48, "vocab_size": 64, "head_dim": 16}
    vision = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 48}
    vision |= {"image_size": 28, "patch_size": 14}
    config = {
        "architectures": ["Gemma3ForConditionalGeneration"],
        "model_type": "gemma3",
        "text_config": text,
        "vision_config": vision,
        "mm_tokens_per_image": 4,
    }
    signature = Signature.from_config(config)
    assert ("lm_head.weight", "model.language_model.embed_tokens.weight") in {
        tuple(sorted(group)) for group in signature.ties
    }


@pytest.mark.parametrize("stored", [torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("value", [1e5, -7e4])
def test_b34_a_cast_that_overflows_names_the_tensor(stored: torch.dtype, value: float, tmp_path: Path) -> None:
    weights = torch.ones(40, 3, dtype=stored)
    weights[31, 2] = value
    _save(tmp_path, {"fine": torch.ones(2, dtype=stored), "large": weights})
    plan = compile_plan(tmp_path, target=Target(dtype="float16"))
    with pytest.raises(CastOverflow, match=r"large: 1 finite values .* too large for torch\.float16"):
        load_state_dict(plan, tmp_path)
    with pytest.raises(CastOverflow, match="large"):
        convert(plan, tmp_path, tmp_path / "converted")
    assert not (tmp_path / "converted").exists()
    kept = compile_plan(tmp_path, target=Target(dtype="float16", dtype_plan={"large": stored}))
    assert torch.equal(load_state_dict(kept, tmp_path)["large"], weights)


def test_b34_infinities_and_nan_that_were_stored_stay(tmp_path: Path) -> None:
    special = torch.tensor([float("inf"), float("-inf"), float("nan"), 65504.0, 1e-8])
    _save(tmp_path, {"w": special})
    loaded = load_state_dict(compile_plan(tmp_path, target=Target(dtype="float16")), tmp_path)
    assert torch.equal(loaded["w"].view(torch.int16), special.half().view(torch.int16))


def test_b34_saving_back_into_a_smaller_dtype_overflows_loudly(tmp_path: Path) -> None:
    _save(tmp_path, {"w": torch.ones(4, dtype=torch.float16)})
    plan = compile_plan(tmp_path, target=Target(dtype="bfloat16"))
    state = load_state_dict(plan, tmp_path)
    state["w"][2] = 1e6
    with pytest.raises(CastOverflow, match="w: 1 finite values"):
        save_checkpoint(state, plan, tmp_path / "saved")
    assert not any((tmp_path / "saved").glob("*")) if (tmp_path / "saved").exists() else True


@pytest.mark.parametrize("wanted", ["U8", "I8", "F32", "BF16", "F8_E4M3"])
def test_b35_scales_are_not_cast_by_value(wanted: str, tmp_path: Path) -> None:
    scales = torch.tensor([120, 125, 127, 130, 140], dtype=torch.uint8).view(torch.float8_e8m0fnu)
    _save(tmp_path, {"scale": scales})
    with pytest.raises(CompileError) as caught:
        compile_plan(tmp_path, signature={"scale": ((5,), wanted)})
    (problem,) = caught.value.problems
    assert (problem.kind, problem.names[0]) == ("dtype", "scale")
    loaded = load_state_dict(compile_plan(tmp_path, signature={"scale": ((5,), "F8_E8M0")}), tmp_path)
    assert torch.equal(loaded["scale"].view(torch.uint8), scales.view(torch.uint8))


def test_b20_parts_of_one_target_lie_in_different_files(tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(0)
    gate, up = ([torch.randn(2, 3, generator=generator) for _ in range(2)] for _ in range(2))
    parts = {f"e.{i}.{name}": t for name, found in (("gate", gate), ("up", up)) for i, t in enumerate(found)}
    recipe = Recipe([WeightConverter(["e.*.gate", "e.*.up"], "experts", [MergeModulelist(0), Concatenate(1)])])
    wanted = torch.cat([torch.stack(gate), torch.stack(up)], 1)
    for names in (("e.0.gate", "e.1.up"), ("e.1.gate", "e.1.up"), ("e.0.up",)):
        folder = tmp_path / "_".join(names)
        _save(folder, {name: parts[name] for name in names}, "model-00001-of-00002.safetensors")
        _save(folder, {n: t for n, t in parts.items() if n not in names}, "model-00002-of-00002.safetensors")
        for dtype in (None, torch.bfloat16):
            plan = compile_plan(folder, recipe, target=Target(dtype=dtype))
            assert torch.equal(load_state_dict(plan, folder)["experts"], wanted.to(dtype or torch.float32))


def test_b22_packed_experts_are_cut_by_a_declared_shard_or_refused(tmp_path: Path) -> None:
    _save(tmp_path, {"experts": torch.arange(24.0).view(4, 2, 3), "scale": torch.arange(4.0)})
    with pytest.raises(CompileError, match="ep_size=2: this version compiles for tensor parallelism only"):
        Target(ep_size=2)
    by_expert = Shard(-3)
    recipe = Recipe(tp_plan={"experts": by_expert, "scale": Shard(-1, one_dim=True)})
    plan = compile_plan(tmp_path, recipe, target=Target(tp_size=2))
    for rank in range(2):
        loaded = load_state_dict(plan, tmp_path, rank)
        assert torch.equal(loaded["experts"], torch.arange(24.0).view(4, 2, 3)[2 * rank : 2 * rank + 2])
        assert torch.equal(loaded["scale"], torch.arange(4.0)[2 * rank : 2 * rank + 2])
    _save(tmp_path / "odd", {"experts": torch.zeros(5, 2, 3)})
    with pytest.raises(CompileError, match=r"5 positions on dim 0 of .* do not divide by 2 ranks"):
        compile_plan(tmp_path / "odd", Recipe(tp_plan={"experts": by_expert}), target=Target(tp_size=2))


def test_b30_every_entry_converts(tmp_path: Path) -> None:
    config = transformers.MixtralConfig(
        hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1,
        num_local_experts=3, vocab_size=32,
    )  # fmt: skip
    torch.manual_seed(0)
    model = transformers.MixtralForCausalLM(config)
    wanted = model.state_dict()
    first = tmp_path / "first"
    model.save_pretrained(first)  # per expert
    plan = compile_plan(first)
    again = tmp_path / "again"
    save_checkpoint(load_state_dict(plan, first), plan, again)
    for folder in (first, again):
        plan = compile_plan(folder)
        with torch.device("meta"):
            empty = transformers.MixtralForCausalLM(config)
        entries = [
            load_state_dict(plan, folder),
            load_state_dict(convert(plan, folder, tmp_path / f"{folder.name}-converted")),
            load_into(transformers.MixtralForCausalLM(config), plan, folder).state_dict(),
            load_into(empty, plan, folder).state_dict(),
        ]
        for loaded in entries:
            assert loaded.keys() == wanted.keys()
            assert all(torch.equal(loaded[name], value) for name, value in wanted.items())


class Slots(nn.Module):
    """A bias that is None, as `nn.Linear(bias=False)` has it, and a buffer that is None."""

    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(2, 2, bias=False)
        self.register_buffer("gone", None)


@pytest.mark.parametrize("extra", ["lin.bias", "gone"])
def test_b31_an_empty_slot_takes_nothing(extra: str, tmp_path: Path) -> None:
    _save(tmp_path / "with", {"lin.weight": torch.ones(2, 2), extra: torch.ones(2)})
    with pytest.raises(CompileError, match=f"unexpected: the model has no {extra}"):
        compile_plan(tmp_path / "with", signature=Slots())
    _save(tmp_path / "without", {"lin.weight": torch.ones(2, 2)})
    module = load_into(Slots(), compile_plan(tmp_path / "without", signature=Slots()), tmp_path / "without")
    assert module.get_submodule("lin").bias is None
    assert torch.equal(module.state_dict()["lin.weight"], torch.ones(2, 2))


def test_spec_9_1_3_the_exact_name_comes_before_a_prefix(tmp_path: Path) -> None:
    """Head and base own the same relative name: transformers swaps the two."""
    _save(tmp_path, {"norm.weight": torch.ones(2), "model.norm.weight": torch.full((2,), 2.0)})
    kinds = {"norm.weight": ((2,), "F32"), "model.norm.weight": ((2,), "F32")}
    signature = Signature(Signature.of(kinds).tensors, base_model_prefix="model")
    loaded = load_state_dict(compile_plan(tmp_path, signature=signature), tmp_path)
    assert [loaded[name][0].item() for name in kinds] == [1.0, 2.0]


@pytest.mark.parametrize("wrapped", [False, True])
def test_spec_9_1_18_a_rename_that_is_taken_back_is_not_a_use(wrapped: bool, tmp_path: Path) -> None:
    """The model knows the stored name and not the new one: the rule does nothing, and the report must not say it did."""
    front = "outer." if wrapped else ""
    _save(tmp_path, {f"{front}text.lin": torch.ones(1), f"{front}text.other": torch.ones(1)})
    wanted = {f"{front}text.lin": ((1,), "F32"), f"{front}new.other": ((1,), "F32")}
    report = compile_plan(tmp_path, Recipe([WeightRenaming("text.", "new.")]), wanted).report
    assert [uses for _, uses in report.rules] == [1]
    assert [text.partition(":")[0] for text in report.kept] == [f"{front}text.lin"]


def test_spec_9_1_17_a_rule_that_matches_nothing_is_in_the_report(tmp_path: Path) -> None:
    _save(tmp_path, {"a.w": torch.ones(1)})
    recipe = Recipe([WeightRenaming("nothing.", "something."), WeightRenaming("a.", "b.")])
    assert [uses for _, uses in compile_plan(tmp_path, recipe).report.rules] == [0, 1]
