"""How converted files are cut: bytes stored for several artifacts of one model, against the time that loading takes.

    python tests/bench/bench_dedup.py [--layers 140] [--hidden 128] [--rounds 5] [--folder DIR]

Makes a Llama-like bf16 checkpoint of 9 tensors a layer (the defaults: 1,263 tensors, 62 MB) and two fine-tunes of it,
each with a tenth of the tensors changed: scattered at random, or those of the last layers. Converts the model for tp 1,
2 and 4, and the fine-tune for tp 1, in each granularity. `stored` is the bytes of distinct files over the sum of
the models' sizes; `files` is how many rank 0 opens; times are the best of some calls with a warm page cache, of everything from
opening the artifact to tensors that are views of mapped files. They depend on the number of files, not on the bytes; the
bound from which a tensor is alone is scaled to the small matrices, as 1 MiB is to those of a hidden size of 1,024.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from builders import Raw, raw, write_file

from loadplan.compiler import Target, compile_plan, conversion, convert, file_groups
from loadplan.compiler.file_groups import FileGroup, group_files
from loadplan.recipes import Recipe
from loadplan.runtime import load_state_dict
from loadplan.runtime.artifact import Artifact
from loadplan.runtime.plan import Head

COLUMN = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj")
ROW = ("self_attn.o_proj", "mlp.down_proj")
RECIPE = Recipe(
    tp_plan={f"model.layers.*.{name}.weight": "colwise" for name in COLUMN}
    | {f"model.layers.*.{name}.weight": "rowwise" for name in ROW}
    | {"lm_head.weight": "colwise"}
)
Grouping = Callable[[Head, int], list[FileGroup]]


def one_file(head: Head, alone_nbytes: int) -> list[FileGroup]:
    """Everything that a rank holds in one file."""
    numbers = tuple(range(len(head.tensors)))
    return [FileGroup(f"rank-{rank}.safetensors", rank, numbers) for rank in range(head.world_size)]


def shared_and_own(head: Head, alone_nbytes: int) -> list[FileGroup]:
    """One file for what all ranks hold whole, and one a rank."""
    shared = tuple(n for n, tensor in enumerate(head.tensors) if tensor.shard_dim < 0)
    own = tuple(n for n, tensor in enumerate(head.tensors) if tensor.shard_dim >= 0)
    groups = [FileGroup("shared.safetensors", None, shared)]
    groups += [FileGroup(f"rank-{rank}.safetensors", rank, own) for rank in range(head.world_size)]
    return [group for group in groups if group.numbers]


def apart(head: Head, alone_nbytes: int) -> list[FileGroup]:
    """As chosen, but every slice in a file of its rank."""
    kept, file_groups.RANKS_OF_A_MACHINE = file_groups.RANKS_OF_A_MACHINE, 1
    try:
        return group_files(head, alone_nbytes)
    finally:
        file_groups.RANKS_OF_A_MACHINE = kept


WAYS: dict[str, tuple[Grouping, float]] = {  # and the bound, in units of the smallest matrix
    "a file a rank": (one_file, 1),
    "shared, rank": (shared_and_own, 1),
    "a layer": (group_files, 100),
    "a tensor, slices apart": (apart, 1),
    "a tensor >= 4 units": (group_files, 4),
    "a tensor >= 1 unit": (group_files, 1),
}


def model(layers: int, hidden: int) -> dict[str, Raw]:
    """A decoder's tensors."""
    inner, vocabulary = hidden * 11 // 4, hidden * 16
    shapes: dict[str, tuple[int, ...]] = {f"{name}.weight": (hidden, hidden) for name in (*COLUMN[:3], ROW[0])}
    shapes |= {f"{name}.weight": (inner, hidden) for name in COLUMN[3:]} | {f"{ROW[1]}.weight": (hidden, inner)}
    shapes |= {"input_layernorm.weight": (hidden,), "post_attention_layernorm.weight": (hidden,)}
    names = {f"model.layers.{layer}.{name}": shape for layer in range(layers) for name, shape in shapes.items()}
    names |= {"model.embed_tokens.weight": (vocabulary, hidden), "lm_head.weight": (vocabulary, hidden)}
    names["model.norm.weight"] = (hidden,)
    return {name: raw("BF16", *shape, seed=i) for i, (name, shape) in enumerate(names.items())}


def main() -> None:
    """Make the checkpoints, convert them in each way, print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("layers", 140), ("hidden", 128), ("rounds", 5)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--folder", type=Path)
    options = parser.parse_args()
    base = model(options.layers, options.hidden)
    last = list(base)[(options.layers - options.layers // 10) * 9 : options.layers * 9]
    scattered = random.Random(0).sample(sorted(base), len(base) // 10)
    with tempfile.TemporaryDirectory(dir=options.folder) as temporary:
        folder = Path(temporary)
        checkpoints = {"base": write_file(folder / "base" / "model.safetensors", base).parent}
        for kind, changed in (("scattered", scattered), ("last layers", last)):
            tensors = {n: raw(t.dtype, *t.shape, seed=-1) if n in changed else t for n, t in base.items()}
            checkpoints[kind] = write_file(folder / kind / "model.safetensors", tensors).parent
        size = sum(len(tensor.data) for tensor in base.values())
        print(f"{len(base)} tensors, {size / 1e6:.0f} MB; tp1, tp2, tp4 and a fine-tune for tp1; load times of rank 0")
        print(
            f"{'granularity':<24}{'stored':>10}{'last layers':>13}{'files tp1':>11}{'tp4':>6}{'load tp1':>11}{'tp4':>10}"
        )
        for way in WAYS:
            _measure(way, checkpoints, folder / way, options)


def _measure(way: str, checkpoints: dict[str, Path], folder: Path, options: argparse.Namespace) -> None:
    grouping, units = WAYS[way]
    alone = int(units * options.hidden * options.hidden * 2)
    setattr(conversion, "group_files", grouping)  # noqa: B010 - not exported from there, and only a benchmark may
    made = {}
    for kind, size in (("base", 1), ("base", 2), ("base", 4), ("scattered", 1), ("last layers", 1)):
        plan = compile_plan(checkpoints[kind], RECIPE, target=Target(tp_size=size))
        made[kind, size] = convert(plan, checkpoints[kind], folder / f"{kind}-{size}", alone_nbytes=alone)
    models = [made["base", size] for size in (1, 2, 4)]
    ratios = [_ratio([*models, made[kind, 1]]) for kind in ("scattered", "last layers")]
    times = [_time(made["base", size].folder, options.rounds) for size in (1, 4)]
    files = [len(set(made["base", size].plan.section(0).copies.source)) for size in (1, 4)]
    print(
        f"{way:<24}{ratios[0]:>10.3f}{ratios[1]:>13.3f}{files[0]:>11}{files[1]:>6}"
        f"{times[0] * 1e3:>8.1f} ms{times[1] * 1e3:>7.1f} ms",
        flush=True,
    )


def _ratio(artifacts: list[Artifact]) -> float:
    files = [file for artifact in artifacts for file in artifact.plan.head.files]
    distinct = {file.content_digest: file.size for file in files}
    sizes = (tensor.type.nbytes for artifact in artifacts for tensor in artifact.plan.head.tensors)
    return sum(distinct.values()) / sum(sizes)


def _time(folder: Path, rounds: int) -> float:
    times = []
    for _ in range(rounds):
        began = time.perf_counter()
        tensors = load_state_dict(folder)
        times.append(time.perf_counter() - began)
        del tensors
    return min(times)


if __name__ == "__main__":
    main()
