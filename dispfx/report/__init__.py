"""What a user sees of a compilation: report.json, table, model card, progress.

schema     the report's fields
json_form  report.json
table      the report in a terminal
sites      what can be pruned in a decoder
coverage   which weights the sites cut, and why the rest is not cut
card       DIR/README.md
settings   the settings of a run, as a table and as a command line
run        a folder, read back
layers     a plan as layers × features
pictures   their plots with matplotlib
page       DIR/report.html
observer   stages and progress while a compilation runs
tasks, evaluation   scores in tasks, and what `dispfx eval` found
quantized  size and loss of ONNX models with fewer bits
tuning     what fine-tuning did
"""

from dispfx.report.card import FolderContents, model_card
from dispfx.report.json_form import from_json, load_report, save_report, to_json, to_plain
from dispfx.report.observer import NullObserver, Observer, TerminalObserver
from dispfx.report.schema import (
    Behaviour,
    Bytes,
    CacheBytes,
    CacheRatio,
    MetConstraint,
    Parameters,
    PerplexityChange,
    Protocol,
    Quantized,
    QuantizedQuality,
    Ratio,
    Refused,
    Report,
    SiteWidth,
    SkillChange,
    Tuning,
    UngatedWeights,
)

__all__ = [
    "Behaviour",
    "Bytes",
    "CacheBytes",
    "CacheRatio",
    "FolderContents",
    "MetConstraint",
    "NullObserver",
    "Observer",
    "Parameters",
    "PerplexityChange",
    "Protocol",
    "Quantized",
    "QuantizedQuality",
    "Ratio",
    "Refused",
    "Report",
    "SiteWidth",
    "SkillChange",
    "TerminalObserver",
    "Tuning",
    "UngatedWeights",
    "from_json",
    "load_report",
    "model_card",
    "save_report",
    "to_json",
    "to_plain",
]
