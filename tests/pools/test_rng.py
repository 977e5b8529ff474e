"""Random numbers that belong to the record: the same in every pool, order and process, and never the caller's."""

from __future__ import annotations

import json
import random
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aioloader.pools.rng import NamedSeeding, SwappedSeeding, record_rng, record_seed

ROOT = Path(__file__).parents[2]
seeds = st.integers(-(1 << 70), 1 << 70)
records = st.tuples(st.text(max_size=8), st.integers(0, 1 << 70))


@given(seed=seeds, epoch=st.integers(0, 1 << 40), record=records)
def test_a_seed_is_a_function_of_its_key_and_has_64_bits(seed: int, epoch: int, record: tuple[str, int]) -> None:
    value = record_seed(seed, epoch, record)
    assert value == record_seed(seed, epoch, (record[0], record[1]))
    assert 0 <= value < 1 << 64


def test_seeds_are_pinned() -> None:
    """A change here changes what every saved run delivers when it is resumed."""
    assert record_seed(0, 0, ("", 0)) == 12793040940332582595
    assert record_seed(7, 3, ("shard-00001.jsonl", 12345)) == 11512347714967919527
    assert record_seed(-1, 1 << 40, ("ü", 1 << 63)) == 8924419782716399978


def test_neighbours_differ_in_half_of_their_bits() -> None:
    base = record_seed(1, 1, ("shard", 1))
    neighbours = [record_seed(1, 1, ("shard", row)) for row in range(2, 200)]
    neighbours += [record_seed(1, epoch, ("shard", 1)) for epoch in range(2, 200)]
    neighbours += [record_seed(seed, 1, ("shard", 1)) for seed in range(2, 200)]
    neighbours += [record_seed(1, 1, (f"shard{number}", 1)) for number in range(200)]
    assert len({base, *neighbours}) == 1 + len(neighbours)
    different = [bin(base ^ other).count("1") for other in neighbours]
    assert 30 < sum(different) / len(different) < 34
    assert min(different) > 10


def test_parts_of_the_key_are_not_interchangeable() -> None:
    numbers = range(4)
    seeds_of_all = {record_seed(seed, epoch, (shard, row)) for seed in numbers for epoch in numbers for row in numbers for shard in "xy"}
    assert len(seeds_of_all) == 2 * 4**3


# In the caller's own process


def global_states() -> tuple[Any, ...]:
    torch = sys.modules.get("torch")
    state = np.random.get_state()
    return random.getstate(), str(state), None if torch is None else torch.get_rng_state().tolist()


def draw_all() -> tuple[Any, ...]:
    return random.random(), random.gauss(0, 1), float(np.random.rand()), int(record_rng().integers(1 << 40))


@settings(max_examples=30)
@given(seed=st.integers(0, 1 << 40), epoch=st.integers(0, 9), rows=st.lists(st.integers(0, 1 << 40), min_size=1, max_size=5, unique=True))
def test_the_callers_generators_are_seeded_for_a_record_and_put_back(seed: int, epoch: int, rows: list[int]) -> None:
    seeding = SwappedSeeding(seed)
    random.gauss(0, 1)
    before = global_states()
    drawn: dict[int, Any] = {}
    for row in [*rows, *reversed(rows)]:
        seeding.begin(epoch, ("shard", row))
        values = draw_all()
        seeding.end()
        assert global_states() == before
        assert drawn.setdefault(row, values) == values
    assert len(set(map(str, drawn.values()))) == len(rows)


def test_torch_is_seeded_and_put_back() -> None:
    torch = pytest.importorskip("torch")
    seeding = SwappedSeeding(3)
    before = global_states()
    drawn = []
    for row in (1, 2, 1):
        seeding.begin(0, ("shard", row))
        drawn.append(torch.rand(2).tolist())
        seeding.end()
    assert global_states() == before
    assert drawn[0] == drawn[2] != drawn[1]


def test_random_and_numpy_do_not_give_the_same_numbers() -> None:
    seeding = SwappedSeeding(5)
    seeding.begin(0, ("shard", 1))
    assert abs(random.random() - float(np.random.rand())) > 1e-9
    seeding.end()


def test_a_record_has_a_generator_of_its_own_in_every_pool() -> None:
    drawn = []
    for seeding in (SwappedSeeding(7), NamedSeeding(7)):
        seeding.begin(2, ("shard", 5))
        drawn.append((record_rng().integers(1 << 40, size=3).tolist(), record_rng().integers(1 << 40, size=3).tolist()))
        seeding.end()
    assert drawn[0] == drawn[1]
    assert drawn[0][0] == drawn[0][1]
    with pytest.raises(RuntimeError, match="record_rng: expected to be called inside a preprocess function, got a call outside"):
        record_rng()


def test_threads_leave_the_global_generators_alone() -> None:
    before = global_states()
    seeding = NamedSeeding(7)
    seeding.begin(0, ("shard", 1))
    seeding.end()
    assert global_states() == before


# In a process of its own, where the generators are wrapped


def in_worker(body: str) -> Any:
    """Run `body` in a fresh process after `LazySeeding(11).install()`; return what it puts into `out`."""
    imports = "import json, random, sys\nfrom aioloader.pools.rng import LazySeeding"
    program = f"{imports}\nout = []\n{textwrap.dedent(body)}\nprint(json.dumps(out))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False, timeout=18, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def inline(draw: Any, rows: list[int]) -> list[Any]:
    seeding, drawn = SwappedSeeding(11), []
    for row in rows:
        seeding.begin(0, ("shard", row))
        drawn.append(draw())
        seeding.end()
    return drawn


def test_workers_draw_what_inline_draws_whatever_was_imported_when() -> None:
    """User modules are imported before, after and in the middle; some take the functions by name."""
    body = """
        import types
        early = types.ModuleType("early")
        seeding = LazySeeding(11)
        seeding.install()
        exec("from random import random as draw", early.__dict__)
        for row in (1, 2, 1):
            seeding.begin(0, ("shard", row))
            one = [early.draw(), random.gauss(0, 1), random.randrange(1000)]
            import numpy as np
            one += [float(np.random.rand()), int(np.random.randint(1 << 30)), np.random.permutation(5).tolist()]
            out.append(one)
            seeding.end()
        seeding.begin(0, ("shard", 3))
        out.append([float(np.random.normal()), random.random()])
        random.seed(5)
        np.random.seed(5)
        out.append([random.random(), float(np.random.rand())])
    """
    rows = in_worker(body)

    def draw() -> list[Any]:
        one: list[Any] = [random.random(), random.gauss(0, 1), random.randrange(1000)]
        return [*one, float(np.random.rand()), int(np.random.randint(1 << 30)), np.random.permutation(5).tolist()]

    assert rows[:3] == inline(draw, [1, 2, 1])
    assert rows[3:4] == inline(lambda: [float(np.random.normal()), random.random()], [3])
    random_state, numpy_state = random.Random(5), np.random.RandomState(5)
    assert rows[4] == [random_state.random(), float(numpy_state.rand())]


def test_torch_is_seeded_from_the_moment_it_is_imported() -> None:
    torch = pytest.importorskip("torch")
    body = """
        seeding = LazySeeding(11)
        seeding.install()
        for row in (1, 2, 1):
            seeding.begin(0, ("shard", row))
            import torch
            out.append(torch.rand(3).tolist())
            seeding.end()
    """
    assert in_worker(body) == inline(lambda: torch.rand(3).tolist(), [1, 2, 1])


def stand_in_for_scipy(folder: Path) -> None:
    (folder / "scipy").mkdir()
    (folder / "scipy" / "stats.py").write_text("import numpy.random\n")


def test_libraries_that_draw_past_the_wrapped_functions_are_seeded_too(tmp_path: Path) -> None:
    """Some hold NumPy's hidden generator itself; they are known by name."""
    stand_in_for_scipy(tmp_path)
    body = f"""
        sys.path.insert(0, {str(tmp_path)!r})
        seeding = LazySeeding(11)
        seeding.install()
        seeding.begin(0, ("shard", 0))
        import numpy as np
        import scipy.stats
        for row in (1, 2, 1):
            seeding.begin(0, ("shard", row))
            out.append(np.random.mtrand._rand.normal(size=2).tolist())
            seeding.end()
    """
    assert in_worker(body) == inline(lambda: np.random.normal(size=2).tolist(), [1, 2, 1])


def test_what_is_imported_in_a_record_leaves_the_other_generators_alone(tmp_path: Path) -> None:
    """They go on with their stream: seeded twice, they would draw the same again."""
    stand_in_for_scipy(tmp_path)
    body = f"""
        sys.path.insert(0, {str(tmp_path)!r})
        seeding = LazySeeding(11)
        seeding.install()
        seeding.begin(0, ("shard", 1))
        import torch
        out.append([torch.rand(1).item(), random.random()])
        import scipy.stats
        out.append([torch.rand(1).item(), random.random()])
        seeding.end()
    """
    torch = pytest.importorskip("torch")
    expected = inline(lambda: [[torch.rand(1).item(), random.random()] for _ in range(2)], [1])
    assert in_worker(body) == expected[0]


def test_the_record_is_that_of_the_thread_that_preprocesses() -> None:
    """Which record it would be in another thread, only the clock knows."""
    body = """
        import threading
        from aioloader.pools.rng import record_rng
        seeding = LazySeeding(11)
        seeding.install()
        def draw():
            try:
                out.append(int(record_rng().integers(1 << 40)))
            except RuntimeError as error:
                out.append(str(error)[:10])
        def draw_elsewhere():
            thread = threading.Thread(target=draw)
            thread.start()
            thread.join()
        draw()
        for row in (1, 2):
            seeding.begin(0, ("shard", row))
            draw()
            draw_elsewhere()
            seeding.end()
    """
    first, second = inline(lambda: int(record_rng().integers(1 << 40)), [1, 2])
    assert in_worker(body) == ["record_rng", first, "record_rng", second, "record_rng"]


def test_wrapped_functions_keep_their_names_and_instances_of_ones_own_are_left_alone() -> None:
    body = """
        own = random.Random(3)
        expected = random.Random(3).random()
        seeding = LazySeeding(11)
        seeding.install()
        seeding.begin(0, ("shard", 1))
        out += [random.random.__name__, random.shuffle.__name__, own.random() == expected]
        import pickle, cloudpickle
        copy = pickle.loads(cloudpickle.dumps(lambda: random.random()))
        first = copy()
        seeding.begin(0, ("shard", 1))
        out.append(first == random.random())
    """
    assert in_worker(body) == ["random", "shuffle", True, True]
