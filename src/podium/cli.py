"""The command `podium`. Nothing heavy is imported before a command needs it."""

import argparse
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from podium import __version__
from podium.errors import InputError, PodiumError

DEFAULT_ROWS = 200


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit code: 0 done, 2 bad input, 130/143 stopped by a signal, 1 anything else."""
    parser = _parser()
    options, overrides = parser.parse_known_args(arguments)
    try:
        return options.command(options, overrides)
    except PodiumError as error:
        print(f"podium: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # `podium list | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


def console() -> None:
    code = main()
    watch = sys.modules.get("podium.runtime._watch")
    is_stopped = code in (130, 143)
    if is_stopped or (watch is not None and watch.stalled):  # Python would wait for a thread that samples, or hangs
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    sys.exit(code)


def train(options: argparse.Namespace, overrides: list[str]) -> int:
    settings = _settings(options, overrides)
    from podium.run import train as run

    return run(settings, console_mode=_console_mode(options)).exit_code


def resume(options: argparse.Namespace, overrides: list[str]) -> int:
    from podium.resume_rules import changes, check_changes
    from podium.run_folder import RunFolder
    from podium.settings import Settings, override, read_toml

    folder = RunFolder.open(options.run)
    before = Settings.from_dict(read_toml(folder.settings))
    settings = Settings.from_dict(override(read_toml(folder.settings), overrides))
    warnings = check_changes(before, settings, options.allow_change)
    for key in options.allow_change:
        if not any(f"{changed}.".startswith(f"{key}.") for changed in changes(before, settings)):
            raise InputError(f"--allow-change {key} has no effect: {key} does not change; add --{key}=VALUE")
    if folder.state == "finished" and not overrides and options.step is None:
        print(f"{options.run} is finished; nothing to do. For more: podium resume {options.run} --run.steps=N")
        return 0
    print("\n".join(warnings), end="\n" if warnings else "", file=sys.stderr)
    from podium.run import resume as run

    allowed = {"step": options.step, "allow_change": options.allow_change}
    return run(settings, folder, console_mode=_console_mode(options), **allowed).exit_code


def evaluate(options: argparse.Namespace, overrides: list[str]) -> int:
    from podium.settings import Settings, override, read_toml

    target = Path(options.model)
    is_run = (target / "settings.toml").is_file()
    if options.settings is None and not is_run:
        raise InputError(f"{target} is not a run folder; add a settings file with [[eval.data]] and [[reward]] tables")
    tables = read_toml(options.settings or target / "settings.toml")
    if is_run:
        tables["model"] = read_toml(target / "settings.toml")["model"]  # the run's weights belong to its own model
    tables = override(tables, overrides)
    adapter = target / "adapter_config.json"
    weights = target / "final" if is_run else target if adapter.is_file() else None
    if weights is not None and not weights.is_dir():
        raise InputError(f"{target} has no trained model yet: {weights} is written when the run finishes")
    if not is_run:
        name = json.loads(adapter.read_text())["base_model_name_or_path"] if weights else options.model
        tables.setdefault("model", {})["name"] = name
    settings = Settings.from_dict(tables)
    from podium.run import evaluate as run

    metrics = run(settings, weights)
    if options.json:
        print(json.dumps(metrics))
    else:
        print("\n".join(f"{name:<20} {value:.4g}" for name, value in metrics.items()))
    return 0


def check(options: argparse.Namespace, overrides: list[str]) -> int:
    settings = _settings(options, overrides)
    if options.rewards:
        from podium.workbench import try_rewards

        report, is_good = try_rewards(settings, options.rows or DEFAULT_ROWS)
        print(report)
        return 0 if is_good else InputError.exit_code
    if options.rows is not None:
        raise InputError("--rows has no effect without --rewards; add it or remove this one")
    from podium.check import check as run

    print(run(settings))
    return 0


def export(options: argparse.Namespace, overrides: list[str]) -> int:
    from podium.run_folder import RunFolder
    from podium.settings import Settings, read_toml

    if overrides:
        raise InputError(f"podium export takes no {overrides[0]}")
    folder = RunFolder.open(options.run)
    settings = Settings.from_dict(read_toml(folder.settings))
    from podium.export import export as run

    step = run(settings, folder, options.out, step=options.step, merge=options.merge)
    print(f"{options.out}: {'a model' if options.merge or not settings.model.lora else 'an adapter'} of step {step}")
    return 0


def serve(options: argparse.Namespace, overrides: list[str]) -> int:
    try:
        from podium.runtime._serve import ServeOptions, serve
    except ModuleNotFoundError as error:
        raise InputError(f"podium serve needs the package {error.name}; pip install 'podium-rl[server]'") from None
    fields = ServeOptions.__dataclass_fields__
    return serve(ServeOptions(**{name: getattr(options, name) for name in fields}), overrides)


def report(options: argparse.Namespace, overrides: list[str]) -> int:
    from podium.report._serve import report_server

    if overrides:
        raise InputError(f"podium report takes no {overrides[0]}")
    with report_server(options.run, options.port) as server:
        print(f"http://127.0.0.1:{server.server_address[1]}/   (Ctrl-C ends it)", flush=True)
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            return 0
    return 0


def show(options: argparse.Namespace, overrides: list[str]) -> int:
    settings = _settings(options, overrides)
    print(json.dumps(settings.to_dict(), indent=1) if options.json else settings.to_toml())
    return 0


def list_choices(options: argparse.Namespace, overrides: list[str]) -> int:
    from podium.lookup import STAGES, choices, find, option_help
    from podium.sections import SECTIONS

    if overrides:
        raise InputError(f"podium list takes no {overrides[0]}")
    every = list(dict.fromkeys([*SECTIONS, *STAGES]))
    if options.stage is not None and options.stage not in every:
        raise InputError(f"{options.stage!r} is not a section; sections: {', '.join(every)}")
    for stage in [options.stage] if options.stage else every:
        print(stage)
        for key, default, help_ in SECTIONS[stage].key_help() if stage in SECTIONS else ():
            print(f"  {key} = {default}   {help_}")
        if stage not in STAGES:
            continue
        for name in choices(stage):
            thing = find(stage, name)
            module = sys.modules[thing.__module__]
            print(f"  {name:<14} {(module.__doc__ or '').strip().splitlines()[0]}")
            for option, default, description in option_help(thing):
                print(f"      {option} = {default}" + (f"   {description}" if description else ""))
    return 0


def _settings(options: argparse.Namespace, overrides: list[str]) -> Any:
    from podium.settings import Settings

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
    """(name, function, help, arguments …) of what begins, goes on with or looks at a run."""
    step = {"type": int, "help": "from this checkpoint instead of the newest"}
    allow = {"action": "append", "default": [], "metavar": "KEY", "help": "let KEY change"}
    model = ("model", {"metavar": "MODEL|RUN"})
    maybe_settings = ("settings", {"type": Path, "nargs": "?", "metavar": "SETTINGS"})
    merge = {"action": "store_true", "help": "the adapter laid into its base: a full model"}
    return [
        ("train", train, "start a run", SETTINGS, AS_JSON, QUIET),
        ("resume", resume, "go on with a run", RUN, ("--step", step), ("--allow-change", allow), AS_JSON, QUIET),
        ("eval", evaluate, "held-out accuracy of a model or a run", model, maybe_settings, AS_JSON),
        (
            "export",
            export,
            "the model or adapter of a checkpoint, as other programs load it",
            RUN,
            ("out", {"type": Path, "metavar": "OUT"}),
            ("--step", step),
            ("--merge", merge),
        ),
    ]


def _other_commands() -> list[tuple[Any, ...]]:
    port = {"type": _port, "metavar": "N", "help": "by default 8787, or a free one where that is taken"}
    return [
        (
            "check",
            check,
            "everything short of training: settings, data, rewards, memory",
            SETTINGS,
            (
                "--rewards",
                {"action": "store_true", "help": "try the rewards alone, on right, wrong and hostile answers"},
            ),
            ("--rows", {"type": _positive, "metavar": "N", "help": f"rows for --rewards, by default {DEFAULT_ROWS}"}),
        ),
        ("serve", serve, "a model behind HTTP, for runs that sample from it", *SERVE_FLAGS),
        ("report", report, "the page of a run, or of a folder of runs, live on this machine", RUN, ("--port", port)),
        ("show", show, "the settings, resolved", SETTINGS, AS_JSON),
        (
            "list",
            list_choices,
            "the keys of a section and its choices, with their options",
            ("stage", {"nargs": "?", "metavar": "STAGE"}),
        ),
    ]


if __name__ == "__main__":
    console()
