"""Load times side by side: transformers, a plan, an artifact, and a bare read of the same bytes.

    python tests/bench/bench_load.py [--layers 12] [--experts 32] [--hidden 1024] [--rounds 5] [--folder DIR]

Makes a bf16 Qwen3-MoE with random weights (the defaults give 2.6 GB in 1,263 tensors), loads it in fresh processes,
one way after the other in each round, and prints medians. The page cache is warm: the files were just written and read.
`call` is the load alone, `process` everything from start to exit, imports included; `anon` is the anonymous memory
held at the end (what is not the page cache). `bare read` is one `preadv` loop on two threads into fresh memory.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

WAYS = {
    "transformers": """
import transformers, torch
transformers.utils.logging.set_verbosity_error(); transformers.utils.logging.disable_progress_bar()
model_class = transformers.Qwen3MoeForCausalLM
began = time.perf_counter()
model = model_class.from_pretrained(checkpoint, dtype="auto")
took = time.perf_counter() - began
""",
    "plan, read": """
from loadplan.runtime import Plan, load_state_dict
began = time.perf_counter()
tensors = load_state_dict(Plan.open(plan), checkpoint, mode="read")
took = time.perf_counter() - began
""",
    "plan, auto": """
from loadplan.runtime import Plan, load_state_dict
began = time.perf_counter()
tensors = load_state_dict(Plan.open(plan), checkpoint)
took = time.perf_counter() - began
""",
    "artifact, map": """
from loadplan.runtime import load_state_dict
began = time.perf_counter()
tensors = load_state_dict(artifact)
took = time.perf_counter() - began
""",
    "bare read": """
import mmap, threading
from pathlib import Path
began = time.perf_counter()
def read(path, low, high, into):
    with open(path, "rb", buffering=0) as file:
        while low < high:
            low += os.preadv(file.fileno(), [into[low:min(high, low + (16 << 20))]], low)
held = []
for path in sorted(Path(checkpoint).glob("*.safetensors")):
    size = path.stat().st_size
    memory = mmap.mmap(-1, size); held.append(memory); view = memoryview(memory)
    threads = [threading.Thread(target=read, args=(path, size * i // 2, size * (i + 1) // 2, view)) for i in range(2)]
    [t.start() for t in threads]; [t.join() for t in threads]
took = time.perf_counter() - began
""",
}

_FRAME = """
import json, os, sys, time
checkpoint, plan, artifact = sys.argv[1:4]
{body}
status = dict(line.split(":", 1) for line in open("/proc/self/status"))
print(json.dumps({{"call": took, "anon": int(status["RssAnon"].split()[0])}}))
"""


def main() -> None:
    """Make the checkpoint, measure, print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("layers", 12), ("experts", 32), ("hidden", 1024), ("rounds", 5)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--folder", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        places = _make(Path(folder), options)
        results: dict[str, list[dict[str, float]]] = {way: [] for way in WAYS}
        for _ in range(options.rounds):
            for way, body in WAYS.items():
                results[way].append(_run(body, places))
        _print(results, places[0])


def _make(folder: Path, options: argparse.Namespace) -> tuple[str, str, str]:
    import torch
    import transformers

    from loadplan.compiler import compile_plan, convert

    transformers.utils.logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    config = transformers.Qwen3MoeConfig(
        hidden_size=options.hidden,
        num_hidden_layers=options.layers,
        num_experts=options.experts,
        moe_intermediate_size=options.hidden,
        num_attention_heads=options.hidden // 64,
        num_key_value_heads=options.hidden // 128,
        vocab_size=16_384,
        head_dim=64,  # type: ignore[call-arg]  # taken, though not declared
    )
    checkpoint = folder / "checkpoint"
    torch.manual_seed(0)
    model = transformers.Qwen3MoeForCausalLM._from_config(config, dtype=torch.bfloat16)  # type: ignore[no-untyped-call]
    model.save_pretrained(checkpoint)
    began = time.perf_counter()
    plan = compile_plan(checkpoint)
    print(f"compiled {plan.report.sources} tensors in {time.perf_counter() - began:.2f} s")
    plan.save(folder / "plan")
    convert(plan, checkpoint, folder / "artifact")
    return str(checkpoint), str(folder / "plan"), str(folder / "artifact")


def _run(body: str, places: tuple[str, str, str]) -> dict[str, float]:
    began = time.perf_counter()
    command = [sys.executable, "-c", _FRAME.format(body=body), *places]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    result: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return result | {"process": time.perf_counter() - began}


def _print(results: dict[str, list[dict[str, float]]], checkpoint: str) -> None:
    size = sum(path.stat().st_size for path in Path(checkpoint).glob("*.safetensors"))
    base = statistics.median(run["call"] for run in results["transformers"])
    print(f"{size / 1e9:.2f} GB, {os.cpu_count()} cores, warm page cache, medians of {len(results['transformers'])}")
    print(f"{'way':<16}{'call s':>9}{'ratio':>8}{'GB/s':>8}{'process s':>11}{'anon MB':>9}")
    for way, runs in results.items():
        call, process, anon = (statistics.median(run[key] for run in runs) for key in ("call", "process", "anon"))
        print(f"{way:<16}{call:>9.3f}{base / call:>8.1f}{size / call / 1e9:>8.2f}{process:>11.2f}{anon / 1e3:>9.0f}")


if __name__ == "__main__":
    main()
