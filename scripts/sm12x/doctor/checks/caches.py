"""Compiled code that another build left behind."""

from __future__ import annotations

import shlex
import time

from sm12x.core.text import counted
from sm12x.doctor.knowledge import Knowledge
from sm12x.doctor.model import INFO, OK, UNKNOWN, WARN, Cache, Diagnosis, HostFacts, Image, Unseen


def stale(facts: HostFacts, known: Knowledge) -> list[Diagnosis]:
    name = "cache.stale"
    findings = [
        known.finding(name, UNKNOWN, f"could not see a cache: {hidden.why}")
        for hidden in facts.hidden_caches
    ]
    image = facts.image
    built = None if isinstance(image, Unseen) else image.built
    if not facts.caches:
        nothing = known.finding(name, OK, "no cache of compiled code was found")
        return findings or [nothing]
    if isinstance(image, Unseen) or built is None:
        places = ", ".join(str(cache.path) for cache in facts.caches)
        seen = f"could not see whether they are the image's, its build time is not known: {places}"
        return [*findings, known.finding(name, UNKNOWN, seen, fix=(_wipe(facts.caches),))]
    return [*findings, *(_compare(cache, image, built, known) for cache in facts.caches)]


def _compare(cache: Cache, image: Image, built: float, known: Knowledge) -> Diagnosis:
    name = "cache.stale"
    about = f"{cache.kind}: {counted(cache.files, 'file')} in {cache.path}"
    release = image.versions.get("flashinfer-python", "")
    if cache.kind == "flashinfer" and cache.versions and release:
        # FlashInfer keeps its releases apart, so those of another are dead weight, not a danger.
        if release in cache.versions:
            return known.finding(name, OK, f"{about}, of the image's FlashInfer {release}")
        seen = f"{about}, of FlashInfer {', '.join(cache.versions)}; the image has {release}"
        return known.finding(name, INFO, seen, fix=(_wipe((cache,)),))
    if cache.newest < built:
        seen = f"{about}, all written before the image was built ({_day(built)}): another build's"
        return known.finding(name, WARN, seen, fix=(_wipe((cache,)),))
    if cache.oldest < built:
        seen = f"{about}, in part from {_day(cache.oldest)}, before the image ({_day(built)})"
        return known.finding(name, WARN, seen, fix=(_wipe((cache,)),))
    return known.finding(name, OK, f"{about}, written since the image was built")


def _wipe(caches: tuple[Cache, ...]) -> str:
    return "rm -rf " + " ".join(shlex.quote(str(cache.path)) for cache in caches)


def _day(at: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(at))
