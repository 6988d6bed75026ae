"""The command line: `k3train VERB [group=choice] [section.key=value] ...`.

The verb is taken off before Hydra sees the arguments, so `--help`, `--cfg job`, `-m` and completion work after it.
Nothing heavy is imported here: a verb's room is imported when the verb runs.
"""

from __future__ import annotations

import difflib
import os
import sys
from typing import TYPE_CHECKING, Any

from k3train import launch, signals, verbs
from k3train.errors import ConfigError

if TYPE_CHECKING:
    import argparse

    from omegaconf import DictConfig

    from k3train.config.schema import Config

PROGRAM = "k3train"


def main(argv: list[str] | None = None) -> None:
    """Entry point of the console script; exits with the verb's code."""
    words = list(sys.argv[1:] if argv is None else argv)
    code = launch.report(words[0] if words else PROGRAM, lambda: dispatch(words))
    sys.stdout.flush()
    if signals.listening():
        signals.ignore()
    raise SystemExit(launch.leave_code(code))


def dispatch(words: list[str]) -> int | None:
    """Find the verb and run it."""
    if not words or words[0] in ("-h", "--help", "help"):
        print(usage())
        return 0 if words else launch.EXIT_USER
    if words[0] == "--version":
        from importlib.metadata import version

        print(f"{PROGRAM} {version(PROGRAM)}")
        return 0
    if words[0] in ("-sc", "--shell-completion"):
        return complete(words)
    name, rest = split_verb(words)
    if verbs.VERBS[name].words:
        return verbs.call(name, rest)
    if name == "submit":
        return submit(rest)
    return run_composed(name, rest)


def split_verb(words: list[str]) -> tuple[str, list[str]]:
    """The verb's name (one or two words) and what follows it. Raises ConfigError with the nearest verb."""
    for count in (2, 1):
        name = " ".join(words[:count])
        if len(words) >= count and name in verbs.VERBS:
            return name, words[count:]
    seconds = [v.partition(" ")[2] for v in verbs.VERBS if v.startswith(words[0] + " ")]
    if seconds:
        raise ConfigError(f"{words[0]} needs one of {', '.join(seconds)}: type `{PROGRAM} {words[0]} {seconds[0]} ...`")
    if "=" in words[0] or words[0].startswith("-"):
        raise ConfigError(f"the verb comes first: type `{PROGRAM} train {' '.join(words)}`")
    close = difflib.get_close_matches(words[0], [v.split()[0] for v in verbs.VERBS], 1, cutoff=0.5)
    hint = f"did you mean {close[0]}?" if close else f"`{PROGRAM} --help` lists the verbs"
    raise ConfigError(f"there is no verb {words[0]!r}; {hint}")


def usage() -> str:
    """What `k3train --help` prints."""
    width = max(map(len, verbs.VERBS))
    lines = [f"  {name:<{width}}  {verb.summary}" for name, verb in verbs.VERBS.items()]
    return "\n".join(
        [
            f"usage: {PROGRAM} VERB [group=choice] [section.key=value] ...",
            "",
            *lines,
            "",
            f"{PROGRAM} train                          the main job: a tiny K3 on the standard library's sources",
            f"{PROGRAM} train --help                   groups and keys;  --cfg job prints the composed configuration",
            f"{PROGRAM} train -m optim.lr=1e-3,3e-3    a sweep",
            f'eval "$({PROGRAM} -sc install=bash)"     completion in this shell',
        ]
    )


# --- verbs that take a configuration -------------------------------------------------------------------------------


def run_composed(name: str, rest: list[str]) -> int | None:
    """Compose the configuration with Hydra, then run the verb on as many ranks as it needs."""
    place = launch.find_place() if verbs.VERBS[name].ranks else None
    if place is not None and place.world > 1:
        signals.listen()
        if "-m" in rest or "--multirun" in rest:
            raise ConfigError("-m starts jobs by itself: run the sweep outside torchrun and srun")
        config = launch.share_config(place, lambda: with_proposed_layout(_only(compose_argv(name, rest)), place.world))
        if place.rank == 0:
            print(f"{place.describe()}", flush=True)
        return verbs.call(name, config)
    composed = compose_argv(name, rest)
    if isinstance(composed, int):
        return composed
    return start(name, composed, rest)


def start(name: str, config: Config, overrides: list[str], *, fresh: bool = False) -> int | None:
    """Run a verb here or in local ranks; `fresh` keeps it out of this process, which has other jobs to run."""
    from k3train.config import checks
    from k3train.config.compose import check_run_folder, claim_run_folder

    place = launch.find_place()
    world = 1
    if verbs.VERBS[name].ranks:
        if name == "train" and config.checkpoint.resume:
            check_run_folder(config)
        config = with_proposed_layout(config, place.world if place else None)
        world = checks.ranks(config, place.world if place else None)
        if name == "train":
            claim_run_folder(config)
    if place is None and world > 1:
        launch.refuse_login_node(name, world, overrides)
        print(f"{world} local processes", flush=True)
        return launch.run_local(name, config, world)
    if fresh:
        return launch.run_child(name, config)
    if verbs.VERBS[name].ranks:
        signals.listen()
    return verbs.call(name, config)


def with_proposed_layout(config: Config, world: int | None) -> Config:
    """Fill in the sizes of parallel.auto, and print why."""
    if not config.parallel.auto:
        return config
    from k3train.planning.layout import resolve_auto

    resolved, why = resolve_auto(config, world)
    print(why, flush=True)
    return resolved


def _only(composed: Config | int) -> Config:
    if isinstance(composed, int):
        raise SystemExit(composed)
    return composed


def compose_argv(name: str, rest: list[str]) -> Config | int:
    """Hand the arguments to Hydra: the checked Config of a plain run, or an exit code where the work is done.

    The work is done by Hydra for --help, --cfg, --info and completion, and by the jobs of a sweep. Raises ConfigError.
    """
    import hydra
    from hydra._internal.utils import get_args_parser

    from k3train import sweep
    from k3train.config import compose as composing
    from k3train.config.overrides import check_overrides, refuse_sweeps

    args = parse_flags(get_args_parser(), name, rest)
    changed = {old: expand_bare(name, old) for old in args.overrides}
    words = [changed.get(word, word) for word in rest]
    args.overrides = [changed[o] for o in args.overrides]
    sweepable = verbs.VERBS[name].ranks or name in ("evaluate", "quantize")
    if not args.multirun:
        refuse_sweeps(args.overrides, sweepable=sweepable)
    check_overrides(args.overrides, composing.conf_dir(), extra_groups=args.config_dir is not None)
    if args.multirun:
        if args.cfg or args.info:
            raise ConfigError("-m starts jobs, and --cfg and --info only show: leave -m out")
        if not sweepable:
            raise ConfigError(f"`{PROGRAM} {name}` cannot be swept with -m")
        swept = sweep.with_params(args.overrides, args.config_dir)
        if swept != args.overrides:  # behind the last override: argparse takes them in one row alone
            at = len(words) - words[::-1].index(args.overrides[-1]) if args.overrides else len(words)
            words[at:at] = [*swept[len(args.overrides) :], "hydra.sweeper.params=null"]
        sweep.refuse_equal_names(swept)
    if args.help and args.config_dir is None:
        print(verb_help(name, args.overrides))
        return 0
    composing.register_schema()
    caught: list[DictConfig] = []
    outcomes: list[tuple[str, int]] = []

    def job(composed: DictConfig) -> None:
        if args.multirun:
            outcomes.append(run_job(name, composed))
        else:
            caught.append(composed)

    job.__module__ = "k3train.cli"  # hydra looks where the function lives; a closure of __main__ would not do
    before = sys.argv
    sys.argv = [PROGRAM, *words]
    try:
        hydra.main(config_path=str(composing.conf_dir()), config_name=composing.PRIMARY, version_base="1.3")(job)()
    finally:
        sys.argv = before
    if caught:
        config = composing.to_config(caught[0])
        if name != "data prepare" and config.data.input is not None:
            raise ConfigError(
                f"data.input={config.data.input} is what `{PROGRAM} data prepare` reads; type data.corpus={config.data.input}"
            )
        return composing.adopt_model(config, args.overrides) if name == "train" else config
    for run, code in outcomes:
        print(f"{run}: {'done' if code == 0 else f'exit code {code}'}", flush=True)
    return max((code for _, code in outcomes), default=0)


def parse_flags(parser: argparse.ArgumentParser, name: str, rest: list[str]) -> argparse.Namespace:
    """Hydra's own flags among the words. Raises ConfigError for a flag that neither of us has."""

    def complain(message: str) -> None:
        hint = (
            "keys are typed as section.key=value, without dashes" if "unrecognized" in message else "see --hydra-help"
        )
        raise ConfigError(f"{message}; {hint}; `{PROGRAM} {name} --help` lists them")

    parser.error = complain  # type: ignore[assignment, method-assign]
    return parser.parse_args(rest)


def verb_help(name: str, overrides: list[str]) -> str:
    """Groups, their options, and the composed configuration. (Hydra's own page takes twice the time.)"""
    from omegaconf import OmegaConf

    from k3train.config import compose as composing
    from k3train.config.overrides import groups

    options = [f"  {group:<11} {', '.join(found)}" for group, found in groups(composing.conf_dir()).items()]
    composed = composing.compose_unchecked(overrides)
    return "\n".join(
        [
            f"usage: {PROGRAM} {name} [group=choice] [section.key=value] ...",
            f"\n{verbs.VERBS[name].summary}",
            "\ngroups (group=choice):",
            *options,
            "\nconfiguration (section.key=value; null is written null):",
            OmegaConf.to_yaml(composed).rstrip(),
            "\n--cfg job prints the configuration alone, -m sweeps over a=1,2, -sc install=bash gives completion;",
            "types and units of every key: k3train/config/schema.py; Hydra's own flags: --hydra-help",
        ]
    )


def run_job(name: str, composed: DictConfig) -> tuple[str, int]:
    """One job of a sweep: a fresh local process, or this one where a launcher plugin already made it fresh."""
    from hydra.core.hydra_config import HydraConfig

    from k3train import sweep
    from k3train.config import compose as composing

    hydra_config = HydraConfig.get()
    overrides = list(hydra_config.overrides.task)
    run = sweep.job_name(str(composed.run.name), overrides)
    local = str(hydra_config.launcher._target_).endswith("BasicLauncher")

    def call() -> int | None:
        composed.run.name = run
        config = composing.to_config(composed)
        if local:
            print(f"== {run}", flush=True)
        return start(name, config, overrides, fresh=local)

    return run, launch.report(f"{name} {run}", call)


def expand_bare(name: str, override: str) -> str:
    """`source=runs/x` after `export` is `export.source=runs/x`: a bare key is looked up in the verb's own section."""
    from k3train.config.keys import all_keys

    key, equals, value = override.partition("=")
    section = verbs.VERBS[name].section
    bare = key.lstrip("+~")
    if section is None or not equals or "." in bare or f"{section}.{bare}" not in all_keys():
        return override
    return f"{key.removesuffix(bare)}{section}.{bare}={value}"


def submit(rest: list[str]) -> int | None:
    """`k3train submit [-m] [--dry-run] overrides`: one job, or one a combination of the sweep."""
    from k3train import sweep
    from k3train.config import compose as composing
    from k3train.config.overrides import check_overrides, refuse_sweeps
    from k3train.submit import Request

    if "-h" in rest or "--help" in rest:
        print(verb_help("submit", [w for w in rest if "=" in w]) + "\n--dry-run shows the script and submits nothing")
        return 0
    flags = [word for word in rest if word.startswith("-")]
    unknown = set(flags) - {"--dry-run", "-m", "--multirun"}
    if unknown:
        raise ConfigError(f"{PROGRAM} submit knows --dry-run and -m, not {' '.join(sorted(unknown))}")
    overrides = [word for word in rest if word not in flags]
    swept = bool(set(flags) & {"-m", "--multirun"})
    if not swept:
        refuse_sweeps(overrides)
    check_overrides(overrides, composing.conf_dir())
    if swept:
        overrides = sweep.with_params(overrides)
        sweep.refuse_equal_names(overrides)
        jobs = []
        for job in sweep.jobs(overrides):
            name = sweep.job_name(composing.compose(job).run.name, job)
            words = [*(o for o in job if not o.startswith("run.name=")), f"run.name='{name}'"]
            jobs.append((composing.compose(words), words))
    else:
        jobs = [(composing.compose(overrides), overrides)]
    return verbs.call("submit", Request(jobs, dry_run="--dry-run" in flags))


# --- completion ----------------------------------------------------------------------------------------------------


def complete(words: list[str]) -> int:
    """Answer the shell: verbs for the first word, else what Hydra knows, with the verb taken off COMP_LINE."""
    line = os.environ.get("COMP_LINE", "")
    typed = line.split()
    verb = next((" ".join(typed[1:n]) for n in (3, 2) if " ".join(typed[1:n]) in verbs.VERBS), None)
    complete_words = len(typed) - (0 if line.endswith(" ") else 1)
    if line and (verb is None or complete_words <= len(verb.split())):
        begun = " ".join(typed[1:]) + (" " if line.endswith(" ") and len(typed) > 1 else "")
        depth = begun.count(" ")
        print(
            " ".join(sorted({v.split()[depth] for v in verbs.VERBS if v.startswith(begun) and v.count(" ") >= depth}))
        )
        return 0
    if verb is not None:
        rest = line.split(None, 1)[1][len(verb) :]
        os.environ["COMP_LINE"] = f"{typed[0]}{rest}"
        if "COMP_POINT" in os.environ:
            os.environ["COMP_POINT"] = str(max(0, int(os.environ["COMP_POINT"]) - len(verb) - 1))
    sys.argv = [sys.argv[0], *words]
    _hydra_only()
    return 0


def _hydra_only() -> None:
    import hydra

    from k3train.config import compose as composing

    def nothing(_: Any) -> None:
        return None

    nothing.__module__ = "k3train.cli"
    composing.register_schema()
    hydra.main(config_path=str(composing.conf_dir()), config_name=composing.PRIMARY, version_base="1.3")(nothing)()


if __name__ == "__main__":
    main()
