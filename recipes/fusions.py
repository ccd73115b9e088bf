"""The build half of the built-in fusion families: what turns the weights of an original module into those of a fused one.

`loadplan.runtime.fusion.fusion_rules` finds these through the entry point group `loadplan.fusions`, as it finds those
of any package. Patterns are relative to the fused module; what a rule needs to know of it are the facts that the
runtime half describes (`loadplan.runtime.fusions`). Nothing here imports torch.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from loadplan.compiler.ops import Concatenate, Conv3dToLinear, FoldBatchNorm, Reshape
from loadplan.compiler.rules import WeightConverter, WeightRenaming

FusionRule = WeightConverter | WeightRenaming


@dataclass(frozen=True, slots=True)
class JoinLinears:
    """Rows of several `Linear`s, one below the other, as one `Linear` called `target`."""

    target: str

    def make_transforms(self, config: object, *, parts: Sequence[str], bias: bool) -> tuple[FusionRule, ...]:
        """`parts`: the children in the order of their rows; `bias`: whether they have one."""
        kinds = ("weight", "bias") if bias else ("weight",)
        return tuple(
            WeightConverter([_exactly(part, kind) for part in parts], f"{self.target}.{kind}", [Concatenate(0)])
            for kind in kinds
        )


@dataclass(frozen=True, slots=True)
class FlattenPatches:
    """The kernel of a convolution over patches as the rows of a `Linear` called `linear_` and its name."""

    def make_transforms(
        self,
        config: object,
        *,
        child: str,
        in_channels: int,
        out_channels: int,
        kernel_size: Sequence[int],
        bias: bool,
    ) -> tuple[FusionRule, ...]:
        """`child`: the convolution; the numbers are those of its weight `[out_channels, in_channels, *kernel_size]`."""
        if len(kernel_size) == 3:
            depth, height, width = kernel_size
            flatten: Conv3dToLinear | Reshape = Conv3dToLinear(in_channels, (depth, height, width))
        else:
            flatten = Reshape((out_channels, -1))
        rules: list[FusionRule] = [WeightConverter(_exactly(child, "weight"), f"linear_{child}.weight", [flatten])]
        if bias:
            rules.append(WeightRenaming(_exactly(child, "bias"), f"linear_{child}.bias"))
        return tuple(rules)


@dataclass(frozen=True, slots=True)
class FoldNorms:
    """Each convolution with the normalisation behind it as one convolution with a bias."""

    def make_transforms(self, config: object, *, pairs: Sequence[Mapping[str, object]]) -> tuple[FusionRule, ...]:
        """`pairs`: of each, the children `conv` and `norm`, `eps` of the latter as a text, and what tensors there are:
        `bias` of the convolution, `counter` of batches of the normalisation."""
        return tuple(self._fold(**pair) for pair in pairs)  # type: ignore[arg-type]

    def _fold(self, *, conv: str, norm: str, eps: str, bias: bool, counter: bool) -> WeightConverter:
        sources = [(conv, "weight"), *((norm, kind) for kind in ("weight", "bias", "running_mean", "running_var"))]
        sources += [(conv, "bias")] if bias else []
        sources += [(norm, "num_batches_tracked")] if counter else []
        patterns = [_exactly(child, kind) for child, kind in sources]
        return WeightConverter(patterns, [f"{conv}.weight", f"{conv}.bias"], [FoldBatchNorm(float(eps))])


FAMILIES: Mapping[str, JoinLinears | FlattenPatches | FoldNorms] = {
    "conv_bn": FoldNorms(),
    "gate_up": JoinLinears("gate_up_proj"),
    "patch_embeddings": FlattenPatches(),
    "patch_embeddings_2d": FlattenPatches(),
    "qkv": JoinLinears("qkv_proj"),
}


def _exactly(child: str, kind: str) -> str:
    """The pattern for a tensor of a child of the fused module."""
    return rf"^{re.escape(child)}\.{kind}$"
