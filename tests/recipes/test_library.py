"""Our own recipes, for every model that transformers has a mapping for, against what its rules make of real names.

`tests/data/oracle-names.json.gz` holds, for each mapped class and type, a tiny model's signature and the headers of the
checkpoints that transformers writes for it, and for each name what transformers' rules turn it into. It is made by

    python tests/recipes/test_library.py FOLDER

from the folder that `tests/oracle/tiny_models.py` fills. Values are compared in `tests/oracle`.
"""

from __future__ import annotations

import gzip
import importlib
import json
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from loadplan.compiler.checkpoint import Checkpoint, Entry
from loadplan.compiler.compose_recipe import LEGACY, compose_recipe
from loadplan.compiler.pipeline import resolve
from loadplan.compiler.recipe import Recipe
from loadplan.compiler.registry import find_recipe, known_recipes, parse_config
from loadplan.compiler.route_names import Conversion, route_names
from loadplan.compiler.signature import Signature
from loadplan.compiler.target import Target
from loadplan.recipes.library import FAMILIES, RECIPES
from loadplan.runtime.dtype import DType
from loadplan.runtime.tensor_type import TensorType

DATA = Path(__file__).parent.parent / "data" / "oracle-names.json.gz"
DEAD = {"mlcd", "mlcd_vision", "xCLIPVisionModel", "xCLIPTextModel", "PPChart2TableModel"}  # no model is called so
NOT_RECORDED = {"timm_wrapper", "tipsv2_dpt"}  # needs timm; has one class that does not go by its own name
SHADOWED = {"qwen2_5_omni_thinker", "qwen3_omni_moe_thinker"}  # their classes all go by their own names
OWN = {LEGACY, "bert-fused-qkv"}  # names that are no model's
THEIR_NAMES = {
    "FuseRuns": "ErnieFuseAndSplitTextVisionExperts",
    "MergeMessageQueries": "Inkling2LoopMergeMessageQueries",
    "PlainFloats": "Inkling2LoopDequantizeExperts",
    "UnpadVocab": "Inkling2UnpadVocab",
}
PARAMETERS = ("dim", "dim0", "dim1", "check_dims", "stack_dim", "concat_dim", "permute_layer_names")


@cache
def recorded() -> Mapping[str, Any]:
    """The data file, by registered name; `NAME@CLASS` is the class without a head of the type NAME."""
    found: Mapping[str, Any] = json.loads(gzip.decompress(DATA.read_bytes()))
    return found


def described(operations: Sequence[object]) -> str:
    """Ops in transformers' words, with what says along which dims they work."""
    texts = []
    for operation in operations:
        kind = type(operation).__name__
        settings = [value for name in PARAMETERS if (value := getattr(operation, name, None)) is not None]
        texts.append(f"{THEIR_NAMES.get(kind, kind)}{json.dumps(settings)}")
    return " ".join(texts)


def layouts() -> list[Any]:
    if __name__ == "__main__":  # the data are being made
        return []
    return [
        pytest.param(name, layout, id=f"{name}-{layout}")
        for name, model in recorded().items()
        for layout in model["stored"]
    ]


def read(name: str, layout: str) -> tuple[Checkpoint, Signature, Mapping[str, Any]]:
    """The recorded checkpoint as headers only, the model, and where transformers' rules send each name."""
    model = recorded()[name]
    stored = model["stored"][layout]
    entries = {
        source: Entry(
            source, TensorType(tuple(shape), DType(stored["others"].get(source, "F32"))), "model.safetensors", 0
        )
        for source, (shape, _) in stored["tensors"].items()
    }
    return Checkpoint((), entries, model["config"]), Signature.from_json(model["signature"]), stored


def converted(conversion: Conversion) -> tuple[str, tuple[str, list[str]]]:
    return conversion.targets[0], (described(conversion.rule.operations), list(conversion.sources()))


@pytest.mark.parametrize(("name", "layout"), layouts())
def test_names_go_where_transformers_sends_them(name: str, layout: str) -> None:
    """Every tensor has one place and the right shape there; no op, no order of sources and no name differs."""
    checkpoint, signature, stored = read(name, layout)
    config = parse_config(checkpoint.config)

    resolved = resolve(checkpoint, compose_recipe(signature, config), signature, Target())

    made = {target: (ops, sources) for target, (ops, sources) in stored["made"].items()}
    in_made = {source for _, sources in made.values() for source in sources}
    plain = {source: target or source for source, (_, target) in stored["tensors"].items() if source not in in_made}
    found = dict(map(converted, resolved.routing.conversions))
    assert resolved.matched.missing == []
    if name == "MtpModel":  # made of draft layers; transformers sets the rest of the main model's tensors aside before
        last = f"model.layers.{config.find_int('num_hidden_layers')}."
        drafts = {source: target for source, target in plain.items() if source.startswith(last)}
        assert drafts == {source: target for source, target in resolved.routing.plain if source.startswith(last)}
        assert found.items() >= {target: made[target] for target in found if target.startswith("layers.")}.items()
        wanted = {target for target, _ in signature.tensors if target.startswith("layers.")}
        assert wanted == {*drafts.values(), *(target for target in found if target.startswith("layers."))}
        return
    assert dict(resolved.routing.plain) == plain
    assert found == made
    assert resolved.matched.unused == []


def test_every_live_name_of_the_mapping_has_a_recipe() -> None:
    conversion_mapping: Any = importlib.import_module("transformers.conversion_mapping")
    mapped = set(conversion_mapping._build_checkpoint_conversion_mapping())
    assert mapped - set(RECIPES) == DEAD
    assert not DEAD & set(RECIPES)


def test_every_entry_is_reached_by_some_model() -> None:
    types: Any = importlib.import_module("transformers.models.auto.configuration_auto")
    classes: Any = importlib.import_module("transformers")
    submodels = [row for model in recorded().values() for row in model["signature"]["submodels"]]
    by_class = {class_name for _, class_name, *_ in submodels}
    by_type = {model_type for _, class_name, model_type, _ in submodels if class_name not in RECIPES}
    others = set(RECIPES) - by_class - by_type - OWN
    dead = [name for name in others if name not in types.CONFIG_MAPPING_NAMES and not hasattr(classes, name)]
    assert dead == []
    mapping: Any = importlib.import_module("transformers.conversion_mapping")
    assert others & set(mapping._build_checkpoint_conversion_mapping()) == NOT_RECORDED | SHADOWED


def test_no_two_families_have_an_entry_for_one_name() -> None:
    counts = Counter(name for family in FAMILIES for name in family)
    assert [name for name, count in counts.items() if count > 1] == []
    assert set(counts) == set(RECIPES) <= set(known_recipes())


def test_digests_tell_recipes_apart() -> None:
    configs = {name.partition("@")[0]: parse_config(model["config"]) for name, model in recorded().items()}
    found = {name: find_recipe(name, config=configs.get(name)) for name in RECIPES}
    recipes = {name: recipe for name, recipe in found.items() if recipe is not None}
    assert recipes.keys() == RECIPES.keys()
    by_digest: dict[str, Recipe] = {}
    for recipe in recipes.values():
        assert by_digest.setdefault(recipe.digest, recipe) == recipe
    assert len(by_digest) > 100
    again = {name: find_recipe(name, config=configs.get(name)) for name in RECIPES}
    assert again == found


@pytest.mark.parametrize(
    ("recipe", "source", "targets"),
    [
        # blocks of one kind each, as published: the library itself writes these in its own layout
        ("dory", "backbone.layers.6.mixer.q_proj.weight", ["model.layers.3.self_attn.q_proj.weight"]),
        ("dory", "backbone.layers.7.mixer.up_proj.weight", ["model.layers.3.mlp.up_proj.weight"]),
        ("dory", "backbone.layers.6.attn_alpha", ["model.layers.3.lambda_1"]),
        ("dory", "backbone.layers.7.mlp_alpha", ["model.layers.3.lambda_2"]),
        # experts as NeMo writes them
        ("nemo_speechlm", "llm.model.layers.4.mixer.experts.down_projs", ["model.language_model.layers.4.mixer.experts.down_proj"]),
        # the unified layout of Gemma 4, and what is one level deeper since
        ("gemma4_unified", "vision_embedder.patch_ln1.bias", ["embed_vision.patch_ln1.bias"]),
        ("gemma4_unified", "embed_vision.embedding_projection.weight", ["embed_vision.multimodal_embedder.embedding_projection.weight"]),
        # modules that tiny models lack
        ("NemotronH_Omni_Reasoning_V3", "sound_projection.linear2.weight", ["embed_audio.linear_2.weight"]),
        ("cohere_asr", "log_softmax.mlp.layer0.weight", ["proj_out.weight"]),
        ("Tipsv2VisionModel", "blocks.5.mlp.w12.bias", [f"encoder.layer.5.mlp.{part}_proj.bias" for part in ("gate", "up")]),
        ("hunyuan_vl", "model.vit.layers.0.mlp.dense_4h_to_h.weight", ["model.vision_tower.layers.0.mlp.fc2.weight"]),
        ("pi0", "paligemma_with_expert.paligemma.lm_head.weight", ["model.vlm.language_model.embed_tokens.weight"]),
        ("gte", "new.encoder.layer.2.attention.qkv_proj.weight", [f"layers.2.self_attn.{part}_proj.weight" for part in "qkv"]),
        ("UltrabertModel", "ultrabert.layers.1.norm.weight", ["layers.1.norm.weight"]),
        ("minimax_m2", "model.layers.1.block_sparse_moe.e_score_correction_bias", ["model.layers.1.mlp.e_score_correction_bias"]),
        ("GPTNeoXForCausalLM", "embed_out.weight", ["lm_head.weight"]),
        ("legacy", "bert.encoder.layer.3.output.LayerNorm.gamma", ["bert.encoder.layer.3.output.LayerNorm.weight"]),
        ("legacy", "encoder.pos_conv_embed.conv.weight_g", ["encoder.pos_conv_embed.conv.parametrizations.weight.original0"]),
        ("legacy", "language_model.model.model.layers.0.mlp.up_proj.weight", ["model.language_model.layers.0.mlp.up_proj.weight"]),
        # cases B01: what only ends like routed experts
        ("mixtral", "model.layers.0.mlp.shared_experts.3.w2.weight", ["model.layers.0.mlp.shared_experts.3.w2.weight"]),
        ("qwen2_moe", "model.layers.0.mlp.experts.3.adapter.up_proj.weight", ["model.layers.0.mlp.experts.3.adapter.up_proj.weight"]),
        ("deepseek_v4", "layers.1.ffn.shared_experts.w2.weight", ["layers.1.mlp.shared_experts.down_proj.weight"]),
    ],
)  # fmt: skip
def test_published_names_that_tiny_models_lack(recipe: str, source: str, targets: list[str]) -> None:
    found = find_recipe(recipe)
    assert found is not None
    routing = route_names([source], found.rules, None)
    routed = [target for conversion in (*routing.conversions, *routing.broken) for target in conversion.targets]
    assert [target for _, target in routing.plain] + routed == targets


@pytest.mark.parametrize(
    ("recipe", "config", "unused"),
    [
        ("deepseek_v3", {"num_hidden_layers": 61, "num_nextn_predict_layers": 1}, ("layers.61",)),
        ("glm4v_moe", {"text_config": {"num_hidden_layers": 46, "num_mtp_layers": 2}}, ("layers.46", "layers.47")),
        ("deepseek_v2", {"num_hidden_layers": 27}, ()),
        ("qwen3_5_text", {"architectures": ["Qwen3_5ForCausalLM"]}, ("model.visual",)),
        ("qwen3_5_text", {"architectures": ["Qwen3_5ForConditionalGeneration"]}, ()),
        ("sam3_tracker_video", {"architectures": ["Sam3VideoModel"]}, ()),
    ],
)
def test_parts_that_the_loaded_class_lacks_are_waived(
    recipe: str, config: Mapping[str, object], unused: tuple[str, ...]
) -> None:
    found = find_recipe(recipe, config=config)
    assert found is not None
    always = find_recipe(recipe)
    assert always is not None
    assert found.may_be_unused == (*always.may_be_unused, *unused)


def test_the_library_needs_no_torch() -> None:
    script = (
        "import sys, loadplan.recipes.library; print(sorted({'torch', 'transformers', 'numpy'} & set(sys.modules)))"
    )
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"


def record(oracle: Path) -> None:
    """Write the data file from the tiny checkpoints in `oracle`, by the rules of the installed transformers."""
    models = {}
    for folder in sorted(path for path in oracle.iterdir() if (path / "runtime").is_dir()):
        model, rules = _built(folder)
        models[folder.name] = {
            "config": _reduced(json.loads((folder / "orig" / "config.json").read_text(encoding="utf-8"))),
            "signature": Signature.from_module(model).to_json(),
            "stored": {
                layout: _stored(folder / layout, model, rules)
                for layout in ("orig", "full")
                if (folder / layout).is_dir()
            },
        }
    text = json.dumps(models, separators=(",", ":"), sort_keys=True)
    DATA.write_bytes(gzip.compress(text.encode(), 9, mtime=0))


def _built(folder: Path) -> tuple[Any, Any]:
    """The model of a tiny checkpoint on the meta device, and the rules for it in two lists."""
    torch: Any = importlib.import_module("torch")
    transformers: Any = importlib.import_module("transformers")
    mapping: Any = importlib.import_module("transformers.conversion_mapping")
    loading: Any = importlib.import_module("transformers.core_model_loading")
    config = transformers.AutoConfig.from_pretrained(folder / "orig")
    name = json.loads((folder / "orig" / "config.json").read_text(encoding="utf-8"))["architectures"][0]
    model_class = getattr(transformers, name, None) or _searched(transformers, name)
    if not isinstance(config, model_class.config_class):
        config = model_class.config_class.from_pretrained(folder / "orig")
    with torch.device("meta"):
        model = model_class._from_config(config, dtype=torch.float32)
        if folder.name == "MtpModel":
            main, model = model, importlib.import_module("transformers.modeling_layers").MtpModel(model, 1)
            rules = model.get_weight_conversions(main)
        else:
            rules = mapping.get_model_conversion_mapping(model)
    converters = [rule for rule in rules if isinstance(rule, loading.WeightConverter)]
    return model, ([rule for rule in rules if rule not in converters], converters)


def _searched(transformers: Any, name: str) -> Any:
    """A class that the package does not export."""
    models = Path(transformers.__file__).parent / "models"
    path = next(path for path in models.glob("*/modeling_*.py") if f"class {name}(" in path.read_text(encoding="utf-8"))
    return getattr(importlib.import_module(f"transformers.models.{path.parent.name}.{path.stem}"), name)


def _reduced(config: Mapping[str, Any]) -> dict[str, object]:
    """What recipes and ops may look at: counts, names of classes and types, and the configs of parts."""
    return {
        key: _reduced(value) if isinstance(value, dict) else value
        for key, value in config.items()
        if isinstance(value, int) or key in ("architectures", "model_type") or key.endswith("config")
    }


def _stored(folder: Path, model: Any, rules: Any) -> dict[str, Any]:
    loading: Any = importlib.import_module("transformers.core_model_loading")
    safetensors: Any = importlib.import_module("safetensors")
    known = model.state_dict()
    prefix = model.base_model_prefix
    renamings, converters = rules
    found: dict[str, Any] = {"tensors": {}, "others": {}, "made": {}}
    by_pattern = {pattern: rule for rule in converters for pattern in rule.source_patterns}
    groups: dict[str, list[tuple[int, int, str]]] = {}
    with safetensors.safe_open(folder / "model.safetensors", "pt") as file:
        for name in sorted(file.keys()):
            view = file.get_slice(name)
            found["others"] |= {} if view.get_dtype() == "F32" else {name: view.get_dtype()}
            target, pattern = loading.rename_source_key(name, renamings, converters, prefix, known)
            if target not in known and name in known:
                target, pattern = loading.rename_source_key(name, [], [], prefix, known)
            if pattern is not None:
                rule = by_pattern[pattern]
                place = int(re.findall(r"[._](\d+)\.", name)[-1]) if "*" in pattern else 0
                groups.setdefault(target, []).append((rule.source_patterns.index(pattern), place, name))
                found["made"][target] = [described(rule.operations), []]
            renamed = target if pattern is None and target != name else ""
            found["tensors"][name] = [view.get_shape(), renamed]
    for target, members in groups.items():
        found["made"][target][1] = [name for _, _, name in sorted(members)]
    return found


if __name__ == "__main__":
    record(Path(sys.argv[1]))
