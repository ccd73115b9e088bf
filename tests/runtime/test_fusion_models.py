"""The built-in families on real models: the fused model computes what the original does, and holds only fused weights."""

from __future__ import annotations

import copy
import io
import pickle
from collections import Counter
from typing import Any

import pytest
import torch
from fusable import FUSABLE, Fusable, assert_same, fused, ids, pixels, tensors_of
from torch import nn
from transformers.fusion_mapping import PatchEmbeddingsFusionSpec

from loadplan.runtime import find_fusions

_CONVOLUTIONS = ("linear_patch_embedding", "linear_patch_embeddings")


@pytest.fixture(scope="module", params=sorted(FUSABLE))
def case(request: pytest.FixtureRequest) -> Fusable:
    return FUSABLE[request.param]


@pytest.fixture(scope="module")
def original(case: Fusable) -> nn.Module:
    return case.build()


def test_outputs_and_gradients_agree(case: Fusable, original: nn.Module) -> None:
    """With gradients: those of the weights that are not fused, all through the fused ones."""
    found = find_fusions(original, case.fusion_config)
    assert Counter(one.family for one in found) == case.fusions
    other = fused(original, case)
    outputs = [case.run(model) for model in (original, other)]
    assert_same(outputs[1], outputs[0])
    assert outputs[0][0].abs().max() > 0.01  # not zeros, which agree with anything
    gradients = []
    for model, output in zip((original, other), outputs, strict=True):
        tensor = output[0] if isinstance(output[0], torch.Tensor) else output.last_hidden_state
        model.zero_grad()
        tensor.square().sum().backward()
        gradients.append({n: p.grad for n, p in model.named_parameters() if p.grad is not None})
        model.zero_grad()
    kept = gradients[0].keys() & gradients[1].keys()
    assert len(kept) > 3
    scale = max(float(gradients[0][name].abs().max()) for name in kept)
    for name in kept - {n for n in kept if _is_folded(other, n)}:
        torch.testing.assert_close(gradients[1][name], gradients[0][name], rtol=1e-9, atol=1e-11 * scale)


def _is_folded(model: nn.Module, name: str) -> bool:
    """Whether the parameter is a folded convolution's, which has the old name and other values."""
    parent = model.get_submodule(name.rpartition(".")[0].rpartition(".")[0])
    return type(parent).__dict__.get("original_class") is not None


def test_without_gradients_and_in_inference_mode(case: Fusable, original: nn.Module) -> None:
    other = fused(original, case)
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            assert_same(case.run(other), case.run(original))


@pytest.mark.parametrize("name", ["llama", "bert", "vit", "clip", "qwen2_vl", "resnet", "detr"])
def test_float32_and_bfloat16(name: str) -> None:
    """Each as near to float64 as the original, but for a factor: their roundings differ, not what they compute."""
    case = FUSABLE[name]
    original = case.build()
    for dtype in (torch.float32, torch.bfloat16):
        plain = copy.deepcopy(original).to(dtype)
        other = fused(plain, case)
        with torch.no_grad():
            exact = tensors_of(case.run(copy.deepcopy(plain).double()))
            outputs = [tensors_of(case.run(model)) for model in (plain, other)]
        for key, wanted in exact.items():
            if not wanted.is_floating_point():
                continue
            errors = [float((output[key].double() - wanted).norm() / wanted.norm()) for output in outputs]
            assert errors[1] < 3 * errors[0] + 4 * torch.finfo(dtype).eps, (key, dtype, errors)


@pytest.mark.parametrize("name", ["llama", "vit", "convnext", "qwen2_vl", "resnet", "detr"])
def test_copies_pickles_and_state_dicts(name: str) -> None:
    case = FUSABLE[name]
    original = case.build()
    other = fused(original, case)
    wanted = case.run(other)
    fresh = fused(case.build(), case)  # a model of transformers that ran with recorders cannot be pickled
    copies = [copy.deepcopy(other), pickle.loads(pickle.dumps(fresh))]
    file = io.BytesIO()
    torch.save(fresh, file)
    file.seek(0)
    copies.append(torch.load(file, weights_only=False))
    for made in copies:
        assert [type(module) for module in made.modules()] == [type(module) for module in other.modules()]
        assert_same(case.run(made), wanted)
        assert list(made.state_dict()) == list(other.state_dict())
    made, state = copies[0], other.state_dict()
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.zero_()  # of the copy, not of `other`
    assert_same(case.run(other), wanted)
    for assign in (False, True):
        fresh = fused(case.model().eval().double(), case)
        fresh.load_state_dict(state, strict=True, assign=assign)
        for key, buffer in other.named_buffers():
            fresh.get_submodule(key.rpartition(".")[0])._buffers[key.rpartition(".")[2]] = buffer
        assert_same(case.run(fresh), wanted)
    with pytest.raises(RuntimeError, match=r"Missing key|Unexpected key"):
        fresh.load_state_dict(original.state_dict())


def test_the_state_dict_holds_the_fused_names_only(case: Fusable, original: nn.Module) -> None:
    other = fused(original, case)
    before, after = original.state_dict(), other.state_dict()
    assert sum(t.numel() for t in other.parameters()) <= sum(t.numel() for t in original.parameters()) + sum(
        t.numel() for t in original.buffers()
    )
    gone, new = before.keys() - after.keys(), after.keys() - before.keys()
    paths = [one.path for one in find_fusions(original, case.fusion_config)]
    assert all(any(name.startswith(f"{path}.") for path in paths) for name in gone | new)
    assert gone and all("linear_" in n or "qkv_proj." in n or "gate_up_proj." in n or n.endswith(".bias") for n in new)


@pytest.mark.parametrize("name", ["llama", "qwen2", "bert", "vit", "clip", "siglip", "dinov2", "convnext"])
def test_each_fused_weight_multiplies_once(name: str) -> None:
    case = FUSABLE[name]
    other = fused(case.build(), case)
    ran: Counter[str] = Counter()
    fused_names = tuple(f".{name}" for name in ("qkv_proj", "gate_up_proj", "linear_projection", *_CONVOLUTIONS))
    for path, module in other.named_modules():
        if path.endswith(fused_names):
            module.register_forward_hook(lambda *_, path=path: ran.update([path]))
    case.run(other)
    assert len(ran) == sum(case.fusions.values()) and set(ran.values()) == {1}


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
@pytest.mark.parametrize("name", ["llama", "qwen2", "bert", "vit", "clip"])
def test_attention_implementations_and_batches(name: str, implementation: str) -> None:
    case = FUSABLE[name]
    original = case.build()
    original.set_attn_implementation(implementation)  # type: ignore[operator]
    other = fused(original, case)
    assert_same(case.run(other), case.run(original))
    if name in ("llama", "qwen2", "bert"):
        for batch, length in ((1, 1), (3, 5)):
            assert_same(other(ids(batch, length)), original(ids(batch, length)))
        mask = torch.tensor([[1, 1, 1, 0, 0], [1, 1, 1, 1, 1]])
        assert_same(other(ids(2, 5), attention_mask=mask), original(ids(2, 5), attention_mask=mask))


def test_activation_checkpointing() -> None:
    """The backward runs the fused modules' forward again."""
    case = FUSABLE["llama"]
    gradients: list[dict[str, Any]] = []
    for model in (case.build(), fused(case.build(), case)):
        model.activation_checkpointing_enable()  # type: ignore[operator]
        case.run(model.train()).logits.square().sum().backward()
        gradients.append({name: parameter.grad for name, parameter in model.named_parameters()})
    plain, found = gradients
    for name in plain.keys() & found.keys():
        torch.testing.assert_close(found[name], plain[name], rtol=1e-9, atol=1e-9)
    for layer in ("model.layers.0.self_attn", "model.layers.1.self_attn"):
        apart = torch.cat([plain[f"{layer}.{part}_proj.weight"] for part in "qkv"])
        torch.testing.assert_close(found[f"{layer}.qkv_proj.weight"], apart, rtol=1e-9, atol=1e-9)


def test_generation_with_a_cache() -> None:
    case = FUSABLE["llama"]
    original = case.build()
    other = fused(original, case)
    options = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 2, "eos_token_id": None}
    for batch in (1, 2):
        found, wanted = (m.generate(ids(batch, 4), **options) for m in (other, original))  # type: ignore[operator]
        assert torch.equal(found, wanted)


@pytest.mark.parametrize("name", ["llama", "bert", "vit", "clip"])
def test_output_recorders_follow(name: str) -> None:
    """The fused model records as the original, and a model that is built later records as before."""
    case = FUSABLE[name]
    original = case.build()
    original.set_attn_implementation("eager")  # type: ignore[operator]
    other = fused(original, case)
    inputs: dict[str, Any] = {"output_attentions": True, "output_hidden_states": True}
    if name in ("llama", "bert", "clip"):
        inputs["input_ids"] = ids()
    if name in ("vit", "clip"):
        inputs["pixel_values"] = pixels(2, 3, 20, 20)
    wanted = original(**inputs)
    assert_same(other(**inputs), wanted)
    assert len(tensors_of(wanted)) >= (10 if name == "clip" else 6)
    later = case.build()
    later.set_attn_implementation("eager")  # type: ignore[operator]
    assert_same(later(**inputs), wanted, rtol=0, atol=0)


@pytest.mark.parametrize("name", ["llama", "vit", "qwen3_vl"])
def test_compiled_models_compute_the_same(name: str) -> None:
    """With the graph capture of torch.compile, but no code generation: its part is what could go wrong."""
    case = FUSABLE[name]
    other = fused(case.build(), case)
    wanted = case.run(other)
    torch._dynamo.reset()
    for path, module in list(other.named_modules()):
        if type(module).__name__.startswith("Fused"):
            module.compile(backend="eager")
            assert path
    with torch.no_grad():
        assert_same(case.run(other), wanted)
    torch._dynamo.reset()


@pytest.mark.parametrize("name", ["qwen2_vl", "qwen2_5_vl", "qwen3_vl", "glm4v"])
def test_patch_embeddings_are_those_of_transformers(name: str) -> None:
    """transformers' own fused class: the same names, and given the same weights the same results."""
    case = FUSABLE[name]
    original, other = case.build(), fused(case.build(), case)
    (found,) = (one for one in find_fusions(original, case.fusion_config) if one.family == "patch_embeddings")
    ours, plain = other.get_submodule(found.path), original.get_submodule(found.path)
    theirs_spec: Any = PatchEmbeddingsFusionSpec()
    assert theirs_spec.is_fusable(plain)
    config: Any = original.config.vision_config  # type: ignore[union-attr]
    fused_class: Any = theirs_spec.make_fused_class(type(plain))
    fields = ("patch_size", "temporal_patch_size", "in_channels", "embed_dim")
    theirs = fused_class(**{f: getattr(config, f) for f in fields}) if name in ("qwen2_vl",) else None
    if theirs is None:
        theirs = fused_class(4, 2, 3, 32) if name == "qwen2_5_vl" else fused_class(config)
    theirs = theirs.double()
    assert {n: t.shape for n, t in ours.state_dict().items()} == {n: t.shape for n, t in theirs.state_dict().items()}
    theirs.load_state_dict(ours.state_dict())
    x = pixels(32, 3 * 2 * 4 * 4)
    assert torch.equal(ours(x), theirs(x))
