"""The verb that trains a pruned decoder: recover, and its other name finetune."""

from dataclasses import replace

from dispfx.cli.launching import launches
from dispfx.cli.making import command_line
from dispfx.cli.screen import Screen
from dispfx.deploy.folder import refuse_existing
from dispfx.settings.trees import RecoverSettings
from dispfx.words.chosen_device import local_device
from dispfx.words.model_origin import origin_of
from dispfx.words.preconditions import check_folder
from dispfx.words.text_origin import check_texts


def recover(settings: RecoverSettings, screen: Screen) -> None:
    """Train a pruned decoder to predict what the dense one predicts, to win back what pruning has cost."""
    text, output = settings.text, settings.output
    check_folder(settings.model.model)
    origin_of(settings.teacher.dense)
    check_texts(text.data, text.data_weight)
    check_texts(text.eval_data or [])
    if not output.resume:
        refuse_existing(output.path)
    if launches(output.launch):
        return
    from dispfx import api
    from dispfx.distributed.ranks import joined
    from dispfx.report import to_plain
    from dispfx.report.tuning_record import tuning_lines

    with (
        joined(local_device(settings.model.device) or "cpu") as ranks,
        screen.observer(ranks.leads) as observer,
    ):
        if not ranks.leads:
            api.follow_recovery(settings, ranks)
            return
        told = api.run_recover(settings, observer, ranks=ranks, command=command_line())
    whole = settings.recovery.train != "lora" or output.merge
    screen.print_json({"out": str(output.out), "merged": whole, **to_plain(told)})
    for line in tuning_lines(told):
        screen.print_text(line)
    screen.print_text(f"written: {output.out}")


def finetune(settings: RecoverSettings, screen: Screen) -> None:
    """Train LoRA adapters on a pruned decoder: another name of `recover --train lora`."""
    recover(replace(settings, recovery=replace(settings.recovery, train="lora")), screen)
