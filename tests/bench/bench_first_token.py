"""Time to the first token of a Llama, with the weights waited for and with modules that wait for their own.

    python tests/bench/bench_first_token.py [--mb 300] [--rounds 7] [--mode read] [--cold] [--folder DIR]

Makes a bf16 Llama of about that size, its plan and one token's input, then starts fresh processes, in turn with
`wait=True` and `wait=False`, which import everything, and time what follows: `load_model` and one forward. Prints the
medians of both, and of the two parts. Files are in the page cache, with --cold on the disk. Cached bytes are read at the
speed of the cores, which the first layers want too: where cores are few, only waiting for a disk leaves any to them. Other work on the machine changes the numbers: the
ways take turns so that both meet it, and minima are printed beside the medians.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

RUN = """
import json, sys, time
import torch, transformers
from loadplan.runtime import Plan, load_model
plan = Plan.open(sys.argv[1])
getattr(transformers, plan.head.model.class_name)
tokens = torch.arange(16)[None]
begin = time.perf_counter()
model = load_model(plan, sys.argv[2], mode=sys.argv[3], wait=sys.argv[4] == "True")
loaded = time.perf_counter()
with torch.no_grad():
    token = int(model(tokens, logits_to_keep=1).logits.argmax())
end = time.perf_counter()
print(json.dumps([loaded - begin, end - begin, token]))
"""


def make(folder: Path, nbytes: int) -> Path:
    """A checkpoint of about `nbytes` and its plan, beside it; returns the plan's path."""
    import torch
    import transformers

    from loadplan.compiler import compile_plan

    hidden, inner, vocab = 1024, 2816, 16_000
    layer = 2 * (4 * hidden * hidden + 3 * hidden * inner)
    config = transformers.LlamaConfig(
        hidden_size=hidden,
        intermediate_size=inner,
        vocab_size=vocab,
        num_attention_heads=16,
        num_key_value_heads=16,
        num_hidden_layers=max(1, (nbytes - 4 * vocab * hidden) // layer),
        dtype=torch.bfloat16,
    )
    model: Any = transformers.LlamaForCausalLM(config)
    model.to(torch.bfloat16).save_pretrained(folder / "model")
    compile_plan(folder / "model").save(folder / "plan")
    return folder / "plan"


def measure(plan: Path, folder: Path, mode: str, wait: bool) -> tuple[float, float, int]:
    """Seconds of the call, seconds to the token, and the token."""
    command = [sys.executable, "-c", RUN, str(plan), str(folder), mode, str(wait)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    call, whole, token = json.loads(done.stdout)
    return call, whole, token


def forget(folder: Path) -> None:
    """Put the files out of the page cache (posix_fadvise(2))."""
    for path in folder.glob("*.safetensors"):
        with path.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mb", type=int, default=300, help="size of the model in MB (default: 300)")
    parser.add_argument("--rounds", type=int, default=7, help="processes of each way (default: 7)")
    parser.add_argument("--mode", default="read", help="as of load_model (default: read)")
    parser.add_argument("--cold", action="store_true", help="put the files out of the page cache before each run")
    parser.add_argument("--folder", type=Path, help="where to make the model (default: a temporary folder)")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.folder) as name:
        folder = Path(name)
        plan = make(folder, options.mb * 10**6)
        found: dict[bool, list[tuple[float, float, int]]] = {True: [], False: []}
        for turn in range(2 * options.rounds + 2):
            wait = turn % 2 == 0
            if options.cold:
                forget(folder / "model")
            result = measure(plan, folder / "model", options.mode, wait)
            if turn > 1:  # the first of each fills the page cache
                found[wait].append(result)
    assert len({token for results in found.values() for _, _, token in results}) == 1, "one model, one token"
    for wait, results in found.items():
        calls, wholes, _ = zip(*results, strict=True)
        print(
            f"wait={wait!s:5}: load_model {statistics.median(calls):.3f} s, first token after "
            f"{statistics.median(wholes):.3f} s (least {min(wholes):.3f} s), medians of {len(results)}"
        )


if __name__ == "__main__":
    main()
