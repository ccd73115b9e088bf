"""Tiny models of transformers that the built-in fusion families fuse, with inputs, in float64 and with noise for weights.

In float64 fused and original agree to a few units in the last place (a matrix product's sums may be grouped in another
order, and folding rounds a weight once more), so that a row in a wrong place, a missing bias or an epsilon cannot hide.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from torch import nn

from loadplan.runtime import find_fusions, fuse_modules

_DECODER = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 2,
}
_TOWER = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}
_EYES = {"depth": 1, "hidden_size": 32, "num_heads": 4, "patch_size": 4, "intermediate_size": 48}
_ROPE = {"rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 10000.0}
_RESNET = {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 2], "layer_type": "basic"}


@dataclass(frozen=True)
class Fusable:
    """A model, what it is run on, and what a configuration fuses in it."""

    model: Callable[[], nn.Module]
    run: Callable[[nn.Module], Any]  # its output: a tensor, or a `ModelOutput`
    fusions: Mapping[str, int]  # family -> modules that it fuses

    def build(self) -> nn.Module:
        """The model in eval mode, the same each time."""
        model = self.model().eval().double()
        fill_with_noise(model)
        return model

    @property
    def fusion_config(self) -> dict[str, bool]:
        return dict.fromkeys(self.fusions, True)


def fill_with_noise(model: nn.Module) -> None:
    """Give all parameters and running statistics values that are nowhere neutral; the same for the same names."""
    state = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, tensor in sorted(state.items()):
            if name.endswith("running_var"):
                tensor.copy_(torch.rand(tensor.shape, generator=generator) + 0.3)
            elif isinstance(tensor, nn.Parameter) or name.endswith(("running_mean", "weight", "bias")):
                tensor.copy_(torch.randn(tensor.shape, generator=generator) * 0.2)


def ids(batch: int = 2, length: int = 7) -> torch.Tensor:
    return torch.arange(3, 3 + batch * length).reshape(batch, length) % 64


def pixels(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def like(model: nn.Module, tensor: torch.Tensor) -> torch.Tensor:
    """`tensor` in the dtype of the model's weights."""
    return tensor.to(next(model.parameters()).dtype)


def _on_text(model: nn.Module) -> Any:
    return model(ids(), attention_mask=torch.ones(2, 7, dtype=torch.long))


def _on_image(size: int) -> Callable[[nn.Module], Any]:
    return lambda model: model(like(model, pixels(2, 3, size, size)))


def _on_patches(model: nn.Module) -> Any:
    grid = torch.tensor([[1, 4, 4], [1, 4, 4]])
    return model.model.visual(like(model, pixels(32, 3 * 2 * 4 * 4)), grid_thw=grid)  # type: ignore[union-attr, operator]


def _two_towers(model: nn.Module) -> Any:
    return model(input_ids=ids(), pixel_values=like(model, pixels(2, 3, 20, 20)))


def _seq2seq(model: nn.Module) -> Any:
    return model(input_ids=ids(), decoder_input_ids=ids(2, 5))


def _make(name: str, config: str, **fields: Any) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        made: nn.Module = getattr(transformers, name)(getattr(transformers, config)(**fields))
        return made

    return make


def _eyed(name: str, config: str, **vision: Any) -> Callable[[], nn.Module]:
    text = {**_DECODER, "num_hidden_layers": 1, "head_dim": 8, "rope_parameters": dict(_ROPE)}
    return _make(name, config, text_config=text, vision_config={**_EYES, "out_hidden_size": 32, **vision})


def _detr() -> nn.Module:
    return _make(
        "DetrForObjectDetection",
        "DetrConfig",
        d_model=32,
        encoder_layers=1,
        decoder_layers=1,
        encoder_attention_heads=2,
        decoder_attention_heads=2,
        encoder_ffn_dim=32,
        decoder_ffn_dim=32,
        num_queries=5,
        backbone_config={"model_type": "resnet", **_RESNET, "out_features": ["stage2"]},
    )()


def fused(model: nn.Module, case: Fusable) -> nn.Module:
    """A fused copy of `model`."""
    other = copy.deepcopy(model)
    fuse_modules(other, find_fusions(other, case.fusion_config))
    return other


def tensors_of(output: Any) -> dict[str, torch.Tensor]:
    """All tensors of a model's output, by where they are."""
    if isinstance(output, torch.Tensor):
        return {"": output}
    if isinstance(output, Mapping):
        parts: list[tuple[object, Any]] = list(output.items())
    elif isinstance(output, list | tuple):
        parts = list(enumerate(output))
    else:
        return {}
    return {f"{key}.{rest}": tensor for key, part in parts for rest, tensor in tensors_of(part).items()}


def assert_same(found: Any, wanted: Any, rtol: float = 1e-10, atol: float = 1e-12) -> None:
    """All tensors of two outputs agree; the default is for numbers near 1 in float64."""
    tensors, expected = tensors_of(found), tensors_of(wanted)
    assert tensors and list(tensors) == list(expected)
    for key, value in expected.items():
        try:
            torch.testing.assert_close(tensors[key], value, rtol=rtol, atol=atol)
        except AssertionError as error:
            raise AssertionError(f"{key}: {error}") from error


FUSABLE: Mapping[str, Fusable] = {
    "llama": Fusable(_make("LlamaForCausalLM", "LlamaConfig", **_DECODER), _on_text, {"qkv": 2, "gate_up": 2}),
    "qwen2": Fusable(_make("Qwen2ForCausalLM", "Qwen2Config", **_DECODER), _on_text, {"qkv": 2, "gate_up": 2}),
    "bert": Fusable(_make("BertModel", "BertConfig", vocab_size=64, **_TOWER), _on_text, {"qkv": 2}),
    "t5": Fusable(
        _make(
            "T5Model",
            "T5Config",
            vocab_size=64,
            d_model=32,
            d_kv=8,
            d_ff=48,
            num_layers=1,
            num_heads=4,
            feed_forward_proj="gated-gelu",
        ),
        _seq2seq,
        {"qkv": 3, "gate_up": 2},
    ),
    "bart": Fusable(
        _make(
            "BartModel",
            "BartConfig",
            vocab_size=64,
            d_model=32,
            encoder_layers=1,
            decoder_layers=1,
            encoder_attention_heads=4,
            decoder_attention_heads=4,
            encoder_ffn_dim=48,
            decoder_ffn_dim=48,
        ),
        _seq2seq,
        {"qkv": 3},
    ),
    "vit": Fusable(
        _make("ViTModel", "ViTConfig", image_size=20, patch_size=4, **_TOWER),
        _on_image(20),
        {"patch_embeddings_2d": 1, "qkv": 2},
    ),
    "clip": Fusable(
        _make(
            "CLIPModel",
            "CLIPConfig",
            text_config={"vocab_size": 64, "eos_token_id": 63, **_TOWER},
            vision_config={"image_size": 20, "patch_size": 4, **_TOWER},
        ),
        _two_towers,
        {"patch_embeddings_2d": 1, "qkv": 4},
    ),
    "siglip": Fusable(
        _make(
            "SiglipVisionModel", "SiglipVisionConfig", image_size=22, patch_size=4, **_TOWER
        ),  # 22: two are left over
        _on_image(22),
        {"patch_embeddings_2d": 1, "qkv": 2},
    ),
    "dinov2": Fusable(
        _make("Dinov2Model", "Dinov2Config", image_size=20, patch_size=4, **_TOWER),
        _on_image(20),
        {"patch_embeddings_2d": 1, "qkv": 2},
    ),
    "convnext": Fusable(
        _make("ConvNextModel", "ConvNextConfig", hidden_sizes=[8, 8, 16, 16], depths=[1, 1, 1, 1]),
        _on_image(64),
        {"patch_embeddings_2d": 1},
    ),
    "qwen2_vl": Fusable(
        _eyed("Qwen2VLForConditionalGeneration", "Qwen2VLConfig", embed_dim=32, mlp_ratio=2),
        _on_patches,
        {"patch_embeddings": 1},
    ),
    "qwen2_5_vl": Fusable(
        _eyed("Qwen2_5_VLForConditionalGeneration", "Qwen2_5_VLConfig", window_size=16),
        _on_patches,
        {"patch_embeddings": 1, "gate_up": 2},
    ),
    "qwen3_vl": Fusable(
        _eyed(
            "Qwen3VLForConditionalGeneration", "Qwen3VLConfig", num_position_embeddings=16, deepstack_visual_indexes=[0]
        ),
        _on_patches,
        {"patch_embeddings": 1},
    ),
    "glm4v": Fusable(
        _eyed("Glm4vForConditionalGeneration", "Glm4vConfig", image_size=16), _on_patches, {"patch_embeddings": 1}
    ),
    "resnet": Fusable(_make("ResNetModel", "ResNetConfig", **_RESNET), _on_image(32), {"conv_bn": 8}),
    "detr": Fusable(_detr, _on_image(64), {"conv_bn": 8, "qkv": 3}),
}
