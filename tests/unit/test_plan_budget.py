"""The budget of one GPU, its machine's memory, and servers that take turns."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from tests.unit.planning import flash, hardware, spark, term

from sm12x import layout, plan
from sm12x.core.errors import BadFileError, UsageError
from sm12x.plan import budget as budgets
from sm12x.plan import host, render
from sm12x.plan.budget import DOES_NOT_FIT, FITS, UNKNOWN, Amount, Cache, budget, ceiling, floor

PRO = hardware("rtx-pro-6000")
GB10 = hardware("gb10")


def test_at_0_70_the_reported_budget_fits_by_about_three_gib() -> None:
    """0.70 x 95 + 22 + 2.4-4.8 = 90.9-93.3: "about 92 GiB, fits with about 3 GiB to spare"."""
    found = budget(PRO, [flash()], [flash("peer")])

    assert found.terms[0].amount == Amount.of(66.5)
    assert (found.total.low, found.total.high) == pytest.approx((90.9, 93.3))
    assert (found.margin.low, found.margin.high) == pytest.approx((1.7, 4.1))
    assert (found.margin.low + found.margin.high) / 2 == pytest.approx(3, abs=0.15)
    assert found.verdict == FITS
    assert found.basis == "reported"


def test_at_0_85_it_does_not_fit() -> None:
    """0.85 x 95 + 22 + 2.4-4.8 = 105.2-107.6: "about 105 GiB: out of memory"."""
    found = budget(PRO, [flash(utilization=0.85)], [flash("peer")])

    assert (found.total.low, found.total.high) == pytest.approx((105.15, 107.55))
    assert found.margin.high < 0
    assert found.verdict == DOES_NOT_FIT


def test_the_largest_safe_utilization_holds_at_the_worst_end() -> None:
    """(95 - 22 - 4.8) / 95 = 0.717: 0.71 fits, 0.72 does not."""
    peer = flash("peer")
    found = budget(PRO, [flash()], [peer])

    assert found.largest == 0.71
    assert budget(PRO, [flash(utilization=0.71)], [peer]).verdict == FITS
    assert budget(PRO, [flash(utilization=0.72)], [peer]).verdict == DOES_NOT_FIT


def test_a_range_that_only_its_better_end_fits_does_not_fit() -> None:
    found = budget(PRO, [flash(utilization=0.73)], [flash("peer")])

    assert found.margin.low < 0 < found.margin.high
    assert found.verdict == DOES_NOT_FIT


def test_an_unknown_term_is_not_an_empty_one() -> None:
    found = budget(PRO, [flash(outside=None)], [flash("peer")])

    assert found.verdict == UNKNOWN
    assert [str(term) for term in found.unknown] == ["outside the budget of flash"]
    # Room for it: 95 - 66.5 - 4.8.
    assert found.margin.low == pytest.approx(23.7)


def test_what_does_not_fit_without_the_unknown_term_does_not_fit() -> None:
    found = budget(PRO, [flash(utilization=1.0, outside=None)], [flash("peer")])

    assert found.verdict == DOES_NOT_FIT


def test_weights_that_the_budget_cannot_hold_do_not_fit() -> None:
    """GLM-5.1-REAP at TP=4: 77.2 GiB of weights do not go into 0.70 x 95 = 66.5."""
    glm = flash("glm", weights=term(77.2), kv=term(11.3), outside=term(0))

    found = budget(PRO, [glm], [])

    assert found.margin.low > 0
    assert found.inside[0].spare is not None
    assert found.inside[0].spare.low == pytest.approx(-22)
    assert found.inside[0].least == 0.94
    assert found.verdict == DOES_NOT_FIT
    assert "raise its utilization to 0.94" in budgets.cuts(PRO, [glm], [])[0]


def test_of_a_range_of_kv_cache_the_lower_end_must_go_in() -> None:
    """DeepSeek-V4-Pro on GB10 at 0.88 served with 0.98 GiB on one machine, 4.64 on others."""
    pro = dataclasses.replace(spark(utilization=0.88), weights=term(102.39), kv=term(0.98, 4.64))

    found = budget(GB10, [pro], [])

    assert found.inside[0].least == 0.87
    assert found.inside[0].spare is not None
    assert found.inside[0].spare.low == pytest.approx(0.88 * 119 - 103.37)


def test_the_first_cut_is_the_one_that_costs_nothing() -> None:
    cuts = budgets.cuts(PRO, [flash(utilization=0.85)], [flash("peer")])

    assert cuts == [
        "the budget of flash: utilization 0.85 -> 0.71 frees 13.3 GiB, which still holds weights "
        "and KV cache",
        "stop peer instead of letting it sleep: 4.8 GiB, which is not enough alone",
    ]


def test_where_no_utilization_fits_that_is_said() -> None:
    heavy = flash(weights=term(60), outside=term(30))
    cuts = budgets.cuts(PRO, [heavy], [flash("peer")])

    assert cuts[0].startswith("no utilization fits: flash needs at least 0.71")
    # (0.71 - 0.63) x 95 GiB are more than the KV cache has to give.
    assert cuts[0].endswith("use more GPUs")
    longer = flash(weights=term(50), kv=term(17), outside=term(30))
    assert "or cut 7.6 GiB of KV cache" in budgets.cuts(PRO, [longer], [flash("peer")])[0]


def test_on_unified_memory_the_host_copy_lies_in_the_same_memory() -> None:
    awake, asleep = spark(utilization=0.40), dataclasses.replace(spark(sleep=1), name="peer")

    found = budget(GB10, [awake], [asleep])

    assert [(term.name, term.of) for term in found.terms] == [
        ("budget", "spark"),
        ("outside the budget", "spark"),
        ("sleep residue", "peer"),
        ("host copy", "peer"),
        ("operating system", ""),
    ]
    # The machine with 119 GiB: 119 x 0.6 - 5 - 3 - 74 - 5.
    assert found.margin.low == pytest.approx(119 * 0.6 - 87)
    assert host.need([asleep], GB10).copies == Amount.of(0)


def test_the_worst_end_of_a_kind_of_machine_is_its_smallest() -> None:
    found = budget(GB10, [spark(utilization=0.9)], [])

    assert found.margin.low == pytest.approx(119 * 0.1 - 5 - 5)
    assert found.margin.high == pytest.approx(121 * 0.1 - 5 - 3)


def test_sleeping_at_level_1_on_unified_memory_is_warned_of() -> None:
    made = plan.make(GB10, [spark(sleep=1, utilization=0.4)])

    assert any("vllm#50011" in text for text in made.warnings)
    assert any("level 1" in text for text in plan.findings(made))


@pytest.mark.parametrize(
    ("kv", "verdict"), [(78.07, DOES_NOT_FIT), (37.29, FITS)], ids=["died", "woke"]
)
def test_a_wake_maps_everything_before_the_host_copy_goes(kv: float, verdict: str) -> None:
    """vllm#50011: on one GB10, 23.30 GiB were saved; 78.07 discarded ended it, 37.29 did not."""
    weights = 23.30
    server = dataclasses.replace(
        spark(sleep=1, utilization=(kv + weights) / 121), weights=term(weights), kv=None
    )
    large = dataclasses.replace(GB10, memory=Amount.of(121))

    found = budget(large, [server], [])

    assert found.wake is not None
    assert found.wake.low == pytest.approx(121 - kv - 2 * weights - 5 - 5)
    assert found.verdict == verdict
    made = plan.make(large, [server], peer=False)
    assert made.verdict == verdict
    assert ("wakes with" in "\n".join(plan.findings(made))) == (verdict == DOES_NOT_FIT)
    assert ("does not fit at a wake" in render.verdict(made)) == (verdict == DOES_NOT_FIT)


def test_weights_that_stay_are_copied_nowhere() -> None:
    # GIVEN a server whose sleep releases the KV cache alone; its weights are in its residue
    keeps = dataclasses.replace(spark(sleep=1), name="peer", keeps_weights=True, residue=term(77))
    awake = spark(utilization=0.30)
    # THEN the budget has them once, a wake maps nothing twice, and nothing is warned of
    found = budget(GB10, [awake], [keeps])
    assert [(one.name, one.of) for one in found.terms if one.of == "peer"] == [
        ("sleep residue", "peer")
    ]
    assert budget(GB10, [keeps], []).wake is None
    assert host.need([dataclasses.replace(flash(), keeps_weights=True)], PRO).copies == Amount.of(0)
    made = plan.make(GB10, [keeps], peer=False)
    assert not any("vllm#50011" in text for text in made.warnings)


def test_kept_kv_takes_what_is_left_and_is_no_need() -> None:
    weights = flash().weights
    assert weights is not None
    keeps = dataclasses.replace(flash(), sleep=1, keeps_kv=True)
    alone = host.need([dataclasses.replace(keeps, keeps_kv=False)], PRO)
    # WHEN nothing limits it, all that the budget has beside the weights
    most = (keeps.utilization * PRO.memory.high - weights.amount.low) * keeps.gpus
    found = host.need([keeps], PRO)
    assert found.kept_kv == pytest.approx(most)
    # THEN it changes nothing of what must fit
    assert (found.copies, found.verdict) == (alone.copies, alone.verdict)
    assert alone.kept_kv == 0
    # WHEN the server has a budget, and on unified memory
    assert host.need([dataclasses.replace(keeps, kv_budget=12.0)], PRO).kept_kv == 12
    assert host.need([dataclasses.replace(keeps, kv_budget=9999.0)], PRO).kept_kv == found.kept_kv
    assert host.need([dataclasses.replace(spark(sleep=1), keeps_kv=True)], GB10).kept_kv == 0


def test_no_copy_is_left_at_a_wake_on_a_card_or_from_level_2() -> None:
    assert budget(PRO, [flash()], []).wake is None
    assert budget(GB10, [spark(sleep=2)], []).wake is None
    assert budget(GB10, [dataclasses.replace(spark(sleep=1), weights=None)], []).wake is None


def test_the_page_cache_is_warned_of_where_the_checkpoint_exceeds_what_is_free() -> None:
    """facts: a 148 GiB checkpoint floods the page cache while loading on GB10."""
    text = host.loading(spark(), GB10)

    assert text is not None
    assert "148 GiB" in text
    assert "40 GiB are free" in text
    small = dataclasses.replace(spark(), weights=term(15))
    assert host.loading(small, GB10) is None
    assert host.loading(flash(), PRO) is None


@pytest.mark.parametrize(
    ("ram", "verdict"), [(None, UNKNOWN), (136.0, FITS), (135.9, DOES_NOT_FIT)]
)
def test_host_copies_count_every_gpu_of_every_sleeper(ram: float | None, verdict: str) -> None:
    """facts: 17 GiB per GPU on four GPUs, and as much again for the peer."""
    need = host.need([flash(), flash("peer")], dataclasses.replace(PRO, ram=ram))

    assert need.copies == Amount.of(136)
    assert need.verdict == verdict


def test_level_2_keeps_no_copy_and_unknown_weights_no_known_one() -> None:
    assert host.need([flash(sleep=2)], PRO).copies == Amount.of(0)
    assert host.need([flash(weights=None)], PRO).copies is None
    assert host.need([flash(weights=None)], PRO).verdict == UNKNOWN


def test_every_subset_of_peers_is_judged() -> None:
    """Two of 0.70 cannot be awake together; one of 0.30 beside one of 0.35 can."""
    rotation = plan.combine(PRO, [flash("a"), flash("b")])
    assert [(row.awake, row.asleep, row.verdict) for row in rotation] == [
        ((), ("a", "b"), FITS),
        (("a",), ("b",), FITS),
        (("b",), ("a",), FITS),
        (("a", "b"), (), DOES_NOT_FIT),
    ]

    small = [
        flash("a", utilization=0.30, outside=term(3)),
        flash("b", utilization=0.35, outside=term(3)),
    ]
    together = plan.combine(PRO, small)[-1]
    assert together.verdict == FITS
    assert together.budget.margin.low == pytest.approx(95 * 0.35 - 6)


def test_what_cannot_sleep_is_stopped_while_others_are_awake() -> None:
    rows = plan.combine(PRO, [flash("a"), flash("b", sleep=0)])

    assert [(row.awake, row.asleep, row.stopped) for row in rows] == [
        ((), ("a",), ("b",)),
        (("a",), (), ("b",)),
        (("b",), ("a",), ()),
        (("a", "b"), (), ()),
    ]


def test_too_many_peers_are_refused() -> None:
    with pytest.raises(UsageError, match="7 recipes"):
        plan.combine(PRO, [flash(str(number)) for number in range(7)])


def test_one_recipe_that_sleeps_is_planned_beside_a_peer_like_itself() -> None:
    made = plan.make(PRO, [flash()])

    assert made.verdict == FITS
    assert [(row.awake, row.asleep) for row in made.rows] == [
        ((), ("flash", "a peer like it")),
        (("flash",), ("a peer like it",)),
    ]
    assert made.host.copies == Amount.of(136)
    assert plan.make(PRO, [flash(sleep=0)]).host.copies == Amount.of(0)
    alone = plan.make(PRO, [flash()], peer=False)
    assert [row.awake for row in alone.rows] == [("flash",)]
    assert alone.needed[0].budget.margin.low == pytest.approx(6.5)


def test_a_rotation_fits_when_each_fits_alone_and_the_copies_fit_together() -> None:
    pair = [flash("a"), flash("b")]
    assert plan.make(PRO, pair).verdict == FITS
    assert plan.make(dataclasses.replace(PRO, ram=128.0), pair).verdict == DOES_NOT_FIT
    assert plan.make(dataclasses.replace(PRO, gpus=2), pair).verdict == DOES_NOT_FIT
    assert plan.make(PRO, [flash("a"), flash("b", utilization=0.85)]).verdict == DOES_NOT_FIT


def test_findings_say_what_is_over_and_what_to_cut() -> None:
    found = plan.findings(plan.make(PRO, [flash(utilization=0.85)]))

    assert found[0] == "flash beside sleeping a peer like it is 12.5 GiB over 95.0 GiB"
    assert found[1].startswith("cut: the budget of flash")
    assert plan.findings(plan.make(PRO, [flash()])) == []
    unknown = plan.findings(plan.make(PRO, [flash(outside=None, sleep=0)]))
    assert unknown == [
        "cannot tell whether flash fits: unknown: outside the budget of flash (room for 28.5 GiB)"
    ]


@pytest.mark.parametrize(
    ("value", "down", "up"), [(0.717, 0.71, 0.72), (0.29, 0.29, 0.29), (0.7 + 1e-12, 0.7, 0.7)]
)
def test_rounding_keeps_to_the_safe_side(value: float, down: float, up: float) -> None:
    assert (floor(value), ceiling(value)) == (down, up)


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("memory = 95", "memory = -1", r": rtx-pro-6000\.memory: is neither a number"),
        ("memory = 95", 'memory = "95"', r": rtx-pro-6000\.memory: is neither a number"),
        ("memory = [119, 121]", "memory = [121, 119]", r": gb10\.memory: is neither a number"),
        ("memory = [119, 121]", "memory = []", r": gb10\.memory: is neither a number"),
        ("unified = true", "unifid = true", r": gb10\.unifid .* perhaps you meant unified"),
        ("amount = [3, 5]", "amount = nan", r": gb10\.system\.amount: is "),
        ('basis = "reported"', 'basis = "said"', r": rtx-pro-6000\.basis is 'said'"),
        ("[rtx-pro-6000]", "[rtx-pro-6000", "cannot be read"),
    ],
)
def test_a_spoilt_table_of_hardware_is_one_error(
    tmp_path: Path, old: str, new: str, said: str
) -> None:
    path = tmp_path / "hardware.toml"
    text = (layout.data() / "hardware.toml").read_text()
    assert old in text
    path.write_text(text.replace(old, new, 1))
    with pytest.raises(BadFileError, match=rf"hardware\.toml.*{said}"):
        host.kinds(path)


CACHE = Cache(start=2.0, token=1e-4, length=10000, limit=30000, sequences=256, default=True)


@pytest.mark.parametrize(
    ("room", "context"), [(2.0, 10000), (2.5, 15000), (1.5, 5000), (9.0, 30000), (0.5, 0)]
)
def test_the_largest_context_is_what_the_rest_of_the_room_holds(room: float, context: int) -> None:
    assert CACHE.context(room) == pytest.approx(context, abs=1)


@pytest.mark.parametrize(("room", "context"), [(2.0, 30000), (1.9, 0)])
def test_a_cache_without_growth_holds_any_context_or_none(room: float, context: int) -> None:
    assert dataclasses.replace(CACHE, token=0.0).context(room) == context


def test_a_server_that_the_release_has_planned_has_its_largest_settings() -> None:
    planned = dataclasses.replace(flash(weights=term(64.5)), cache=CACHE)
    (inside,) = budget(hardware("rtx-pro-6000"), [planned], []).inside
    # 66.5 - 64.5 GiB.
    assert (inside.context, inside.requests) == (10000, 1.0)
    assert inside.most_sequences is None
    states = dataclasses.replace(planned, cache=dataclasses.replace(CACHE, block=0.25))
    (inside,) = budget(hardware("rtx-pro-6000"), [states], []).inside
    assert inside.most_sequences == 8
