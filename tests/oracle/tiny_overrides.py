"""What the generic shrinking of `tiny_configs.py` does not get right: values for single types, and whole configs.

Facts about the config classes of transformers 5.24: which sizes must agree, which layer kinds exist, which fields the
generic rules must not touch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import transformers

# Sizes are equal by chance as rarely as possible: 2 * INTER != HIDDEN, experts != heads.
VOCAB, HIDDEN, INTER, MOE_INTER = 128, 32, 48, 24
LAYERS, HEADS, KV_HEADS, HEAD_DIM, RANK = 2, 4, 2, 8, 16
EXPERTS, TOP_K = 6, 2
IMAGE, PATCH, MAX_POS = 32, 8, 64

DROP = object()
"""As an override: the field keeps its default."""

_MROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 1, 1]}

OVERRIDES: dict[str, dict[str, Any]] = {  # registry key first, then the model type at every level
    "dory": {
        "num_hidden_layers": 3,
        "n_input_layers": 1,
        "n_recurrent_layers": 1,
        "n_output_layers": 1,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    },
    "hy_v4_vl_text": {
        "qk_rope_head_dim": 8,
        "head_dim": 8,
        "num_key_value_heads": HEADS,
        "rope_parameters": dict(_MROPE),
        "indexer_types": ["full", "shared"],
    },
    "hy_v4": {"num_key_value_heads": HEADS, "indexer_types": ["full", "shared"]},
    "cosmos3_edge_text": {"rope_parameters": dict(_MROPE)},
    "hunyuan_vl_text": {"head_dim": HEAD_DIM},
    "hunyuan_v1_moe": {"head_dim": HEAD_DIM, "num_experts": EXPERTS, "moe_topk": TOP_K},
    "gemma4_unified_text": {
        "num_hidden_layers": 2,
        "layer_types": ["sliding_attention", "full_attention"],
        "head_dim": 8,
        "num_kv_shared_layers": 0,
        "per_layer_config": {1: {"head_dim": 16}},
    },
    "nemotron_h_omni": {
        "video_temporal_patch_size": 2,
        "downsample_ratio": 0.5,
        "vision_hidden_size": HIDDEN,
        "projector_hidden_size": HIDDEN,
    },
    "radio": {"video_temporal_patch_size": 2, "max_img_size": 64},
    "BeitForSemanticSegmentation": {"num_hidden_layers": 4, "out_indices": [1, 2, 3, 4], "auxiliary_channels": 16},
    "BeitBackbone": {"num_hidden_layers": 4, "out_indices": [1, 2, 3, 4], "add_fpn": True},
    "lw_detr_vit": {
        "image_size": 64,
        "pretrain_image_size": 64,
        "patch_size": 16,
        "num_windows": 4,
        "num_hidden_layers": 3,
        "window_block_indices": [0, 1],
        "out_indices": [1, 2, 3],
        "num_attention_heads": 4,
    },
    "lw_detr": {
        "projector_scale_factors": [1.0],
        "group_detr": 2,
        "c2f_num_blocks": 1,
        "d_model": HIDDEN,
        "num_queries": 8,
    },
    "glm5_next_text": {
        "num_key_value_heads": HEADS,
        "qk_rope_head_dim": 0,
        "head_dim": 0,
        "indexer_types": ["full", "full"],
        "index_kpool": 4,
    },
    "mimi": {
        "num_filters": 8,
        "upsampling_ratios": [2, 2],
        "upsample_groups": HIDDEN,
        "num_quantizers": 3,
        "vector_quantization_hidden_dimension": 16,
        "codebook_dim": 16,
        "num_key_value_heads": HEADS,
    },
    "vibevoice_acoustic_tokenizer_encoder": {
        "num_filters": 4,
        "downsampling_ratios": [2, 2],
        "depths": [1, 1, 1],
        "hidden_size": 16,
    },
    "molmo2_adapter": {"vision_feature_layer": [1, 0]},
    "molmo2_vision": {"image_size": [32, 32], "num_position_embeddings": 16},
    "mimi_decoder": {
        "num_filters": 8,
        "upsampling_ratios": [2, 2],
        "upsample_groups": HIDDEN,
        "num_quantizers": 3,
        "vector_quantization_hidden_dimension": 16,
        "codebook_dim": 16,
        "num_key_value_heads": HEADS,
    },
    "mimi_encoder": {
        "num_filters": 8,
        "upsampling_ratios": [2, 2],
        "upsample_groups": HIDDEN,
        "num_quantizers": 3,
        "vector_quantization_hidden_dimension": 16,
        "codebook_dim": 16,
        "num_key_value_heads": HEADS,
    },
    "emu3": {"vocabulary_map": {"<image>": 5, "<|extra_200|>": 6, "<|visual token 000000|>": 7}},
    "emu3_vqgan": {
        "base_channels": 32,
        "channel_multiplier": [1, 1],
        "num_res_blocks": 1,
        "attn_resolutions": [1],
        "hidden_size": 32,
    },
    "deepseek_ocr2_text": {
        "mlp_layer_types": ["dense", "sparse"],
        "num_experts_per_tok": TOP_K,
        "n_group": 1,
        "topk_group": 1,
    },
    "deepseek_ocr2_sam_vision_model": {
        "downsample_channels": [16, HIDDEN],
        "output_channels": 16,
        "num_hidden_layers": 2,
        "global_attn_indexes": [1],
        "image_size": 64,
        "patch_size": 16,
    },
    "esm": {"vocab_size": 33, "pad_token_id": 1, "mask_token_id": 32, "position_embedding_type": "rotary"},
    "dots3_note_audio_encoder": {
        "adapter_input_size": HIDDEN,
        "adapter_out_dim": HIDDEN,
        "downsample_hidden_size": 8,
        "feature_size": 16,
    },
    "dots3_note_vision_encoder": {
        "num_hidden_layers": 2,
        "mlp_layer_types": ["dense", "sparse"],
        "adapter_in_dim": HIDDEN,
        "adapter_out_dim": HIDDEN,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "per_layer_config": {1: {"num_local_experts": 3}},
    },
    "dots3_note_text": {
        "num_hidden_layers": 2,
        "num_attention_heads": HEADS,
        "num_key_value_heads": HEADS,
        "head_dim": 16,
        "kv_lora_rank": 16,
        "q_lora_rank": 16,
        "qk_nope_head_dim": 8,
        "qk_rope_head_dim": 8,
        "v_head_dim": 8,
        "rope_parameters": DROP,
        "layer_types": ["indexed_attention", "sliding_attention"],
        "mlp_layer_types": ["dense", "sparse"],
        "shared_experts_intermediate_size": MOE_INTER,
        "per_layer_config": {
            1: {"num_attention_heads": 2, "num_key_value_heads": 2, "kv_lora_rank": 24, "qk_nope_head_dim": 8}
        },
    },
    "lfm2_moe": {"num_hidden_layers": 2, "layer_types": ["conv", "full_attention"], "num_dense_layers": 1},
    "ernie4_5_vl_moe_text": {
        "moe_intermediate_size": [24, 24],
        "moe_num_experts": EXPERTS,
        "head_dim": 16,
        "hidden_size": 64,
        "num_attention_heads": 4,
        "mlp_layer_types": ["dense", "sparse"],
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [3, 3, 2]},
    },
    "maskformer-swin": {},
    "dinov2": {"use_swiglu_ffn": True},
    "dinov2_with_registers": {"use_swiglu_ffn": True},
    "Tipsv2VisionBackbone": {"use_swiglu_ffn": True},
    "BeitModel": {"use_shared_relative_position_bias": True, "use_relative_position_bias": True},
    "minimax_m3_vl_text": {
        "layer_types": ["full_attention", "minimax_m3_sparse"],
        "mlp_layer_types": ["dense", "sparse"],
        "index_n_heads": 2,
        "index_head_dim": 8,
        "index_block_size": 4,
        "index_topk_blocks": 2,
        "dense_intermediate_size": INTER,
        "shared_intermediate_size": MOE_INTER,
        "rotary_dim": 4,
    },
    "flint": {"mlp_only_layers": [0]},
    "inkling_text": {"mlp_layer_types": ["dense", "sparse"]},
    "inkling2_loop_text": {
        "num_hidden_layers": 3,
        "layer_types": ["hybrid_sliding", "hybrid", "hybrid_sliding"],
        "n_layers_per_attn_res_block": 1,
        "loop_layer_index_start": 1,
        "loop_layer_index_end": 2,
        "loop_num_passes": 2,
        "loop_gate_rank": 4,
        "swa_num_attention_heads": HEADS,
        "swa_head_dim": HEAD_DIM,
        "swa_num_key_value_heads": KV_HEADS,
    },
    "nemotron_h": {"layers_block_type": ["linear_attention", "moe", "full_attention", "mlp"]},
    "swin": {
        "embed_dim": 16,
        "depths": [1, 1, 1, 1],
        "num_heads": [2, 2, 2, 2],
        "window_size": 4,
        "image_size": 32,
        "patch_size": 4,
    },
    "d_fine": {
        "encoder_in_channels": [16, 24, 32],
        "encode_proj_layers": [2],
        "decoder_in_channels": [HIDDEN] * 3,
        "num_queries": 8,
        "num_denoising": 4,
        "eval_idx": -1,
    },
    "hgnet_v2": {
        "stem_channels": [3, 8, 8],
        "stage_in_channels": [8, 8, 16, 24],
        "stage_mid_channels": [8, 8, 8, 8],
        "stage_out_channels": [8, 16, 24, 32],
        "stage_num_blocks": [1, 1, 1, 1],
        "stage_numb_of_layers": [1, 1, 1, 1],
        "hidden_sizes": [8, 16, 24, 32],
        "depths": [1, 1, 1, 1],
        "embedding_size": 8,
        "out_features": ["stage2", "stage3", "stage4"],
    },
    "qwen4_exp_text": {
        "indexer_n_heads": 2,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 8,
        "indexer_budget": 8,
        "indexer_compress_ratio": 4,
        "ple_layer_ids": [1],
        "ple_embed_dim": 16,
        "heads_per_ngram": 2,
        "ngram_size": 3,
        "ngram_vocab_size_base": 64,
        "make_ngram_vocab_size_divisible_by": 8,
        "split_ngram_parts": 4,
        "hc_count": 2,
        "hc_lowrank": 8,
        "eos_token_id": 2,
    },
    "dots1": {
        "n_routed_experts": EXPERTS,
        "n_shared_experts": 1,
        "num_experts_per_tok": TOP_K,
        "first_k_dense_replace": 1,
    },
    "Qwen3OmniMoeTalkerConfig": {"spatial_merge_size": 2},
    "qwen3_omni_moe_talker_text": {"shared_expert_intermediate_size": MOE_INTER},
    "gemma3n_text": {
        "num_hidden_layers": 4,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "num_kv_shared_layers": 2,
        "intermediate_size": [INTER] * 4,
        "activation_sparsity_pattern": [0.0] * 4,
        "laurel_rank": 8,
        "hidden_size_per_layer_input": 8,
        "vocab_size_per_layer_input": VOCAB,
    },
    "gradium_phonon_tts": {"num_key_value_heads": HEADS},
    "nemotron3_5_transcribe_asr_audio": {"num_key_value_heads": HEADS},
    "nemotron3_5_transcribe_word_timestamp": {"num_key_value_heads": HEADS},
    "nemotron3_diarization_audio": {"num_key_value_heads": HEADS},
    "sapiens2": {
        "num_hidden_layers": 3,
        "num_key_value_heads_per_layer": [4, 2, 4],
        "num_first_full_attention_layers": 1,
        "num_last_full_attention_layers": 1,
        "num_key_value_attention_heads": 2,
        "num_register_tokens": 2,
        "image_size": 64,
        "patch_size": 16,
        "out_indices": [3],
    },
}


def _sapiens(**extra: Any) -> dict[str, Any]:
    return {"head_config": {"conv_out_channels": [8, 8, 8], "upsample_out_channels": [16, 16], **extra}}


_DECONV = _sapiens(upsample_out_channels=[16, 16, 8, 8], conv_out_channels=[8, 8])
_SHUFFLE = {"use_pixel_shuffle": True, "conv_kernel_sizes": [3, 3, 3], "upsample_kernel_sizes": [3, 3]}
_SCALE = {
    "scale_conv_out_channels": [16, 16, 8],
    "scale_conv_kernel_sizes": [3, 3, 3],
    "scale_final_hidden_sizes": [16, 8],
}
OVERRIDES["sapiens2"] |= _DECONV
OVERRIDES |= {
    "Sapiens2ForSemanticSegmentation": _DECONV,
    "Sapiens2ForPoseEstimation": _sapiens(),
    "Sapiens2ForNormalEstimation": _sapiens(**_SHUFFLE),
    "Sapiens2ForImageMatting": _sapiens(**_SHUFFLE),
    "Sapiens2ForPointmapEstimation": _sapiens(**_SHUFFLE, **_SCALE),
}


def _resnet(*stages: int) -> Any:
    """A backbone with the outputs of these stages."""
    config_class: Any = transformers.ResNetConfig
    return config_class(
        embedding_size=8,
        hidden_sizes=[8, 16, 24, 32],
        depths=[1, 1, 1, 1],
        layer_type="basic",
        out_features=[f"stage{stage}" for stage in stages],
    )


def _detr(config_class: str, stages: tuple[int, ...] = (2, 3, 4), **extra: Any) -> Any:
    values: dict[str, Any] = {
        "backbone_config": _resnet(*stages),
        "encoder_layers": 2,
        "decoder_layers": 2,
        "encoder_ffn_dim": INTER,
        "decoder_ffn_dim": INTER,
        "encoder_attention_heads": 4,
        "decoder_attention_heads": 4,
        "d_model": HIDDEN,
        "num_queries": 8,
    }
    return getattr(transformers, config_class)(**{**values, **extra})


def _maskformer() -> Any:
    config_class: Any = transformers.SwinConfig
    swin = config_class(
        embed_dim=16,
        depths=[1, 1, 1, 1],
        num_heads=[2, 2, 2, 2],
        window_size=4,
        image_size=64,
        patch_size=4,
        out_features=["stage1", "stage2", "stage3", "stage4"],
    )
    return transformers.MaskFormerConfig(
        backbone_config=swin,
        decoder_config=_detr("DetrConfig"),
        fpn_feature_size=HIDDEN,
        mask_feature_size=HIDDEN,
    )


def _t5gemma2_encoder() -> Any:
    """Its dropout fields come from the config of encoder and decoder together."""
    from oracle.tiny_configs import tiny_config

    return tiny_config(transformers.T5Gemma2Config, "t5gemma2_encoder").encoder


_ALL = (1, 2, 3, 4)
CONFIG_BUILDERS: Mapping[str, Callable[[], Any]] = {
    "MaskFormerForInstanceSegmentation": _maskformer,
    "MaskFormerModel": _maskformer,
    "t5gemma2_encoder": _t5gemma2_encoder,
    "DetrModel": lambda: _detr("DetrConfig"),
    "DetrForSegmentation": lambda: _detr("DetrConfig", _ALL, encoder_attention_heads=8),
    "ConditionalDetrModel": lambda: _detr("ConditionalDetrConfig"),
    "ConditionalDetrForSegmentation": lambda: _detr(
        "ConditionalDetrConfig", _ALL, encoder_attention_heads=8, decoder_attention_heads=8
    ),
    "DeformableDetrForObjectDetection": lambda: _detr("DeformableDetrConfig", num_feature_levels=4),
    "DeformableDetrModel": lambda: _detr("DeformableDetrConfig", num_feature_levels=4),
}
"""Class name or registry key -> a whole config, for those that shrinking cannot make."""
