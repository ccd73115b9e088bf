"""A small config for any model type: its default one, with sizes shrunk by what the fields are called."""

from __future__ import annotations

import dataclasses
import re
import zlib
from collections.abc import Callable, Sequence
from typing import Any

from oracle.tiny_overrides import (
    CONFIG_BUILDERS,
    DROP,
    EXPERTS,
    HEAD_DIM,
    HEADS,
    HIDDEN,
    IMAGE,
    INTER,
    KV_HEADS,
    LAYERS,
    MAX_POS,
    MOE_INTER,
    OVERRIDES,
    PATCH,
    RANK,
    TOP_K,
    VOCAB,
)


def at_most(size: int) -> Callable[[int], int]:
    """The rule of a field that may be smaller."""
    return lambda value: min(value, size)


def exactly(size: int) -> Callable[[int], int]:
    """The rule of a field that others divide, or are divided by."""
    return lambda value: size


def as_is(value: int) -> int:
    """The rule of a field that no size depends on, or that is handled by itself."""
    return value


INT_RULES: Sequence[tuple[str, Callable[[int], int]]] = [  # field name, new value; the first that matches
    (r".*token_id|.*_token_index|.*_token_ids?|.*_id", as_is),
    (
        (
            r"num_labels|type_vocab_size|num_channels|in_channels|in_chans|channels|image_channels|"
            r"num_image_with_embedding"
        ),
        as_is,
    ),
    (r"(.*_)?(vocab_size|vocabulary_size|n_vocab|num_tokens)(_.*)?", at_most(VOCAB)),
    (r"(.*_)?codebook_size|bins", at_most(32)),
    (r"linear_num_key_heads|.*linear_num_k_heads|gdn_num_k_heads", exactly(2)),
    (r"linear_num_value_heads|.*linear_num_v_heads|gdn_num_v_heads", exactly(4)),
    (r"mamba_(num_heads|n_heads)|num_mamba_heads", exactly(8)),
    (r"mamba_(head_dim|d_head)", exactly(8)),
    (r"(mamba_)?(n_groups|d_groups|ngroups|num_groups)|mamba_n_groups", at_most(2)),
    (r"(mamba_)?(d_state|state_size|ssm_state_size)", at_most(8)),
    (r"(mamba_)?chunk_size", at_most(8)),
    (r"mamba_dt_rank|time_step_rank|.*lora_rank.*|.*_rank", at_most(RANK)),
    (r"(.*_)?(num_)?(key_value_heads|kv_heads|query_groups)|n_kv_heads?", at_most(KV_HEADS)),
    (r"qk_rope_head_dim|rope_head_dim|rotary_dim", at_most(4)),
    (
        (
            r"(.*_)?(head_dim|head_size|kv_channels|d_kv|key_head_dim|value_head_dim|qk_head_dim|"
            r"attention_head_size|dim_head|head_width)(_.*)?"
        ),
        at_most(HEAD_DIM),
    ),
    (r"(.*_)?(num_attention_heads|attention_heads|num_heads|n_heads?|heads|num_head)(_.*)?", at_most(HEADS)),
    (
        (
            r"(num_|n_)?(local_|routed_|shared_)?experts_per_tok(en)?|moe_(k|topk)|top_k_experts|"
            r"num_experts_per_token|moe_top_k|top_k|moe_num_active_primary_experts"
        ),
        at_most(TOP_K),
    ),
    (r"n_group|num_expert_groups?|topk_group|num_limited_groups|router_n_groups?", exactly(1)),
    (r"n_shared_experts|num_shared_experts?|moe_num_shared_experts", at_most(1)),
    (
        r"(moe_)?(num|n)_(local_|routed_)?(experts|expert)|num_experts.*|moe_num_experts|n_routed_experts",
        at_most(EXPERTS),
    ),
    (
        (
            r"first_k_dense_replace|num_dense_layers|moe_layer_start_index|first_dense_layers|n_dense_layers|"
            r"moe_first_k_dense.*"
        ),
        at_most(1),
    ),
    (r"num_nextn_predict_layers|num_mtp_layers|mtp_num_layers|n_mtp.*", exactly(0)),
    (
        (
            r"(.*_)?(moe|expert|shared_expert|routed).*(intermediate_size|ffn_dim|hidden_dim|inter_dim|"
            r"ffn_hidden_size)(_.*)?|(moe_inter|expert_inter).*"
        ),
        at_most(MOE_INTER),
    ),
    (
        (
            r"(.*_)?(intermediate_size|intermediate_dim|ffn_dim|ffn_hidden_size|mlp_dim|mlp_hidden_size|inner_dim|"
            r"d_ff|n_inner|feedforward_dim|feed_forward_dim|ff_dim|dim_feedforward|ffn_intermediate_size|mlp_size|"
            r"inter_size|ffn_size|fc_dim|mlp_hidden_dim|adapter_hidden_size)(_.*)?"
        ),
        at_most(INTER),
    ),
    (
        (
            r"(.*_)?(hidden_size|hidden_dim|d_model|n_embd|embed_dim|embedding_dim|embedding_size|projection_dim|"
            r"proj_dim|projection_size|projector_dim|model_dim|width|hidden_channels|out_hidden_size|feature_size|"
            r"output_dim|output_size|input_dim|dim|conv_dim|channel_dim|embed_size|text_dim|fpn_hidden_size|"
            r"d_embed|latent_dim|emb_dim|cross_attention_dim|dims|proj_size|bottleneck_features|n_embed|"
            r"neck_hidden_size|fusion_hidden_size|output_channels|neck_hidden_sizes|hidden_size_per_layer_input|"
            r"hidden_features|subsampling_conv_channels)(_.*)?"
        ),
        at_most(HIDDEN),
    ),
    (
        (
            r"(.*_)?(num_hidden_layers|num_layers|n_layers?|layers|depth|num_blocks|n_blocks|num_stages|"
            r"hidden_layers|num_hidden_blocks|encoder_layers|decoder_layers|nlayers|num_res_blocks)(_.*)?"
        ),
        at_most(LAYERS),
    ),
    (r"(.*_)?image_size(_.*)?|img_size|pretrain_image_size|crop_size", exactly(IMAGE)),
    (r"(.*_)?patch_size(_.*)?", at_most(PATCH)),
    (
        (
            r"(.*_)?(max_position_embeddings|n_positions|n_ctx|max_seq_len|max_sequence_length|seq_length|"
            r"max_position|max_source_positions|max_target_positions|max_positions|"
            r"original_max_position_embeddings|position_embedding_size|num_position_embeddings|num_positions|"
            r"max_window_layers|max_text_len|context_length|max_length)(_.*)?"
        ),
        at_most(MAX_POS),
    ),
    (
        (
            r"(.*_)?(num_queries|num_query_tokens|num_latents|n_latents|num_object_queries|"
            r"two_stage_num_proposals|mm_tokens_per_image|num_query|query_length|tokens_per_image|"
            r"num_image_tokens|video_seq_length|image_seq_length|image_seq_len|max_soft_tokens|"
            r"vision_soft_tokens_per_image)(_.*)?"
        ),
        at_most(16),
    ),
    (r"(.*_)?(num_mel_bins|n_mels|num_mels|mel_bins|feat_dim|input_features)", at_most(16)),
    (r"(.*_)?(sliding_window|window_size|attention_window|local_attention)(_.*)?", at_most(8)),
    (r"(.*_)?(num_filters|base_channels|ch|stem_channels|num_groups|hidden_channel)", at_most(16)),
    (r"index_topk|indexer_topk|index_n_topk|block_topk", at_most(4)),
]

LIST_RULES: Sequence[tuple[str, Callable[[list[int]], list[int]]]] = [
    (
        r"(.*_)?depths?|layers|num_blocks|(.*_)?stage_.*layers|num_encoder_blocks",
        lambda values: [1] * len(values),
    ),
    (
        (
            r"(.*_)?(hidden_sizes|embed_dims|channels|neck_hidden_sizes|encoder_in_channels|conv_dims?|hidden_channels|"
            r"stage_in_channels|stage_mid_channels|stage_out_channels)"
        ),
        lambda values: [min(value, 8 * place) for place, value in enumerate(values, start=1)],
    ),
    (r"(.*_)?(image_size|img_size)", lambda values: [IMAGE] * len(values)),
    (r"(.*_)?patch_size", lambda values: [min(value, PATCH) for value in values]),
]

_KEPT = {"model_type", "rope_parameters", "dtype", "architectures", "attention_types", "id2label", "label2id"}
_ABSENT = object()


def build_config(model_class: Any, key: str) -> Any:
    """A small config for `model_class`, as registered under `key`."""
    builder = CONFIG_BUILDERS.get(model_class.__name__) or CONFIG_BUILDERS.get(key)
    return builder() if builder else _tiny(_config_class(model_class, key), key, None, 0)


def tiny_config(config_class: Any, key: str) -> Any:
    """A small config of that class; `key` chooses its overrides."""
    return _tiny(config_class, key, None, 0)


def _config_class(model_class: Any, key: str) -> Any:
    """The type's own config class where it borrows the model class of another type."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    own = getattr(model_class.config_class, "model_type", None)
    if own != key and key in CONFIG_MAPPING and not key[0].isupper():
        return CONFIG_MAPPING[key]
    return model_class.config_class


def _tiny(config_class: Any, key: str, default: Any, depth: int) -> Any:
    default = config_class() if default is None else default
    return type(default)(**_shrunk(default, key, depth))


def _shrunk(config: Any, key: str, depth: int) -> dict[str, Any]:
    """Keyword arguments for a small version of `config`, which holds its class's defaults."""
    from transformers import PreTrainedConfig

    kind = type(config)
    over = dict(OVERRIDES.get(kind.model_type or kind.__name__, {}))
    if depth == 0:
        over |= OVERRIDES.get(key, {})
    names = [part.name for part in dataclasses.fields(kind)] if dataclasses.is_dataclass(kind) else list(vars(config))
    found: dict[str, Any] = {}
    layers = None
    for name in names:
        value = _field(config, name)
        if name in _KEPT or name.startswith("_") or name in over or value is _ABSENT:
            continue
        if isinstance(value, PreTrainedConfig):
            found[name] = _tiny(type(value), key, value, depth + 1)
        elif isinstance(value, int) and not isinstance(value, bool):
            found[name] = _smaller(name, value)
            if name in ("num_hidden_layers", "num_layers"):
                layers = found[name]
        elif isinstance(value, list | tuple) and value and all(type(item) is int for item in value):
            found[name] = type(value)(_smaller_list(name, list(value)))
    layers = over.get("num_hidden_layers", layers)
    for name in names:
        value = _field(config, name)
        is_texts = isinstance(value, list | tuple) and value and all(isinstance(item, str) for item in value)
        if is_texts and name not in over and name.endswith("layer_types") and layers is not None:
            found[name] = _one_of_each(value, layers)
    for name, value in over.items():
        if value is DROP:
            found.pop(name, None)
        elif isinstance(value, dict) and isinstance(inner := _field(config, name), PreTrainedConfig):
            found[name] = type(inner)(**{**_shrunk(inner, key, depth + 1), **value})
        else:
            found[name] = value
    return {name: value for name, value in found.items() if name in over or not _is_kept(value, config, name)}


def _is_kept(value: Any, config: Any, name: str) -> bool:
    """Whether `value` is what `config` has; configs in it are always made anew (some cannot be compared)."""
    from transformers import PreTrainedConfig

    return not isinstance(value, PreTrainedConfig) and value == _field(config, name)


def _field(config: Any, name: str) -> Any:
    """The plain attribute, also of fields that differ by layer and refuse to be read as one."""
    return vars(config)[name] if name in vars(config) else getattr(config, name, _ABSENT)


def _smaller(name: str, value: int) -> int:
    if re.fullmatch(r".*(token_id|token_index|_id)", name) and value >= VOCAB:
        return 1 + zlib.crc32(name.encode()) % (VOCAB - 2)
    return next((rule(value) for pattern, rule in INT_RULES if re.fullmatch(pattern, name)), value)


def _smaller_list(name: str, values: list[int]) -> list[int]:
    if re.fullmatch(r".*(token_id|token_ids|_ids)", name):
        return [value if value < VOCAB else 1 + value % (VOCAB - 2) for value in values]
    return next((rule(values) for pattern, rule in LIST_RULES if re.fullmatch(pattern, name)), values)


def _one_of_each(kinds: Sequence[str], count: int) -> list[str]:
    """`count` layer kinds, as many different ones as possible."""
    distinct = list(dict.fromkeys(kinds))
    return (distinct * count)[:count]
