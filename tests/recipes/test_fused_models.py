"""Fused models of transformers: compiled from the original checkpoint, loaded, run, and saved back.

What is loaded has the bits of the model of `from_pretrained` fused in memory, and so have its outputs. Those of the model
as it was are within what sums in another order may differ by (a product of another size is summed in other blocks).
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from builders import TINY_DECODER
from safetensors import safe_open
from safetensors.torch import load_file
from saving import check_restores, files_in

from loadplan.compiler.pipeline import compile_plan
from loadplan.compiler.target import Target
from loadplan.runtime.build_model import build_model
from loadplan.runtime.fusion import fuse_modules
from loadplan.runtime.load import load_into, load_state_dict
from loadplan.runtime.open_plan import Plan
from loadplan.runtime.save import SaveError, save_checkpoint

transformers = pytest.importorskip("transformers")

_ENCODER = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}
_VISION = {"depth": 1, "embed_dim": 32, "hidden_size": 32, "num_heads": 2, "patch_size": 4, "intermediate_size": 40}
_ROPE = {"rope_type": "default", "mrope_section": [1, 1, 2]}
_RESNET = {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 2]}


@dataclass(frozen=True)
class Case:
    """A tiny model, and the fusions that apply to it."""

    model_class: str
    fusions: tuple[str, ...]
    fused: int  # modules
    config: Mapping[str, Any] = field(default_factory=dict)
    vision: Mapping[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        return f"{self.model_class}-{'+'.join(self.fusions)}"


DECODER = {**TINY_DECODER, "num_key_value_heads": 2}
CASES = [
    Case("LlamaForCausalLM", ("qkv", "gate_up"), 4, DECODER),
    Case("Qwen2ForCausalLM", ("qkv", "gate_up"), 4, DECODER),
    Case(
        "Qwen3MoeForCausalLM",
        ("qkv",),
        2,
        {**DECODER, "moe_intermediate_size": 16, "num_experts": 4, "num_experts_per_tok": 2, "head_dim": 8},
    ),
    Case("BertForMaskedLM", ("qkv",), 2, {**_ENCODER, "vocab_size": 60}),
    Case("AlbertForMaskedLM", ("qkv",), 1, {**_ENCODER, "vocab_size": 60, "embedding_size": 16}),
    Case(
        "ViTForImageClassification",
        ("qkv", "patch_embeddings_2d"),
        3,
        {**_ENCODER, "image_size": 16, "patch_size": 8},
    ),
    Case("Qwen2VLForConditionalGeneration", ("patch_embeddings", "qkv"), 3, vision=_VISION),
    Case(
        "Qwen2_5_VLForConditionalGeneration",
        ("patch_embeddings", "gate_up"),
        4,
        vision={**_VISION, "out_hidden_size": 32, "fullatt_block_indexes": [0]},
    ),
    Case(
        "Qwen3VLForConditionalGeneration",
        ("patch_embeddings", "qkv", "gate_up"),
        5,
        vision={**_VISION, "out_hidden_size": 32, "deepstack_visual_indexes": [0], "num_position_embeddings": 16},
    ),
    Case(
        "Glm4vForConditionalGeneration",
        ("patch_embeddings",),
        1,
        vision={**_VISION, "out_hidden_size": 32},
    ),
    Case("ResNetForImageClassification", ("conv_bn",), 11, _RESNET),
]


def build(case: Case) -> Any:
    """The model with random weights and statistics, always the same."""
    model_class = getattr(transformers, case.model_class)
    config: dict[str, Any] = dict(case.config)
    if case.vision:
        text = {**DECODER, "rope_parameters": _ROPE, "head_dim": 8, "vocab_size": 120}
        ids = {"image_token_id": 100, "video_token_id": 101, "vision_start_token_id": 102, "vision_end_token_id": 103}
        config = {"text_config": text, "vision_config": dict(case.vision), **ids}
    torch.manual_seed(1)
    model = model_class(model_class.config_class(**config)).eval()
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for name, tensor in sorted(model.state_dict(keep_vars=True).items()):
            if tensor.is_floating_point():
                noise = torch.rand(tensor.shape, generator=generator) - (0 if name.endswith("running_var") else 0.5)
                tensor.copy_(noise * (0.2 if tensor.ndim > 1 else 1) + (0.5 if name.endswith("running_var") else 0))
    return model


def save(case: Case, folder: Path) -> Path:
    """The model's checkpoint: weights and config."""
    build(case).save_pretrained(folder)
    (folder / "generation_config.json").unlink(missing_ok=True)
    return folder


def outputs(model: Any, case: Case) -> list[torch.Tensor]:
    """The model's outputs on fixed inputs: text, an image, or both."""
    generator = torch.Generator().manual_seed(3)
    text = {"input_ids": torch.arange(1, 9)[None]}
    with torch.no_grad():
        if case.vision:
            grid = torch.tensor([[1, 4, 4]])
            size = 3 * case.vision["patch_size"] ** 2 * model.config.vision_config.temporal_patch_size
            pixels = torch.randn(16, size, generator=generator)
            seen = model.model.visual(pixels.to(model.dtype), grid)
            found = seen if isinstance(seen, torch.Tensor) else next(iter(seen.values()))
            return [found, model(**text).logits]
        if case.model_class in ("ViTForImageClassification", "ResNetForImageClassification"):
            return [model(torch.randn(2, 3, 16, 16, generator=generator).to(model.dtype)).logits]
        return [model(**text).logits]


def fused_model(plan: Plan, folder: Path) -> Any:
    model = build_model(json.loads((folder / "config.json").read_text()))
    fuse_modules(model, plan.head.fusions)
    return load_into(model, plan, folder).eval()


@pytest.mark.parametrize("case", CASES, ids=str)
def test_compile_load_run_and_save(case: Case, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    original, back = tmp_path / "original", tmp_path / "back"
    save(case, original)
    plan = compile_plan(original, target=Target(fusions=dict.fromkeys(case.fusions, True)))
    assert len(plan.head.fusions) == case.fused
    assert {one.family for one in plan.head.fusions} == set(case.fusions)
    assert plan.report.unused == () and plan.report.missing == ()
    noted = [note for note in plan.report.notes if note.startswith("fused by")]
    assert len(noted) == len(case.fusions)

    model = fused_model(plan, original)
    wanted = getattr(transformers, case.model_class).from_pretrained(original).eval()
    rights = outputs(wanted, case)
    for found, right in zip(outputs(model, case), rights, strict=True):
        assert right.isfinite().all() and right.std() > 0
        assert torch.allclose(found, right, rtol=1e-4, atol=1e-5)
    fuse_modules(wanted, plan.head.fusions)  # by torch on whole tensors, in the model: the same bits
    state = wanted.state_dict()
    assert state.keys() == model.state_dict().keys()
    assert all(torch.equal(tensor, state[name]) for name, tensor in model.state_dict().items())
    for found, right in zip(outputs(model, case), outputs(wanted, case), strict=True):
        assert torch.equal(found, right)

    with caplog.at_level(logging.WARNING):
        save_checkpoint(model, plan, back)
    if "conv_bn" not in case.fusions:
        assert files_in(back) == files_in(original)
        assert not [record for record in caplog.records if record.name.startswith("loadplan")]
        return
    assert f"{case.fused} batch normalisations were folded" in caplog.text
    assert headers(back) == headers(original)
    again = getattr(transformers, case.model_class).from_pretrained(back).eval()
    assert torch.allclose(outputs(again, case)[0], outputs(model, case)[0], rtol=1e-5, atol=1e-6)


def headers(folder: Path) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Name, dtype and shape of all tensors, in the order of the file."""
    with safe_open(folder / "model.safetensors", "pt") as file:
        slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118 - no mapping
        return {name: (found.get_dtype(), tuple(found.get_shape())) for name, found in slices.items()}


def test_folded_norms_of_detr(tmp_path: Path) -> None:
    """Frozen normalisations, which are buffers only; queries, keys and values beside them."""
    inner = transformers.ResNetConfig(**_RESNET, out_features=["stage2"])
    sizes = {"d_model": 16, "encoder_layers": 1, "decoder_layers": 1, "encoder_ffn_dim": 16, "decoder_ffn_dim": 16}
    heads = {"encoder_attention_heads": 2, "decoder_attention_heads": 2, "num_queries": 4}
    config = transformers.DetrConfig(
        use_timm_backbone=False, backbone=None, backbone_config=inner, use_pretrained_backbone=False, **sizes, **heads
    )
    torch.manual_seed(1)
    model = transformers.DetrForObjectDetection(config).eval()
    with torch.no_grad():
        for name, buffer in model.named_buffers():
            if "running" in name or name.endswith("normalization.bias"):
                buffer.copy_(torch.rand_like(buffer) + 0.5)
    original = tmp_path / "original"
    model.save_pretrained(original)
    plan = compile_plan(original, target=Target(fusions={"conv_bn": True, "qkv": True}))
    fused = fused_model(plan, original)
    assert {one.family for one in plan.head.fusions} == {"conv_bn", "qkv"}
    pixels = torch.randn(1, 3, 32, 32, generator=torch.Generator().manual_seed(3))
    with torch.no_grad():
        found, right = fused(pixels), transformers.DetrForObjectDetection.from_pretrained(original).eval()(pixels)
    assert torch.allclose(found.logits, right.logits, rtol=1e-4, atol=1e-5)
    assert torch.allclose(found.pred_boxes, right.pred_boxes, rtol=1e-4, atol=1e-5)
    save_checkpoint(fused, plan, tmp_path / "back")
    assert headers(tmp_path / "back") == headers(original)


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    return save(CASES[0], tmp_path / "llama")


def test_ranks_hold_their_own_heads(llama: Path, tmp_path: Path) -> None:
    """Each rank's fused matrix is its queries, its keys, its values; saved from all ranks, the files are the same."""
    plan = compile_plan(llama, target=Target(fusions={"qkv": True, "gate_up": True}, tp_size=2))
    stored = load_file(llama / "model.safetensors")
    for rank in range(2):
        loaded = load_state_dict(plan, llama, rank)
        for layer in range(2):
            front = f"model.layers.{layer}"
            for target, parts in (
                ("self_attn.qkv_proj", ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")),
                ("mlp.gate_up_proj", ("mlp.gate_proj", "mlp.up_proj")),
            ):
                own = [stored[f"{front}.{part}.weight"].chunk(2)[rank] for part in parts]
                assert torch.equal(loaded[f"{front}.{target}.weight"], torch.cat(own))
    check_restores(plan, llama, tmp_path / "back")


def test_the_fused_layout_on_request(llama: Path, tmp_path: Path) -> None:
    plan = compile_plan(llama, target=Target(fusions={"qkv": True}))
    model = fused_model(plan, llama)
    save_checkpoint(model, plan, tmp_path / "fused", original_format=False)
    saved = load_file(tmp_path / "fused" / "model.safetensors")
    assert "model.layers.0.self_attn.qkv_proj.weight" in saved
    assert not any("q_proj" in name for name in saved if "qkv_proj" not in name)
    assert all(torch.equal(tensor, model.state_dict()[name]) for name, tensor in saved.items())


def test_a_model_that_is_not_fused_is_not_saved_by_a_plan_that_is(llama: Path, tmp_path: Path) -> None:
    plan = compile_plan(llama, target=Target(fusions={"qkv": True}))
    model = transformers.LlamaForCausalLM.from_pretrained(llama)
    with pytest.raises(SaveError, match=r"model\.layers\.0\.self_attn\.qkv_proj\.weight is missing"):
        save_checkpoint(model, plan, tmp_path / "back")


def test_what_the_config_asks_for_unless_the_target_says_otherwise(llama: Path) -> None:
    config = json.loads((llama / "config.json").read_text())
    (llama / "config.json").write_text(json.dumps({**config, "fusion_config": {"qkv": True}}))
    plan = compile_plan(llama)
    assert [one.family for one in plan.head.fusions] == ["qkv", "qkv"]
    assert "fused by qkv, as config.json asks: 2 modules" in plan.report.notes
    other = compile_plan(llama, target=Target(fusions={"gate_up": True}))
    assert [one.family for one in other.head.fusions] == ["gate_up", "gate_up"]
    assert "fused by gate_up, as the target asks: 2 modules" in other.report.notes
    by_names = compile_plan(llama, signature="recipe")
    assert by_names.head.fusions == () and by_names.report.notes[-1].startswith(
        "nothing is fused, though config.json asks"
    )
    for nothing in ({}, {"qkv": False}):
        none = compile_plan(llama, target=Target(fusions=nothing))
        assert none.head.fusions == () and not any("fused" in note for note in none.report.notes)
        assert none.digest != plan.digest


def test_a_model_on_the_meta_device_or_off_it_as_signature(llama: Path) -> None:
    by_config = compile_plan(llama, target=Target(fusions={"qkv": True}))
    loaded = transformers.LlamaForCausalLM.from_pretrained(llama)
    before = {name: tensor.clone() for name, tensor in loaded.state_dict().items()}
    with torch.device("meta"):
        empty = transformers.LlamaForCausalLM(loaded.config)
    for module in (loaded, empty):
        plan = compile_plan(llama, signature=module, target=Target(fusions={"qkv": True}))
        assert plan.head.tensors == by_config.head.tensors and plan.head.fusions == by_config.head.fusions
        assert "qkv_proj" not in str(module)
    assert all(torch.equal(tensor, before[name]) for name, tensor in loaded.state_dict().items())
