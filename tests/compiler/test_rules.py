r"""Rules on names: cases B02, B03, B04, B05 (forward), B11 and B17, with varied names, and transformers' own registry.

`WeightRenaming` and `PrefixChange` are compared with those of transformers on every renaming of its registry, over
names made from the patterns. Where the two may differ, and why, is listed in `DIFFERENCES`; a difference of another
kind fails, and so does an entry of the list that nothing shows any more.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from itertools import product
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loadplan.compiler.ops import Concatenate, MergeModulelist
from loadplan.compiler.patterns import PatternError
from loadplan.compiler.rules import GroupWeightRename, PrefixChange, Rename, Scoped, WeightConverter, WeightRenaming


def renamed(rule: Rename, name: str) -> str:
    (made,) = rule.rename([name])
    return made


RENAMINGS: list[tuple[str | tuple[str, ...], str | tuple[str, ...], str, str]] = [
    # B03: every group is carried over
    (r"enc\.(\d+)\.blk\.(\d+)\.", r"e\1.b\2.", "enc.3.blk.7.w", "e3.b7.w"),
    (r"enc\.(\d+)\.blk\.(\d+)\.", r"e\1.b\2.", "m.enc.12.blk.0.norm.w", "m.e12.b0.norm.w"),
    (r"(\w+)\.h\.(\d+)\.(q|k|v)\.", r"\3.\2.\1.", "m.h.4.k.w", "k.4.m.w"),
    (r"(a)(b)(c)(d)(e)(f)(g)(h)(i)", r"\9\8\7\6\5\4\3\2\1", "abcdefghi.w", "ihgfedcba.w"),
    # B04: the match is replaced, not the first text like it
    (r"(?<=decoder\.)norm", "ln", "encoder.norm.decoder.norm.weight", "encoder.norm.decoder.ln.weight"),
    (r"norm(?=\.weight)", "ln", "norm_block.norm.weight", "norm_block.ln.weight"),
    (r"(?<=1\.)old", "new", "layers.0.old.layers.1.old.weight", "layers.0.old.layers.1.new.weight"),
    ("old", "new", "layers.0.old.layers.1.old.weight", "layers.0.new.layers.1.old.weight"),
    (r"(?<!model\.)layer.", "model.layer.", "model.layer.0.layer.weight", "model.layer.0.model.layer.weight"),
    ("fc1", "up", "m.fc10.fc1.w", "m.fc10.up.w"),
    # B02: a name is not a part of a longer one
    ("weight", "kernel", "m.weight_scale_inv", "m.weight_scale_inv"),
    ("down_proj", "w2", "m.experts.down_proj_blocks", "m.experts.down_proj_blocks"),
    ("down_proj", "w2", "m.experts.down_proj.weight", "m.experts.w2.weight"),
    # B05, forward: only what the rule concerns, once
    ("encoder.layers", "layers", "encoder.layers.0.w", "layers.0.w"),
    ("encoder.layers", "layers", "layers.0.w", "layers.0.w"),
    ("encoder.layers", "layers", "encoder.encoder.layers.0.w", "encoder.layers.0.w"),
    ("encoder.layers", "layers", "encoder_layers.0.w", "encoder_layers.0.w"),
    # several sources
    (("gamma", "scale"), "weight", "norm.gamma", "norm.weight"),
    (("gamma", "scale"), "weight", "norm.scale", "norm.weight"),
    (("gamma", "beta"), ("weight", "bias"), "norm.beta", "norm.bias"),
    (("norm", "norm.gamma"), ("ln", "ln.weight"), "norm.gamma", "ln.weight"),
    (("norm.gamma", "norm"), ("ln.weight", "ln"), "norm.gamma", "ln.weight"),
    # what `*` matched is carried over, as it was spelled
    ("experts.*.w1", "experts.*.gate", "m.experts.03.w1.weight", "m.experts.03.gate.weight"),
    ("w1_*", "gate_*", "experts.w1_11", "experts.gate_11"),
    ("l.*.e.*.w", "layer.*.expert.*.w", "l.3.e.7.w", "layer.3.expert.7.w"),
    ("l.*.e.*.w", "layer.*.w", "l.3.e.7.w", "layer.3.w"),
    (r"l.\d+.w", "layer.*.w", "l.3.w", "layer.3.w"),
    (r"l.*.(a|b)", r"\1.*", "l.3.b", "b.3"),
    # spellings of targets
    (r"\.attn\.", r"\.self_attn\.", "m.attn.w", "m.self_attn.w"),
    ("^perception", "^model", "perception.w", "model.w"),
    (r"^model(?!\.(text|vit))", "model.text", "model.a", "model.text.a"),
    (r"^model(?!\.(text|vit))", "model.text", "model.vit.a", "model.vit.a"),
    ("^text_model.", "", "text_model.lin.w", "lin.w"),
]


@pytest.mark.parametrize(("sources", "targets", "name", "wanted"), RENAMINGS)
def test_renamings(sources: str | tuple[str, ...], targets: str | tuple[str, ...], name: str, wanted: str) -> None:
    assert renamed(WeightRenaming(sources, targets), name) == wanted


@pytest.mark.parametrize(("sources", "targets", "name", "wanted"), [row for row in RENAMINGS if r"\2" in str(row[1])])
def test_the_inverse_of_a_renaming_with_groups_gives_the_name_back(
    sources: str, targets: str, name: str, wanted: str
) -> None:
    """The inverse is written here by hand: the target's groups, by what they matched, as sources of the others."""
    groups = re.findall(r"\((?!\?)[^)]*\)", sources)
    order = [int(number) for number in re.findall(r"\\(\d)", targets)]
    inverse_source = re.sub(r"\\(\d)", lambda found: groups[int(found[1]) - 1], targets.replace(".", r"\."))
    numbers = iter(range(1, len(groups) + 1))
    inverse_target = re.sub(r"\([^)]*\)", lambda _: f"\\{order.index(next(numbers)) + 1}", sources)
    assert renamed(WeightRenaming(inverse_source, inverse_target), wanted) == name


REFUSED = [
    (lambda: WeightRenaming("a", ["b", "c"]), "WeightRenaming(a -> b, c): give one target, or one for each of the 1"),
    (lambda: WeightRenaming([], "b"), "patterns are one text or several, not []"),
    (lambda: WeightRenaming([1], "b"), "patterns are one text or several, not [1]"),  # type: ignore[list-item]
    (lambda: WeightRenaming(r"(a)", r"\2"), r"target '\\2' uses capture group 2, the source pattern has 1"),
    (lambda: WeightRenaming([r"(a)", "b"], r"\1"), r"target '\\1' uses capture group 1, the source pattern has 0"),
    (lambda: WeightRenaming("a(", "b"), "source pattern 'a(' is not a regular expression: missing )"),
    (lambda: WeightRenaming("a.*", "b.*.c.*"), "target 'b.*.c.*' has 2 `*`, 'a.*' 1"),
    (lambda: WeightRenaming("a", "b.*"), "target 'b.*' has 1 `*`, 'a' 0"),
    (lambda: GroupWeightRename(["a", "b"], ["c"]), "GroupWeightRename(a, b -> c): each source needs its own target"),
    (
        lambda: GroupWeightRename([r"l.(\d+).n0", "n1"], [r"l.\1.n1", "n2"]),
        "GroupWeightRename(l.(\\d+).n0, n1 -> l.\\1.n1, n2): 'n1' lacks a group of 'l.(\\\\d+).n0', which tells",
    ),
    (lambda: PrefixChange(), "PrefixChange(remove None): give prefix_to_add or prefix_to_remove, not both"),
    (lambda: PrefixChange("a", "b"), "PrefixChange(add a): give prefix_to_add or prefix_to_remove, not both"),
    (lambda: PrefixChange(""), "PrefixChange(remove None): '' is not made of whole components"),
    (lambda: PrefixChange(prefix_to_remove="a."), "PrefixChange(remove a.): 'a.' is not made of whole components"),
    (lambda: PrefixChange("a", model_prefix="b..c"), "PrefixChange(add a behind b..c): 'b..c' is not made of whole"),
    (lambda: WeightConverter("a", "b"), "WeightConverter(a -> b): a converter needs operations; use WeightRenaming"),
    (lambda: WeightConverter("a", "b", [int]), "WeightConverter(a -> b): <class 'int'> is not an"),  # type: ignore[list-item]
    (
        lambda: WeightConverter("a.*.b.*.w", "c", [MergeModulelist(0)]),
        "WeightConverter(a.*.b.*.w -> c): 'a.*.b.*.w' has 2 numbers; only one can be a list's, capture the others",
    ),
    (
        lambda: WeightConverter(["(a).w", "b.w"], r"\1.w", [Concatenate(0)]),
        r"target '\\1.w' uses capture group 1, the source pattern has 0",
    ),
]


@pytest.mark.parametrize(("make", "message"), REFUSED)
def test_a_rule_that_cannot_bind_is_refused_when_it_is_made(make: Any, message: str) -> None:
    with pytest.raises(PatternError, match=f"^{re.escape(message)}"):
        make()


@pytest.mark.parametrize(
    "rule",
    [
        WeightRenaming(["a.*", "b"], "c"),
        GroupWeightRename(["a", "b"], ["b", "c"]),
        PrefixChange("a"),
        WeightConverter("a.*", "b", [MergeModulelist(0)]),
    ],
)
def test_rules_are_values(rule: WeightRenaming | GroupWeightRename | PrefixChange | WeightConverter) -> None:
    import copy
    import pickle

    twin = copy.deepcopy(rule)
    assert twin == rule == pickle.loads(pickle.dumps(rule))
    assert hash(twin) == hash(rule)
    assert str(rule).startswith(type(rule).__name__ + "(")


# B11: chains of names renamed at once, decided place by place.

CHAINS = [
    (("norm0", "norm1"), ("norm1", "norm2"), "layers.{}.{}.weight", ("norm0", "norm1"), ("norm1", "norm2")),
    (("conv1", "conv2"), ("conv0", "conv1"), "enc.{}.{}.bias", ("conv1", "conv2"), ("conv0", "conv1")),
    # a guard that sorts after its dependent
    (("zz0", "aa1"), ("aa1", "bb2"), "m.{}.{}.w", ("zz0", "aa1"), ("aa1", "bb2")),
    # three in a row, and a pattern of several components
    (("n0", "n1", "n2"), ("n1", "n2", "n3"), "l.{}.x.{}", ("n0", "n1", "n2"), ("n1", "n2", "n3")),
    (("mlp.fc0", "mlp.fc1"), ("mlp.fc1", "mlp.fc2"), "b.{}.{}.w", ("mlp.fc0", "mlp.fc1"), ("mlp.fc1", "mlp.fc2")),
    # a guard with a dot in front, a dependent without
    ((r"\.norm0", "norm1"), (".norm1", "norm2"), "l.{}.{}.w", ("norm0", "norm1"), ("norm1", "norm2")),
    # the place is in the pattern, as transformers' registry writes it
    ((r"t.b.(\d+).n0", r"t.b.(\d+).n1"), (r"t.b.\1.n1", r"t.b.\1.n2"), "t.b.{}.{}.w", ("n0", "n1"), ("n1", "n2")),
    (("t.b.*.n0", "t.b.*.n1"), ("t.b.*.n1", "t.b.*.n2"), "x.t.b.{}.{}.w", ("n0", "n1"), ("n1", "n2")),
]


@pytest.mark.parametrize(("sources", "targets", "names", "old", "new"), CHAINS)
@pytest.mark.parametrize("styles", ["o", "n", "on", "no", "ooo", "nnonn", "onoonnoonoon"])
def test_a_group_is_renamed_at_once_and_layer_by_layer(
    sources: tuple[str, ...],
    targets: tuple[str, ...],
    names: str,
    old: tuple[str, ...],
    new: tuple[str, ...],
    styles: str,
) -> None:
    before = [names.format(at, part) for at, style in enumerate(styles) for part in (old if style == "o" else new)]
    wanted = [names.format(at, part) for at in range(len(styles)) for part in new]
    rule = GroupWeightRename(sources, targets)
    assert rule.rename(before) == wanted
    assert rule.rename(before[::-1]) == wanted[::-1]  # whatever the order
    assert rule.rename(wanted) == wanted  # and only once
    assert len(set(wanted)) == len(wanted)


def test_one_after_the_other_would_collapse_the_names() -> None:
    """What plain rules do with such a chain, which is why there are groups."""
    names = ["l.0.norm0.w", "l.0.norm1.w"]
    for rule in (WeightRenaming("norm0", "norm1"), WeightRenaming("norm1", "norm2")):
        names = rule.rename(names)
    assert names == ["l.0.norm2.w", "l.0.norm2.w"]


# B06, as far as a rule can be wrong about it: prefixes are whole components.

PREFIXES = [
    (PrefixChange("model"), "lin.w", "model.lin.w"),
    (PrefixChange("model"), "model.lin.w", "model.lin.w"),
    (PrefixChange("model"), "model_extra.w", "model.model_extra.w"),
    (PrefixChange("model"), "modelXlin.w", "model.modelXlin.w"),
    (PrefixChange("a.b"), "a.c.w", "a.b.a.c.w"),
    (PrefixChange("a.b"), "a.b.w", "a.b.w"),
    (PrefixChange(prefix_to_remove="model"), "model.lin.w", "lin.w"),
    (PrefixChange(prefix_to_remove="model"), "model.model.lin.w", "model.lin.w"),
    (PrefixChange(prefix_to_remove="model"), "model_extra.w", "model_extra.w"),
    (PrefixChange(prefix_to_remove="model"), "modelXlin.w", "modelXlin.w"),
    (PrefixChange(prefix_to_remove="model"), "x.model.lin.w", "x.model.lin.w"),
    (PrefixChange("text", model_prefix="model"), "model.lin.w", "model.text.lin.w"),
    (PrefixChange("text", model_prefix="model"), "model.text.lin.w", "model.text.lin.w"),
    (PrefixChange("text", model_prefix="model"), "model_lin.w", "model_lin.w"),
    (PrefixChange("text", model_prefix="model"), "head.w", "head.w"),
    (PrefixChange(prefix_to_remove="text", model_prefix="a.b"), "a.b.text.lin.w", "a.b.lin.w"),
    (PrefixChange(prefix_to_remove="text", model_prefix="a.b"), "a.text.lin.w", "a.text.lin.w"),
]


@pytest.mark.parametrize(("rule", "name", "wanted"), PREFIXES)
def test_prefixes_are_whole_components(rule: PrefixChange, name: str, wanted: str) -> None:
    assert renamed(rule, name) == wanted


_PARTS = st.lists(st.sampled_from(["model", "text", "modelx", "lin", "w"]), min_size=1, max_size=4).map(".".join)


@given(_PARTS, st.sampled_from((None, "model", "text")))
def test_adding_a_prefix_and_removing_it_gives_the_name_back(name: str, front: str | None) -> None:
    added = renamed(PrefixChange("text", model_prefix=front), name)
    assert renamed(PrefixChange("text", model_prefix=front), added) == added
    if added != name:
        assert renamed(PrefixChange(prefix_to_remove="text", model_prefix=front), added) == name


# B08: a rule of a nested model, on the names below it.

SCOPES = [
    (Scoped(WeightRenaming(r"^blocks\.", "layers."), "vision"), "vision.blocks.0.w", "vision.layers.0.w"),
    (Scoped(WeightRenaming(r"^blocks\.", "layers."), "vision"), "text.blocks.0.w", "text.blocks.0.w"),
    (Scoped(WeightRenaming(r"^blocks\.", "layers."), "vision"), "vision_x.blocks.0.w", "vision_x.blocks.0.w"),
    (Scoped(WeightRenaming(r"^blocks\.", "layers."), "vision"), "m.vision.blocks.0.w", "m.vision.blocks.0.w"),
    (Scoped(WeightRenaming(r"^blocks\.", "layers."), "vision", "m"), "m.vision.blocks.0.w", "m.vision.layers.0.w"),
    (Scoped(WeightRenaming(r"^blocks\.", "layers."), "vision", "m"), "vision.blocks.0.w", "vision.layers.0.w"),
    (Scoped(WeightRenaming(r"^blocks\.", "layers."), "", "m"), "m.blocks.0.w", "m.layers.0.w"),
    (Scoped(WeightRenaming("vision", "tower"), "vision"), "vision.vision.w", "vision.tower.w"),
    (Scoped(PrefixChange("text"), "a.b", "m"), "m.a.b.w", "m.a.b.text.w"),
    (Scoped(PrefixChange(prefix_to_remove="text"), "a.b"), "a.b.text.w", "a.b.w"),
]


@pytest.mark.parametrize(("rule", "name", "wanted"), SCOPES)
def test_a_scoped_rule_sees_the_names_below_its_module(rule: Scoped, name: str, wanted: str) -> None:
    assert renamed(rule, name) == wanted


def test_a_scoped_group_is_decided_below_its_module() -> None:
    rule = Scoped(GroupWeightRename(["n0", "n1"], ["n1", "n2"]), "a")
    assert rule.rename(["a.n1.w", "b.n0.w", "b.n1.w"]) == ["a.n1.w", "b.n0.w", "b.n1.w"]
    assert rule.rename(["b.n1.w", "a.n0.w", "a.n1.w"]) == ["b.n1.w", "a.n1.w", "a.n2.w"]


def test_a_scoped_converter_claims_a_place_in_the_whole_name() -> None:
    claim = Scoped(WeightConverter("^experts.*.w", "x", [MergeModulelist(0)]), "vision", "m").claim(
        "m.vision.experts.4.w"
    )
    assert claim is not None
    assert (claim[0], claim[1].start, claim[1].end, claim[1].indices) == (0, 9, 20, (4,))


# B01, B02: what a converter claims. The table of names is in `test_patterns.py`.


def test_a_converter_claims_by_its_longest_source() -> None:
    rule = WeightConverter(["w", "experts.*.w", "experts.*.gate.w"], "x", [Concatenate(0)])
    claims = [rule.claim(name) for name in ("m.experts.3.w", "m.experts.3.gate.w", "m.w", "m.v")]
    assert [claim and (claim[0], claim[1].indices) for claim in claims] == [(1, (3,)), (2, (3,)), (0, ()), None]


SPELLINGS = {
    "experts.*.w1.weight": "m.experts.{}.w1.weight",
    "experts.w1_*": "m.experts.w1_{}",
    "expert*_w1": "m.expert{}_w1",
    "experts.*.w1": "m.experts.{:02d}.w1.weight",
    "experts.*": "m.experts.{}",
    "e*x": "m.e{}x",
}


@pytest.mark.parametrize("pattern", SPELLINGS)
@pytest.mark.parametrize("number", [0, 2, 9, 10, 11, 100, 383])
def test_the_number_of_an_expert_is_read_however_it_is_spelled(pattern: str, number: int) -> None:  # cases B17
    claim = WeightConverter(pattern, "packed", [MergeModulelist(0)]).claim(SPELLINGS[pattern].format(number))
    assert claim is not None
    assert claim[1].indices == (number,)


_TEXTS = st.text(r"ab.*\d()|^$_1", min_size=1, max_size=8)
_NAMES = st.lists(st.text("ab._01*\n", max_size=8), max_size=5)


@pytest.mark.filterwarnings("ignore:Possible (nested|set):FutureWarning")  # of `re`
@settings(max_examples=1000, deadline=None)
@given(st.lists(_TEXTS, min_size=1, max_size=2), st.lists(_TEXTS, min_size=1, max_size=2), _NAMES)
def test_random_rules_rename_or_are_refused(sources: list[str], targets: list[str], names: list[str]) -> None:
    for make in (WeightRenaming, GroupWeightRename):
        try:
            rule = make(sources, targets)
        except PatternError:
            continue
        assert len(rule.rename(names)) == len(names)
    try:
        converter = WeightConverter(sources, targets, [Concatenate(0)])
    except PatternError:
        return
    for name in names:
        claim = converter.claim(name)
        assert claim is None or name[claim[1].end :] in ("", ".weight", ".bias", "weight", "bias")


# transformers' own rules.

DIFFERENCES = {
    "span": "transformers replaces the first text that is equal to the match, we replace the match (cases B04)",
    "dot": "an unescaped dot of a pattern is any character there, a dot here (581 patterns rely on meaning a dot)",
    "component": "a `*` crosses dots there, it is one component here (cases B01)",
}


def _samples(pattern: str) -> Iterator[str]:
    """Names that `pattern`, a source of the registry, matches: lookarounds dropped, each choice taken."""
    pattern = re.sub(r"\(\?<?[=!](?:\([^()]*\)|\(\?:[^()]*\)|[^()])*\)", "", pattern).lstrip("^").replace("(?:)", "")
    choice = re.search(r"\(([^()]*\|[^()]*)\)", pattern)
    if choice:
        for part in choice[1].split("|"):
            yield from _samples(pattern[: choice.start()] + part + pattern[choice.end() :])
        return
    for text, filled in (
        ("*.", "7."),
        (r"\d+", "12"),
        (".+", "foo.bar"),
        ("[0-9]", "4"),
        ("[123]", "2"),
        ("(", ""),
        (")", ""),
    ):
        pattern = pattern.replace(text, filled)
    yield pattern.replace(r"\.", ".")
    if re.search(r"(?<!\\)\.", pattern):
        yield re.sub(r"(?<!\\)\.", "_", pattern).replace(r"\.", ".")
    if "7." in pattern:
        yield pattern.replace("7.", "7.inner.").replace(r"\.", ".")


FRONTS = ("", "model.", "model.layers.0.", "x_", "norm_block.norm.")
BACKS = ("", "weight", ".weight", "_scale_inv", ".bias", "s", "2.weight", ".norm.weight")


def _reason(rule: Any, name: str, theirs: str) -> str | None:
    """The entry of `DIFFERENCES` that explains `theirs`, worked out with `re` alone."""
    for source in rule._original_source_patterns:
        strict = source.replace("*.", r"[^.]+\.")
        literal = re.sub(r"(?<!\\)\.(?![*+?{])", r"\\.", strict) + (r"(?!\w)" if source[-1].isalnum() else "")
        found = re.search(literal, name)
        if found and name.index(found[0]) != found.start():
            return "span"
        if found is None and re.search(strict, name):
            return "dot"
        if found is None and "*." in source and theirs != name:
            return "component"
    return None


@pytest.fixture(scope="module")
def registry() -> dict[str, list[Any]]:
    mapping = pytest.importorskip("transformers.conversion_mapping")
    found: dict[str, list[Any]] = mapping._build_checkpoint_conversion_mapping()
    return found


def test_renamings_agree_with_transformers_on_its_registry(registry: dict[str, list[Any]]) -> None:
    import transformers.core_model_loading as theirs

    rules: dict[tuple[object, ...], Any] = {}
    for rule in (rule for rules_of in registry.values() for rule in rules_of):
        if type(rule) is theirs.WeightRenaming:
            rules.setdefault((*rule._original_source_patterns, ..., *rule._original_target_patterns), rule)
    assert len(rules) > 800
    shown: Counter[str] = Counter()
    compared = changed = 0
    for rule in rules.values():
        ours = WeightRenaming(rule._original_source_patterns, rule._original_target_patterns)
        bases = [base for source in rule._original_source_patterns for base in _samples(source)]
        matched = False
        for front, base, back in product(FRONTS, bases, BACKS):
            name = front + base + back
            wanted, found = rule.rename_source_key(name)[0], renamed(ours, name)
            compared += 1
            changed += found != name
            matched = matched or found != name or "weight" in base
            if found != wanted:
                reason = _reason(rule, name, wanted)
                assert reason is not None, f"{ours}: {name} -> {found}, transformers says {wanted}"
                shown[reason] += 1
        assert matched, f"{ours} changes none of the names made from it"
    assert set(shown) == set(DIFFERENCES)
    assert compared > 25_000
    assert changed > 10_000


def test_chains_of_a_model_agree_with_transformers_on_its_registry(registry: dict[str, list[Any]]) -> None:
    """Each list as a whole, on names made from all its rules: every step on the name that transformers has by then."""
    import transformers.core_model_loading as theirs

    steps = 0
    for rules in registry.values():
        renamings = [rule for rule in rules if type(rule) is theirs.WeightRenaming]
        bases = [base for rule in renamings for source in rule._original_source_patterns for base in _samples(source)]
        ours = [WeightRenaming(rule._original_source_patterns, rule._original_target_patterns) for rule in renamings]
        for front, base in product(("", "model."), bases[:40]):
            name = f"{front}{base}.weight"
            for theirs_rule, our_rule in zip(renamings, ours, strict=True):
                wanted = theirs_rule.rename_source_key(name)[0]
                assert renamed(our_rule, name) == wanted or _reason(theirs_rule, name, wanted), (str(our_rule), name)
                name = wanted
                steps += 1
    assert steps > 20_000


def test_prefixes_agree_with_transformers_on_its_registry(registry: dict[str, list[Any]]) -> None:
    import transformers.core_model_loading as theirs

    rules = [rule for rules_of in registry.values() for rule in rules_of if type(rule) is theirs.PrefixChange]
    assert len(rules) > 40
    for rule in rules:
        ours = PrefixChange(rule.prefix_to_add, rule.prefix_to_remove, rule.model_prefix or None)
        words = [part for part in (rule.model_prefix, rule.prefix_to_add or rule.prefix_to_remove) if part]
        for count in range(4):
            for parts in product([*words, "lin", f"{words[-1]}_x"], repeat=count):
                name = ".".join((*parts, "weight"))
                assert renamed(ours, name) == rule.rename_source_key(name)[0]


@pytest.mark.parametrize("style", [0, 1])
def test_groups_agree_with_transformers_on_its_registry(registry: dict[str, list[Any]], style: int) -> None:
    """Where all layers are of one style and the guard sorts first; elsewhere transformers is wrong (cases B11)."""
    import transformers.core_model_loading as theirs

    rules = [rule for rules_of in registry.values() for rule in rules_of if type(rule) is theirs.GroupWeightRename]
    assert len(rules) >= 2
    for rule in rules:
        sources, targets = rule._original_source_patterns, rule._original_target_patterns
        fresh = theirs.GroupWeightRename(list(sources), list(targets))
        spelled = targets if style else [source.replace(r"(\d+)", r"\1") for source in sources]
        names = [text.replace(r"\1", str(layer)) + ".weight" for layer in range(3) for text in spelled]
        wanted = [fresh.rename_source_key(name)[0] for name in names]
        assert GroupWeightRename(sources, targets).rename(names) == wanted
        assert (wanted == names) is bool(style)
