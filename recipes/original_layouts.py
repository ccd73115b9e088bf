"""Models published as their authors trained them, with modules called after other code bases throughout.

Molmo 2 (OLMo's training code), Step 3 (OpenAI's CLIP in the tower), Mistral Large 4 (Mistral's `consolidated` files).
Facts: the rules that transformers 5.24 has registered for these names.
"""

from __future__ import annotations

from collections.abc import Mapping

from loadplan.compiler.ir import Config
from loadplan.compiler.ops import Concatenate, PermuteForRope, Split
from loadplan.compiler.recipe import Recipe
from loadplan.compiler.registry import RecipeSource
from loadplan.compiler.rules import WeightConverter
from loadplan.recipes.idioms import QKV, cut, cut_in_proj, draft_layers, inside, join, rename, stack_experts

# The text model was `transformer`, the towers stood in one `vision_backbone`.
_MOLMO_TEXT = r"(?<!image_vit\.)transformer\."
_MOLMO = rename(
    {
        rf"{_MOLMO_TEXT}ln_f\.": "language_model.norm.",
        rf"{_MOLMO_TEXT}blocks\.": "language_model.layers.",
        _MOLMO_TEXT: "language_model.",
        r"vision_backbone\.image_vit\.transformer\.resblocks\.": "vision_tower.layers.",
        r"vision_backbone\.image_vit\.": "vision_tower.",
        r"vision_backbone\.(image_pooling_2d|image_projector)\.": r"multi_modal_projector.\1.",
        r"\.attention\.w([qkvo])\.": r".self_attn.\1_proj.",
        r"\.feed_forward\.w([12])\.": r".mlp.fc\1.",
        r"\.attention_norm\.": ".layer_norm1.",
        r"\.ffn_norm\.": ".layer_norm2.",
        r"image_pooling_2d\.w([qkvo])\.": r"image_pooling_2d.\1_proj.",
        r"image_projector\.w1\.": "image_projector.gate_proj.",
        r"image_projector\.w2\.": "image_projector.down_proj.",
        r"image_projector\.w3\.": "image_projector.up_proj.",
    }
)
# Fewer keys than queries, so rows are cut by the model's sizes; new tokens had an embedding of their own.
_MOLMO_LAYERS = (
    *rename(
        {
            r"\.attn_norm\.": ".input_layernorm.",
            r"\.ff_norm\.": ".post_attention_layernorm.",
            r"self_attn\.attn_out\.": "self_attn.o_proj.",
            r"mlp\.ff_out\.": "mlp.down_proj.",
        }
    ),
    WeightConverter("self_attn.att_proj", [f"self_attn.{part}" for part in QKV], [Split(0)]),
    cut("mlp.ff_proj", "mlp.up_proj", "mlp.gate_proj"),
    join(["wte.embedding", "wte.new_embedding"], "embed_tokens.weight"),
)

# The stack is stored as such, gate and up apart.
_STEP3 = (
    *rename(
        {
            r"^vision_model\.": "model.vision_model.",
            r"^vit_large_projector\.": "model.multi_modal_projector.",
            r"^model\.(embed_tokens|layers|norm)\.": r"model.language_model.\1.",
            r"\.moe\.gate\.weight": ".mlp.gate.weight",
            r"\.moe\.router_bias": ".mlp.gate.e_score_correction_bias",
            r"\.moe\.down_proj\.weight": ".mlp.experts.down_proj",
            r"\.moe\.down_proj\.weight_scale_inv": ".mlp.experts.down_proj_scale_inv",
            r"\.share_expert\.": ".mlp.shared_experts.",
        }
    ),
    WeightConverter(["moe.gate_proj.weight", "moe.up_proj.weight"], "mlp.experts.gate_up_proj", [Concatenate(1)]),
)
_STEP3_TOWER = rename(
    {
        r"^conv1\.weight": "embeddings.patch_embedding.weight",
        "^positional_embedding": "embeddings.position_embedding.weight",
        r"^transformer\.resblocks\.": "layers.",
        r"^ln_pre\.": "pre_layernorm.",
        r"^vit_downsampler([12])\.": r"downsampler\1.",
        r"\.ls_([12])\.gamma": r".lambda_\1",
        r"\.mlp\.c_fc\.": ".mlp.fc1.",
        r"\.mlp\.c_proj\.": ".mlp.fc2.",
        r"\.attn\.": ".self_attn.",
        r"\.ln_1\.": ".layernorm_before.",
        r"\.ln_2\.": ".layernorm_after.",
    }
)


def _step3(config: Config) -> Recipe:
    return Recipe(_STEP3, may_be_unused=draft_layers(config))


def _step3_tower(config: Config) -> Recipe:
    """Heads are the tower's, whose config is the whole one when the tower is loaded alone."""
    within = "vision_config" if config.find("vision_config") else None
    turned = PermuteForRope(within, ("q_proj", "k_proj"))
    return Recipe((*_STEP3_TOWER, *cut_in_proj("self_attn", turned)))


# Latent attention in the text model; in the tower, pairs of rotary components lie side by side.
_GATED = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}
_MISTRAL = (
    *rename(
        {
            r"^vision_encoder\.": "model.vision_tower.",
            **inside(
                "^",
                "model.language_model.",
                {
                    r"tok_embeddings\.": "embed_tokens.",
                    r"lerope\.alpha": "rotary_emb.alpha",
                    r"layers\.": "layers.",
                    r"norm\.": "norm.",
                },
            ),
            r"^output\.": "lm_head.",
            **inside(
                "^",
                "model.multi_modal_projector.",
                {
                    r"pre_mm_projector_norm\.": "norm.",
                    r"patch_merger\.": "patch_merger.",
                    r"vision_language_adapter\.w_in\.": "linear_1.",
                    r"vision_language_adapter\.w_out\.": "linear_2.",
                },
            ),
            r"\.w([vo])\.": r".\1_proj.",
            **inside(
                r"\.(feed_forward|shared_experts)\.",
                r".\1.",
                {rf"{old}\.": f"{new}." for old, new in _GATED.items()},
            ),
        }
    ),
    *(
        WeightConverter(f"attention.w{part}", f"attention.{part}_proj", [PermuteForRope("vision_config")])
        for part in "qk"
    ),
)
_MISTRAL_TEXT = (
    *rename(
        {
            r"\.attention\.": ".self_attn.",
            r"\.wq\.": ".q_proj.",
            r"\.wkv_a_with_mqa\.": ".kv_a_proj_with_mqa.",
            r"\.wkv_b\.": ".kv_b_proj.",
            r"\.attention_norm\.": ".input_layernorm.",
            r"\.ffn_norm\.": ".post_attention_layernorm.",
            r"\.kv_a_norm\.": ".kv_a_layernorm.",
            r"\.feed_forward\.": ".mlp.",
            r"(?<!mlp)\.(gate|experts|shared_experts)\.": r".mlp.\1.",
            r"\.ssmax_scaling\.s": ".softmax_scaling.scale",
            r"\.ssmax_scaling\.b": ".softmax_scaling.bias",
        }
    ),
    *stack_experts("w1", "w3", "w2"),
)

ORIGINAL_LAYOUTS: Mapping[str, RecipeSource] = {
    "molmo2": Recipe(_MOLMO),
    "Molmo2TextModel": Recipe(_MOLMO_LAYERS),
    "step3p7": _step3,
    "step3p5_vision": _step3_tower,
    "mistral_large4": Recipe(_MISTRAL, may_be_unused=("mtp_dspark",)),
    "mistral_large4_text": Recipe(_MISTRAL_TEXT),
}
