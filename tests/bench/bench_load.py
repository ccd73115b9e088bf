"""Load times side by side: transformers, other loaders, a plan, an artifact, and a raw read of the same bytes.

    python tests/bench/bench_load.py [--case moe|small|tiny] [--rounds 5] [--cold] [--json FILE] [--folder DIR]

Makes a checkpoint with random weights and loads it in fresh processes, all ways in each round, in an order drawn anew
for each; prints medians. Cases:

    moe      bf16 Qwen3-MoE, 2.6 GB in 1,263 tensors (--layers 12 --experts 32 --hidden 1024)
    small    bf16 Qwen3-MoE of 49,000 expert tensors of 1 KB each, which the model holds stacked
    flat     the tensors of `small` under names and in shapes as they are: no model, so no transformers
    tiny     a Llama of 1 MB: what a process costs that loads almost nothing

`call` is the load alone, `process` everything from start to exit, imports included. `raw` is the time of `preadv` on two
threads into large pages, of the same bytes in the same round; `x raw` is a multiple of it. `read` is what went through
system calls, not what was mapped; a mapped page is read when it is first used, or in the ways "… all pages" before the
call returns. `peak` is the highest anonymous memory (what is not page cache) above that before the call, seen in a run of its own that is not timed.
With --cold the files are put out of the page cache before each run.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import statistics
import subprocess
import sys
import tempfile
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

_TRANSFORMERS = """
import transformers, torch
transformers.utils.logging.set_verbosity_error(); transformers.utils.logging.disable_progress_bar()
config = transformers.AutoConfig.from_pretrained(checkpoint)
model_class = getattr(transformers, config.architectures[0])
begin()
model = model_class.from_pretrained(checkpoint, dtype="auto")
end()
"""
_PLAN = """
from loadplan.runtime import Plan, load_state_dict
begin()
tensors = load_state_dict(Plan.open(plan), checkpoint{more})
end()
"""
_ARTIFACT = """
from loadplan.runtime import load_state_dict
begin()
tensors = load_state_dict(artifact{more})
end()
"""
WAYS = {
    "raw": """
import mmap, threading
begin()
def read(path, low, high, into):
    with open(path, "rb", buffering=0) as file:
        while low < high:
            low += os.preadv(file.fileno(), [into[low:min(high, low + (16 << 20))]], low)
memories = []
for path in files:
    size = path.stat().st_size
    memory = mmap.mmap(-1, size + (2 << 20)); memory.madvise(mmap.MADV_HUGEPAGE); memories.append(memory)
    view = memoryview(memory)
    threads = [threading.Thread(target=read, args=(path, size * i // 2, size * (i + 1) // 2, view)) for i in range(2)]
    [t.start() for t in threads]; [t.join() for t in threads]
end()
""",
    "transformers": _TRANSFORMERS,
    "load_file": """
from safetensors.torch import load_file
begin()
tensors = [load_file(path) for path in files]
end()
""",
    "runai": """
from runai_model_streamer import SafetensorsStreamer
begin()
with SafetensorsStreamer() as streamer:
    streamer.stream_files([str(path) for path in files])
    tensors = {name: tensor.clone() for name, tensor in streamer.get_tensors()}
end()
""",
    "fastsafetensors": """
from fastsafetensors import SafeTensorsFileLoader, SingleGroup
begin()
loader = SafeTensorsFileLoader(SingleGroup(), device="cpu", nogds=True)
loader.add_filenames({0: [str(path) for path in files]})
buffers = loader.copy_files_to_device()
tensors = {name: buffers.get_tensor(name) for name in loader.get_keys()}
end()
""",
    "plan": _PLAN.format(more=""),
    "plan, all pages": _PLAN.format(more=", residency='read'"),
    "plan, read": _PLAN.format(more=", mode='read'"),
    "plan, runai": "import runai_model_streamer" + _PLAN.format(more=", backend='runai'"),
    "plan, fastsafetensors": "import fastsafetensors" + _PLAN.format(more=", backend='fastsafetensors'"),
    "artifact": _ARTIFACT.format(more=""),
    "artifact, all pages": _ARTIFACT.format(more=", residency='read'"),
    "load_model": """
import transformers
from loadplan.runtime import Plan, load_model
getattr(transformers, transformers.AutoConfig.from_pretrained(checkpoint).architectures[0])
begin()
model = load_model(Plan.open(plan), checkpoint)
end()
""",
}
NEEDS = {
    "runai": "runai-model-streamer",
    "fastsafetensors": "fastsafetensors",
    "plan, runai": "runai-model-streamer",
    "plan, fastsafetensors": "fastsafetensors",
}
MODEL = {"transformers", "load_model"}  # ways that need a model class

_FRAME = """
import json, os, sys, time
from pathlib import Path
checkpoint, plan, artifact = sys.argv[1:4]
files = sorted(Path(checkpoint).glob("*.safetensors"))
def rchar():
    return int(open("/proc/self/io").read().split("rchar:")[1].split()[0])
def anonymous():
    return int(open("/proc/self/status").read().split("RssAnon:")[1].split()[0]) * 1024
def begin():
    global began, before, held
    held = anonymous()
    before = rchar()
    began = time.perf_counter()
def end():
    global took
    took = time.perf_counter() - began
{body}
print(json.dumps({{"call": took, "read": rchar() - before, "held": held}}))
"""

Places = tuple[str, str, str]
Result = dict[str, float]


def main() -> None:
    """Make the checkpoint, measure, print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", choices=["moe", "small", "flat", "tiny"], default="moe")
    for name, default in (("layers", 12), ("experts", 32), ("hidden", 1024), ("rounds", 5)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--cold", action="store_true", help="put the files out of the page cache before each run")
    parser.add_argument("--way", action="append", choices=list(WAYS), help="only these, and raw; repeatable")
    parser.add_argument("--json", type=Path, help="file for all single results")
    parser.add_argument("--folder", type=Path, help="where to make the checkpoint; needs 8 GB for `moe`")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        places = _make(Path(folder), options)
        ways = [way for way in WAYS if _runs_here(way, options)]
        results: dict[str, list[Result]] = {way: [] for way in ways}
        for _ in range(options.rounds):
            for way in random.sample(ways, len(ways)):
                results[way].append(_run(way, places, cold=options.cold))
        peaks = {way: _peak(way, places) for way in ways}
        _print(results, peaks, places, options)
        if options.json:
            options.json.write_text(json.dumps(results, indent=1))


def _runs_here(way: str, options: argparse.Namespace) -> bool:
    if options.way and way not in (*options.way, "raw"):
        return False
    if options.case == "flat" and way in MODEL:
        return False
    try:
        return not NEEDS.get(way) or bool(version(NEEDS[way]))
    except PackageNotFoundError:
        print(f"{way}: {NEEDS[way]} is not installed, left out", file=sys.stderr)
        return False


def _make(folder: Path, options: argparse.Namespace) -> Places:
    import torch
    from safetensors.torch import save_file

    from loadplan.compiler import compile_plan, convert

    checkpoint = folder / "checkpoint"
    if options.case == "flat":
        checkpoint.mkdir()
        tensors = {f"layers.{n // 100}.blocks.{n % 100}.weight": torch.randn(512).bfloat16() for n in range(50_000)}
        save_file(tensors, checkpoint / "model.safetensors", {"format": "pt"})
    else:
        _save_model(checkpoint, options)
    began = time.perf_counter()
    plan = compile_plan(checkpoint, signature="recipe" if options.case == "flat" else None)
    print(f"compiled {plan.report.sources} tensors in {time.perf_counter() - began:.2f} s")
    plan.save(folder / "plan")
    convert(plan, checkpoint, folder / "artifact")
    return str(checkpoint), str(folder / "plan"), str(folder / "artifact")


def _save_model(checkpoint: Path, options: argparse.Namespace) -> None:
    import torch
    import transformers

    transformers.utils.logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    torch.manual_seed(0)
    sizes = {
        "moe": (options.hidden, options.layers, options.experts, options.hidden, 16_384),
        "small": (16, 16, 1024, 32, 256),
    }
    if options.case == "tiny":
        tiny = transformers.LlamaConfig(
            hidden_size=64, intermediate_size=128, num_hidden_layers=4, num_attention_heads=4, vocab_size=2048
        )
        model = transformers.LlamaForCausalLM._from_config(tiny, dtype=torch.bfloat16)  # type: ignore[no-untyped-call]
    else:
        hidden, layers, experts, inner, words = sizes[options.case]
        head_dim = min(hidden // 2, 64)
        config = transformers.Qwen3MoeConfig(
            hidden_size=hidden,
            num_hidden_layers=layers,
            num_experts=experts,
            moe_intermediate_size=inner,
            num_attention_heads=hidden // head_dim,
            num_key_value_heads=hidden // head_dim // 2,
            vocab_size=words,
            head_dim=head_dim,  # type: ignore[call-arg]  # taken, though not declared
        )
        model = transformers.Qwen3MoeForCausalLM._from_config(config, dtype=torch.bfloat16)  # type: ignore[no-untyped-call]
    model.save_pretrained(checkpoint)


def _command(way: str, places: Places) -> list[str]:
    return [sys.executable, "-c", _FRAME.format(body=WAYS[way]), *places]


def _run(way: str, places: Places, *, cold: bool) -> Result:
    if cold:
        _forget(places)
    began = time.perf_counter()
    done = subprocess.run(_command(way, places), capture_output=True, text=True, check=False)
    took = time.perf_counter() - began
    if done.returncode:
        sys.exit(f"{way} failed:\n{done.stderr}")
    result: Result = json.loads(done.stdout.splitlines()[-1])
    return result | {"process": took}


def _forget(places: Places) -> None:
    """Put the files out of the page cache (posix_fadvise(2)); needs no privilege for clean pages."""
    for folder in (places[0], places[2]):
        for path in Path(folder).rglob("*.safetensors"):
            descriptor = os.open(path, os.O_RDONLY)
            os.fsync(descriptor)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(descriptor)


def _peak(way: str, places: Places) -> int:
    """The highest anonymous memory of a run above that before the call, in bytes, looked at every millisecond or so."""
    process = subprocess.Popen(_command(way, places), stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    highest = 0
    status = Path(f"/proc/{process.pid}/status")
    while process.poll() is None:
        lines = status.read_text().splitlines()
        highest = max([highest, *(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon"))])
        time.sleep(0.001)
    assert process.stdout is not None
    with process.stdout as output:
        held: int = json.loads(output.read().splitlines()[-1])["held"]
    return highest - held


def _print(
    results: dict[str, list[Result]], peaks: dict[str, int], places: Places, options: argparse.Namespace
) -> None:
    size = sum(path.stat().st_size for path in Path(places[0]).glob("*.safetensors"))
    packages = ", ".join(f"{name} {version(name)}" for name in ("torch", "transformers", "safetensors"))
    cache = "cold" if options.cold else "warm"
    print(f"{options.case}: {size / 1e9:.3f} GB, {os.cpu_count()} cores, {platform.machine()}, {packages}")
    print(f"page cache {cache}, medians of {options.rounds} fresh processes in shuffled order")
    medians = {
        way: {key: statistics.median(run[key] for run in runs) for key in runs[0]} for way, runs in results.items()
    }
    peer = medians.get("transformers", {}).get("call")
    header = ("way", "call s", "least", "most", "x raw", "x faster", "process s", "read MB", "peak MB")
    print("{:<22}{:>9}{:>9}{:>9}{:>8}{:>10}{:>11}{:>9}{:>9}".format(*header))
    for way, runs in results.items():
        calls = [run["call"] for run in runs]
        m = medians[way]
        faster = f"{peer / m['call']:.1f}" if peer else "-"
        print(
            f"{way:<22}{m['call']:>9.3f}{min(calls):>9.3f}{max(calls):>9.3f}{m['call'] / medians['raw']['call']:>8.2f}"
            f"{faster:>10}{m['process']:>11.2f}{m['read'] / 1e6:>9.0f}{peaks[way] / 1e6:>9.0f}"
        )


if __name__ == "__main__":
    main()
