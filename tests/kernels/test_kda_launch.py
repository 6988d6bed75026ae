"""Repeating a launch without Triton's binding: what counts as the same launch, and when the long way is taken.

A stand-in for the kernel and the driver records what is called; the kernels themselves are the business of
test_kda_triton_gpu.py.
"""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("triton")
from triton import knobs

from k3kernels.kda.triton import launch


class Compiled:
    """What a first launch hands back; counts the direct ones."""

    def __init__(self, device: int) -> None:
        self.function, self.packed_metadata = f"function on {device}", "packed"
        self.direct: list[tuple[Any, ...]] = []

    def run(self, *args: Any) -> None:
        self.direct.append(args)


class Kernel:
    """Looks like a compiled function of two arguments and two constants; counts the launches that Triton bound."""

    def __init__(self, machine: "Machine") -> None:
        self.params = [SimpleNamespace(name=name) for name in ("x", "n", "BLOCK", "FLAG")]
        self.pre_run_hooks: list[Any] = []
        self.machine, self.bound = machine, 0
        self.made: list[Any] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def call(*args: Any, **meta: Any) -> Any:
            self.bound += 1
            self.made.append(self.machine.make(self.machine.device))
            return self.made[-1]

        return call


class Machine:
    """The current device and stream, and what a launch makes."""

    def __init__(self) -> None:
        self.device, self.stream = 0, "stream 7"
        self.make: Any = Compiled

    def get_current_device(self) -> int:
        return self.device

    def get_current_stream(self, device: int) -> str:
        return f"{self.stream} of {device}"


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    found = Machine()
    monkeypatch.setattr(launch, "driver", SimpleNamespace(active=found))
    monkeypatch.setattr(launch, "DIRECT", True)
    monkeypatch.setattr(launch, "_seen", {})
    return found


META = {"BLOCK": 64, "FLAG": True, "num_warps": 4}


def test_a_repeated_launch_goes_straight_to_the_device(machine: Machine) -> None:
    kernel, x = Kernel(machine), torch.zeros(8)
    launch.launch(kernel, 3, x, 5, **META)
    assert (kernel.bound, kernel.made[0].direct) == (1, [])
    machine.stream = "stream 9"  # of the moment, as under a graph's capture
    other = torch.zeros(16)
    launch.launch(kernel, 4, other, 5, **META)
    assert kernel.bound == 1
    (call,) = kernel.made[0].direct
    assert call[:9] == (4, 1, 1, "stream 9 of 0", "function on 0", "packed", None, None, None)
    assert call[9] is other
    assert call[10:] == (5, 64, True)  # constants in the kernel's order, options left out


X = torch.zeros(64)
DIFFERENT: dict[str, tuple[tuple[Any, ...], dict[str, Any]]] = {
    "another alignment": ((X[1:], 5), META),
    "another dtype": ((X.double(), 5), META),
    "another integer": ((X, 6), META),
    "an integer that is equal as a float": ((X, 5.0), META),
    "no tensor": ((None, 5), META),
    "another constant": ((X, 5), {**META, "BLOCK": 32}),
    "another option": ((X, 5), {**META, "num_warps": 8}),
    "constants by other names": ((X, 5), {"FLAG": 64, "BLOCK": True, "num_warps": 4}),
}


@pytest.mark.parametrize("what", DIFFERENT)
def test_takes_the_long_way(machine: Machine, what: str) -> None:
    kernel = Kernel(machine)
    launch.launch(kernel, 3, X, 5, **META)
    args, meta = DIFFERENT[what]
    launch.launch(kernel, 3, *args, **meta)
    assert kernel.bound == 2
    assert not kernel.made[0].direct


def test_one_and_true_are_different_arguments(machine: Machine) -> None:
    assert launch._kind(1) != launch._kind(True)
    assert launch._kind(1) != launch._kind(1.0)
    assert launch._kind(1) == launch._kind(1)


def test_descriptors_count_by_dtype_and_block(machine: Machine) -> None:
    def descriptor(dtype: torch.dtype, *block: int) -> Any:
        return SimpleNamespace(base=torch.zeros(8, dtype=dtype), block_shape=list(block), shape=[8, 8])

    kind = launch._kind(descriptor(torch.bfloat16, 64, 128))
    assert kind == launch._kind(descriptor(torch.bfloat16, 64, 128))
    assert kind != launch._kind(descriptor(torch.bfloat16, 64, 64))
    assert kind != launch._kind(descriptor(torch.float16, 64, 128))


def test_each_device_and_each_kernel_has_its_own(machine: Machine) -> None:
    first, second = Kernel(machine), Kernel(machine)
    launch.launch(first, 3, X, 5, **META)
    launch.launch(second, 3, X, 5, **META)
    machine.device = 1
    launch.launch(first, 3, X, 5, **META)
    assert (first.bound, second.bound) == (2, 1)
    launch.launch(first, 3, X, 5, **META)
    assert first.bound == 2
    assert first.made[1].direct[0][3:5] == ("stream 7 of 1", "function on 1")
    assert not first.made[0].direct


@pytest.mark.parametrize(
    "answer", [SimpleNamespace(result=lambda: None), None], ids=["is still being compiled", "was forbidden by a hook"]
)
def test_nothing_is_remembered_of_a_kernel_that(machine: Machine, answer: Any) -> None:
    kernel = Kernel(machine)
    machine.make = lambda device: answer
    for _ in range(2):
        launch.launch(kernel, 3, X, 5, **META)
    assert kernel.bound == 2
    machine.make = Compiled
    for _ in range(3):
        launch.launch(kernel, 3, X, 5, **META)
    assert kernel.bound == 3


def test_what_is_remembered_is_bounded(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "MOST", 10)
    kernel = Kernel(machine)
    for n in range(25):
        launch.launch(kernel, 3, X, n, **META)
        assert len(launch._seen) <= 10
    assert kernel.bound == 25
    launch.launch(kernel, 3, X, 24, **META)
    assert kernel.bound == 25
    launch.launch(kernel, 3, X, 0, **META)  # forgotten
    assert kernel.bound == 26


@pytest.mark.parametrize("name", ["launch_enter_hook", "launch_exit_hook"])
def test_a_profiler_sees_every_launch(machine: Machine, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    kernel = Kernel(machine)
    launch.launch(kernel, 3, X, 5, **META)
    monkeypatch.setattr(getattr(knobs.runtime, name), "calls", [print])
    launch.launch(kernel, 3, X, 5, **META)
    assert kernel.bound == 2
    monkeypatch.undo()


def test_a_hook_of_the_kernel_is_called(machine: Machine) -> None:
    kernel = Kernel(machine)
    kernel.pre_run_hooks.append(print)
    for _ in range(2):
        launch.launch(kernel, 3, X, 5, **META)
    assert kernel.bound == 2


@pytest.mark.parametrize("hook", ["launch_enter_hook", "launch_exit_hook"])
def test_a_hook_that_was_taken_away_is_none(machine: Machine, monkeypatch: pytest.MonkeyPatch, hook: str) -> None:
    monkeypatch.setattr(knobs.runtime, hook, None)
    kernel = Kernel(machine)
    for _ in range(2):
        launch.launch(kernel, 3, X, 5, **META)
    assert kernel.bound == 1


def test_other_versions_of_triton_bind_every_launch(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "DIRECT", False)
    kernel = Kernel(machine)
    for _ in range(3):
        launch.launch(kernel, 3, X, 5, **META)
    assert kernel.bound == 3
    assert not launch._seen


def test_kernels_of_the_interpreter_are_called_as_they_are(machine: Machine) -> None:
    kernel = Kernel(machine)
    del kernel.params
    for _ in range(2):
        launch.launch(kernel, 3, X, 5, **META)
    assert kernel.bound == 2


def test_an_empty_grid_launches_nothing(machine: Machine) -> None:
    kernel = Kernel(machine)
    launch.launch(kernel, 0, X, 5, **META)
    assert kernel.bound == 0


def test_the_launcher_is_that_of_the_installed_triton() -> None:
    """What the direct way relies on: which numbers and objects a compiled kernel's `run` takes, in which order."""
    import inspect

    from triton.compiler import CompiledKernel
    from triton.runtime.jit import JITFunction

    if not launch.DIRECT:
        pytest.skip("another version of Triton: every launch is bound")
    body = " ".join(inspect.getsource(JITFunction.run).split())
    assert (
        "kernel.run(grid_0, grid_1, grid_2, stream, kernel.function, kernel.packed_metadata, launch_metadata," in body
    )
    assert "*bound_args.values())" in body
    assert isinstance(inspect.getattr_static(CompiledKernel, "run"), property)
