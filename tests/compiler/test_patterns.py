r"""Patterns against names: tables of what matches where, refusals, and random texts.

Written out by hand from the semantics in `patterns.py` and cases B01, B02, B17 and B32; plan patterns are also compared
with `fnmatch` on components. What transformers makes of its own rules is compared in `test_rules.py`.
"""

from __future__ import annotations

import re
from fnmatch import fnmatchcase

import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from loadplan.compiler.patterns import (
    PatternError,
    check_plan_pattern,
    compile_source,
    compile_target,
    matches_components,
    matches_module_or_name,
)

# Pattern, name, the text that it matches (None: it does not), its groups, the numbers of its `*`.
Found = tuple[str, str, str | None, tuple[str, ...], tuple[int | str, ...]]

RENAMING: list[Found] = [
    # a dot is a dot
    ("mlp.gate", "l.0.mlp.gate.weight", "mlp.gate", (), ()),
    ("mlp.gate", "l.0.mlp_gate.weight", None, (), ()),
    (r"mlp\.gate", "l.0.mlpxgate", None, (), ()),
    ("tracker_model.(.+)", "tracker_model.a.b", "tracker_model.a.b", ("a.b",), ()),
    # an end in a letter or digit is the end of a word; an end in anything else is not
    ("weight", "a.weight", "weight", (), ()),
    ("weight", "a.weight_scale_inv", None, (), ()),
    ("weight", "a.weights", None, (), ()),
    ("weight", "a.weight2", None, (), ()),
    ("weight", "a.preweight", "weight", (), ()),
    ("weight", "a.weight.absmax", "weight", (), ()),
    ("fc1", "m.fc10.fc1.w", "fc1", (), ()),
    ("hc_", "m.hc_fn", "hc_", (), ()),
    ("norm.", "m.norm.weight", "norm.", (), ()),
    ("norm.", "m.norm_w", None, (), ()),
    ("weight|bias", "a.weight_g", None, (), ()),
    ("weight|bias", "a.bias_g", None, (), ()),
    ("weight|bias", "a.weight_g.bias", "bias", (), ()),
    ("a.|b", "m.a.w", "a.", (), ()),
    # `*` is one component, or a number in one
    ("experts.*.w1", "m.experts.3.w1", "experts.3.w1", (), (3,)),
    ("experts.*.w1", "m.experts.3.adapter.w1", None, (), ()),
    ("experts.*.w1", "m.experts.3.adapter.experts.4.w1", "experts.4.w1", (), (4,)),
    ("experts.*.w1", "m.experts.shared.w1", "experts.shared.w1", (), ("shared",)),
    (r"experts\.*\.w1", "m.experts.12.w1", "experts.12.w1", (), (12,)),
    ("experts.*", "m.experts.7.w1", "experts.7", (), (7,)),
    ("*.w1", "m.3.w1", "3.w1", (), (3,)),
    ("w1_*", "experts.w1_11", "w1_11", (), (11,)),
    ("w1_*", "experts.w1_11x", None, (), ()),
    ("expert*_w1", "expert10_w1", "expert10_w1", (), (10,)),
    ("expert*_w1", "experts_w1", None, (), ()),
    ("a.*.b.*.c", "a.1.b.2.c", "a.1.b.2.c", (), (1, 2)),
    ("experts.*.w1", "experts.007.w1", "experts.007.w1", (), (7,)),
    ("experts.*.w1", f"experts.{'9' * 5000}.w1", f"experts.{'9' * 5000}.w1", (), ("9" * 5000,)),
    (
        "experts.*.w1",
        "experts.\N{ARABIC-INDIC DIGIT THREE}.w1",
        "experts.\N{ARABIC-INDIC DIGIT THREE}.w1",
        (),
        ("\N{ARABIC-INDIC DIGIT THREE}",),
    ),
    # a quantifier stays one
    (r"layers.\d+.w", "layers.12.w", "layers.12.w", (), (12,)),
    (r"layers.(\d+).w", "layers.12.w", "layers.12.w", ("12",), ()),
    (r"layers.(?:\d+).w", "layers.12.w", "layers.12.w", (), ()),
    (r"layers.\d+?.w", "layers..w", None, (), ()),
    (r"a(.*)b", "xaccb", "accb", ("cc",), ()),
    (r"^(.*)\.w", "a.b.w", "a.b.w", ("a.b",), ()),
    (r"^.*\.w", "a.b.w", "a.b.w", (), ()),
    (r".*\.w", "a.b.w", "a.b.w", (), ()),
    (r"x(?:q|.*)\.w", "xabc.w", "xabc.w", (), ()),
    ("encoder.*norm", "encoder.layers.norm", "encoder.layers.norm", (), ()),
    (r"conv[0-9]+", "m.conv12.w", "conv12", (), ()),
    (r"conv[.*]x", "m.conv*x", "conv*x", (), ()),
    ("a.{2}b", "axxb", "axxb", (), ()),
    # anchors, lookarounds, groups
    ("^model", "model.a", "model", (), ()),
    ("^model", "a.model.b", None, (), ()),
    ("^(?!head)", "body.w", "", (), ()),
    ("^(?!head)", "head.w", None, (), ()),
    (r"(?<=decoder\.)norm", "encoder.norm.decoder.norm.w", "norm", (), ()),
    (r"norm(?=\.weight)", "norm_block.norm.weight", "norm", (), ()),
    (r"(enc|dec)\.(\d+)", "m.dec.4.w", "dec.4", ("dec", "4"), ()),
    (r"(?P<side>enc|dec)\.w", "enc.w", "enc.w", ("enc",), ()),
    (r"l.*.(a|b)_\1", "l.1.a_b.l.2.b_b", "l.2.b_b", ("b",), (2,)),
    (r"(a)?b", "xb", "b", ("",), ()),
]


@pytest.mark.parametrize(("pattern", "name", "text", "groups", "indices"), RENAMING)
def test_where_a_renaming_matches(
    pattern: str, name: str, text: str | None, groups: tuple[str, ...], indices: tuple[int | str, ...]
) -> None:
    found = compile_source(pattern).search(name)
    if text is None:
        assert found is None
        return
    assert found is not None
    assert (name[found.start : found.end], found.groups, found.indices) == (text, groups, indices)


@pytest.mark.parametrize(
    ("pattern", "name", "place"),
    [
        (r"(?<=decoder\.)norm", "encoder.norm.decoder.norm.weight", 21),
        (r"norm(?=\.weight)", "norm_block.norm.weight", 11),
        ("old", "layers.0.old.layers.1.old.weight", 9),
    ],
)
def test_the_place_of_a_match_is_its_own(pattern: str, name: str, place: int) -> None:  # cases B04
    found = compile_source(pattern).search(name)
    assert found is not None
    assert found.start == place


# Cases B01 and B02: a converter takes whole tensors, never a part of a name. With other words and depths.
NEIGHBOURS = [
    ("experts.*.w2.weight", "l.0.mlp.experts.3.w2.weight", True),
    ("experts.*.w2.weight", "experts.3.w2.weight", True),
    ("experts.*.w2.weight", "l.0.mlp.shared_experts.3.w2.weight", False),
    ("experts.*.w2.weight", "l.0.mlp.experts.3.adapter.w2.weight", False),
    ("experts.*.w2.weight", "l.0.mlp.experts.3.w2.weight_scale_inv", False),
    ("experts.*.w2.weight", "l.0.mlp.experts.3.w2.weight.absmax", False),
    ("experts.*.w2.weight", "l.0.mlp.experts.3.w2.weight.weight", False),
    ("experts.*.w2.weight", "l.0.mlp.experts.3.w2.weight.bias", False),
    ("experts.*.w2.weight", "l.0.mlp.experts.3.w2.bias", False),
    ("experts.*.w2", "l.0.mlp.experts.3.w2.weight", True),
    ("experts.*.w2", "l.0.mlp.experts.3.w2.bias", True),
    ("experts.*.w2", "l.0.mlp.experts.3.w2", True),
    ("experts.*.w2", "l.0.mlp.experts.3.w2.scale", False),
    ("experts.*.w2", "l.0.mlp.experts.3.w2_scale", False),
    ("experts.down_proj", "l.0.mlp.experts.down_proj", True),
    ("experts.down_proj", "l.0.mlp.experts.down_proj_scale_inv", False),
    ("experts.down_proj", "l.0.mlp.experts.down_proj_blocks", False),
    ("experts.down_proj", "l.0.mlp.experts.down_proj.scale", False),
    ("gate_proj.weight", "m.gate_proj.weight", True),
    ("gate_proj.weight", "m.big_gate_proj.weight", False),
    ("gate_proj.weight", "m.gate_proj.weight_scale_inv", False),
    ("gate_proj.weight", "m.gate_proj.weight.absmax", False),
    ("attn.qkv.", "m.attn.qkv.weight", True),
    ("attn.qkv.", "m.attn.qkv.extra.weight", False),
    (r"\.attn.qkv", "m.attn.qkv.bias", True),
    ("^attn.qkv", "attn.qkv.bias", True),
    ("^attn.qkv", "m.attn.qkv.bias", False),
    ("attn.in_proj_", "m.attn.in_proj_weight", True),
    ("attn.in_proj_", "m.attn.in_proj_bias", True),
    ("attn.in_proj_", "m.attn.in_proj_other", False),
    ("w1|w2", "m.w2.weight", True),
    ("w1|w2", "m.w1_scale", False),
    ("w1|w2", "m.xw1", False),
    ("weight", "m.weight", True),
    ("weight", "m.weight\n", False),
]


@pytest.mark.parametrize(("pattern", "name", "taken"), NEIGHBOURS)
def test_a_converter_takes_whole_tensors_only(pattern: str, name: str, taken: bool) -> None:
    assert (compile_source(pattern).search_tensor(name) is not None) is taken


@given(st.text("abc_.0", min_size=1, max_size=6), st.text("abc_.0", max_size=6), st.sampled_from(("w2", "down_proj")))
def test_what_surrounds_a_claimed_name_is_whole_components(front: str, back: str, leaf: str) -> None:
    """Compared with splitting at dots: the expert, its number and its leaf must be components by themselves."""
    name = f"{front}experts.3.{leaf}{back}"
    found = compile_source(f"experts.*.{leaf}").search_tensor(name)
    assume("experts" not in front)
    wanted = (not front or front.endswith(".")) and back in ("", ".weight", ".bias")
    assert (found is not None) is wanted


TARGETS = [
    ("model.layers", 0, (), (), "model.layers"),
    (r"\.mlp\.", 0, (), (), ".mlp."),
    ("^model.", 0, (), (), "model."),
    ("model.head$", 0, (), (), "model.head"),
    (r"model\$", 0, (), (), "model$"),
    ("", 0, (), (), ""),
    (r"e\1.b\2.", 2, ("3", "7"), (), "e3.b7."),
    (r"\2\1", 2, ("x", "y"), (), "yx"),
    (r"\1\1", 1, ("x",), (), "xx"),
    (r"a.(\d+).b", 1, ("5",), (), "a.5.b"),
    (r"(enc|dec).(\d+)", 2, ("enc", "5"), (), "enc.5"),
    (r"((a)|b).c", 2, ("a", "a"), (), "a.c"),
    (r"(a(b)).(c)", 3, ("ab", "b", "c"), (), "ab.c"),
    (r"model(?!\.(language_model|visual))", 0, (), (), "model"),
    (r"(?<!x\.)(?<!\w)norm(?=y).(\d)", 1, ("4",), (), "norm.4"),
    ("experts.*.gate", 0, (), ("03",), "experts.03.gate"),
    ("a.*.b_*", 0, (), ("1", "2"), "a.1.b_2"),
    ("experts.*.gate", 0, (), (), "experts.*.gate"),
]


@pytest.mark.parametrize(("text", "captures", "groups", "stars", "wanted"), TARGETS)
def test_targets_are_filled_in(
    text: str, captures: int, groups: tuple[str, ...], stars: tuple[str, ...], wanted: str
) -> None:
    assert compile_target(text, captures).expand(groups, stars) == wanted


SOURCE_FAULTS = [
    ("", "a source pattern is empty: it would match before any name; write '^' if that is meant"),
    ("a(b", "source pattern 'a(b' is not a regular expression: missing ), unterminated subpattern at position 1"),
    ("a)b", "source pattern 'a)b' is not a regular expression: unbalanced parenthesis at position 1"),
    ("+a", "source pattern '+a' is not a regular expression: nothing to repeat at position 0"),
    ("[a", "source pattern '[a' is not a regular expression: unterminated character set at position 0"),
    ("(?<=a+)b", "source pattern '(?<=a+)b' is not a regular expression: look-behind requires fixed-width pattern"),
    ("a{9999999999}", "source pattern 'a{9999999999}' is not a regular expression: the repetition number is too large"),
    (
        "(?>a)b",
        "source pattern '(?>a)b': of the `(?` groups, only (?:, (?P<name>, (?=, (?!, (?<=, (?<! work",
    ),
    (r"a\1", r"source pattern 'a\\1' refers to capture group 1, 0 are before it"),
    (r"(a)*.\2", r"source pattern '(a)*.\\2' refers to capture group 2, 1 are before it"),
]


@pytest.mark.parametrize(("text", "message"), SOURCE_FAULTS)
def test_sources_that_are_refused(text: str, message: str) -> None:
    with pytest.raises(PatternError, match=f"^{re.escape(message)}$"):
        compile_source(text)


TARGET_FAULTS = [
    (r"a\1", 0, r"target 'a\\1' uses capture group 1, the source pattern has 0"),
    (r"a\1.\3", 2, r"target 'a\\1.\\3' uses capture group 3, the source pattern has 2"),
    (r"a\0", 1, r"target 'a\\0' uses capture group 0, the source pattern has 1"),
    (r"(a).(b)", 1, "target '(a).(b)' uses capture group 2, the source pattern has 1"),
    (r"a\g<1>", 1, r"target 'a\\g<1>': '\\g' does not say which text the name gets"),
    (r"layers.\d+", 0, r"target 'layers.\\d+': '\\d' does not say which text the name gets"),
    ("a\\", 0, r"target 'a\\': '\\' does not say which text the name gets"),
    ("a(?:b|c)", 0, "target 'a(?:b|c)': '(?:' does not say which text the name gets"),
    ("a(?i)b", 1, "target 'a(?i)b': '(' does not say which text the name gets"),
    ("a[12]", 0, "target 'a[12]': '[12]' does not say which text the name gets"),
    ("a(b", 1, "target 'a(b' opens a parenthesis that it does not close"),
    ("a)b", 0, "target 'a)b' closes a parenthesis that it does not open"),
]


@pytest.mark.parametrize(("text", "captures", "message"), TARGET_FAULTS)
def test_targets_that_are_refused(text: str, captures: int, message: str) -> None:
    with pytest.raises(PatternError, match=f"^{re.escape(message)}$"):
        compile_target(text, captures)


_PIECES = st.sampled_from(
    [
        *r"\.*+?^$()[]{}|-0123ab_:<>=!P#&~",
        r"\.",
        r"\d",
        r"(?=",
        r"(?<!",
        r"(?:",
        r"(?P<n>",
        r"(?i)",
        r"\1",
        "*.",
        ".*",
        "weight",
    ]
)
_TEXTS = st.lists(_PIECES, max_size=14).map("".join) | st.text(max_size=12)
_NAMES = st.lists(
    st.sampled_from(["a", "b", "_", ".", "0", "12", "weight", "experts", "\n", "*", "\u0663"]), max_size=12
)


@pytest.mark.filterwarnings("ignore:Possible (nested|set):FutureWarning")  # of `re`, about `[[` and `[a--b]`
@settings(max_examples=1500, deadline=None)
@example("(?i)a", ["a"])
@example("(?#a)", ["a"])
@example("(?(1)a|b)", ["a"])
@example("*.*.*", ["a", ".", "b"])
@given(_TEXTS, _NAMES)
def test_random_sources_match_something_or_are_refused(text: str, parts: list[str]) -> None:
    name = "".join(parts)
    try:
        pattern = compile_source(text)
    except PatternError:
        return
    for found in (pattern.search(name), pattern.search_tensor(name)):
        if found is not None:
            assert 0 <= found.start <= found.end <= len(name)
            assert len(found.groups) == len(pattern.captures)
            assert len(found.indices) == len(found.stars) == len(pattern.wildcards)


@settings(max_examples=800, deadline=None)
@given(_TEXTS, st.integers(0, 3))
def test_random_targets_are_filled_in_or_refused(text: str, captures: int) -> None:
    try:
        target = compile_target(text, captures)
    except PatternError:
        return
    made = target.expand(("\x01",) * captures, ("\x02",) * target.stars)
    assert made.count("\x02") == target.stars + text.count("\x02")
    assert r"\(" in text or "(" not in made


# Plan patterns, cases B32.


@pytest.mark.parametrize(
    ("pattern", "name", "matches"),
    [
        ("wo", "wo.weight", True),
        ("wo", "block.wo.weight", True),
        ("wo", "word_embedding.weight", False),
        ("wo", "two.weight", False),
        ("wo", "block.wo", True),
        ("layers.*.wo", "layers.3.wo.weight", True),
        ("layers.*.wo", "layers.3.attn.wo.weight", False),
        ("layers.*.wo", "model.layers.3.wo.weight", True),
        ("layer_*", "model.layer_12.w", True),
        ("layer_*", "model.layers.12.w", False),
        ("a.b", "aXb", False),
        ("*", "a", True),
        ("norm.weight", "norm.weight_scale", False),
        ("a+b", "a+b.w", True),
        ("a+b", "aab.w", False),
    ],
)
def test_plan_patterns_are_runs_of_components(pattern: str, name: str, matches: bool) -> None:
    assert matches_components(pattern, name) is matches


@pytest.mark.parametrize(
    ("pattern", "name", "matches"),
    [
        ("layers.*.q_proj", "layers.3.q_proj.weight", True),
        ("layers.*.q_proj", "layers.3.q_proj.bias", True),
        ("layers.*.q_proj", "layers.3.q_proj", True),
        ("layers.*.q_proj.weight", "layers.3.q_proj.weight", True),
        ("layers.*.q_proj", "layers.3.q_proj.lora.weight", False),
        ("layers.*.q_proj", "model.layers.3.q_proj.weight", False),
        ("layers.*.q_proj", "layers.3.my_q_proj.weight", False),
        ("layers.*", "layers.3.q_proj.weight", False),
        ("*", "norm.weight", True),
    ],
)
def test_parallel_plan_patterns_are_a_module_or_a_tensor(pattern: str, name: str, matches: bool) -> None:
    assert matches_module_or_name(pattern, name) is matches


_COMPONENTS = st.lists(st.text("ab*", min_size=1, max_size=3), min_size=1, max_size=3)


@given(_COMPONENTS, st.lists(st.text("ab", min_size=1, max_size=3), min_size=1, max_size=5))
def test_plan_patterns_agree_with_fnmatch_on_components(pattern: list[str], name: list[str]) -> None:
    def fits(parts: list[str]) -> bool:
        return len(parts) == len(pattern) and all(map(fnmatchcase, parts, pattern))

    windows = [name[at : at + len(pattern)] for at in range(len(name))]
    assert matches_components(".".join(pattern), ".".join(name)) is any(map(fits, windows))
    wanted = fits(name) or fits(name[:-1])
    assert matches_module_or_name(".".join(pattern), ".".join(name)) is wanted


@pytest.mark.parametrize("pattern", ["", ".", "a.", ".a", "a..b"])
def test_plan_patterns_with_an_empty_component_are_refused(pattern: str) -> None:
    with pytest.raises(PatternError, match=f"^plan pattern {re.escape(repr(pattern))} has an empty component$"):
        check_plan_pattern(pattern)


@given(st.text(max_size=10), st.text(max_size=10))
def test_random_plan_patterns_answer_or_are_refused(pattern: str, name: str) -> None:
    try:
        check_plan_pattern(pattern)
    except PatternError:
        assert "" in pattern.split(".")
        return
    assert matches_components(pattern, pattern.replace("*", "x"))
    assert not matches_components(pattern, name) or "*" in pattern or pattern in name
