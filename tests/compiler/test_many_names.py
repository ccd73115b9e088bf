"""A checkpoint of DeepSeek-V3's size, 58 layers of 256 experts with weights and scales: 89,088 tensors.

Headers are complete and data is a hole. The compilation runs in a process of its own, and the memory is the operating
system's number. The time is printed (`pytest -s`), not asserted.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

LAYERS, EXPERTS, HIDDEN, INTER, FILES = 58, 256, 7168, 2048, 160

COMPILE = """
import json, sys, time
from loadplan.compiler import compile_plan
from loadplan.compiler.ops import Concatenate, MergeModulelist
from loadplan.recipes import Recipe, WeightConverter

def stack(leaf, suffix):
    gate, up, down = (f"mlp.experts.*.{name}_proj.{leaf}" for name in ("gate", "up", "down"))
    merge = MergeModulelist(0)
    yield WeightConverter([gate, up], f"mlp.experts.gate_up_proj{suffix}", [merge, Concatenate(1)])
    yield WeightConverter(down, f"mlp.experts.down_proj{suffix}", [merge])

began = time.perf_counter()
recipe = Recipe([*stack("weight", ""), *stack("weight_scale_inv", "_scale_inv")])
plan = compile_plan(sys.argv[1], recipe, "recipe")
took = time.perf_counter() - began
cost = plan.cost(0)
print(json.dumps({
    "seconds": took,
    "rss": int(open("/proc/self/status").read().split("VmHWM:")[1].split()[0]) * 1024,  # ru_maxrss has the parent's
    "sources": plan.report.sources,
    "targets": {tensor.name: str(tensor.type) for tensor in plan.head.tensors[:4]},
    "count": len(plan.head.tensors),
    "read": cost.read_nbytes,
    "wanted": cost.target_nbytes,
}))
"""


def _write(folder: Path) -> int:
    """The sparse files and their index; returns the bytes of all tensors."""
    names = [
        (f"model.layers.{layer}.mlp.experts.{expert}.{name}_proj.{leaf}", (shape[0] // step, shape[1] // step), dtype)
        for layer in range(3, 3 + LAYERS)
        for expert in range(EXPERTS)
        for name, shape in (("gate", (INTER, HIDDEN)), ("up", (INTER, HIDDEN)), ("down", (HIDDEN, INTER)))
        for leaf, step, dtype in (("weight", 1, "F8_E4M3"), ("weight_scale_inv", 128, "F32"))
    ]
    share = -(-len(names) // FILES)
    weight_map: dict[str, str] = {}
    total = 0
    for number in range(FILES):
        file = f"model-{number + 1:05d}-of-{FILES:05d}.safetensors"
        header: dict[str, object] = {}
        end = 0
        for name, shape, dtype in names[number * share : (number + 1) * share]:
            nbytes = shape[0] * shape[1] * (1 if dtype == "F8_E4M3" else 4)
            header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [end, end + nbytes]}
            weight_map[name] = file
            end += nbytes
        text = json.dumps(header).encode()
        with (folder / file).open("wb") as output:
            output.write(len(text).to_bytes(8, "little") + text)
            output.truncate(8 + len(text) + end)
        total += end
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}), encoding="utf-8")
    return total


def test_ninety_thousand_names(tmp_path: Path) -> None:
    total = _write(tmp_path)
    command = [sys.executable, "-c", COMPILE, str(tmp_path)]
    found = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    print(f"\n{found['sources']} tensors in {FILES} files: {found['seconds']:.1f} s, {found['rss'] / 1e6:.0f} MB")
    assert found["sources"] == LAYERS * EXPERTS * 6
    assert found["count"] == LAYERS * 4
    assert found["targets"] == {
        "model.layers.10.mlp.experts.down_proj": "F8_E4M3[256,7168,2048]",
        "model.layers.10.mlp.experts.down_proj_scale_inv": "F32[256,56,16]",
        "model.layers.10.mlp.experts.gate_up_proj": "F8_E4M3[256,4096,7168]",
        "model.layers.10.mlp.experts.gate_up_proj_scale_inv": "F32[256,32,56]",
    }
    assert found["read"] == found["wanted"] == total
    assert found["rss"] < 1e9
