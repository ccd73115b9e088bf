"""What the compiler makes of each published key set; SOURCE.txt in the folder of its data says where it is from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from corpus import shapes

INDEX = "model.safetensors.index.json"
TORCH_INDEX = "pytorch_model.bin.index.json"
DIFFUSERS_INDEX = "diffusion_pytorch_model.safetensors.index.json"


@dataclass(frozen=True)
class Cure:
    """What a message tells the user to do."""

    config: Mapping[str, object] = field(default_factory=dict)  # fields of config.json, corrected
    waivers: tuple[str, ...] = ()  # may_be_unused, beside the recipe called `recipe`
    recipe: str = ""
    as_recipe: bool = False  # signature="recipe"
    published: bool = False  # the other version of the file, which was published too


@dataclass(frozen=True)
class KeySet:
    """A checkpoint as published, and what is expected of it."""

    name: str
    model: str
    facts: shapes.Facts | None  # None: `file` is a header, and says itself
    dtype: str
    why: str  # what the verdict rests on
    file: str = INDEX
    folder: str = ""  # of the data; as `name` if empty
    counted: float = 0  # the published total_size less the bytes of data, where it counts something else
    also: tuple[str, ...] = ()  # other indices in the folder, with their files
    opened: str = ""  # what is given to the compiler; the folder if empty
    instead: Mapping[str, str] = field(default_factory=dict)  # file of the folder: published file with its content
    stock_config: Mapping[str, object] | None = None  # where none was published
    has_config: bool = True
    kinds: frozenset[str] = frozenset()  # of the problems; none: it compiles
    words: tuple[str, ...] = ()  # in the message, or among the notes, waivers and ties of the report
    targets: int = 0
    unused: int = 0
    cure: Cure | None = None


QWEN3_MOE = {  # Qwen/Qwen3-30B-A3B, the sizes that make up the total that TransGQA's publisher states
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "moe_intermediate_size": 768,
    "num_hidden_layers": 48,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "num_experts": 128,
    "vocab_size": 151936,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}
_FITS = "names and shapes are the class's own"
_UNKNOWN = "transformers has no such class: names are taken as they are"
_NO_CLASS = "no signature: transformers has no class"
_NO_NAME = "no signature: no config.json names an architecture"

KEY_SETS = (
    KeySet(
        "bert-minilm-l6",
        "BertModel",
        None,
        "F32",
        "position_ids is a buffer of the past: waived",
        file="model.safetensors.header.json",
        targets=103,
        unused=1,
        words=("embeddings.position_ids",),
    ),
    KeySet(
        "bloom-176b",
        "BloomForCausalLM",
        shapes.bloom,
        "BF16",
        "no `transformer.` in front, no head: base prefix added, head tied",
        also=(TORCH_INDEX,),
        targets=845,
        words=("lm_head.weight", "pytorch_model"),
    ),
    KeySet(
        "bloom-176b merge conflict",
        "BloomForCausalLM",
        shapes.bloom,
        "BF16",
        "the index is two JSON texts",
        folder="bloom-176b",
        instead={INDEX: "model.safetensors.index.MERGE-CONFLICT.json"},
        kinds=frozenset({"index"}),
        words=(INDEX, "is not valid JSON"),
        cure=Cure(published=True),
    ),
    KeySet(
        "bloom-176b huge total",
        "BloomForCausalLM",
        shapes.bloom,
        "BF16",
        "total_size has 72 digits: metadata is not read",
        file=TORCH_INDEX,
        folder="bloom-176b",
        instead={TORCH_INDEX: "pytorch_model.bin.index.HUGE-TOTAL.json"},
        targets=845,
        words=("lm_head.weight",),
    ),
    KeySet(
        "chatglm3-kolors",
        "ChatGLMModel",
        shapes.chatglm,
        "F16",
        _UNKNOWN,
        file=TORCH_INDEX,
        targets=200,
        words=(_NO_CLASS,),
    ),
    KeySet(
        "deepseek-ocr", "DeepseekOCRForCausalLM", shapes.deepseek_ocr, "F32", _UNKNOWN, targets=2711, words=(_NO_CLASS,)
    ),
    KeySet(
        "falcon-180b",
        "FalconForCausalLM",
        shapes.falcon,
        "BF16",
        "the head is stored although the class ties it: both are loaded, and joined if equal",
        targets=644,
        words=("transformer.word_embeddings.weight = lm_head.weight",),
    ),
    KeySet(
        "flux1-dev-transformer",
        "FluxTransformer2DModel",
        shapes.diffusion_transformer,
        "BF16",
        "diffusers: the config names no architecture",
        file=DIFFUSERS_INDEX,
        targets=1160,
        words=(_NO_NAME,),
    ),
    KeySet(
        "gemma3-vl-27b",
        "Gemma3ForConditionalGeneration",
        shapes.gemma3,
        "BF16",
        "older levels of names, no head: renamed, tied",
        targets=1247,
        words=("lm_head.weight",),
    ),
    KeySet(
        "gpt-neox-redpajama-7b",
        "GPTNeoXForCausalLM",
        shapes.gpt_neox,
        "F16",
        "masks and inv_freq of the past: waived; embed_out is the head",
        file=TORCH_INDEX,
        counted=-32 * 2048 * 2048 * 7 / 8,  # a bool counted as a bit
        targets=388,
        unused=96,
        words=("attention.masked_bias", "rotary_emb.inv_freq"),
    ),
    KeySet(
        "granitemoe-1b-a400m",
        "GraniteMoeForCausalLM",
        shapes.granite,
        "F32",
        "experts are stacks already, the head is tied",
        targets=218,
        words=("lm_head.weight",),
    ),
    KeySet(
        "kimi2-pcl-moe",
        "DeepseekV3ForCausalLM",
        shapes.deepseek,
        "BF16",
        "grouped attention under the name of a class with latent attention",
        counted=1516272,  # the headers, too
        kinds=frozenset({"unexpected", "missing"}),
        words=(
            "pass the class that it was saved from as signature",
            "the model has no model.layers.*.self_attn.q_proj.weight (32 times)",
            "becomes model.layers.*.self_attn.kv_b_proj.weight (32 times)",
        ),
        cure=Cure(as_recipe=True),
        targets=11967,
    ),
    KeySet(
        "lisa-llava-sam",
        "LISAForCausalLM",
        shapes.lisa,
        "BF16",
        f"{_UNKNOWN}; inv_freq is waived by LLaVA's recipe",
        file=TORCH_INDEX,
        targets=891,
        unused=32,
        words=(_NO_CLASS, "rotary_emb.inv_freq"),
    ),
    KeySet(
        "lisa-llava-sam trailing junk",
        "LISAForCausalLM",
        shapes.lisa,
        "BF16",
        "git's configuration behind the closing brace",
        file=TORCH_INDEX,
        folder="lisa-llava-sam",
        instead={"config.json": "config.TRAILING-JUNK.json"},
        kinds=frozenset({"config"}),
        words=("config.json: is not valid JSON",),
        cure=Cure(published=True),
        targets=891,
    ),
    KeySet("llama3_1-70b", "LlamaForCausalLM", shapes.decoder, "F32", _FITS, targets=723),
    KeySet(
        "minicpm-v-2_6",
        "Qwen2ForCausalLM",
        shapes.minicpm,
        "BF16",
        "the config is that of the language model alone",
        kinds=frozenset({"unexpected"}),
        words=("may_be_unused=('resampler', 'vpm')", "has no vpm.encoder.layers.*.mlp.fc1.weight (27 times)"),
        cure=Cure(waivers=("resampler", "vpm"), recipe="qwen2"),
        targets=339,
    ),
    KeySet(
        "minimax-m1",
        "MiniMaxM1ForCausalLM",
        shapes.mixtral,
        "BF16",
        f"{_UNKNOWN}; the F32 router stays F32",
        targets=8243,
        words=(_NO_CLASS,),
    ),
    KeySet(
        "mistral4-mla-moe-mlx4bit",
        "Mistral3ForConditionalGeneration",
        shapes.mistral4_mlx,
        "BF16",
        "MLX's 4-bit layout, no vision tower",
        kinds=frozenset({"unexpected", "missing", "shape"}),
        words=("the checkpoint is quantised", "end in biases, scales", "signature='recipe'"),
        cure=Cure(as_recipe=True),
        targets=1483,
    ),
    KeySet("mixtral-8x22b", "MixtralForCausalLM", shapes.mixtral, "BF16", "experts one by one: stacked", targets=507),
    KeySet(
        "molmo-7b-nf4",
        "MolmoForCausalLM",
        shapes.molmo_nf4,
        "F16",
        f"{_UNKNOWN}, packed bytes too",
        counted=168,  # the JSON texts of quantisation states are of different lengths
        targets=921,
        words=(_NO_CLASS,),
    ),
    KeySet(
        "mt5-xl-encoder",
        "T5EncoderModel",
        shapes.t5_encoder,
        "F32",
        "the encoder's embedding is tied",
        targets=219,
        words=("encoder.embed_tokens.weight",),
    ),
    KeySet(
        "peft-gpt2-lora",
        "LoRA of GPT-2",
        None,
        "F32",
        "an adapter has no config.json of a model",
        file="adapter_model.header.json",
        has_config=False,
        targets=25,
        words=(_NO_NAME,),
    ),
    KeySet("phi3-mini", "Phi3ForCausalLM", shapes.phi3, "BF16", f"{_FITS}, fused matrices too", targets=195),
    KeySet(
        "qwen-vl-gptq-int4",
        "QWenLMHeadModel",
        shapes.qwen_vl_gptq,
        "F16",
        f"{_UNKNOWN}, packed integers too",
        targets=1461,
        words=(_NO_CLASS,),
    ),
    KeySet(
        "qwen3-30b-a3b-transgqa",
        "Qwen3 MoE with an indexer",
        shapes.qwen_moe,
        "BF16",
        "no config.json",
        has_config=False,
        stock_config=QWEN3_MOE,
        targets=19107,
        words=(_NO_NAME,),
    ),
    KeySet(
        "qwen3-30b-a3b-transgqa stock config",
        "Qwen3MoeForCausalLM",
        shapes.qwen_moe,
        "BF16",
        "stock Qwen3 has neither biases nor an indexer",
        folder="qwen3-30b-a3b-transgqa",
        stock_config=QWEN3_MOE,
        kinds=frozenset({"unexpected"}),
        words=(
            "may_be_unused=('bias', 'indexer')",
            "the model has no model.layers.*.self_attn.indexer.v_transform (48 times)",
        ),
        cure=Cure(waivers=("bias", "indexer"), recipe="qwen3_moe"),
        targets=531,
    ),
    KeySet(
        "qwen3-vl-8b",
        "Qwen3VLForConditionalGeneration",
        shapes.qwen3_vl,
        "BF16",
        f"{_FITS}; total_size is 0: metadata is not read",
        counted=-17534247392,
        targets=750,
    ),
    KeySet(
        "qwen3_5-moe-reap",
        "Qwen3_5MoeForConditionalGeneration",
        shapes.qwen_moe,
        "F16",
        "the class is that of the whole model, the config and the keys are those of its text model",
        kinds=frozenset({"config"}),
        words=("takes a config of type 'qwen3_5_moe'", "the class of this type alone is Qwen3_5MoeForCausalLM"),
        cure=Cure(config={"architectures": ["Qwen3_5MoeForCausalLM"]}),
        targets=693,
    ),
    KeySet(
        "sd3_5-large-transformer",
        "SD3Transformer2DModel",
        shapes.diffusion_transformer,
        "BF16",
        "diffusers: the config names no architecture",
        file=DIFFUSERS_INDEX,
        targets=1227,
        words=(_NO_NAME,),
    ),
    KeySet(
        "t5-v1_1-xxl-encoder",
        "T5 encoder",
        shapes.t5_encoder,
        "BF16",
        "the config names no architecture",
        targets=219,
        words=(_NO_NAME,),
    ),
    KeySet(
        "t5-v1_1-xxl-fp16-variant",
        "T5EncoderModel",
        shapes.t5_encoder,
        "F16",
        "two indices in one folder: the plain one is taken; the class keeps `wo` in F32",
        also=("model.safetensors.index.fp16.json",),
        targets=219,
        words=("encoder.embed_tokens.weight", "model.fp16-00001-of-00002.safetensors is left out"),
    ),
    KeySet(
        "t5-v1_1-xxl-fp16-variant fp16",
        "T5EncoderModel",
        shapes.t5_encoder,
        "F16",
        "the index given by its path",
        folder="t5-v1_1-xxl-fp16-variant",
        also=("model.safetensors.index.fp16.json",),
        opened="model.safetensors.index.fp16.json",
        targets=219,
        words=("encoder.embed_tokens.weight", "model-00001-of-00002.safetensors is left out"),
    ),
)
