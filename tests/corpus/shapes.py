"""Shapes of the tensors of published models, by name: facts of each architecture, with the sizes of its config.

An index says no shapes. These tables do, independently of transformers and of recipes; the sum of their bytes is
checked against the `total_size` that the publisher states. A key is the end of a name, by components, with numbers as
`*`; the longest that fits counts, and a name with its numbers comes before one without. A bias has the rows of its
weight. A shape may begin with a dtype, where the tensor has another one than the rest of the checkpoint.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

Config = Mapping[str, Any]
Shape = tuple[int | str, ...]
Table = Mapping[str, Shape]

_NUMBER = re.compile(r"(?<![^.])\d+(?![^.])")


def collapse(name: str) -> str:
    """`name` with every number that is a component as `*`."""
    return _NUMBER.sub("*", name)


def find_shape(name: str, table: Table) -> Shape:
    """The shape of the tensor called `name`. Raises `KeyError`."""
    exact, general = name.split("."), collapse(name).split(".")
    for depth in range(len(exact)):
        for tail in (".".join(exact[depth:]), ".".join(general[depth:])):
            if tail in table:
                return table[tail]
            weight = f"{tail.removesuffix('.bias')}.weight"
            if tail.endswith(".bias") and weight in table:
                shape = table[weight]
                return shape[: 2 if shape and isinstance(shape[0], str) else 1]
    raise KeyError(name)


def matrices(rows: int, columns: int, *modules: str) -> dict[str, Shape]:
    """The weights of `modules` that map `columns` inputs to `rows` outputs."""
    return {f"{module}.weight": (rows, columns) for module in modules}


def norms(size: int, *modules: str) -> dict[str, Shape]:
    """The weights of norms over `size` channels."""
    return {f"{module}.weight": (size,) for module in modules}


def attention(hidden: int, heads: int, groups: int, head: int, out: str = "o_proj") -> dict[str, Shape]:
    """Query, key, value and output of an attention with grouped heads."""
    return {
        **matrices(heads * head, hidden, "q_proj"),
        **matrices(groups * head, hidden, "k_proj", "v_proj"),
        **matrices(hidden, heads * head, out),
    }


def gated(hidden: int, inner: int, at: str = "mlp") -> dict[str, Shape]:
    """A gated MLP in module `at`."""
    return {
        **matrices(inner, hidden, f"{at}.gate_proj", f"{at}.up_proj"),
        **matrices(hidden, inner, f"{at}.down_proj"),
    }


def decoder(config: Config, **other: int) -> Table:
    """Llama and what is laid out as it is; `other` are sizes that the config does not give."""
    sizes = {**config, **other}
    hidden, heads = sizes["hidden_size"], sizes["num_attention_heads"]
    head = sizes.get("head_dim") or hidden // heads
    return {
        **matrices(sizes["vocab_size"], hidden, "embed_tokens", "lm_head"),
        **attention(hidden, heads, sizes["num_key_value_heads"], head),
        **gated(hidden, sizes["intermediate_size"]),
        **norms(hidden, "norm", "input_layernorm", "post_attention_layernorm"),
        **norms(head, "q_norm", "k_norm", "q_layernorm", "k_layernorm"),
        "rotary_emb.inv_freq": ("F32", head // 2),
    }


def mixtral(config: Config) -> Table:
    """Mixtral, and MiniMax-M1: its router is F32, and most layers have linear attention with three times as many heads."""
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    inside = config["num_attention_heads"] * config.get("head_dim", 0)
    gate: Shape = (config["num_local_experts"], hidden)
    return {
        **decoder(config),
        **matrices(inner, hidden, "w1", "w3"),
        **matrices(hidden, inner, "w2"),
        "gate.weight": ("F32", *gate) if config["model_type"] == "minimax_m1" else gate,
        **matrices(3 * inside, hidden, "qkv_proj"),
        **matrices(inside, hidden, "output_gate"),
        **matrices(hidden, inside, "out_proj"),
        **norms(inside, "self_attn.norm"),
    }


def deepseek(config: Config) -> Table:
    """Routed and shared experts beside dense layers. The head is the config's, where that says one, else 128."""
    hidden, inner = config["hidden_size"], config["moe_intermediate_size"]
    groups = config.get("num_query_groups", config["num_key_value_heads"])
    return {
        **decoder(config, num_key_value_heads=groups, head_dim=128),
        **gated(hidden, inner, "experts.*"),
        **gated(hidden, inner * config["n_shared_experts"], "shared_experts"),
        **matrices(config["n_routed_experts"], hidden, "gate"),
        "gate.e_score_correction_bias": ("F32", config["n_routed_experts"]),
    }


def sam(width: int, layers: int, whole: int, heads: int) -> Table:
    """The image encoder of Segment Anything at 1024 pixels; every `whole`-th layer attends to the whole image."""
    head = width // heads
    return {
        "patch_embed.proj.weight": (width, 3, 16, 16),
        "pos_embed": (1, 64, 64, width),
        **matrices(3 * width, width, "qkv"),
        **matrices(width, width, "attn.proj"),
        **matrices(4 * width, width, "lin1"),
        **matrices(width, 4 * width, "lin2"),
        **norms(width, "norm1", "norm2"),
        **{f"attn.rel_pos_{axis}": (27, head) for axis in "hw"},  # windows of 14 x 14
        **{f"{layer}.attn.rel_pos_{axis}": (127, head) for layer in range(whole - 1, layers, whole) for axis in "hw"},
        "neck.0.weight": (256, width, 1, 1),
        "neck.2.weight": (256, 256, 3, 3),
        **norms(256, "neck.1", "neck.3"),
    }


def deepseek_ocr(config: Config) -> Table:
    """A decoder with experts, SAM-B and CLIP-L."""
    language = {**decoder(config), **deepseek(config)}
    width, positions = 1024, 257
    return {
        **language,
        "image_newline": (config["hidden_size"],),
        "view_seperator": (config["hidden_size"],),
        **matrices(config["hidden_size"], 2 * width, "projector.layers"),
        **sam(768, 12, 3, 12),
        "net_2.weight": (512, 256, 3, 3),
        "net_3.weight": (1024, 512, 3, 3),
        "class_embedding": (width,),
        "patch_embedding.weight": (width, 3, 14, 14),
        **matrices(positions, width, "position_embedding"),
        "position_ids": ("I64", 1, positions),
        **norms(width, "pre_layrnorm", "layer_norm1", "layer_norm2"),
        **matrices(3 * width, width, "qkv_proj"),
        **matrices(width, width, "out_proj"),
        **matrices(4 * width, width, "fc1"),
        **matrices(width, 4 * width, "fc2"),
    }


def lisa(config: Config) -> Table:
    """LLaVA's decoder and projector, SAM-H with its prompt encoder and mask decoder."""
    hidden, out = config["hidden_size"], config["out_dim"]
    half = out // 2  # attention between image and tokens is narrower
    across = ("cross_attn_image_to_token", "cross_attn_token_to_image", "final_attn_token_to_image")
    masks: Table = {
        **matrices(hidden, hidden, "text_hidden_fcs.0.0"),
        **matrices(out, hidden, "text_hidden_fcs.0.2"),
        **sam(1280, 32, 8, 16),
        **matrices(1, out, "no_mask_embed", "not_a_point_embed", "point_embeddings.*", "iou_token"),
        **matrices(4, out, "mask_tokens", "iou_prediction_head.layers.2"),
        **matrices(out, out, "iou_prediction_head.layers.*", "output_hypernetworks_mlps.*.layers.*"),
        **matrices(out // 8, out, *(f"output_hypernetworks_mlps.{number}.layers.2" for number in range(4))),
        "output_upscaling.0.weight": (out, out // 4, 2, 2),
        "output_upscaling.0.bias": (out // 4,),
        **norms(out // 4, "output_upscaling.1"),
        "output_upscaling.3.weight": (out // 4, out // 8, 2, 2),
        "output_upscaling.3.bias": (out // 8,),
        **matrices(half, out, *(f"{place}.{part}_proj" for place in across for part in "qkv")),
        **matrices(out, half, *(f"{place}.out_proj" for place in across)),
        **matrices(out, out, *(f"transformer.layers.*.self_attn.{part}_proj" for part in ("q", "k", "v", "out"))),
        **matrices(2048, out, "transformer.layers.*.mlp.lin1"),
        **matrices(out, 2048, "transformer.layers.*.mlp.lin2"),
        **norms(out, *(f"transformer.layers.*.norm{number}" for number in range(1, 5)), "norm_final_attn"),
        "mask_downscaling.0.weight": (4, 1, 2, 2),
        **norms(4, "mask_downscaling.1"),
        "mask_downscaling.3.weight": (16, 4, 2, 2),
        **norms(16, "mask_downscaling.4"),
        "mask_downscaling.6.weight": (out, 16, 1, 1),
        "positional_encoding_gaussian_matrix": (2, half),
    }
    kept = {key: ("F32", *shape) for key, shape in masks.items()}  # trained, and saved as they were
    return {**decoder(config), **matrices(hidden, config["mm_hidden_size"], "mm_projector"), **kept}


def siglip(width: int, inner: int, patch: int, positions: int) -> Table:
    """SigLIP's vision tower."""
    return {
        "patch_embedding.weight": (width, 3, patch, patch),
        **matrices(positions, width, "position_embedding"),
        **norms(width, "layer_norm1", "layer_norm2", "post_layernorm"),
        **matrices(inner, width, "fc1"),
        **matrices(width, inner, "fc2"),
        **attention(width, 1, 1, width, "out_proj"),
    }


def gemma3(config: Config) -> Table:
    """A text decoder with four norms a layer behind SigLIP."""
    text, vision = config["text_config"], config["vision_config"]
    width, hidden = vision["hidden_size"], text["hidden_size"]
    positions = (vision["image_size"] // vision["patch_size"]) ** 2
    tower = siglip(width, vision["intermediate_size"], vision["patch_size"], positions)
    return {
        **tower,
        **{f"language_model.model.layers.*.self_attn.{key}": shape for key, shape in _parts(decoder(text)).items()},
        **{key: shape for key, shape in decoder(text).items() if key not in tower},
        **norms(hidden, "pre_feedforward_layernorm", "post_feedforward_layernorm"),
        "mm_input_projection_weight": (width, hidden),
        **norms(width, "mm_soft_emb_norm"),
    }


def minicpm(config: Config) -> Table:
    """Qwen2 with SigLIP and a resampler, whose sizes are not in the config."""
    hidden, width = config["hidden_size"], 1152
    language = decoder(config)
    return {
        **siglip(width, 4304, 14, 70 * 70),
        **{f"model.layers.*.self_attn.{key}": shape for key, shape in _parts(language).items()},
        **{key: shape for key, shape in language.items() if key not in _parts(language)},
        "resampler.query": (64, hidden),
        "resampler.proj": (hidden, hidden),
        "in_proj_weight": (3 * hidden, hidden),
        "in_proj_bias": (3 * hidden,),
        **matrices(hidden, hidden, "resampler.attn.out_proj"),
        **matrices(hidden, width, "kv_proj"),
        **norms(hidden, "ln_q", "ln_kv", "ln_post"),
    }


def _parts(table: Table) -> Table:
    """What a vision tower calls so, too."""
    return {key: shape for key, shape in table.items() if key in ("q_proj.weight", "k_proj.weight", "v_proj.weight")}


def qwen3_vl(config: Config) -> Table:
    """Qwen3 behind a vision tower that is read at four depths."""
    vision = config["vision_config"]
    width, inner, patch = vision["hidden_size"], vision["intermediate_size"], vision["patch_size"]
    merged = width * vision["spatial_merge_size"] ** 2
    return {
        **decoder(config["text_config"]),
        "patch_embed.proj.weight": (width, vision["in_channels"], vision["temporal_patch_size"], patch, patch),
        **matrices(vision["num_position_embeddings"], width, "pos_embed"),
        **norms(width, "norm1", "norm2", "merger.norm"),
        **norms(merged, "deepstack_merger_list.*.norm"),
        **matrices(3 * width, width, "qkv"),
        **matrices(width, width, "attn.proj"),
        **matrices(inner, width, "mlp.linear_fc1"),
        **matrices(width, inner, "mlp.linear_fc2"),
        **matrices(merged, merged, "linear_fc1"),
        **matrices(vision["out_hidden_size"], merged, "linear_fc2"),
    }


def qwen_moe(config: Config) -> Table:
    """Qwen3 with experts; Qwen3.5 has linear attention in most layers, and a gate in the query of the others."""
    hidden, inner = config["hidden_size"], config["moe_intermediate_size"]
    keys = config.get("linear_num_key_heads", 0) * config.get("linear_key_head_dim", 0)
    value_heads, value_head = config.get("linear_num_value_heads", 0), config.get("linear_value_head_dim", 0)
    values = value_heads * value_head
    rows = config["num_attention_heads"] * config["head_dim"] * (2 if config.get("attn_output_gate") else 1)
    return {
        **decoder({"intermediate_size": 0, **config}),
        **matrices(rows, hidden, "q_proj"),
        **gated(hidden, inner, "experts.*"),
        **gated(hidden, config.get("shared_expert_intermediate_size", 0), "shared_expert"),
        **matrices(config["num_experts"], hidden, "gate"),
        **matrices(1, hidden, "shared_expert_gate"),
        **matrices(2 * keys + values, hidden, "in_proj_qkv"),
        **matrices(values, hidden, "in_proj_z"),
        **matrices(value_heads, hidden, "in_proj_a", "in_proj_b"),
        **matrices(hidden, values, "linear_attn.out_proj"),
        **norms(value_head, "linear_attn.norm"),
        "conv1d.weight": (2 * keys + values, 1, config.get("linear_conv_kernel_dim", 0)),
        "A_log": (value_heads,),
        "dt_bias": (value_heads,),
        "indexer.qk_index_proj": (128, 128),  # TransGQA's: the sizes that make up the publisher's total
        "indexer.v_transform": (512,),
    }


def bloom(config: Config) -> Table:
    """BLOOM: query, key and value in one matrix, a norm behind the embedding."""
    hidden = config["n_embed"]
    return {
        **matrices(config["vocab_size"], hidden, "word_embeddings"),
        **norms(hidden, "ln_f", "word_embeddings_layernorm", "input_layernorm", "post_attention_layernorm"),
        **matrices(3 * hidden, hidden, "query_key_value"),
        **matrices(hidden, hidden, "dense"),
        **matrices(4 * hidden, hidden, "dense_h_to_4h"),
        **matrices(hidden, 4 * hidden, "dense_4h_to_h"),
    }


def falcon(config: Config) -> Table:
    """Falcon's newer layout: a key and a value for each group of queries, two norms for parallel branches."""
    hidden = config["hidden_size"]
    head = hidden // config["num_attention_heads"]
    return {
        **matrices(config["vocab_size"], hidden, "word_embeddings", "lm_head"),
        **norms(hidden, "ln_f", "ln_attn", "ln_mlp"),
        **matrices((config["num_attention_heads"] + 2 * config["num_kv_heads"]) * head, hidden, "query_key_value"),
        **matrices(hidden, hidden, "dense"),
        **matrices(4 * hidden, hidden, "dense_h_to_4h"),
        **matrices(hidden, 4 * hidden, "dense_4h_to_h"),
    }


def gpt_neox(config: Config) -> Table:
    """GPT-NeoX, with the buffers that transformers 4.28 still saved."""
    hidden, inner, length = config["hidden_size"], config["intermediate_size"], config["max_position_embeddings"]
    return {
        **matrices(config["vocab_size"], hidden, "embed_in", "embed_out"),
        **norms(hidden, "final_layer_norm", "input_layernorm", "post_attention_layernorm"),
        **matrices(3 * hidden, hidden, "query_key_value"),
        **matrices(hidden, hidden, "dense"),
        **matrices(inner, hidden, "dense_h_to_4h"),
        **matrices(hidden, inner, "dense_4h_to_h"),
        "attention.bias": ("BOOL", 1, 1, length, length),
        "attention.masked_bias": (),
        "rotary_emb.inv_freq": (hidden // config["num_attention_heads"] // 2,),
    }


def granite(config: Config) -> Table:
    """Llama's attention, and experts stored as stacks."""
    hidden, inner, experts = config["hidden_size"], config["intermediate_size"], config["num_local_experts"]
    return {
        **decoder(config),
        "input_linear.weight": (experts, 2 * inner, hidden),
        "output_linear.weight": (experts, hidden, inner),
        **matrices(experts, hidden, "router.layer"),
    }


def phi3(config: Config) -> Table:
    """Llama with query, key and value in one matrix, and gate and up in one."""
    hidden, heads, groups = config["hidden_size"], config["num_attention_heads"], config["num_key_value_heads"]
    return {
        **decoder(config),
        **matrices((heads + 2 * groups) * (hidden // heads), hidden, "qkv_proj"),
        **matrices(2 * config["intermediate_size"], hidden, "gate_up_proj"),
    }


def t5_encoder(config: Config) -> Table:
    """The encoder of T5 v1.1."""
    hidden, inside = config["d_model"], config["d_kv"] * config["num_heads"]
    return {
        **matrices(config["vocab_size"], hidden, "shared"),
        **matrices(inside, hidden, "q", "k", "v"),
        **matrices(hidden, inside, "o"),
        **matrices(config["relative_attention_num_buckets"], config["num_heads"], "relative_attention_bias"),
        **matrices(config["d_ff"], hidden, "wi_0", "wi_1"),
        **matrices(hidden, config["d_ff"], "wo"),
        **norms(hidden, "layer_norm", "final_layer_norm"),
    }


def chatglm(config: Config) -> Table:
    """ChatGLM3: two groups of keys and values, gate and up in one matrix."""
    hidden, inner, head = config["hidden_size"], config["ffn_hidden_size"], config["kv_channels"]
    return {
        **matrices(config["padded_vocab_size"], hidden, "word_embeddings", "output_layer"),
        **norms(hidden, "final_layernorm", "input_layernorm", "post_attention_layernorm"),
        **matrices(hidden + 2 * config["multi_query_group_num"] * head, hidden, "query_key_value"),
        **matrices(hidden, hidden, "dense"),
        **matrices(2 * inner, hidden, "dense_h_to_4h"),
        **matrices(hidden, inner, "dense_4h_to_h"),
        "inv_freq": (head // 4,),
    }


def diffusion_transformer(config: Config) -> Table:
    """FLUX.1 and Stable Diffusion 3.5, as diffusers stores them."""
    hidden = config["num_attention_heads"] * config["attention_head_dim"]
    channels, last = config["in_channels"], config["num_layers"] - 1
    patch = config["patch_size"]
    return {
        **matrices(hidden, channels, "x_embedder"),
        **matrices(hidden, config["joint_attention_dim"], "context_embedder"),
        **matrices(hidden, 256, "timestep_embedder.linear_1", "guidance_embedder.linear_1"),
        **matrices(hidden, config["pooled_projection_dim"], "text_embedder.linear_1"),
        **matrices(hidden, hidden, "linear_2", "add_q_proj", "add_k_proj", "add_v_proj", "to_add_out"),
        **matrices(hidden, hidden, "to_q", "to_k", "to_v", "to_out.*"),
        **norms(config["attention_head_dim"], "norm_q", "norm_k", "norm_added_q", "norm_added_k"),
        **matrices(6 * hidden, hidden, "norm1.linear", "norm1_context.linear"),
        **matrices(3 * hidden, hidden, "norm.linear"),
        **matrices(2 * hidden, hidden, "norm_out.linear"),
        **matrices(4 * hidden, hidden, "ff.net.*.proj", "ff_context.net.*.proj", "proj_mlp"),
        **matrices(hidden, 4 * hidden, "ff.net.*", "ff_context.net.*"),
        **matrices(hidden, 5 * hidden, "single_transformer_blocks.*.proj_out"),
        **matrices(patch * patch * channels, hidden, "proj_out"),
        "pos_embed.proj.weight": (hidden, channels, patch, patch),
        "pos_embed.pos_embed": (1, config.get("pos_embed_max_size", 0) ** 2, hidden),
        **(
            matrices(2 * hidden, hidden, f"transformer_blocks.{last}.norm1_context.linear")
            if config["_class_name"] == "SD3Transformer2DModel"  # its last block has no context behind it
            else {}
        ),
    }


def gptq(rows: int, columns: int, *modules: str) -> dict[str, Shape]:
    """Linear layers in 4 bits, 8 values an integer, with a scale and a zero for each 128 inputs; always with a bias."""
    return {
        key: shape
        for module in modules
        for key, shape in {
            f"{module}.qweight": ("I32", columns // 8, rows),
            f"{module}.qzeros": ("I32", columns // 128, rows // 8),
            f"{module}.scales": (columns // 128, rows),
            f"{module}.g_idx": ("I32", columns),
            f"{module}.bias": (rows,),
        }.items()
    }


def qwen_vl_gptq(config: Config) -> Table:
    """The first Qwen, quantised, with a vision tower of OpenCLIP's that is not."""
    hidden, inner, visual = config["hidden_size"], config["intermediate_size"] // 2, config["visual"]
    width, queries = visual["width"], 256
    wide = int(width * visual["mlp_ratio"])
    return {
        **matrices(config["vocab_size"], hidden, "wte", "lm_head"),
        **norms(hidden, "ln_1", "ln_2", "ln_f", "ln_q", "ln_kv", "ln_post"),
        **gptq(3 * hidden, hidden, "h.*.attn.c_attn"),
        **gptq(hidden, hidden, "h.*.attn.c_proj"),
        **gptq(inner, hidden, "h.*.mlp.w1", "h.*.mlp.w2"),
        **gptq(hidden, inner, "h.*.mlp.c_proj"),
        "attn_pool.query": (queries, hidden),
        "attn_pool.pos_embed": (queries, hidden),
        **matrices(hidden, width, "attn_pool.kv_proj"),
        **matrices(hidden, hidden, "attn_pool.attn.out_proj"),
        "attn_pool.attn.in_proj_weight": (3 * hidden, hidden),
        "attn_pool.attn.in_proj_bias": (3 * hidden,),
        "visual.proj": (hidden, hidden),
        "visual.conv1.weight": (width, 3, visual["patch_size"], visual["patch_size"]),
        "visual.positional_embedding": (queries, width),
        **norms(width, "ln_pre", "resblocks.*.ln_1", "resblocks.*.ln_2"),
        **matrices(3 * width, width, "attn.in_proj"),
        **matrices(width, width, "attn.out_proj"),
        **matrices(wide, width, "resblocks.*.mlp.c_fc"),
        **matrices(width, wide, "resblocks.*.mlp.c_proj"),
    }


def mlx(*shape: int, modules: tuple[str, ...]) -> dict[str, Shape]:
    """Linear layers in 4 bits, 8 values an integer, with a scale and an offset for each 64 inputs."""
    rows, columns = shape[:-1], shape[-1]
    found: dict[str, Shape] = {}
    for module in modules:
        found[f"{module}.weight"] = ("U32", *rows, columns // 8)
        found[f"{module}.scales"] = found[f"{module}.biases"] = (*rows, columns // 64)
    return found


def mistral4_mlx(config: Config) -> Table:
    """Mistral 4, whose key and value projections MLX absorbs into two others, one matrix a head."""
    text = config["text_config"]
    hidden, heads, inner = text["hidden_size"], text["num_attention_heads"], text["moe_intermediate_size"]
    rank, experts = text["kv_lora_rank"], text["n_routed_experts"]
    return {
        **mlx(text["vocab_size"], hidden, modules=("embed_tokens", "lm_head")),
        **mlx(text["q_lora_rank"], hidden, modules=("q_a_proj",)),
        **mlx(heads * text["qk_head_dim"], text["q_lora_rank"], modules=("q_b_proj",)),
        **mlx(rank + text["qk_rope_head_dim"], hidden, modules=("kv_a_proj_with_mqa",)),
        **mlx(heads, rank, text["qk_nope_head_dim"], modules=("embed_q",)),
        **mlx(heads, text["v_head_dim"], rank, modules=("unembed_out",)),
        **mlx(hidden, heads * text["v_head_dim"], modules=("o_proj",)),
        **mlx(inner, hidden, modules=("shared_experts.gate_proj", "shared_experts.up_proj")),
        **mlx(hidden, inner, modules=("shared_experts.down_proj",)),
        **mlx(experts, inner, hidden, modules=("switch_mlp.gate_proj", "switch_mlp.up_proj")),
        **mlx(experts, hidden, inner, modules=("switch_mlp.down_proj",)),
        **matrices(experts, hidden, "mlp.gate"),
        **norms(hidden, "norm", "input_layernorm", "post_attention_layernorm"),
        **norms(rank, "kv_a_layernorm"),
        **norms(text["q_lora_rank"], "q_a_layernorm"),
    }


def nf4(rows: int, columns: int, *modules: str) -> dict[str, Shape]:
    """Linear layers in 4 bits as bitsandbytes packs them: two values a byte, a scale for each 64."""
    return {
        key: shape
        for module in modules
        for key, shape in {
            f"{module}.weight": ("U8", rows * columns // 2, 1),
            f"{module}.weight.absmax": ("F32", rows * columns // 64),
            f"{module}.weight.quant_map": ("F32", 16),
            f"{module}.weight.quant_state.bitsandbytes__nf4": ("U8", 80),  # a JSON text, of about this length
            f"{module}.bias": (rows,),
        }.items()
    }


def molmo_nf4(config: Config) -> Table:
    """Molmo, quantised except its vision tower (CLIP-L at 336 pixels) and head."""
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    head = hidden // config["num_attention_heads"]
    width = 1024
    return {
        **nf4(hidden + 2 * config["num_key_value_heads"] * head, hidden, "att_proj"),
        **nf4(hidden, hidden, "attn_out"),
        **nf4(inner, hidden, "blocks.*.ff_proj"),
        **nf4(hidden, inner // 2, "blocks.*.ff_out"),
        **norms(hidden, "attn_norm", "ff_norm", "ln_f"),
        **matrices(config["embedding_size"], hidden, "transformer.ff_out"),
        "wte.embedding": (config["embedding_size"], hidden),
        "wte.new_embedding": (128, hidden),
        **matrices(width, 2 * width, *(f"image_pooling_2d.w{part}" for part in "qkv")),
        **matrices(width, width, "image_pooling_2d.wo", *(f"attention.w{part}" for part in "qkvo")),
        **matrices(inner // 2, width, "image_projector.w1", "image_projector.w3"),
        **matrices(hidden, inner // 2, "image_projector.w2"),
        **matrices(4 * width, width, "feed_forward.w1"),
        **matrices(width, 4 * width, "feed_forward.w2"),
        **norms(width, "pre_ln", "attention_norm", "ffn_norm"),
        "class_embedding": (width,),
        "positional_embedding": (577, width),
        "patch_embedding.weight": (width, 3 * 14 * 14),
        "pad_embed": (2, 2 * width),
    }


Facts = Callable[[Config], Table]
