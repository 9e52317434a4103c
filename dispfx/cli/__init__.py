"""The command line: `dispfx VERB`.

    app          the verbs and the entry point
    verb         a verb, generated from its settings
    making       compile, learn, apply, recover, finetune
    using        inspect, verify, export, generate, sample
    evaluating   eval, bench
    showing      report, compare, passes, doctor
    config_file  compile --config
    faults       errors → message and exit code
    screen       where progress and results go

A verb checks its arguments, calls one function of `dispfx.api`, and shows the result.  Nothing here imports
torch before that check, so that `dispfx --help` and typos are fast.
"""

from dispfx.cli.app import main

__all__ = ["main"]
