"""The verb that trains a pruned decoder: finetune."""

from dispfx.cli.making import command_line
from dispfx.cli.screen import Screen
from dispfx.deploy.folder import refuse_existing
from dispfx.settings.trees import FinetuneSettings
from dispfx.words.preconditions import check_folder
from dispfx.words.text_origin import check_texts


def finetune(settings: FinetuneSettings, screen: Screen) -> None:
    """Train LoRA adapters on a pruned decoder, to recover quality."""
    text, output = settings.text, settings.output
    check_folder(settings.model.model)
    check_texts(text.data)
    check_texts(text.eval_data or [])
    if not output.resume:
        refuse_existing(output.path)
    from dispfx import api
    from dispfx.report import to_plain
    from dispfx.report.tuning_record import tuning_lines

    with screen.observer() as observer:
        record = api.finetune(settings, observer=observer, command=command_line())
    screen.print_json({"out": str(output.out), "merged": output.merge, **to_plain(record)})
    for line in tuning_lines(record):
        screen.print_text(line)
    screen.print_text(f"written: {output.out}")
