"""The command `podium`. Nothing heavy is imported before a command needs it."""

import argparse
import copy
import json
import os
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from podium import __version__
from podium.errors import InputError, PodiumError
from podium.untrusted import say, warn

DEFAULT_ROWS = 200
Argument = tuple[str, dict[str, Any]]
"""Name and keyword arguments of `add_argument`."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit code: 0 done, 2 bad input, 3 no step trained anything, 130/143 stopped by a signal, 1 anything else."""
    options, overrides = _parser().parse_known_args(arguments)
    try:
        if overrides and options.command in (export, push, report, list_choices):
            raise InputError(f"podium {options.command_name} takes no {overrides[0]}")
        return options.command(options, overrides)
    except PodiumError as error:
        warn(f"podium: {error}")
        return error.exit_code
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # `podium list | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


def console() -> None:
    try:
        code = main()
    except Exception:  # a defect of Podium; the traceback may quote text that others wrote
        warn(traceback.format_exc())
        code = 1
    watchdog = sys.modules.get("podium.run.watchdog")
    has_stalled = watchdog is not None and watchdog.stalled
    if code in (130, 143) or has_stalled:  # a normal exit would wait for a thread that samples, or hangs
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    sys.exit(code)


def train(options: argparse.Namespace, overrides: list[str]) -> int:
    settings = _settings(options, overrides)
    from podium.run.start import train as run

    return run(settings, console_mode=_console_mode(options)).exit_code


def resume(options: argparse.Namespace, overrides: list[str]) -> int:
    from podium.run.build import changes, check_changes
    from podium.run.checkpoint import list_checkpoints, step_of
    from podium.run.folder import RunFolder
    from podium.settings.tables import Settings, override, read_run_settings

    folder = RunFolder.open(options.run)
    before = Settings.from_dict(read_run_settings(folder.settings))
    settings = Settings.from_dict(override(read_run_settings(folder.settings), overrides))
    checkpoints = {step_of(place): place for place in list_checkpoints(folder.checkpoints)}
    step = max(checkpoints, default=None) if options.step is None else options.step
    # The checkpoint's own settings count. Its warnings are shown when it is restored.
    check_changes(before, settings, options.allow_change, step)
    committed = _committed_settings(checkpoints[step]) if step in checkpoints else None
    changed = {*changes(before, settings), *changes(committed or before, settings)}
    for key in options.allow_change:
        if not any(f"{each}.".startswith(f"{key}.") for each in changed):
            raise InputError(f"--allow-change {key} has no effect: {key} does not change; add --{key}=VALUE")
    if folder.state == "finished" and not overrides and options.step is None:
        say(f"{options.run} is finished; nothing to do. For more: podium resume {options.run} --run.steps=N")
        return 0
    from podium.run.start import resume as run

    allowed = {"step": options.step, "allow_change": options.allow_change}
    return run(settings, folder, console_mode=_console_mode(options), **allowed).exit_code


def _committed_settings(checkpoint: Path) -> Any:
    """The settings of a checkpoint, from which an edited settings.toml may differ.

    None if they cannot be read: the restore reports what is wrong.
    """
    from podium.run.checkpoint import read_settings
    from podium.settings.tables import Settings

    try:
        text = read_settings(checkpoint)
        return Settings.stored(text) if text is not None else None
    except (OSError, ValueError, InputError):
        return None


def evaluate(options: argparse.Namespace, overrides: list[str]) -> int:
    from podium.evaluation import as_text, compared, comparison_data, results_file, verdict
    from podium.export import find_trained
    from podium.run.start import held_out_results
    from podium.settings.tables import read_run_settings, read_toml

    if options.out is not None and options.out.exists():
        raise InputError(f"{options.out} exists already; give a new file")
    targets = [target for target in (options.model, options.against) if target is not None]
    found = [find_trained(target) for target in targets]
    if options.settings is not None:
        tables = read_toml(options.settings)
    elif found[0].run is not None:
        tables = read_run_settings(found[0].run.settings)
    else:
        advice = "add a settings file with [[eval.data]] and [[reward]] tables"
        raise InputError(f"{options.model} is not a run folder; {advice}")
    settings = [_eval_settings(tables, trained, overrides) for trained in found]
    results = [held_out_results(each, trained.weights) for each, trained in zip(settings, found, strict=True)]
    files = [results_file(*each) for each in zip(targets, (each.to_dict() for each in settings), results, strict=True)]
    text, data, flat = as_text(results[0]), dict(files[0]), results[0].metrics()
    if options.against is not None:
        made = compared(*results)
        said = verdict(*made, options.model, options.against)
        pair = comparison_data(*made, said)
        data |= {"against": files[1], "comparison": pair}
        flat |= {"against": results[1].metrics(), "comparison": pair}
        text = f"{options.model}\n{text}\n\n{options.against}\n{as_text(results[1])}\n\n{said}"
    if options.out is not None:
        options.out.write_text(json.dumps(data, indent=1), encoding="utf-8")
    say(json.dumps(flat) if options.json else text)
    return 0


def _eval_settings(tables: dict[str, Any], trained: Any, overrides: list[str]) -> Any:
    """The tables with the evaluated model; a run's weights belong to the run's own model."""
    from podium.settings.tables import Settings, override

    own = trained.model if trained.run else tables.get("model", {})
    made = override({**copy.deepcopy(tables), "model": copy.deepcopy(own)}, overrides)
    return Settings.from_dict(made if trained.run else {**made, "model": {**made["model"], **trained.model}})


def check(options: argparse.Namespace, overrides: list[str]) -> int:
    settings = _settings(options, overrides)
    if options.rewards:
        from podium.check.rewards import try_rewards

        report, is_good = try_rewards(settings, options.rows or DEFAULT_ROWS)
    elif options.rows is not None:
        raise InputError("--rows has no effect without --rewards; add it or remove this one")
    else:
        from podium.check.verdicts import check as run

        report, is_good = run(settings)
    say(report)
    return 0 if is_good else InputError.exit_code


def export(options: argparse.Namespace, overrides: list[str]) -> int:
    from podium.export import export as run

    made = run(options.target, options.out, merge=options.merge, step=options.step)
    for name, size in made.files.items():
        say(f"{size:>14,}  {name}")
    if made.gap is not None:
        say(f"read again and compared with base + adapter: logprobs differ by at most {made.gap:.2g}")
    say(f"{options.out}: {'a LoRA adapter' if made.kind == 'adapter' else 'a model'}; README.md says how to load it")
    return 0


def push(options: argparse.Namespace, overrides: list[str]) -> int:
    from podium.export import push as run

    flags = {name: getattr(options, name) for name in ("merge", "step", "private", "dry_run")}
    for line in run(options.target, options.name, **flags):
        say(line)
    return 0


def serve(options: argparse.Namespace, overrides: list[str]) -> int:
    try:
        from podium.server.serve import ServeOptions, serve
    except ModuleNotFoundError as error:
        raise InputError(f"podium serve needs the package {error.name}; pip install 'podium-rl[server]'") from None
    fields = ServeOptions.__dataclass_fields__
    return serve(ServeOptions(**{name: getattr(options, name) for name in fields}), overrides)


def report(options: argparse.Namespace, overrides: list[str]) -> int:
    from podium.report.web.serve import report_server

    with report_server(options.run, options.port) as server:
        say(f"http://127.0.0.1:{server.server_address[1]}/   (Ctrl-C ends it)")
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            return 0
    return 0


def show(options: argparse.Namespace, overrides: list[str]) -> int:
    settings = _settings(options, overrides)
    say(json.dumps(settings.to_dict(), indent=1) if options.json else settings.to_toml())
    return 0


def list_choices(options: argparse.Namespace, overrides: list[str]) -> int:
    from podium.settings.lookup import STAGES, choices, find, option_help
    from podium.settings.sections import SECTIONS

    every = list(dict.fromkeys([*SECTIONS, *STAGES]))
    if options.stage is not None and options.stage not in every:
        raise InputError(f"{options.stage!r} is not a section; sections: {', '.join(every)}")
    for stage in [options.stage] if options.stage else every:
        say(stage)
        for key, default, help_ in SECTIONS[stage].key_help() if stage in SECTIONS else ():
            say(f"  {key} = {default}   {help_}")
        if stage not in STAGES:
            continue
        for name in choices(stage):
            thing = find(stage, name)
            module = sys.modules[thing.__module__]
            say(f"  {name:<14} {(module.__doc__ or '').strip().splitlines()[0]}")
            for option, default, description in option_help(thing):
                say(f"      {option} = {default}" + (f"   {description}" if description else ""))
    return 0


def _settings(options: argparse.Namespace, overrides: list[str]) -> Any:
    from podium.settings.tables import Settings

    return Settings.from_toml(options.settings, overrides)


def _console_mode(options: argparse.Namespace) -> str | None:
    """`--json` and `--quiet` are the console report's modes, for this call only."""
    return "json" if options.json else "quiet" if options.quiet else None


def _positive(text: str) -> int:
    if not text.isdigit() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number above 0")
    return int(text)


def _port(text: str) -> int:
    if not text.isdigit() or int(text) > 65535:
        raise argparse.ArgumentTypeError(f"{text!r} is not a port; give 0 to 65535, 0 for any free one")
    return int(text)


def _parser() -> argparse.ArgumentParser:
    description = "Reinforcement learning for language models: one TOML file per run, --section.key=value overrides it."
    parser = argparse.ArgumentParser(prog="podium", description=description)
    parser.add_argument("--version", action="version", version=f"podium {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for name, (function, help_, arguments) in COMMANDS.items():
        sub = commands.add_parser(name, help=help_, description=help_, allow_abbrev=False)
        sub.set_defaults(command=function, command_name=name)
        for argument, details in arguments:
            sub.add_argument(argument, **details)
    return parser


SETTINGS: Argument = ("settings", {"type": Path, "metavar": "SETTINGS"})
RUN: Argument = ("run", {"type": Path, "metavar": "RUN"})
TARGET: Argument = ("target", {"metavar": "RUN|ADAPTER"})
AS_JSON: Argument = ("--json", {"action": "store_true", "help": "output for programs"})
QUIET: Argument = ("--quiet", {"action": "store_true", "help": "print the summary only"})
MERGE: Argument = ("--merge", {"action": "store_true", "help": "plain weights, with the adapter merged into its base"})
AT_STEP: Argument = ("--step", {"type": int, "metavar": "N", "help": "from this checkpoint instead of the end"})
COMMANDS: dict[str, tuple[Callable[[argparse.Namespace, list[str]], int], str, Sequence[Argument]]] = {
    "train": (train, "start a run", [SETTINGS, AS_JSON, QUIET]),
    "resume": (
        resume,
        "continue a run",
        [
            RUN,
            ("--step", {"type": int, "help": "from this checkpoint instead of the newest"}),
            ("--allow-change", {"action": "append", "default": [], "metavar": "KEY", "help": "let KEY change"}),
            AS_JSON,
            QUIET,
        ],
    ),
    "eval": (
        evaluate,
        "held-out accuracy with its interval; compares two models",
        [
            ("model", {"metavar": "MODEL|RUN"}),
            ("settings", {"type": Path, "nargs": "?", "metavar": "SETTINGS"}),
            ("--against", {"metavar": "MODEL|RUN", "help": "a second model, on the same prompts"}),
            ("--out", {"type": Path, "metavar": "FILE", "help": "write numbers, settings and every rollout as JSON"}),
            AS_JSON,
        ],
    ),
    "export": (
        export,
        "write the trained model to a folder that others can load",
        [TARGET, ("out", {"type": Path, "metavar": "OUT"}), MERGE, AT_STEP],
    ),
    "push": (
        push,
        "upload the trained model to the model hub",
        [
            TARGET,
            ("name", {"metavar": "HUB_NAME", "help": "such as me/my-model"}),
            MERGE,
            AT_STEP,
            ("--private", {"action": "store_true", "help": "make the repository private"}),
            ("--dry-run", {"action": "store_true", "help": "list what would be uploaded; needs no account"}),
        ],
    ),
    # --model.key=value and --engine.key=value set the other options of `podium serve`.
    "serve": (
        serve,
        "serve a model over HTTP, for runs that sample from it",
        [
            ("model", {"metavar": "MODEL", "help": "embedded, a folder, a hub name, an adapter's folder or a run"}),
            ("--host", {"help": "default: 127.0.0.1"}),
            ("--port", {"type": int, "help": "default: 8000; 0: any free port"}),
            ("--uds", {"type": Path, "metavar": "PATH", "help": "a unix socket of this user instead of a port"}),
            ("--token-file", {"type": Path, "metavar": "FILE", "help": "made with a new token if it does not exist"}),
            ("--root", {"type": Path, "metavar": "FOLDER", "help": "where weights are read; default: a new folder"}),
            ("--engine", {"default": "inprocess", "metavar": "NAME", "help": "inprocess (default) or vllm_local"}),
            ("--tp", {"type": _positive, "metavar": "N", "help": "GPUs for one copy of the model"}),
            ("--lora-rank", {"type": _positive, "metavar": "R", "help": "start ready for adapters of this rank"}),
        ],
    ),
    "report": (
        report,
        "the page of a run, or of a folder of runs, live on this machine",
        [RUN, ("--port", {"type": _port, "metavar": "N", "help": "default: 8787, or a free one if that is taken"})],
    ),
    "check": (
        check,
        "everything short of training: settings, data, rewards, memory, time",
        [
            SETTINGS,
            (
                "--rewards",
                {"action": "store_true", "help": "try the rewards alone, on right, wrong and hostile answers"},
            ),
            ("--rows", {"type": _positive, "metavar": "N", "help": f"rows for --rewards; default: {DEFAULT_ROWS}"}),
        ],
    ),
    "show": (show, "print the resolved settings", [SETTINGS, AS_JSON]),
    "list": (
        list_choices,
        "the keys of a section and its choices, with their options",
        [("stage", {"nargs": "?", "metavar": "SECTION"})],
    ),
}


if __name__ == "__main__":
    console()
