"""`k3train train`: from a composed configuration to a finished run folder."""

from __future__ import annotations

import os
import re
import shutil
import time
from pathlib import Path
from typing import Any

from k3train import platform
from k3train.config.schema import Config
from k3train.errors import CheckpointError, EnvironmentError_


def run_training(config: Config) -> int:
    """Train, or go on training, the run that the configuration names. Returns the exit code: 0 when all steps are
    done, launch.EXIT_REQUEUE when the run stopped early with a checkpoint."""
    from k3train import signals

    signals.listen()  # from here on a stop request is kept until the loop can honour it

    platform.install()
    import torch

    from k3train import launch

    place = launch.init_distributed(config)
    _set_threads(config, place.local_world)
    platform.install_adam()
    return _Run(config, place, torch.device(_device())).run()


def _device() -> str:
    import torch

    return f"cuda:{torch.cuda.current_device()}" if torch.cuda.is_available() else "cpu"


def _set_threads(config: Config, local_world: int) -> None:
    """Half of the cores a process: the operations of models that train on a CPU are too small to share well."""
    import torch

    cores = len(os.sched_getaffinity(0))
    torch.set_num_threads(config.train.threads or max(1, cores // (2 * max(1, local_world))))
    if not torch.cuda.is_available():
        platform.keep_freed_memory()


class _Run:
    """Everything between the process group and the closing table."""

    def __init__(self, config: Config, place: Any, device: Any) -> None:
        from k3train.tracking.progress import Progress

        self.config, self.place, self.device = config, place, device
        self.folder = Path(config.run.dir) / config.run.name
        self.is_main = place.rank == 0
        self.started = time.time()
        self.progress: Progress | None = None

    def say(self, message: str) -> None:
        if not self.is_main:
            return
        if self.progress is not None:
            self.progress.say(message)
        else:
            print(message, flush=True)

    def run(self) -> int:
        from k3train import launch
        from k3train.config import compose
        from k3train.parallel import layout as layouts
        from k3train.train.data import prepare_data

        config = self.config
        saved = compose.check_run_folder(config)
        if self.is_main:
            compose.claim_run_folder(config)
            refuse_second(self.folder)
        sizes = layouts.sizes_from_config(config.parallel, self.place.world)
        layout = layouts.initialize(sizes)
        self.say(f"run: {self.folder} ({self.place.describe()}, layout {sizes.describe()}, {self._where()})")
        self._refuse_machine()
        origin = self._origin()
        data = prepare_data(config, layout, self.device, self.say)
        if self.is_main:
            self._lay_out(data.tokenizer)
        engine = self._engine(layout)
        trainer = self._trainer(engine, origin, data, compose.diff(saved, config) if saved is not None else {})
        begin, begin_tokens = time.perf_counter(), trainer.state.consumed_tokens
        trainer.train()
        rate = (trainer.state.consumed_tokens - begin_tokens) / max(time.perf_counter() - begin, 1e-9)
        self._finish(trainer, engine, data, rate)
        return 0 if trainer.finished else launch.EXIT_REQUEUE

    def _lay_out(self, tokenizer: Path | None) -> None:
        """The run folder with its configuration and, for text, its tokenizer.

        Raises EnvironmentError_ where it cannot be written.
        """
        from k3train.config import compose

        try:
            compose.save_resolved(self.config, self.folder / "config.yaml")
            if tokenizer is not None:
                shutil.copyfile(tokenizer, self.folder / "tokenizer.json")
        except OSError as error:
            raise compose.unwritable(self.config, self.folder, error) from error

    def _where(self) -> str:
        import torch

        if self.device.type == "cuda":
            return torch.cuda.get_device_name(self.device)
        return f"CPU, {torch.get_num_threads()} thread{'s' if torch.get_num_threads() > 1 else ''} a process"

    def _refuse_machine(self) -> None:
        """Refuse what was asked for by name and this machine lacks before text is tokenised, as the engine would after.

        Raises EnvironmentError_.
        """
        from k3train.config.precision import precision_of
        from k3train.engine.megatron import training_dtype
        from k3train.model.backend import make_backend

        if self.config.engine.name == "deepspeed":
            from k3train.engine.deepspeed import require

            require()
        model, train = self.config.model, self.config.train
        precision = precision_of(train.precision, train.bf16_parts)
        if model.backend != "auto" or precision.recipe is not None:
            sizes = model.mla.nope_dim + model.mla.shared_dim, model.mla.v_dim
            dtype = training_dtype(train.precision, self.device)
            make_backend(model.backend, self.device, dtype=dtype, precision=precision, head_dims=sizes)

    def _engine(self, layout: Any) -> Any:
        if self.config.engine.name == "deepspeed":
            from k3train.engine.deepspeed import DeepSpeedEngine

            return DeepSpeedEngine(self.config, layout, self.device)
        from k3train.engine.megatron import MegatronEngine

        engine = MegatronEngine(self.config, layout, self.device)
        if engine.ctx.backend.notice:
            self.say(engine.ctx.backend.notice)
        return engine

    def _trainer(self, engine: Any, origin: Any, data: Any, changes: dict[str, tuple[Any, Any]]) -> Any:
        import torch.distributed as dist

        from k3train.config import compose
        from k3train.planning import flops
        from k3train.tracking.progress import Progress
        from k3train.tracking.tracker import Tracker
        from k3train.tracking.wandb import WandbSettings
        from k3train.train import recall
        from k3train.train.callbacks.checkpointing import Checkpointing
        from k3train.train.callbacks.evaluation import Evaluation
        from k3train.train.callbacks.guard import Guard
        from k3train.train.callbacks.profiling import Profiling
        from k3train.train.callbacks.reporting import Reporting
        from k3train.train.callbacks.signals import StopSignals
        from k3train.train.callbacks.statistics import DepthAndDecay, ExpertLoad, Throughput, UpdateNorm
        from k3train.train.callbacks.watchdog import Watchdog
        from k3train.train.loop import Trainer

        config = self.config
        state, resumed = self._resume(engine, origin)
        tracker = None
        if self.is_main:
            tracking = config.tracking
            tracker = Tracker(
                self.folder, compose.to_dict(config), run_name=config.run.name, wandb_mode=tracking.wandb,
                resume_step=state.step if resumed else None, resume_id=state.run_id,
                settings=WandbSettings(project=tracking.project, entity=tracking.entity),
            )  # fmt: skip
            state.run_id = tracker.run_id
            if resumed and changes:
                shown = ", ".join(f"{key}: {old} -> {new}" for key, (old, new) in changes.items())
                self.say(f"the configuration has changed since this run was last started: {shown}")
                tracker.event("config", shown, state.step)
            if state.step < config.train.steps:
                self.progress = Progress(config.train.steps, state.step, every_seconds=config.tracking.progress_seconds)
        shared_id = [state.run_id]
        dist.broadcast_object_list(shared_id, src=0)  # the state is saved once and must be the same on every rank
        state.run_id = shared_id[0]
        counted = flops.flops_per_token(config.model, config.train.seq_length)
        devices = self.place.world
        peak = flops.PEAK_TFLOPS if self.device.type == "cuda" else None
        about = {"model": config.model.name, "run": config.run.name}
        checkpointing = Checkpointing(self.folder / "checkpoints", about, tracker)
        watchdog = Watchdog(self.folder / "logs", self.place.rank, config.train.watchdog_seconds, tracker)
        growth, bad_steps = config.train.max_norm_growth, config.train.max_bad_steps
        callbacks = [
            watchdog,
            *(
                [Profiling(config.train.profile, self.folder / "profile")]
                if config.train.profile and self.is_main
                else []
            ),
            StopSignals(),
            ExpertLoad(),
            DepthAndDecay(config.tracking.decay_every, config.model.kda.decay_bound),
            UpdateNorm(config.tracking.decay_every),
            Throughput(counted, devices, peak),
            Reporting(tracker, self.progress, config.train.log_every),
            checkpointing,
            Guard(checkpointing, tracker, growth=growth, max_bad_steps=bad_steps),
        ]
        if data.held_out is not None:
            every = config.train.eval_every
            by_recall = recall.accuracy if data.tokenizer is None else None
            evaluation = Evaluation(every, data.held_out, data.tokens_per_byte, data.unigram_loss, by_recall)
            callbacks.insert(6, evaluation)
        return Trainer(config, engine, data.train, state, callbacks, is_main=self.is_main, say=self.say)

    def _origin(self) -> tuple[str, bool, bool] | None:
        """The newest good checkpoint of this run, else `checkpoint.load`: its path, whether its optimizer's state is
        read, whether it is this run's. None for a new run. Raises CheckpointError where `checkpoint.load` holds none.

        A run's own checkpoint goes first: a requeued job is started by the command that names `checkpoint.load`.
        """
        import torch.distributed as dist

        from k3train.train import checkpoint as disk

        config = self.config.checkpoint
        choice: list[Any] = [None]
        if self.is_main:
            found = disk.newest_good(self.folder / "checkpoints", self.say) if config.resume else None
            if found is not None:
                choice[0] = (str(found.path), disk.has_optimizer(found.path), True)
            elif config.load is not None:
                try:
                    path = disk.locate(Path(config.load), self.say)
                except CheckpointError as error:
                    raise CheckpointError(f"checkpoint.load={config.load}: {error}") from error
                choice[0] = (str(path), config.load_optimizer and disk.has_optimizer(path), False)
        dist.broadcast_object_list(choice, src=0)
        return choice[0]

    def _resume(self, engine: Any, origin: tuple[str, bool, bool] | None) -> tuple[Any, bool]:
        """The state to go on from, and whether it is this run's; says which checkpoint was read and why."""
        from k3train.train.state import RunState

        config = self.config.checkpoint
        if origin is None:
            return RunState(), False
        path, optimizer, same_run = origin
        loaded = RunState.from_dict(engine.load(Path(path), optimizer=optimizer))
        if not same_run:
            how = f"checkpoint.load, {'with' if optimizer else 'without'} the optimizer's state"
            why = "this run has no whole checkpoint of its own" if config.resume else "checkpoint.resume=false"
            self.say(f"starting from the weights of {path} ({how}): {why}")
            return RunState(), False
        done = loaded.step >= self.config.train.steps
        self.say(f"resuming {path} after step {loaded.step}" + (": all steps are done" if done else ""))
        if config.load is not None:
            self.say(
                f"checkpoint.load={config.load} is not used: the run goes on from its own newest checkpoint, as a requeued "
                "job must; run.name=OTHER starts another run from it"
            )
        loaded.restarts += not done
        return loaded, True

    def _finish(self, trainer: Any, engine: Any, data: Any, tokens_per_second: float) -> None:
        from k3train.tracking.progress import final_table
        from k3train.train.callbacks import reporting

        sample = None
        wanted = self.config.train.sample_tokens > 0
        # a run that was asked to stop has no time to write; one on recall has no words
        if wanted and trainer.finished and data.tokenizer is not None:
            from tokenizers import Tokenizer

            tokenizer = Tokenizer.from_file(str(data.tokenizer))
            prompt = self.config.train.sample_prompt
            sample = prompt + tokenizer.decode(self._sample(engine, tokenizer.encode(prompt).ids))
        if not self.is_main:
            return
        drawn: list[Path] = []
        try:
            if sample is not None:
                (self.folder / "sample.txt").write_text(sample + "\n")
            drawn = reporting.draw(self.folder, data.unigram_loss)
        except OSError as error:  # the checkpoint is there: a full disk spoils the pictures alone
            print(f"plots and sample could not be written to {self.folder}: {error.strerror or error}", flush=True)
        self.progress = None
        rows = reporting.closing_rows(trainer, tokens_per_second if trainer.state.step else 0.0, data.unigram_loss)
        rows.append(("time, from the start of the command", f"{time.time() - _process_start():.0f} s"))
        account = trainer.shared.get("wandb", {})
        written = ["metrics.jsonl", *[p.name for p in drawn], *(["sample.txt"] if sample is not None else [])]
        rows.append(("run folder", f"{self.folder} ({', '.join(written)})"))
        rows.append(("checkpoint", str(trainer.shared.get("checkpoint", self.folder / "checkpoints"))))
        rows.append(
            ("W&B", f"{account.get('mode', 'disabled')} run in {account.get('folder') or self.folder / 'wandb'}")
        )
        if not trainer.finished:
            how = "with a checkpoint" if trainer.state.step else "before the first step"
            sentence = f"Stopped ({trainer.stop_reason}) {how}. The same command goes on: {self._command()}"
        else:
            sentence = self._next(data.tokenizer is not None)
        if "train/mfu" in trainer.shared.get("rates", {}):
            self._print_mfu(rows, trainer.shared["rates"])
        if sample is not None:
            print(f"sample: {sample!r}", flush=True)
        final_table(rows, sentence)

    def _print_mfu(self, rows: list[tuple[str, str]], rates: dict[str, float]) -> None:
        """The share of the chip's peak in the last step, with the formula behind it."""
        from k3train.planning import flops

        share, rate = rates["train/mfu"], rates["train/tflops"]
        rows.append(("MFU, last step", f"{share:.1%} = {rate:.1f} of {flops.PEAK_TFLOPS} TFLOP/s"))
        print(flops.formula(self.config.model, self.config.train.seq_length), flush=True)

    def _sample(self, engine: Any, prompt: list[int]) -> list[int]:
        """Greedy tokens after `prompt`: with a cache where one process holds the model, else through the layout."""
        sizes, count = engine.layout.sizes, self.config.train.sample_tokens
        whole = sizes.world == 1 and self.config.engine.name == "megatron"  # ZeRO-3 leaves a model of pieces
        if whole and self.config.model.mixer == "kda":
            from k3train.inference.decoder import Decoder
            from k3train.inference.generate import Sampling, generate

            return [
                row[0] for row in generate(Decoder(engine.models[0]), [prompt], count, Sampling()) if row[0] is not None
            ]
        from k3train.train.sampling import greedy

        return greedy(engine, prompt, count)

    def _next(self, text: bool) -> str:
        name, corpus = run_name_word(self.config.run.name), self.config.data.corpus
        if text:
            return f"Next: k3train generate {name} 'generate.prompt=\"def \"'"
        return f"Next: k3train evaluate {name} 'evaluate.suites=[\"{corpus}\"]'"

    def _command(self) -> str:
        return f"k3train train {run_name_word(self.config.run.name)}"


def refuse_second(folder: Path) -> None:
    """Refuse a run folder in which another process of this machine trains, and note this process down there.

    Of other machines nothing is asked: a lock on a file server may outlive the node that held it, and a requeued job
    must start. Raises EnvironmentError_.
    """
    import socket

    import psutil

    note, here = folder / ".running", socket.gethostname()
    try:
        host, pid, begun = note.read_text().split()
        other = psutil.Process(int(pid))
        alive = other.status() != psutil.STATUS_ZOMBIE and abs(other.create_time() - float(begun)) < 2.0
    except (OSError, ValueError, psutil.Error):
        host, pid, alive = here, "", False
    if alive and host == here and int(pid) != os.getpid():
        raise EnvironmentError_(
            f"process {pid} is training in {folder}: two would spoil each other's checkpoints; type run.name=OTHER, or "
            f"stop that one first (kill {pid} saves a checkpoint)"
        )
    note.write_text(f"{here} {os.getpid()} {_process_start()}\n")


def run_name_word(name: str) -> str:
    """The override to type in a shell for a run of this name: jobs of a sweep have = and , in theirs."""
    return f"run.name={name}" if re.fullmatch(r"[\w.+-]+", name) else f"'run.name=\"{name}\"'"


def _process_start() -> float:
    """Unix time at which this process was started, set-up of the interpreter included."""
    import psutil

    return psutil.Process().create_time()
