r"""How rule and plan patterns match tensor names.

A rule's source pattern is a regular expression with the reading that transformers gives it, less its accidents:

- `*` standing for a whole name component is exactly one component (`experts.*.w1`); glued to other text it is a number
  (`w1_*`). What it matches is the *index* of a tensor in a list.
- A plain `.` is a dot, unless a quantifier follows it.
- A pattern, or a choice of it (`a|b`), that ends in a letter or digit does not match inside a longer word.
- A leading `^` ties the pattern to the start of the name. Lookarounds and capture groups work as in `re`.

Targets may be spelled as transformers spells them: a leading `^`, a trailing `$`, lookarounds and the backslash of `\.`
are dropped, and the n-th capture group of a target means `\n`. A `*` in the target of a renaming stands for what the
source's `*` matched; in that of a converter, for the numbers of a list.

Plan patterns (dtype plan, parallel plan, waivers) are made of whole components: `*` is one component, or any text
inside one. `wo` matches `block.wo.weight` and never `word_embeddings.weight`.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from loadplan.cache.error import LoadplanError

_TOKEN = re.compile(r"\\.|\[(?:\\.|[^\]\\])*\]|\(\?(?:P<\w+>|<?[=!]|[a-z]*:)|.", re.DOTALL)
_LOOKAROUNDS = ("(?=", "(?!", "(?<=", "(?<!")
_QUANTIFIERS = ("*", "+", "?", "{")
_MAX_DIGITS = 9  # of the number of a list's tensor; longer ones are text
_LEAVES = frozenset({"weight", "bias"})  # what `nn.Module`s call the tensors that one module pattern may stand for


class PatternError(LoadplanError, ValueError):
    """A pattern of a recipe is not well formed; raised when the rule is made."""


@dataclass(frozen=True, slots=True)
class Match:
    """Where a source pattern lies in a name."""

    start: int
    end: int
    groups: tuple[str, ...]  # the pattern's own capture groups, from 1
    stars: tuple[str, ...]  # what its `*` matched

    @property
    def indices(self) -> tuple[int | str, ...]:
        """What each `*` matched; a number if it can be one of a list."""
        return tuple(map(_index, self.stars))


@dataclass(frozen=True, slots=True)
class SourcePattern:
    """One compiled source pattern of a rule."""

    text: str
    regex: re.Pattern[str]
    tensor_regex: re.Pattern[str]  # as `regex`, for a converter: tied to component borders
    wildcards: tuple[int, ...]  # group numbers of `*`
    captures: tuple[int, ...]  # group numbers of the pattern's own groups

    def search(self, name: str) -> Match | None:
        """The first place where the pattern matches, else None."""
        return self._match(self.regex.search(name))

    def search_tensor(self, name: str) -> Match | None:
        """As `search`, for a converter: the match begins at a component, and only a parameter's own name follows.

        So `experts.*.w2.weight` leaves `shared_experts.3.w2.weight` alone, `gate_proj.weight` leaves
        `gate_proj.weight.absmax` alone, and `attn.qkv` takes `attn.qkv.weight` and `attn.qkv.bias`.
        """
        return self._match(self.tensor_regex.search(name))

    def _match(self, found: re.Match[str] | None) -> Match | None:
        if found is None:
            return None
        groups, stars = (tuple(found.group(g) or "" for g in ids) for ids in (self.captures, self.wildcards))
        return Match(found.start(), found.end(), groups, stars)


def _index(text: str) -> int | str:
    return int(text) if text.isascii() and text.isdigit() and len(text) <= _MAX_DIGITS else text


@lru_cache(maxsize=4096)
def compile_source(text: str) -> SourcePattern:
    """The pattern as a regular expression. Raises `PatternError`."""
    if not text:
        raise PatternError("a source pattern is empty: it would match before any name; write '^' if that is meant")
    tokens = _TOKEN.findall(text)
    parts: list[str] = []
    wildcards: list[int] = []
    captures: list[int] = []
    groups = depth = 0
    for at, token in enumerate(tokens):
        after = tokens[at + 1] if at + 1 < len(tokens) else ""
        depth += token.startswith("(") - (token == ")")
        if token == "*" and (kind := _wildcard(tokens, at)):
            groups += 1
            wildcards.append(groups)
            parts.append(kind)
            continue
        is_number = token == "+" and after not in _QUANTIFIERS and parts[-1:] == [r"\d"]
        if is_number and depth == 0:  # a bare number tells tensors apart as `*` does
            groups += 1
            wildcards.append(groups)
            parts[-1] = r"(\d+)"
            continue
        if token == "(" or token.startswith("(?P<"):
            groups += 1
            captures.append(groups)
        if token == "|" and depth == 0:
            parts.append(_word_end(tokens[:at], parts))
        quantified = after in _QUANTIFIERS and not (after == "*" and _wildcard(tokens, at + 1))
        parts.append(r"\." if token == "." and not quantified else _renumbered(text, token, captures))
    body = "".join(parts) + _word_end(tokens, parts)
    last = re.split(r"\\?\.|_", text)[-1]
    rest = "" if last in _LEAVES else r"(?:\.?(?:weight|bias))?"
    try:
        regex = re.compile(body)
        tensor_regex = re.compile(rf"(?:^|(?<=\.)|(?=\.))(?:{body})(?={rest}\Z)")
    except (re.error, OverflowError, RecursionError) as error:
        raise PatternError(f"source pattern {text!r} is not a regular expression: {error}") from error
    if regex.groups != groups:
        raise PatternError(
            f"source pattern {text!r}: of the `(?` groups, only (?:, (?P<name>, (?=, (?!, (?<=, (?<! work"
        )
    return SourcePattern(text, regex, tensor_regex, tuple(wildcards), tuple(captures))


def _word_end(tokens: Sequence[str], parts: Sequence[str]) -> str:
    """The expression for the end of a word, if these tokens, which became `parts`, end in a letter, digit or number."""
    ends = bool(tokens) and len(tokens[-1]) == 1 and (tokens[-1].isalnum() or parts[-1].endswith(("]+)", "d+)")))
    return r"(?!\w)" if ends else ""


def _renumbered(text: str, token: str, captures: Sequence[int]) -> str:
    """`token`, with `\\1` as the number that the pattern's own first group has beside those of `*`."""
    if not (token[0] == "\\" and token[1:].isdigit()):
        return token
    number = int(token[1:])
    if not 1 <= number <= len(captures):
        raise PatternError(f"source pattern {text!r} refers to capture group {number}, {len(captures)} are before it")
    return rf"(?:\{captures[number - 1]})"


def _wildcard(tokens: list[str], at: int) -> str | None:
    """The expression for the `*` at `at` if it is a wildcard of ours, None if it is the quantifier of `re`."""
    before = tokens[at - 1] if at else ""
    after = tokens[at + 1] if at + 1 < len(tokens) else ""
    ends = after in ("", ".", r"\.")
    if before == r"\." or before == "" or (before == "." and not _opens_group(tokens, at - 1)):
        return r"([^.]+)" if ends else None
    word = len(before) == 1 and (before.isalnum() or before == "_")
    return r"(\d+)" if word and (ends or after == "_" or after.isalnum()) else None


def _opens_group(tokens: list[str], dot: int) -> bool:
    """Whether the dot begins a group, a choice or the name, where a component's dot cannot be: `.*` is any text."""
    return dot == 0 or tokens[dot - 1].startswith("(") or tokens[dot - 1] in ("|", "^")


@dataclass(frozen=True, slots=True)
class TargetPattern:
    """One target of a rule, ready to be filled in."""

    text: str
    parts: tuple[str | int, ...]  # literal text, numbers of capture groups, and each `*` by itself

    @property
    def stars(self) -> int:
        """The number of `*`."""
        return self.parts.count("*")

    def expand(self, groups: Sequence[str], stars: Sequence[str] = ()) -> str:
        """The text with the capture groups of the source's match, and with what its `*` matched if given."""
        left = iter(stars)
        return "".join(
            groups[part - 1] if isinstance(part, int) else next(left, part) if part == "*" else part
            for part in self.parts
        )


@lru_cache(maxsize=4096)
def compile_target(text: str, captures: int) -> TargetPattern:
    r"""The target with its group references. Raises `PatternError` when it names a group the source does not have."""
    tokens = _TOKEN.findall(text)
    if tokens[:1] == ["^"]:
        tokens = tokens[1:]
    if tokens[-1:] == ["$"]:
        tokens = tokens[:-1]
    parts: list[str | int] = []
    groups = 0
    opened: list[str] = []  # parentheses around this token; what stands in them is not part of the name
    for at, token in enumerate(tokens):
        if token == ")":
            if not opened:
                raise PatternError(f"target {text!r} closes a parenthesis that it does not open")
            opened.pop()
        elif token in _LOOKAROUNDS or (token == "(" and tokens[at + 1 : at + 2] != ["?"]):
            groups += token == "(" and not set(opened) & set(_LOOKAROUNDS)
            opened.append(token)
            parts += [groups] if token == "(" and len(opened) == 1 else []
        elif opened:
            opened += [token] if token.startswith("(") else []
        elif token[0] == "\\" and token[1:].isdigit():
            parts.append(int(token[1:]))
        elif token[0] in "([\\" and (token in ("(", "\\") or token[1:2].isalnum() or len(token) > 2):
            raise PatternError(f"target {text!r}: {token!r} does not say which text the name gets")
        else:
            parts.append(token.removeprefix("\\"))
    if opened:
        raise PatternError(f"target {text!r} opens a parenthesis that it does not close")
    for number in parts:
        if isinstance(number, int) and not 1 <= number <= captures:
            raise PatternError(f"target {text!r} uses capture group {number}, the source pattern has {captures}")
    return TargetPattern(text, _with_text_joined(parts))


def _with_text_joined(parts: Sequence[str | int]) -> tuple[str | int, ...]:
    joined: list[str | int] = []
    for part in parts:
        if joined and all(isinstance(text, str) and text != "*" for text in (joined[-1], part)):
            joined[-1] = f"{joined[-1]}{part}"
        else:
            joined.append(part)
    return tuple(joined)


@lru_cache(maxsize=4096)
def _components(pattern: str, anchored: bool) -> re.Pattern[str]:
    if not pattern or not all(pattern.split(".")):
        raise PatternError(f"plan pattern {pattern!r} has an empty component")
    parts = [re.escape(part).replace(r"\*", "[^.]+" if part == "*" else "[^.]*") for part in pattern.split(".")]
    return re.compile((r"" if anchored else r"(?:^|.*\.)") + r"\.".join(parts) + r"(?=\.|$)")


def matches_components(pattern: str, name: str) -> bool:
    """Whether `pattern` is a run of whole components anywhere in `name`."""
    return _components(pattern, False).match(name) is not None


def matches_module_or_name(pattern: str, name: str) -> bool:
    """Whether `pattern` is the whole of `name`, or of the path of the module that owns it."""
    found = _components(pattern, True).match(name)
    return found is not None and "." not in name[found.end() :].removeprefix(".")


def check_plan_pattern(pattern: str) -> None:
    """Refuse a plan pattern that is not made of whole components. Raises `PatternError`."""
    _components(pattern, False)
