"""Runs recipes through mergekit, in mergekit's own Python: `PYTHON parity_mergekit.py < jobs`.

The standard input has JSON: a list of {"recipe": text, "out": folder, "seed": n}. For each a line of JSON goes to the
standard output: null, or the message of the error that ended it.
"""

import contextlib
import json
import logging
import os
import sys

os.environ.update(HF_HUB_OFFLINE="1", TRANSFORMERS_OFFLINE="1", HF_DATASETS_OFFLINE="1", TQDM_DISABLE="1")


def main() -> None:
    """Run the jobs."""
    import yaml
    from mergekit.config import MergeConfiguration
    from mergekit.merge import run_merge
    from mergekit.options import MergeOptions

    logging.disable(logging.WARNING)
    for job in json.load(sys.stdin):
        options = MergeOptions(copy_tokenizer=False, write_model_card=False, quiet=True, random_seed=job["seed"])
        error = None
        try:
            with contextlib.redirect_stdout(sys.stderr):
                run_merge(MergeConfiguration.model_validate(yaml.safe_load(job["recipe"])), job["out"], options)
        except Exception as found:
            error = f"{type(found).__name__}: {found}".splitlines()[0]
        print(json.dumps(error), flush=True)


main()
