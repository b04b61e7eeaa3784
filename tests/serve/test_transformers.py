"""A merged causal language model, loaded by transformers from the mount and from an export."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from mergefs.recipe import Recipe
from mergefs.repository import Repository
from tools.synth import make

RECIPE = """
merge_method: ties
base_model: base
models:
  - model: expert-0
    parameters: {weight: 0.7, density: 0.5}
  - model: expert-1
    parameters: {weight: 0.5, density: 0.4}
"""


@pytest.mark.fuse
@pytest.mark.parametrize("lazy", [False, True])
def test_logits_from_the_mount_are_those_of_the_export(tmp_path: Path, lazy: bool) -> None:
    from mergefs.serve.mount import umount

    make("tiny", 2, tmp_path / "models", seed=3)
    with Repository.init(tmp_path / "repo", 1 << 16) as repository:
        repository.ingest(tmp_path / "models/base", "base")
        for name in ("expert-0", "expert-1"):
            repository.ingest(tmp_path / "models" / name, name, base="base")
        report = repository.merge(Recipe.parse(RECIPE), "merged", lazy=lazy)
        repository.export("merged", tmp_path / "exported")
        repository.mount(tmp_path / "mounted", report.manifest)
        try:
            tokens = torch.tensor([[1, 5, 9, 2, 40, 7]])
            logits = []
            for folder in ("mounted", "exported"):
                model = AutoModelForCausalLM.from_pretrained(tmp_path / folder)
                assert AutoTokenizer.from_pretrained(tmp_path / folder) is not None
                with torch.no_grad():
                    logits.append(model(tokens).logits)
                del model
        finally:
            umount(tmp_path / "mounted")
        assert torch.isfinite(logits[0]).all()
        assert torch.equal(*logits)
        base = AutoModelForCausalLM.from_pretrained(tmp_path / "models/base")
        with torch.no_grad():
            assert not torch.equal(base(tokens).logits, logits[0])
