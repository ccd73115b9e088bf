"""Decoders without experts that were published under other names, and those that mix kinds of attention.

Linear-attention layers (Gated DeltaNet and its like) keep one short convolution over query, key and value, where files
have three. Facts: the rules that transformers 5.24 has registered for these names.
"""

from __future__ import annotations

from collections.abc import Mapping

from loadplan.compiler.ops import Split
from loadplan.compiler.recipe import Recipe
from loadplan.compiler.registry import RecipeSource
from loadplan.compiler.rules import IndexFold, WeightConverter
from loadplan.recipes.idioms import STALE_BUFFERS, cut, inside, join_convolutions, rename

# GPT-2's names around Llama's layers.
_EXAONE = rename(
    {
        **inside(r"^transformer\.", "model.", {r"wte\.": "embed_tokens.", r"h\.": "layers.", r"ln_f\.": "norm."}),
        r"\.attn\.attention\.": ".self_attn.",
        r"\.self_attn\.out_proj\.": ".self_attn.o_proj.",
        r"\.ln_1\.": ".input_layernorm.",
        r"\.ln_2\.": ".post_attention_layernorm.",
        r"\.mlp\.c_fc_0\.": ".mlp.gate_proj.",
        r"\.mlp\.c_fc_1\.": ".mlp.up_proj.",
        r"\.mlp\.c_proj\.": ".mlp.down_proj.",
    }
)

# Two modules of layers in a loop; attention is gated, the gate's rows first.
_HRM = (
    *rename({r"\.attn\.o_proj\.": ".self_attn.o_proj."}),
    cut("mlp.gate_up_proj", "mlp.gate_proj", "mlp.up_proj"),
    cut("attn.gqkv_proj", *(f"self_attn.{part}_proj" for part in ("gate", "q", "k", "v"))),
)

_OLMO_HYBRID = (
    *rename({"attention_layer_norm": "input_layernorm", "feedforward_layer_norm": "post_attention_layernorm"}),
    join_convolutions("linear_attn"),
)

# Rows of query, key and value, of the output gate, of the step and of the decay, by the model's sizes.
_LARA = (
    *rename({r"linear_attn\.out_norm\.": "linear_attn.norm."}),
    WeightConverter(
        "linear_attn.in_proj", [f"linear_attn.in_proj_{part}" for part in ("qkv", "z", "b", "a")], [Split(0)]
    ),
)

# Each layer is two blocks in the file, attention and MLP, both with a scale (`alpha`) for what they add.
_DORY = (
    IndexFold(r"layers\.(\d+)\.mixer", [r"layers.\1.self_attn", r"layers.\1.mlp"]),
    IndexFold(r"layers\.(\d+)\.attn_alpha", [r"layers.\1.lambda_1"] * 2),
    IndexFold(r"layers\.(\d+)\.mlp_alpha", [r"layers.\1.lambda_2"] * 2),
    *rename(
        {
            r"\.self_attn\.g_proj\.": ".self_attn.gate_proj.",
            r"^backbone\.": "model.",
            r"^(model\.)?embeddings\.": r"\1embed_tokens.",
        }
    ),
)

# Masks were buffers in the files of GPT-2 and its kin; GPT-NeoX's head is `embed_out`.
_NEOX_BUFFERS = ("attention.bias", "attention.masked_bias", "attention.rotary_emb.inv_freq")

DECODERS: Mapping[str, RecipeSource] = {
    "GPTNeoXForCausalLM": Recipe(rename({r"^embed_out\.": "lm_head."}), may_be_unused=_NEOX_BUFFERS),
    "gpt_neox": Recipe(may_be_unused=_NEOX_BUFFERS),
    "gpt2": Recipe(may_be_unused=("attn.bias", "attn.masked_bias", "crossattention.bias")),
    "exaone": Recipe(_EXAONE, may_be_unused=("attention.rotary.inv_freq", "self_attn.rotary.inv_freq")),
    "dory": Recipe(_DORY),
    "hrm_text": Recipe(_HRM),
    "lfm3": Recipe(rename({r"\.self_attn\.gate_proj\.": ".self_attn.g_proj."})),
    "olmo_hybrid": Recipe(_OLMO_HYBRID, may_be_unused=("mtp", *STALE_BUFFERS)),
    "lara_mini": Recipe(_LARA),
    "timesfm2_5": Recipe(rename({"ff0": "fc1", "ff1": "fc2"})),  # forecasts numbers, built as a text decoder is
}
