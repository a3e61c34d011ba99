"""An engine that starts while other processes free memory of the same device.

What they free is not this engine's: the KV cache stays within the budget.
"""

from __future__ import annotations

import functools
import importlib
import itertools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from tests.witness.memory_rig import BUDGET, MEMORY, UNIT, WORKER, Torch, worker
from tests.witness.world import World, expect

pytestmark = [pytest.mark.loads(MEMORY), pytest.mark.loads(WORKER)]
WEIGHTS = 20 * UNIT
PEAK = 5 * UNIT
RIGHT = BUDGET - WEIGHTS - PEAK


class Start:
    """An engine that starts beside another process, which holds ``held`` units."""

    def __init__(self, world: World, held: int) -> None:
        self.world = world
        self.theirs = [world.take(UNIT) for _ in range(held)]
        self.stats = Torch(world)
        self.warnings: list[str] = []
        module: Any = importlib.import_module(WORKER)
        module.logger = SimpleNamespace(
            debug=lambda *_: None,
            info=lambda *_: None,
            info_once=lambda *_: None,
            warning=self.warn,
        )

    def warn(self, text: str, *arguments: object) -> None:
        self.warnings.append(text % arguments)

    def free(self, units: int) -> None:
        """The other process frees that much."""
        for _ in range(units):
            self.world.take_back(self.theirs.pop())

    def take(self, units: int) -> None:
        """The other process takes that much."""
        self.theirs += [self.world.take(UNIT) for _ in range(units)]

    def move(self, units: int) -> None:
        """The other process takes that much, or frees it where it is less than 0."""
        if units < 0:
            self.free(-units)
        else:
            self.take(units)

    def load(self, *, pool: bool = False) -> None:
        if pool:
            self.stats.load(kept=WEIGHTS, replaced=30 * UNIT)
        else:
            self.stats.load_without_a_pool(WEIGHTS)

    def left(self, graphs: int = 0, **during: Callable[[], object]) -> int:
        """What the worker gives the KV cache."""
        found: int = worker(
            self.stats, WEIGHTS, PEAK, graphs, **during
        ).determine_available_memory()
        return found


@pytest.mark.parametrize("pool", [False, True])
@pytest.mark.parametrize("freed", [19, 20, 21, 60])
def test_what_another_process_frees_during_the_load_is_not_ours(
    world: World, freed: int, pool: bool
) -> None:
    """Also where less is freed than the weights take: the release then counts too little."""
    start = Start(world, held=60)
    start.load(pool=pool)
    start.free(freed)
    expect("left for the cache", start.left(), RIGHT)


@pytest.mark.parametrize("freed", [10, 60])
def test_what_another_process_frees_during_profiling_is_not_ours(world: World, freed: int) -> None:
    start = Start(world, held=60)
    start.load()
    expect("left for the cache", start.left(profiling=lambda: start.free(freed)), RIGHT)


def test_what_the_run_takes_outside_of_torch_counts_nonetheless(world: World) -> None:
    """Handles and code of kernels, where the other process fell asleep during the load."""
    start = Start(world, held=60)
    start.load()
    start.free(60)
    left = start.left(profiling=lambda: world.take(3 * UNIT))
    expect("left for the cache", left, RIGHT - 3 * UNIT)


@pytest.mark.parametrize("freed", [5, 60])
def test_graphs_never_take_less_than_nothing(world: World, freed: int) -> None:
    """What is freed while they are measured hides what they take, and no more than that."""
    start = Start(world, held=60)
    start.load()
    left = start.left(4 * UNIT, capturing=lambda: start.free(freed))
    expect("left for the cache", left, RIGHT)


def test_one_warning_says_what_was_measured(world: World) -> None:
    start = Start(world, held=60)
    start.load()
    start.free(50)
    start.left()
    expect("warnings", len(start.warnings), 1)
    figure = importlib.import_module(MEMORY).format_gib(WEIGHTS)
    assert f"{figure} GiB" in start.warnings[0], (figure, start.warnings)


@pytest.mark.guard
@pytest.mark.parametrize("graphs", [0, 4])
@pytest.mark.parametrize("outside", [0, 3])
def test_alone_it_is_as_before(world: World, outside: int, graphs: int) -> None:
    start = Start(world, held=30)
    start.load()
    left = start.left(graphs * UNIT, profiling=lambda: [world.take(UNIT) for _ in range(outside)])
    expect("left for the cache", left, RIGHT - (outside + graphs) * UNIT)
    expect("warnings", start.warnings, [])


@pytest.mark.guard
def test_what_another_process_takes_counts_as_before(world: World) -> None:
    start = Start(world, held=30)
    start.load()
    start.take(10)
    expect("left for the cache", start.left(), RIGHT - 10 * UNIT)
    expect("warnings", start.warnings, [])


def test_the_cache_is_within_the_budget_whatever_others_do(world: World) -> None:
    for moves in itertools.product((-30, -7, 0, 7), repeat=2):
        start = Start(world, held=100)
        start.load()
        start.move(moves[0])
        left = start.left(profiling=functools.partial(start.move, moves[1]))
        most = BUDGET - WEIGHTS - PEAK
        assert left <= most, f"moves {moves}: {(left - most) // UNIT} units above the budget"
        for address in (*start.theirs, start.stats.weights):
            world.take_back(address)
