"""The command line: `dispfx VERB`.

    app         the verbs and the entry point
    making      compile, learn, apply
    using       inspect, verify, export, generate
    evaluating  eval
    measuring   bench
    tuning      finetune
    showing     report, compare, doctor
    options     every option, once
    repeating   compile --from-report
    faults      errors → message and exit code
    screen      where progress and results go

A verb checks the user's words, calls one function of `dispfx.api`, and shows the result.  Nothing here
imports torch before the words are checked, so that `dispfx --help` and a wrong word are answered at
once.
"""

from dispfx.cli.app import main

__all__ = ["main"]
