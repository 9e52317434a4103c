#!/usr/bin/env python
"""Write the API reference from docstrings, as HTML.

    python tools/reference_pages.py FOLDER

The pages are those of `MODULES`, and show their public names: those of `__all__`, or without a leading
underscore.
"""

import argparse
import inspect
import sys
from collections.abc import Sequence
from html import escape
from importlib import import_module
from pathlib import Path

from dispfx.report.page import document, section
from dispfx.settings import trees
from dispfx.settings.field import section_fields

MODULES = (
    "dispfx",
    "dispfx.api",
    "dispfx.errors",
    "dispfx.plan.plan",
    "dispfx.ir.program",
    "dispfx.ir.sites",
    "dispfx.settings",
    "dispfx.settings.learning_settings",
    "dispfx.settings.trees",
    "dispfx.settings.verb_settings",
    "dispfx.quality.agreement",
    "dispfx.verification.equivalence",
    "dispfx.quality.perplexity",
    "dispfx.ir.pipeline",
    "dispfx.report",
)


INDEX_FILE = "index.html"


def write_reference(folder: Path) -> list[Path]:
    """Write a page a module and an index, and return the pages."""
    import pdoc
    from pdoc import render

    package = import_module("dispfx")
    # They are imported when they are used first, so that `import dispfx` is quick; pdoc looks without using.
    for name in package.__all__:
        setattr(package, name, getattr(package, name))
    _describe_settings()
    render.configure(docformat="google", footer_text="dispfx", show_source=False)
    # pdoc takes a module with all below it; what is below is taken out again, and asked for by itself.
    wanted = [word for module in MODULES for word in (module, f"!{module.replace('.', '[.]')}[.].*")]
    pdoc.pdoc(*wanted, output_directory=folder)
    pages = {module: folder / f"{module.replace('.', '/')}.html" for module in MODULES}
    # pdoc's own index leads to the first page, which does not link to other pages.
    (folder / INDEX_FILE).write_text(_index(), encoding="utf-8")
    return list(pages.values())


def _describe_settings() -> None:
    """Add what each field of a section says of itself to the docstring of the section."""
    for kind in {kind for tree in trees.TREES for kind in tree.sections().values()}:
        lines = [
            f"    {one.name}: {one.facts.doc}"
            + (f" Default: {one.facts.default}." if one.facts.default else "")
            for one in section_fields(kind)
        ]
        said = inspect.cleandoc(kind.__doc__ or "")
        before, _, after = said.partition("Args:\n")
        kind.__doc__ = "\n".join([before.rstrip(), "", "Args:", *lines, *([after.rstrip()] if after else [])])


def _index() -> str:
    """Return a page that leads to all others, with what each module says of itself."""
    items = []
    for module in MODULES:
        said = (import_module(module).__doc__ or "").split("\n\n")[0].replace("\n", " ")
        place = escape(f"{module.replace('.', '/')}.html")
        items.append(f'<li><a href="{place}"><code>{module}</code></a>: {escape(said)}</li>')
    return document("dispfx: API reference", section("API reference", f"<ul>{''.join(items)}</ul>"))


def main(words: Sequence[str] | None = None) -> int:
    """Write the pages and say where they are."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    args = parser.parse_args(words)
    write_reference(args.folder)
    print(args.folder / INDEX_FILE)
    return 0


if __name__ == "__main__":
    sys.exit(main())
