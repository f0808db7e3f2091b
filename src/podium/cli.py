"""The command `podium`. Nothing heavy is imported before a command needs it."""

import argparse
import copy
import json
import os
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from podium import __version__
from podium.errors import InputError, PodiumError
from podium.terminal import say, warn

DEFAULT_ROWS = 200


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit code: 0 done, 2 bad input, 3 no step trained anything, 130/143 stopped by a signal, 1 anything else."""
    parser = _parser()
    options, overrides = parser.parse_known_args(arguments)
    try:
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
    except Exception:  # a defect of ours; what it quotes may be foreign text
        warn(traceback.format_exc())
        code = 1
    watchdog = sys.modules.get("podium.run.watchdog")
    is_stopped = code in (130, 143)
    if is_stopped or (
        watchdog is not None and watchdog.stalled
    ):  # Python would wait for a thread that samples, or hangs
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
    from podium.run.folder import RunFolder
    from podium.settings.tables import Settings, override, read_run_settings

    folder = RunFolder.open(options.run)
    before = Settings.from_dict(read_run_settings(folder.settings))
    settings = Settings.from_dict(override(read_run_settings(folder.settings), overrides))
    # Its warnings are shown when the checkpoint is restored, whose own settings count.
    check_changes(before, settings, options.allow_change, options.step or _last_step(folder))
    changed = {*changes(before, settings), *changes(_committed_settings(folder, options.step) or before, settings)}
    for key in options.allow_change:
        if not any(f"{each}.".startswith(f"{key}.") for each in changed):
            raise InputError(f"--allow-change {key} has no effect: {key} does not change; add --{key}=VALUE")
    if folder.state == "finished" and not overrides and options.step is None:
        say(f"{options.run} is finished; nothing to do. For more: podium resume {options.run} --run.steps=N")
        return 0
    from podium.run.start import resume as run

    allowed = {"step": options.step, "allow_change": options.allow_change}
    return run(settings, folder, console_mode=_console_mode(options), **allowed).exit_code


def _last_step(folder: Any) -> int | None:
    from podium.run.checkpoint import list_checkpoints, step_of

    return next((step_of(place) for place in reversed(list_checkpoints(folder.checkpoints))), None)


def _committed_settings(folder: Any, step: int | None) -> Any:
    """Those of the checkpoint to go on from, from which settings.toml differs where it was edited by hand.

    None where there is none, or none that can be read: the restore says what is wrong with it.
    """
    import tomllib

    from podium.run.checkpoint import list_checkpoints, read_settings, step_of
    from podium.settings.refusals import of_first_version
    from podium.settings.tables import Settings

    places = [place for place in list_checkpoints(folder.checkpoints) if step is None or step_of(place) == step]
    try:
        text = read_settings(places[-1]) if places else None
        return Settings.from_dict(of_first_version(tomllib.loads(text))) if text is not None else None
    except (OSError, ValueError, InputError):
        return None


def evaluate(options: argparse.Namespace, overrides: list[str]) -> int:
    from podium.evaluation.scorecard import as_text, compared, comparison_data, results_file, verdict
    from podium.export.trained import find_trained

    if options.out is not None and options.out.exists():
        raise InputError(f"{options.out} is there already; give a new file")
    found = [(target, find_trained(target)) for target in (options.model, options.against) if target is not None]
    tables = _eval_tables(options.settings, found[0][1].run, options.model)
    settings = [_eval_settings(tables, trained, overrides) for _, trained in found]
    from podium.run.start import held_out_results

    results = [held_out_results(s, trained.weights) for s, (_, trained) in zip(settings, found, strict=True)]
    told = [results_file(target, s.to_dict(), r) for (target, _), s, r in zip(found, settings, results, strict=True)]
    text, data, flat = as_text(results[0]), dict(told[0]), results[0].metrics()
    if options.against is not None:
        made = compared(*results)
        said = verdict(*made, options.model, options.against)
        pair = comparison_data(*made, said)
        data |= {"against": told[1], "comparison": pair}
        flat |= {"against": results[1].metrics(), "comparison": pair}
        text = f"{options.model}\n{text}\n\n{options.against}\n{as_text(results[1])}\n\n{said}"
    if options.out is not None:
        options.out.write_text(json.dumps(data, indent=1), encoding="utf-8")
    say(json.dumps(flat) if options.json else text)
    return 0


def _eval_tables(settings: Path | None, run: Any, target: str) -> dict[str, Any]:
    from podium.settings.tables import read_run_settings, read_toml

    if settings is None and run is None:
        raise InputError(f"{target} is not a run folder; add a settings file with [[eval.data]] and [[reward]] tables")
    return read_run_settings(run.settings) if settings is None else read_toml(settings)


def _eval_settings(tables: dict[str, Any], trained: Any, overrides: list[str]) -> Any:
    """The tables with the model that is asked; a run's weights belong to its own model."""
    from podium.settings.tables import Settings, override

    own = trained.model if trained.run else tables.get("model", {})
    made = override({**copy.deepcopy(tables), "model": copy.deepcopy(own)}, overrides)
    return Settings.from_dict(made if trained.run else {**made, "model": {**made["model"], **trained.model}})


def check(options: argparse.Namespace, overrides: list[str]) -> int:
    settings = _settings(options, overrides)
    if options.rewards:
        from podium.check.rewards import try_rewards

        report, is_good = try_rewards(settings, options.rows or DEFAULT_ROWS)
        say(report)
        return 0 if is_good else InputError.exit_code
    if options.rows is not None:
        raise InputError("--rows has no effect without --rewards; add it or remove this one")
    from podium.check.verdicts import check as run

    report, is_good = run(settings)
    say(report)
    return 0 if is_good else InputError.exit_code


def export(options: argparse.Namespace, overrides: list[str]) -> int:
    _refuse(overrides, "export")
    from podium.export.folder import export as run

    made = run(options.target, options.out, merge=options.merge, step=options.step)
    for name, size in made.files.items():
        say(f"{size:>14,}  {name}")
    if made.gap is not None:
        say(f"read again and compared with base + adapter: logprobs differ by at most {made.gap:.2g}")
    say(f"{options.out}: {'a LoRA adapter' if made.kind == 'adapter' else 'a model'}; README.md says how to load it")
    return 0


def push(options: argparse.Namespace, overrides: list[str]) -> int:
    _refuse(overrides, "push")
    from podium.export.folder import push as run

    for line in run(
        options.target,
        options.name,
        merge=options.merge,
        step=options.step,
        private=options.private,
        dry_run=options.dry_run,
    ):
        say(line)
    return 0


def _refuse(overrides: list[str], command: str) -> None:
    if overrides:
        raise InputError(f"podium {command} takes no {overrides[0]}")


def serve(options: argparse.Namespace, overrides: list[str]) -> int:
    try:
        from podium.server.serve import ServeOptions, serve
    except ModuleNotFoundError as error:
        raise InputError(f"podium serve needs the package {error.name}; pip install 'podium-rl[server]'") from None
    fields = ServeOptions.__dataclass_fields__
    return serve(ServeOptions(**{name: getattr(options, name) for name in fields}), overrides)


def report(options: argparse.Namespace, overrides: list[str]) -> int:
    from podium.report.web.serve import report_server

    _refuse(overrides, "report")
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

    _refuse(overrides, "list")
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


def _positive(text: str) -> int:
    if not text.isdigit() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"{text!r} is no number above 0")
    return int(text)


def _port(text: str) -> int:
    if not text.isdigit() or int(text) > 65535:
        raise argparse.ArgumentTypeError(f"{text!r} is no port; give 0 to 65535, 0 for any free one")
    return int(text)


def _console_mode(options: argparse.Namespace) -> str | None:
    """`--json` and `--quiet` are the console report's modes, for this call only."""
    return "json" if options.json else "quiet" if options.quiet else None


EVAL_FLAGS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("model", {"metavar": "MODEL|RUN"}),
    ("settings", {"type": Path, "nargs": "?", "metavar": "SETTINGS"}),
    ("--against", {"metavar": "MODEL|RUN", "help": "a second one, on the same prompts"}),
    ("--out", {"type": Path, "metavar": "FILE", "help": "writes numbers, settings and every rollout as JSON"}),
)
TAKEN: tuple[tuple[str, dict[str, Any]], ...] = (
    ("--merge", {"action": "store_true", "help": "plain weights, with the adapter merged into its base"}),
    ("--step", {"type": int, "metavar": "N", "help": "as it was at this checkpoint, instead of at the end"}),
)
EXPORT_FLAGS = (
    ("target", {"metavar": "RUN|ADAPTER"}),
    ("out", {"type": Path, "metavar": "OUT"}),
    *TAKEN,
)
PUSH_FLAGS = (
    ("target", {"metavar": "RUN|ADAPTER"}),
    ("name", {"metavar": "HUB_NAME", "help": "such as me/my-model"}),
    *TAKEN,
    ("--private", {"action": "store_true", "help": "makes the repository private"}),
    ("--dry-run", {"action": "store_true", "help": "lists what would be uploaded; needs no account"}),
)
REPORT_FLAGS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("run", {"type": Path, "metavar": "RUN"}),
    ("--port", {"type": _port, "metavar": "N", "help": "by default 8787, or a free one where that is taken"}),
)
SERVE_FLAGS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("model", {"metavar": "MODEL", "help": "embedded, a folder, a hub name, an adapter's folder or a run"}),
    ("--host", {"help": "by default 127.0.0.1"}),
    ("--port", {"type": int, "help": "by default 8000; 0: any that is free"}),
    ("--uds", {"type": Path, "metavar": "PATH", "help": "a unix socket of this user's instead of a port"}),
    ("--token-file", {"type": Path, "metavar": "FILE", "help": "made with a new token if it is not there"}),
    ("--root", {"type": Path, "metavar": "FOLDER", "help": "where weights are read, by default a new folder"}),
    ("--engine", {"default": "inprocess", "metavar": "NAME", "help": "inprocess (default) or vllm_local"}),
    ("--tp", {"type": _positive, "metavar": "N", "help": "GPUs for one copy of the model"}),
    ("--lora-rank", {"type": _positive, "metavar": "R", "help": "start ready for adapters of this rank"}),
)
"""Of `podium serve`; --model.key=value and --engine.key=value set the rest."""


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="podium",
        description="Reinforcement learning for language models: one TOML file a run, "
        "--section.key=value overrides it.",
    )
    parser.add_argument("--version", action="version", version=f"podium {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for name, function, help_, *arguments in (*_run_commands(), *_other_commands()):
        sub = commands.add_parser(name, help=help_, description=help_, allow_abbrev=False)
        sub.set_defaults(command=function)
        for argument, details in arguments:
            sub.add_argument(argument, **details)
    return parser


SETTINGS = ("settings", {"type": Path, "metavar": "SETTINGS"})
RUN = ("run", {"type": Path, "metavar": "RUN"})
AS_JSON = ("--json", {"action": "store_true", "help": "output for machines"})
QUIET = ("--quiet", {"action": "store_true", "help": "the summary only"})


def _run_commands() -> list[tuple[Any, ...]]:
    """(name, function, help, arguments …) of what begins, goes on with or judges a run."""
    step = {"type": int, "help": "from this checkpoint instead of the newest"}
    allow = {"action": "append", "default": [], "metavar": "KEY", "help": "let KEY change"}
    return [
        ("train", train, "start a run", SETTINGS, AS_JSON, QUIET),
        ("resume", resume, "go on with a run", RUN, ("--step", step), ("--allow-change", allow), AS_JSON, QUIET),
        ("eval", evaluate, "held-out accuracy with its interval; two models compared", *EVAL_FLAGS, AS_JSON),
        ("export", export, "what was trained, as a folder that others can load", *EXPORT_FLAGS),
        ("push", push, "the same, to the model hub", *PUSH_FLAGS),
        ("serve", serve, "a model behind HTTP, for runs that sample from it", *SERVE_FLAGS),
        ("report", report, "the page of a run, or of a folder of runs, live on this machine", *REPORT_FLAGS),
    ]


def _other_commands() -> list[tuple[Any, ...]]:
    rewards = {"action": "store_true", "help": "try the rewards alone, on right, wrong and hostile answers"}
    rows = {"type": _positive, "metavar": "N", "help": f"rows for --rewards, by default {DEFAULT_ROWS}"}
    everything = "everything short of training: settings, data, rewards, memory, time"
    choices = "the keys of a section and its choices, with their options"
    return [
        ("check", check, everything, SETTINGS, ("--rewards", rewards), ("--rows", rows)),
        ("show", show, "the settings, resolved", SETTINGS, AS_JSON),
        ("list", list_choices, choices, ("stage", {"nargs": "?", "metavar": "STAGE"})),
    ]


if __name__ == "__main__":
    console()
