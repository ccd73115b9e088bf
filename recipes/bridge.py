"""Recipes out of an installed transformers: the rules that it has registered for a model, in our words.

For models newer than our library, and for mappings that users have registered with transformers themselves. Nothing of
transformers runs but the look-up: each of its rules and ops is read by field and written again as the value of ours
that does the same, or refused by name. Our matching is the stricter one (`loadplan.compiler.patterns`), which matters
in one place:

Where a converter may begin. transformers searches its patterns anywhere in a name, so that `experts.*.w1` also takes
`shared_experts.0.w1`; ours begin at a name component. Some registered converters need the former: `attn.in_proj_bias`
is meant to take `self_attn.in_proj_bias`. The model decides. Where it has a tensor that a target of the converter
names from the start of a component, that is how the converter is meant. Only where all tensors that its targets name
have more text in front, inside the component, does the converter also take that text, and carry it over.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

from loadplan.cache.error import LoadplanError
from loadplan.compiler import ops
from loadplan.compiler.ir import Op
from loadplan.compiler.patterns import compile_target
from loadplan.compiler.recipe import Recipe
from loadplan.compiler.rules import (
    GroupWeightRename,
    IndexFold,
    IndexShift,
    PrefixChange,
    Rule,
    Scoped,
    WeightConverter,
    WeightRenaming,
)

if TYPE_CHECKING:
    from torch import nn

_Made = tuple[WeightRenaming | GroupWeightRename | PrefixChange | IndexShift | IndexFold | WeightConverter, ...]
_HOME = "transformers.core_model_loading"  # classes of the same name from elsewhere may do anything
_ANY = 99  # capture groups: more than a pattern can have
_IN_WORD = r"(\w*)"


class BridgeError(LoadplanError, TypeError):
    """transformers has a rule or an op for a model that is not one of those known here."""

    def __init__(self, kind: str, name: str, model: str) -> None:
        super().__init__(kind, name, model)
        self.kind, self.name, self.model = kind, name, model

    def __str__(self) -> str:
        return (
            f"transformers has the {self.kind} {self.name} registered for {self.model}, and loadplan does not know what "
            f"it does; write a recipe for {self.model} (loadplan.recipes), with an op of your own if need be"
        )


def bridge_recipe(model: nn.Module, key_mapping: Mapping[str, str] | None = None) -> Recipe:
    r"""The recipe that the installed transformers has for `model` and the models inside it.

    Args:
        model: a model of transformers, best built under `torch.device("meta")`. Only its names and config are read.
        key_mapping: as in `from_pretrained`: regular expression -> replacement, applied before all else. An empty
            replacement deletes what is matched.

    Raises:
        BridgeError: a registered rule or op is of a class that is not transformers' own, or that we have not.
        PatternError: a registered pattern is not well formed.
    """
    from transformers.conversion_mapping import get_model_conversion_mapping

    find: Callable[..., Iterable[Any]] = get_model_conversion_mapping
    known = tuple(model.state_dict(keep_vars=True))
    rules: list[Rule] = []
    for transform in find(model, dict(key_mapping) if key_mapping else None):
        made = _translate(transform, model, known)
        scope = transform.scope_prefix
        rules.extend(
            made if scope is None else (Scoped(rule, scope, transform.base_model_prefix or "") for rule in made)
        )
    return Recipe(rules=rules)


def _translate(transform: Any, model: nn.Module, known: Iterable[str]) -> _Made:
    """One registered rule as rules of ours, without its scope."""
    kind = type(transform)
    if kind.__module__ == _HOME and kind.__name__ == "WeightConverter":
        return (_converter(transform, model, known),)
    if kind.__module__ != _HOME or kind.__name__ not in _RULES:
        raise BridgeError("rule", _qualified(kind), type(model).__name__)
    return _RULES[kind.__name__](transform)


def _converter(transform: Any, model: nn.Module, known: Iterable[str]) -> WeightConverter:
    operations = [_translate_op(op, model) for op in transform.operations]
    sources, targets = transform._original_source_patterns, transform._original_target_patterns
    if any(isinstance(op, ops.PlainFloats) for op in operations):
        sources = sources[:1]  # the others are scales, which dense values have not; with scales, `PlainFloats` refuses
    if all(source[:1].isalnum() for source in sources) and _begins_in_words(targets, known):
        sources = [_IN_WORD + source for source in sources]
        targets = [r"\1" + _renumbered(target) for target in targets]
    return WeightConverter(sources, targets, operations)


def _translate_op(op: Any, model: nn.Module) -> Op:
    kind = type(op)
    made = _OPS[kind.__name__](op, model.config) if kind.__module__ == _HOME and kind.__name__ in _OPS else None
    if made is None:
        settings = ", ".join(f"{name}={value!r}" for name, value in sorted(vars(op).items()))
        raise BridgeError("op", f"{_qualified(kind)}({settings})", type(model).__name__)
    return made


def _qualified(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


def _begins_in_words(targets: Iterable[str], known: Iterable[str]) -> bool:
    """Whether the tensors that `targets` name all have more of their component in front of what is named."""
    spelled = [_spelled(target) for target in targets]
    found = [place for name in known for text in spelled for place in text.finditer(name)]
    return bool(found) and not any(place.start() == 0 or place.string[place.start() - 1] == "." for place in found)


def _spelled(target: str) -> re.Pattern[str]:
    """An expression for what a target becomes when it is filled in; nothing for one that begins with a dot."""
    parts = compile_target(target, _ANY).parts
    texts = [".+?" if isinstance(part, int) else r"\d+" if part == "*" else re.escape(part) for part in parts]
    return re.compile(("" if target[:1].isalnum() else "(?!)") + "".join(texts) + r"(?!\w)")


def _renumbered(target: str) -> str:
    r"""`target` as the end of a longer one whose source has one group more in front: its groups count on by one."""
    return "".join(rf"\{part + 1}" if isinstance(part, int) else part for part in compile_target(target, _ANY).parts)


def _renaming(transform: Any) -> _Made:
    sources, targets = transform._original_source_patterns, transform._original_target_patterns
    return (WeightRenaming(sources, targets),)


def _group(transform: Any) -> _Made:
    return (GroupWeightRename(transform._original_source_patterns, transform._original_target_patterns),)


def _prefix(transform: Any) -> _Made:
    return (PrefixChange(transform.prefix_to_add, transform.prefix_to_remove, transform.model_prefix or None),)


def _shift(transform: Any) -> _Made:
    pairs = zip(transform._original_source_patterns, transform._original_target_patterns, strict=True)
    return tuple(IndexShift(source, target, transform.offset) for source, target in pairs)


def _layer_pairs(transform: Any) -> _Made:
    """Facts: `LayerPairCollapse` has no parameters; a layer's attention is block 2n, its MLP block 2n + 1."""
    return (
        IndexFold(r"layers\.(\d+)\.mixer", (r"layers.\1.self_attn", r"layers.\1.mlp")),
        IndexFold(r"layers\.(\d+)\.attn_alpha", (r"layers.\1.lambda_1",) * 2),
        IndexFold(r"layers\.(\d+)\.mlp_alpha", (r"layers.\1.lambda_2",) * 2),
    )


_RULES: Mapping[str, Callable[[Any], _Made]] = {
    "GroupWeightRename": _group,
    "Inkling2IndexOffsetWeightRename": _shift,
    "LayerPairCollapse": _layer_pairs,
    "PrefixChange": _prefix,
    "WeightRenaming": _renaming,
}


def _chunk(op: Any, config: Any) -> Op | None:
    return ops.Chunk(op.dim) if op.num_shards_attribute is None else None


def _concatenate(op: Any, config: Any) -> Op:
    return ops.Concatenate(op.dim)  # `num_shards_attribute` is for its inverse, which ours knows without


def _rope(op: Any, config: Any) -> Op:
    """With the size of a head as the model's classes see it: a config.json may leave defaults out."""
    within = op.subconfig_key if op.subconfig_key and hasattr(config, op.subconfig_key) else None
    fields = getattr(config, within) if within else config
    heads, hidden = getattr(fields, "num_attention_heads", None), getattr(fields, "hidden_size", None)
    head_dim = getattr(fields, "head_dim", None) or (hidden // heads if hidden and heads else None)
    return ops.PermuteForRope(within, op.permute_layer_names or None, op.inverse, head_dim)


def _unpad(op: Any, config: Any) -> Op | None:
    return None if op.inverse else ops.UnpadVocab(getattr(config.get_text_config(), "unpadded_vocab_size", None))


_OPS: Mapping[str, Callable[[Any, Any], Op | None]] = {  # op, the model's config; None for what ours cannot do
    "Chunk": _chunk,
    "Concatenate": _concatenate,
    "Conv3dToLinear": lambda op, config: ops.Conv3dToLinear(op.in_channels, tuple(op.kernel_size)),
    "ErnieFuseAndSplitTextVisionExperts": lambda op, config: ops.FuseRuns(op.stack_dim, op.concat_dim),
    "ErnieSplitAndDecoupleTextVisionExperts": lambda op, config: ops.SplitRuns(op.stack_dim, op.concat_dim),
    "Inkling2LoopDequantizeExperts": lambda op, config: ops.PlainFloats(),
    "Inkling2LoopMergeMessageQueries": lambda op, config: ops.MergeMessageQueries(op.inverse),
    "Inkling2UnpadVocab": _unpad,
    "Interleave": lambda op, config: ops.Interleave(op.dim, op.inverse),
    "LinearToConv3d": lambda op, config: ops.LinearToConv3d(op.in_channels, tuple(op.kernel_size)),
    "MergeModulelist": lambda op, config: ops.MergeModulelist(op.dim),
    "PermuteForRope": _rope,
    "Split": lambda op, config: ops.Split(op.dim),
    "SplitModulelist": lambda op, config: ops.SplitModulelist(op.dim),
    "Transpose": lambda op, config: ops.Transpose(op.dim0, op.dim1, op.check_dims),
}
