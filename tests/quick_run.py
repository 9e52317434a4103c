"""Which files `tools/test --quick` leaves out because their tests together take too long.

It takes every test that is not marked `slow` or `long`, of every file that is not named here.  What is named
compiles whole folders, starts processes, or captures dozens of decoders.  `tests/tools/test_quick_run.py`
checks that every room keeps tests.
"""

from pathlib import Path

# By folder: names of test files without "test_" and ".py".
LEFT_OUT = {
    "report": "page",
    "tracing": "valid_lengths",
    "passes": "outline_layers insert_scales",
    "tests": "documents cached_capture choices constant_branch experts foreign_decoders installed invariants "
    "meta_capture packaging stream_selection width wrapped_decoders zoo_smoke",
    "api": "bos rehearsal bench commands compilation length_checks onnx_folder own_passes preflight preview "
    "recovery static tasks",
    "cli": "app config_file evaluating faults interrupting lost_rank making measuring orphaned_ranks "
    "recovering using",
    "deploy": "checkpoint folder generate reload",
    "docs": "guide other_pages readme",
    "huggingface": "adapters behaviour classes copies dense heads lm_eval loading ordinary own_code "
    "registering saved_again state_dicts",
    "learning": "state ranks",
    "measure": "estimate logits_by_rows",
    "onnx": "full_sequence legalize tidying twin",
    "tools": "build decoder_shapes learning_profile measure_memory reproduce train_small",
    "training": "objectives decoder preparation replay shards",
    "trust": "interrupted_runs no_code_from_data other_loaders repeated_runs several_decoders",
}


def is_left_out(file: Path) -> bool:
    """Whether the quick run leaves a file out."""
    return file.stem.removeprefix("test_") in LEFT_OUT.get(file.parent.name, "").split()
