"""Encoders of text (and proteins): ESM, and BERTs with rotary positions, published in the layouts of other libraries.

nomic, GTE and jina keep query, key and value in one matrix (flash-attention's `Wqkv`). `UltrabertModel` is stored with
the prefix of the whole model. Facts: the rules that transformers 5.24 has registered for these names.
"""

from __future__ import annotations

from collections.abc import Mapping

from loadplan.compiler.recipe import Recipe
from loadplan.compiler.registry import RecipeSource
from loadplan.compiler.rules import PrefixChange
from loadplan.recipes.idioms import alike, cut, cut_qkv, rename

_FREQUENCIES = ("inv_freq", "original_inv_freq")  # buffers that models compute
_PLAIN_LAYERS = {r"encoder\.layers\.": "layers.", "emb_ln": "embeddings.LayerNorm"}
_POST_NORMS = {"norm1": "post_attention_layernorm", "norm2": "post_mlp_layernorm"}

_NOMIC = (
    *rename(
        {
            **_PLAIN_LAYERS,
            "attn.out_proj": "self_attn.o_proj",
            "mlp.fc11": "mlp.up_proj",
            "mlp.fc12": "mlp.gate_proj",
            "mlp.fc2": "mlp.down_proj",
            **_POST_NORMS,
        }
    ),
    cut_qkv("attn.Wqkv", "self_attn"),
)
_JINA = (
    *rename({**_PLAIN_LAYERS, "mixer.out_proj": "self_attn.o_proj", **_POST_NORMS}),
    cut_qkv("mixer.Wqkv", "self_attn"),
)
_GTE = (
    PrefixChange(prefix_to_remove="new"),  # what the authors call their class
    *rename(
        {
            r"encoder\.layer\.": "layers.",
            "attention.o_proj": "self_attn.o_proj",
            "attn_ln": "post_attention_layernorm",
            "mlp_ln": "post_mlp_layernorm",
            "lm_head.norm": "lm_head.layer_norm",
        }
    ),
    cut_qkv("attention.qkv_proj", "self_attn"),
    cut("mlp.up_gate_proj", "mlp.up_proj", "mlp.gate_proj"),
)
# One rotary table for all layers; each layer had its own copy.
_ESM = rename(
    {
        "encoder.layer.*.attention.self.rotary_embeddings.inv_freq": "rotary_embeddings.inv_freq",
        "LayerNorm.gamma": "LayerNorm.weight",
        "LayerNorm.beta": "LayerNorm.bias",
    }
)
_ULTRABERT = {r"^ultrabert\.": "model."}

# Stored names that models do not have: positions 0, 1, 2, ...; T5's decoder once had positions in cross-attention.
_POSITION_IDS = ("embeddings.position_ids",)
_T5_UNUSED = ("decoder.block.0.layer.1.EncDecAttention.relative_attention_bias",)
_T5_REST = ("decoder.block", "decoder.final_layer_norm", "decoder.embed_tokens", "lm_head")

TEXT_ENCODERS: Mapping[str, RecipeSource] = {
    **alike(Recipe(may_be_unused=_POSITION_IDS), "roberta xlm-roberta electra"),
    **alike(Recipe(may_be_unused=_T5_UNUSED), "t5 mt5 umt5 longt5"),
    **alike(Recipe(may_be_unused=_T5_REST), "T5EncoderModel MT5EncoderModel UMT5EncoderModel"),
    "nomic_bert": Recipe(_NOMIC, may_be_unused=_FREQUENCIES),
    "jina_embeddings_v3": Recipe(_JINA, may_be_unused=_FREQUENCIES),
    "gte": Recipe(_GTE, may_be_unused=_FREQUENCIES),
    "esm": Recipe(_ESM, may_be_unused=(*_POSITION_IDS, "position_embeddings.weight")),
    "UltrabertModel": Recipe((PrefixChange(prefix_to_remove="ultrabert"),)),
    "UltrabertForMaskedLM": Recipe(rename({**_ULTRABERT, r"^cls\.": "head.decoder."})),
    **alike(
        Recipe(rename(_ULTRABERT)),
        "UltrabertForSequenceClassification UltrabertForTokenClassification UltrabertForQuestionAnswering",
    ),
    "UltraVBertForMaskedLM": Recipe(
        rename({r"^head\.decoder\.": "lm_head.", r"^head\.": "projection_head."}), may_be_unused=("vision_model.head",)
    ),
}
