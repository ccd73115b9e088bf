"""Vision-language and omni models of recent years whose towers, projectors and texts each have a layout of their own.

Facts: the rules that transformers 5.24 has registered for these names.
"""

from __future__ import annotations

from collections.abc import Mapping

from loadplan.compiler.ops import Chunk, FuseRuns, PermuteForRope, Transpose
from loadplan.compiler.recipe import Recipe
from loadplan.compiler.registry import RecipeSource
from loadplan.compiler.rules import GroupWeightRename, PrefixChange, WeightConverter
from loadplan.recipes.idioms import BARE_TEXT, QKV, STALE_BUFFERS, inside, join, rename, stack_experts

# MoonViT's norms and MLP counted from 0, and count from 1 now: old and new names overlap, so both move at once.
_KIMI_BLOCK = r"vision_tower\.encoder\.blocks\.(\d+)\."
_KIMI_K25 = (
    *rename({r"^language_model\.model\.": "model.language_model.", r"^language_model\.lm_head\.": "lm_head."}),
    *(
        GroupWeightRename(
            [f"{_KIMI_BLOCK}{module}{number}" for number in range(2)],
            [rf"vision_tower.encoder.blocks.\1.{module}{number + 1}" for number in range(2)],
        )
        for module in ("norm", "mlp.fc")
    ),
    *rename(
        {
            rf"{_KIMI_BLOCK}wo\.": r"vision_tower.encoder.blocks.\1.attn.proj.",
            r"^vision_tower\.encoder\.": "model.vision_tower.",
            r"\.blocks\.": ".layers.",
            r"^vision_tower\.patch_embed\.pos_emb\.weight": "vision_tower.patch_embed.pos_emb.position_embeddings",
            r"^vision_tower\.patch_embed\.": "model.vision_tower.patch_embed.",
            r"^mm_projector\.proj\.0\.": "model.mm_projector.in_proj.",
            r"^mm_projector\.proj\.2\.": "model.mm_projector.out_proj.",
            r"^mm_projector\.": "model.mm_projector.",
        }
    ),
    WeightConverter(
        "wqkv",
        [f"attn.{part}" for part in QKV],
        [Chunk(0), PermuteForRope("vision_config", ("q_proj", "k_proj"))],
    ),
    *stack_experts(),
)

# A CLIP tower, a Mixtral-like text model with an indexer for sparse attention; gate and up are one matrix in every MLP.
_MINIMAX_M3 = (
    *rename(
        {
            r"^language_model\.lm_head\.": "lm_head.",
            r"^language_model\.model\.": "model.language_model.",
            **inside(
                r"^vision_tower\.vision_model\.",
                "model.vision_tower.",
                {
                    r"embeddings\.patch_embedding\.": "embeddings.proj.",
                    r"encoder\.layers\.": "layers.",
                    r"pre_layrnorm\.": "pre_layrnorm.",
                },
            ),
            r"^multi_modal_projector\.": "model.multi_modal_projector.",
            r"^patch_merge_mlp\.linear_": "model.multi_modal_projector.merge_linear_",
            r"\.block_sparse_moe\.e_score_correction_bias": ".mlp.gate.e_score_correction_bias",
            r"\.block_sparse_moe\.": ".mlp.",
            r"\.self_attn\.index_([qk])_(proj|norm)\.": r".self_attn.indexer.\1_\2.",
        }
    ),
    *stack_experts("w1", "w3", "w2"),
    join(["gate_proj.weight", "up_proj.weight"], "gate_up_proj.weight"),
)

# A `Sequential` of norm, two matrices and an activation, as InternVL has it; a Parakeet encoder for sound.
_NEMOTRON_OMNI = rename(
    {
        **inside(
            r"^mlp1\.",
            "multi_modal_projector.",
            {r"0\.": "layer_norm.", r"1\.": "linear_1.", r"3\.": "linear_2."},
        ),
        r"^vision_projector\.vision_final_layernorm\.": "vision_final_layernorm.",
        r"^sound_encoder\.encoder\.": "audio_tower.",
        r"^sound_projection\.norm\.": "embed_audio.layer_norm.",
        r"^sound_projection\.linear([12])\.": r"embed_audio.linear_\1.",
    }
)

_HYPERCLOVAX = (
    *rename({r"^model\.language_model\.lm_head\.": "lm_head.", r"^model\.vision_projector\.": "model.projector."}),
    PrefixChange(prefix_to_remove="model", model_prefix="model.language_model"),
)

# dots: the text model's modules stood among the others; the adapter of the audio encoder beside it.
_DOTS_MODEL = (
    PrefixChange(prefix_to_remove="model"),
    *rename(
        {
            r"^(embed_tokens|layers|norm)\.": r"language_model.\1.",
            r"^vision_encoder\.": "vision_tower.",
            r"^audio_encoder\.": "audio_tower.",
            r"^audio_adapter\.": "audio_tower.audio_adapter.",
        }
    ),
)
_DOTS_HEAD = rename(
    {
        r"^audio_encoder\.audio_adapter\.": "audio_adapter.",
        r"^(vision_encoder|audio_encoder|audio_adapter)\.": r"model.\1.",
    }
)
_DOTS_AUDIO = rename(
    {
        r"^(?:audio_)?adapter\.proj\.0\.": "adapter.norm.",
        r"^(?:audio_)?adapter\.proj\.1\.": "adapter.fc1.",
        r"^(?:audio_)?adapter\.proj\.3\.": "adapter.fc2.",
        r"^audio_adapter\.": "adapter.",
        r"^(?:dots_encoder\.)?speech_encoder\.": "",
        r"^(?:conv_stem\.)?conv2d1\.": "conv_stem.convs.0.",
        r"^(?:conv_stem\.)?conv2d2\.": "conv_stem.convs.1.",
        r"^(?:conv_stem\.)?conv2d3\.": "conv_stem.convs.2.",
        r"^conv_out\.": "conv_stem.conv_out.",
        **inside(
            r"^layers\.(\d+)\.",
            r"layers.\1.",
            {
                r"self_attn\.out_proj\.": "self_attn.o_proj.",
                r"self_attn_layer_norm\.": "input_layernorm.",
                r"final_layer_norm\.": "post_attention_layernorm.",
                r"fc1\.": "mlp.gate_up_proj.",
                r"fc2\.": "mlp.down_proj.",
            },
        ),
    }
)
_DOTS_VISION = (
    *rename(
        {
            r"^post_trunk_norm\.": "norm.",
            r"^adapter\.": "merger.",
            r"(blocks\.\d+)\.norm_([12])\.": r"\1.norm\2.",
            r"(blocks\.\d+\.mlp)\.fc1\.": r"\1.gate_proj.",
            r"(blocks\.\d+\.mlp)\.fc2\.": r"\1.down_proj.",
            r"(blocks\.\d+\.mlp)\.fc3\.": r"\1.up_proj.",
            r"\.mlp\.gate_weight": ".mlp.gate.weight",
            r"\.mlp\.router_bias": ".mlp.e_score_correction_bias",
        }
    ),
    *stack_experts("fc1", "fc3", "fc2"),
)
# ERNIE: experts of text, then of images, in one list, so the routers' (transposed) and the biases come in pairs.
_ERNIE = (
    *rename(
        {
            r"^(model\.)?vision_model\.": r"\1vision_tower.",
            r"(spatial|temporal)_linear\.0\.": r"\1_linear.fc1.",
            r"(spatial|temporal)_linear\.2\.": r"\1_linear.fc2.",
            r"(spatial|temporal)_linear\.3\.": r"\1_linear.ln.",
            **BARE_TEXT,
        }
    ),
    WeightConverter("mlp.gate.weight_1", "mlp.vision_moe.gate.weight", [Transpose(0, 1)]),
    WeightConverter("mlp.gate.weight", "mlp.text_moe.gate.weight", [Transpose(0, 1)]),
    WeightConverter(
        "mlp.moe_statics.e_score_correction_bias",
        [f"mlp.{kind}_moe.gate.moe_statics.e_score_correction_bias" for kind in ("text", "vision")],
        [Chunk(0)],
    ),
    *(
        WeightConverter(
            [f"mlp.experts.*.{part}.weight" for part in parts],
            [f"mlp.{kind}_moe.experts.{target}" for kind in ("text", "vision")],
            [FuseRuns(0, 1)],
        )
        for parts, target in ((("down_proj",), "down_proj"), (("gate_proj", "up_proj"), "gate_up_proj"))
    ),
)
_LFM3_VISION = rename({"patchifier": "patch_embed", "q_layernorm": "q_norm", "k_layernorm": "k_norm"})

VISION_LANGUAGE: Mapping[str, RecipeSource] = {
    "kimi_k25": Recipe(_KIMI_K25, may_be_unused=STALE_BUFFERS),
    "minimax_m3_vl": Recipe(_MINIMAX_M3, may_be_unused=("mtp",)),
    "NemotronH_Omni_Reasoning_V3": Recipe(_NEMOTRON_OMNI, may_be_unused=("feature_extractor",)),
    "hyperclovax_vision_v2": Recipe(_HYPERCLOVAX),
    "Dots3NoteModel": Recipe(_DOTS_MODEL, may_be_unused=("mtp", "layers.46")),
    "Dots3NoteForConditionalGeneration": Recipe(_DOTS_HEAD, may_be_unused=("mtp", "layers.46")),
    "Dots3NoteTextModel": Recipe(stack_experts()),
    "dots3_note_audio_encoder": Recipe(_DOTS_AUDIO),
    "dots3_note_vision_encoder": Recipe(_DOTS_VISION),
    "ernie4_5_vl_moe": Recipe(_ERNIE),
    "lfm3_vl_vision": Recipe(_LFM3_VISION),
}
