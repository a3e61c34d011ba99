"""The machines and servers of the figures that the plan's tests stand on."""

from __future__ import annotations

from sm12x.plan.budget import Amount, Deployment, Hardware, Term
from sm12x.plan.host import kinds

# "Frontier MoE sleep/wake at TP=4 on consumer Blackwell", doradus-research, 16 May 2026.
SOURCE = "doradus-research, 16 May 2026"


def hardware(key: str) -> Hardware:
    return kinds()[key]


def term(low: float, high: float | None = None, *, basis: str = "reported") -> Term:
    amount = Amount(low=low, high=low if high is None else high)
    return Term(name="", amount=amount, basis=basis, source=SOURCE)


WEIGHTS, KV, OUTSIDE, RESIDUE = term(17), term(7), term(22), term(2.4, 4.8)


def flash(
    name: str = "flash",
    *,
    utilization: float = 0.70,
    sleep: int = 1,
    weights: Term | None = WEIGHTS,
    kv: Term | None = KV,
    outside: Term | None = OUTSIDE,
    residue: Term | None = RESIDUE,
) -> Deployment:
    """DeepSeek-V4-Flash at TP=4 on four RTX PRO 6000, as reported."""
    return Deployment(
        name=name,
        utilization=utilization,
        gpus=4,
        machines=1,
        sleep=sleep,
        weights=weights,
        kv=kv,
        outside=outside,
        residue=residue,
    )


def spark(*, utilization: float = 0.80, sleep: int = 0) -> Deployment:
    """DeepSeek-V4-Flash at TP=2 over two GB10."""
    return Deployment(
        name="spark",
        utilization=utilization,
        gpus=1,
        machines=2,
        sleep=sleep,
        weights=term(74),
        kv=term(8),
        outside=term(5),
        residue=term(3),
    )
