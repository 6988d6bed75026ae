"""Verbs, help, completion, bare keys: what the command line says before any work is done."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import pytest

from k3train import cli, launch, verbs
from k3train.errors import ConfigError


def outcome(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as ended:
        cli.main(list(words))
    said = capsys.readouterr()
    assert isinstance(ended.value.code, int)
    return ended.value.code, said.out, said.err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["trian"], "did you mean train?"),
        (["model=k3"], "type `k3train train model=k3`"),
        (["--cfg", "job"], "the verb comes first"),
        (["checkpoint"], "needs one of list, verify, prune"),
        (["data", "prepar"], "needs one of prepare"),
        (["train", "lr=1"], "did you mean optim.lr?"),
        (["train", "+experiment=smoke"], "type experiment=smoke"),
        (["train", "parallel.tensor=3"], "type parallel.tensor=2"),
        (["train", "-m", "model.balancing=quantile,sing"], "did you mean model.balancing=sign?"),
        (["plan", "-m", "train.steps=1,2"], "cannot be swept"),
        (["train", "-m", "experiment=ladder", "--cfg", "job"], "leave -m out"),
        (["train", "optim.lr=1e-3,3e-3"], "1e-3,3e-3 are several values, and one run takes one; type -m to run"),
        (["train", "optim.lrr=1e-3,3e-3"], "did you mean optim.lr?"),
        (["train", "experiment=ladder,smoke"], "and one run takes one; type -m to run a job for each"),
        (["submit", "train.steps=1,2"], "and one run takes one; type -m to run a job for each"),
        (["generate", "prompt=import,os"], "one run takes one; quote it: generate.prompt='\"import,os\"'\n"),
        (["evaluate", "suites=heldout,recall:overwrite"], "type evaluate.suites=[heldout,recall:overwrite]; type -m"),
        (["train", "--resume"], "keys are typed as section.key=value"),
        (["train", "data.input=corpus.jsonl"], "type data.corpus=corpus.jsonl"),
    ],
)
def test_mistakes_are_answered_in_a_sentence(
    capsys: pytest.CaptureFixture[str], words: list[str], message: str
) -> None:
    code, _, err = outcome(capsys, *words)
    assert (code, message in err, "Traceback" in err) == (launch.EXIT_USER, True, False), err


def test_help_lists_every_verb(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = outcome(capsys, "--help")
    assert code == 0 and all(verb in out for verb in verbs.VERBS)


def test_no_words_is_help_and_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = outcome(capsys)
    assert code == launch.EXIT_USER and "usage:" in out


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert outcome(capsys, "--version")[:2] == (0, "k3train 0.1.0\n")


def test_help_of_a_verb_shows_groups_and_the_composed_values(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = outcome(capsys, "train", "--help", "model=k3_proxy", "optim=muon")
    assert code == 0
    assert "kimi_linear_48b" in out and "hidden_size: 1792" in out and "name: muon" in out


def test_cfg_job_prints_the_configuration(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = outcome(capsys, "train", "--cfg", "job", "model.kda.decay_bound=null")
    assert code == 0 and "decay_bound: null" in out and "hydra:" not in out


@pytest.mark.parametrize("words", [["train", "--help"], ["train", "--cfg", "job"], ["--help"]], ids=" ".join)
def test_nothing_heavy_is_imported(words: list[str]) -> None:
    program = (
        "import sys\nfrom k3train import cli\n"
        f"try:\n    cli.main({words!r})\nexcept SystemExit:\n    pass\n"
        "heavy = [m for m in ('torch', 'megatron', 'wandb', 'transformers', 'numpy') if m in sys.modules]\n"
        "sys.exit(f'imported {heavy}' if heavy else 0)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("verb", "typed", "meant"),
    [
        ("export", "source=runs/x", "export.source=runs/x"),
        ("import", "source=x", "imports.source=x"),
        ("data prepare", "input=a.txt", "data.input=a.txt"),
        ("data prepare", "+input=a.txt", "+data.input=a.txt"),
        ("generate", "top_k=4", "generate.top_k=4"),
        ("generate", "run.name=x", "run.name=x"),
        ("generate", "model=k3", "model=k3"),
        ("train", "steps=3", "steps=3"),
    ],
)
def test_a_bare_key_belongs_to_its_verbs_section(verb: str, typed: str, meant: str) -> None:
    assert cli.expand_bare(verb, typed) == meant


@pytest.mark.parametrize(
    ("line", "found", "absent"),
    [
        ("k3train ", "train", "list"),
        ("k3train tr", "track train", "plan"),
        ("k3train checkpoint ", "list prune verify", "train"),
        ("k3train data p", "prepare", "train"),
        ("k3train train mod", "model=", "optim="),
        ("k3train train model=k3_", "model=k3_proxy", "kimi"),
        ("k3train data prepare data.tok", "data.tokenizer=", "model="),
    ],
)
def test_completion(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, line: str, found: str, absent: str
) -> None:
    monkeypatch.setattr(sys, "argv", ["k3train"])
    monkeypatch.setenv("COMP_LINE", line)
    monkeypatch.setenv("COMP_POINT", str(len(line)))
    code, out, _ = outcome(capsys, "-sc", "query=bash")
    assert code == 0 and all(word in out.split() for word in found.split()) and absent not in out


def test_completion_installs(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["k3train"])
    monkeypatch.delenv("COMP_LINE", raising=False)
    code, out, _ = outcome(capsys, "-sc", "install=bash")
    assert code == 0 and "hydra_bash_completion k3train" in out


def test_every_verbs_target_is_named_well() -> None:
    for verb in verbs.VERBS.values():
        module, _, function = verb.target.partition(":")
        assert module.split(".")[0] in ("k3train", "k3data") and function.isidentifier()


def test_a_missing_room_is_a_sentence(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setitem(verbs.VERBS, "doctor", verbs.Verb("", "k3train.no_such_room:doctor", words=True))
    code, _, err = outcome(capsys, "doctor")
    assert code == launch.EXIT_USER and "not part of this version" in err


def test_report_turns_outcomes_into_exit_codes(capsys: pytest.CaptureFixture[str]) -> None:
    def raising(error: BaseException) -> Any:
        def call() -> int:
            raise error

        return call

    assert launch.report("x", lambda: None) == 0
    assert launch.report("x", lambda: launch.EXIT_REQUEUE) == launch.EXIT_REQUEUE
    assert launch.report("x", raising(ConfigError("wrong key"))) == launch.EXIT_USER
    assert launch.report("x", raising(RuntimeError("broken"))) == launch.EXIT_FAULT
    assert launch.report("x", raising(KeyboardInterrupt())) == 130
    assert launch.report("x", raising(PermissionError(13, "Permission denied", "/there"))) == launch.EXIT_USER
    assert launch.report("x", raising(OSError(5, "Input/output error", "/disk"))) == launch.EXIT_FAULT
    err = capsys.readouterr().err
    assert "k3train x: wrong key" in err and "RuntimeError: broken" in err
    assert "k3train x: /there cannot be used (Permission denied); allow" in err and "PermissionError" not in err


def test_the_environment_is_left_alone_by_a_plain_verb(capsys: pytest.CaptureFixture[str]) -> None:
    before = dict(os.environ)
    outcome(capsys, "train", "--help")
    assert dict(os.environ) == before
