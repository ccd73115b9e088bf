"""A project of many checkpoints and variants, to see what a build costs that has nothing to do."""

from __future__ import annotations

import os
from pathlib import Path

import torch
from safetensors.torch import save_file

MATRIX = 'matrix.m]\ntp_size = [1, 2]\ndtype = ["bfloat16", "float16"]\nsignature = "recipe"\n'


def make_project(folder: Path, checkpoints: int, tensors: int) -> Path:
    """Checkpoints of `tensors` small tensors each, every fourth as a torch file, in four variants each; the folder."""
    folder.mkdir(parents=True)
    tables = []
    for number in range(checkpoints):
        place = folder / f"weights-{number}"
        place.mkdir()
        state = {f"model.layers.{i}.mlp.up_proj.weight": torch.full((2, 2), float(number)) for i in range(tensors)}
        if number % 4 == 3:
            path = place / "pytorch_model.bin"
            torch.save(state, path)
        else:
            path = place / "model.safetensors"
            save_file(state, path)
        os.utime(path, (1, 1))  # files of this moment would be read again, to be sure
        tables.append(f'[checkpoint.c{number}]\nsource = "weights-{number}"\n[checkpoint.c{number}.{MATRIX}')
    (folder / "loadplan.toml").write_text("\n".join(tables), encoding="utf-8")
    (folder / "dodo.py").write_text("from loadplan.compiler.tasks import *\n", encoding="utf-8")
    return folder
