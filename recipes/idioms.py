"""What most tables are made of: renamings by table, and the few ways in which families stack, split and join tensors.

Renamings run in the order of their table, each on what the ones before it left; converters see the final names. Names
in a table are patterns (`loadplan.compiler.patterns`): a plain dot is a dot, `^` is the start of a name, `*` one
component.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from loadplan.compiler.ir import Config, Op
from loadplan.compiler.ops import Chunk, Concatenate, MergeModulelist
from loadplan.compiler.registry import RecipeSource, config_names
from loadplan.compiler.rules import Rule, WeightConverter, WeightRenaming

Rules = tuple[Rule, ...]

STALE_BUFFERS = ("rotary_emb.inv_freq",)  # old transformers saved them; models compute them
BARE_TEXT = {
    r"^(model\.)?(embed_tokens|layers|norm)\.": r"\1language_model.\2."
}  # a text model without a level of its own
QKV = ("q_proj", "k_proj", "v_proj")


def alike(recipe: RecipeSource, names: str) -> dict[str, RecipeSource]:
    """One recipe under several names, which are separated by blanks."""
    return dict.fromkeys(names.split(), recipe)


def rename(names: Mapping[str, str]) -> Rules:
    """A renaming for each entry, in order."""
    return tuple(WeightRenaming(old, new) for old, new in names.items())


def inside(old: str, new: str, names: Mapping[str, str]) -> dict[str, str]:
    """`names`, with `old` before each old name and `new` before each new one."""
    return {f"{old}{before}": f"{new}{after}" for before, after in names.items()}


def qkv_names(old: str, new: str) -> dict[str, str]:
    """Attention's `query`, `key` and `value` in module `old`, as `q_proj`, `k_proj` and `v_proj` in module `new`."""
    return inside(f"{old}.", f"{new}.", {"query": "q_proj", "key": "k_proj", "value": "v_proj"})


def into_model(*modules: str) -> Rules:
    """Top-level modules moved below `model`, and the head out of the language model: one more level since 4.52."""
    return rename({"^language_model.lm_head": "lm_head", rf"^({'|'.join(modules)})\b": r"model.\1"})


def into_language_model(*others: str) -> WeightRenaming:
    """Everything below `model` moved below `model.language_model`, except what is there already and `others`."""
    return WeightRenaming(rf"^model\.(?!(?:{'|'.join(('language_model', *others))})\.)", "model.language_model.")


def stack_experts(
    gate: str = "gate_proj", up: str = "up_proj", down: str = "down_proj", at: str = "mlp.experts"
) -> tuple[WeightConverter, WeightConverter]:
    """The converters of a layer's experts at `at`, whose three matrices are called so.

    They become `gate_up_proj[expert, 2 * intermediate, hidden]`, gate first, and `down_proj[expert, hidden,
    intermediate]`.
    """
    return (
        WeightConverter(
            [f"{at}.*.{gate}.weight", f"{at}.*.{up}.weight"],
            f"{at}.gate_up_proj",
            [MergeModulelist(0), Concatenate(1)],
        ),
        stack(f"{at}.*.{down}.weight", f"{at}.down_proj"),
    )


def stack(source: str, target: str) -> WeightConverter:
    """A list of matrices as one tensor, list number first."""
    return WeightConverter(source, target, [MergeModulelist(0)])


def join(sources: Iterable[str], target: str) -> WeightConverter:
    """Tensors one below the other."""
    return WeightConverter(sources, target, [Concatenate(0)])


def join_convolutions(module: str) -> WeightConverter:
    """The short convolutions before query, key and value, as one over all their channels."""
    return join([f"{module}.{part}_conv1d.weight" for part in "qkv"], f"{module}.conv1d.weight")


def cut(fused: str, *targets: str) -> WeightConverter:
    """A module's rows (weight and bias) cut into equal parts, one for each target."""
    return WeightConverter(fused, targets, [Chunk(0)])


def cut_qkv(fused: str, attention: str) -> WeightConverter:
    """A module with the rows of query, then key, then value, as three in `attention`."""
    return cut(fused, *(f"{attention}.{part}" for part in QKV))


def cut_in_proj(attention: str, *operations: Op) -> Rules:
    """`in_proj_weight` and `in_proj_bias` of `torch.nn.MultiheadAttention`: rows of query, then key, then value."""
    return tuple(
        WeightConverter(
            f"{attention}.in_proj_{kind}",
            [f"{attention}.{part}.{kind}" for part in QKV],
            [Chunk(0), *operations],
        )
        for kind in ("weight", "bias")
    )


def left_alone(config: Config, endings: tuple[str, ...], parts: tuple[str, ...]) -> tuple[str, ...]:
    """`parts` of a whole model's checkpoint, if the class that is loaded is one of its own parts; by its name's ending.

    Inside the whole model nothing is left: there, a name that fits nowhere is a fault.
    """
    return parts if any(name.endswith(endings) for name in config_names(config)[:1]) else ()


def draft_layers(config: Config) -> tuple[str, ...]:
    """The layers that follow the last one: they draft further tokens (MTP), and the model itself has none of them."""
    places = (None, "text_config")
    count = next((n for place in places if (n := config.find_int("num_hidden_layers", place))), 0)
    fields = ("num_nextn_predict_layers", "num_mtp_layers")
    drafts = next((n for field in fields for place in places if (n := config.find_int(field, place))), 0)
    return tuple(f"layers.{number}" for number in range(count, count + drafts)) if count else ()
