"""The time of `doit` when there is nothing to do: fresh processes, medians.

    python tests/bench/bench_noop.py [--checkpoints 20] [--tensors 300] [--rounds 7]

Each checkpoint has four variants (2 dtypes, 1 and 2 ranks), each of them compiled, converted and verified before; every
fourth is a torch file. `python` is an interpreter that does nothing, `doit list` doit without any question, for
comparison. The page cache is warm.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from many_variants import make_project


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkpoints", type=int, default=20, metavar="COUNT")
    parser.add_argument("--tensors", type=int, default=300, metavar="COUNT", help="in each checkpoint")
    parser.add_argument("--rounds", type=int, default=7, metavar="COUNT")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = make_project(Path(temporary, "project"), options.checkpoints, options.tensors)
        began = time.perf_counter()
        _run(folder, "-m", "doit")
        print(
            f"{4 * options.checkpoints} variants of {options.tensors} tensors, built in {time.perf_counter() - began:.1f} s"
        )
        time.sleep(2.1)  # until no output is of this moment any more
        _run(folder, "-m", "doit")
        ways = {"python": ("-c", "pass"), "doit list": ("-m", "doit", "list"), "doit": ("-m", "doit")}
        for name, args in ways.items():
            took = [_run(folder, *args) for _ in range(options.rounds)]
            print(f"{name:>10}: median {statistics.median(took):.2f} s, from {min(took):.2f} to {max(took):.2f}")


def _run(folder: Path, *args: str) -> float:
    began = time.perf_counter()
    subprocess.run([sys.executable, *args], cwd=folder, check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - began


if __name__ == "__main__":
    main()
